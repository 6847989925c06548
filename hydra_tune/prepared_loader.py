"""What `prepare` gives back for a loader: the same in everything, its batches on the trial's device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hydra_tune.errors import PrepareError
from hydra_tune.fork import gate
from hydra_tune.loader_progress import LoaderProgress
from hydra_tune.trial import Trial


class PreparedLoader:
    """Stands for the loader in everything; its batches arrive on the trial's device, while there is a trial: the loader
    does not keep it. A copy is one of the plain loader. Special methods Python looks up on the class; `standing_for`
    makes one with those that the loader has.
    """

    __slots__ = ("__weakref__", "_prepared")
    _prepared: tuple[Any, Callable[[], Trial | None], LoaderProgress | None]

    def __init__(self, loader: Any, trial: Callable[[], Trial | None], progress: LoaderProgress | None) -> None:
        object.__setattr__(self, "_prepared", (loader, trial, progress))

    @classmethod
    def standing_for(
        cls, loader: Any, trial: Callable[[], Trial | None], progress: LoaderProgress | None = None
    ) -> PreparedLoader:
        """With `progress`, that of a trial which writes checkpoints; `trial` is a weak reference."""
        special = (*_GIVE_BATCHES, *_GIVE_OTHERS)
        return _with_methods(tuple(name for name in special if hasattr(type(loader), name)))(loader, trial, progress)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._prepared[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prepared[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._prepared[0], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._prepared[0], name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._prepared[0].__reduce_ex__(protocol)

    def __iter__(self) -> PreparedLoader:
        (loader, reference, progress), trial = self._prepared, _living(self)
        if trial is not None:
            if trial.is_here:  # a thread that fetches ahead comes at any time
                trial.boundary()
            if progress is not None and trial.resumption is not None:
                trial.resumption.before_iteration(progress)
        with gate.one_at_a_time:  # now, not at the first batch: it may draw a seed
            batches = iter(loader) if progress is None else progress.iterate()
        iteration = PreparedLoader.standing_for(batches, reference, progress)
        if progress is not None:
            progress.follow(iteration)
        return iteration


_GIVE_BATCHES = ("__next__", "__getitem__")
_GIVE_OTHERS = ("__len__", "__bool__", "__contains__", "__setitem__", "__delitem__", "__call__")


@functools.cache
def _with_methods(names: tuple[str, ...]) -> type[PreparedLoader]:
    return type("PreparedLoader", (PreparedLoader,), {"__slots__": (), **{name: _method(name) for name in names}})


def _method(name: str) -> Callable[..., Any]:
    def method(self: PreparedLoader, *args: Any, **kwargs: Any) -> Any:
        loader, trial = self._prepared[0], _living(self)
        if name == "__next__" and trial is not None:
            result = _next_of(self, trial)
        else:
            result = getattr(type(loader), name)(loader, *args, **kwargs)
        return result if trial is None or name not in _GIVE_BATCHES else trial.residency.to_device(result)

    return method


def _next_of(prepared: PreparedLoader, trial: Trial) -> Any:
    """The next batch; once it is there, what came before it may be written."""
    if trial.is_here:
        trial.boundary()
    (loader, _, progress), resumption = prepared._prepared, trial.resumption
    if progress is None or resumption is None:
        return next(loader)
    states = resumption.before_batch(progress)
    try:
        batch = next(loader)
    except StopIteration:
        progress.has_ended()
        raise
    if states is not None:
        trial.checkpoint(states)
    progress.has_given()
    return batch


def plain_loader(loader: Any) -> Any:
    """What was given to an earlier `prepare`, if it was."""
    return loader._prepared[0] if isinstance(loader, PreparedLoader) else loader


def refuse_what_is_no_loader(loaders: Sequence[Any]) -> None:
    """Accelerate's and DeepSpeed's `prepare` take a schedule, a second optimizer or model, a loss here.

    Raises:
        PrepareError: one of them gives no batches.
    """
    for place, given in enumerate(loaders, 3):
        gives_batches = callable(given) or any(hasattr(type(given), name) for name in ("__iter__", *_GIVE_BATCHES))
        is_schedule_or_scaler = hasattr(given, "state_dict") and (
            hasattr(given, "get_last_lr") or hasattr(given, "unscale_")
        )
        if not gives_batches or is_schedule_or_scaler or isinstance(given, (torch.optim.Optimizer, nn.Module)):
            raise PrepareError(
                f"what follows the optimizer are loaders, iterables of batches, but argument {place} is a "
                f"{type(given).__name__}. Leave it out, and use it as it is: prepare takes one model a call, and one "
                "of its optimizers. Write extra_state=[it] for checkpoints to hold a schedule or a scaler."
            )


def _living(loader: PreparedLoader) -> Trial | None:
    """Its trial; where that has ended, the model is plain and on the host, and so are the batches."""
    trial = loader._prepared[1]()
    return None if trial is None or trial.ended else trial
