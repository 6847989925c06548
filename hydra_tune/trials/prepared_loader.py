"""The loader that `prepare` returns: it behaves as the plain one, but its batches are on the trial's device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hydra_tune.checkpoints.loader_progress import LoaderProgress
from hydra_tune.errors import PrepareError
from hydra_tune.process.fork import gate
from hydra_tune.trials.trial import Trial


class PreparedLoader:
    """A proxy of a loader. Its batches are on the trial's device, as long as the trial lives.

    All attributes, its class too, are the loader's. A copy or pickle of it is one of the plain loader.

    Args:
        reference: a weak reference to the trial.
        progress: notes how far the loader has come, if the trial writes checkpoints.
    """

    __slots__ = ("__weakref__", "_prepared")  # one name, so that all others are the loader's
    _prepared: tuple[Any, Callable[[], Trial | None], LoaderProgress | None]

    def __init__(self, loader: Any, reference: Callable[[], Trial | None], progress: LoaderProgress | None) -> None:
        object.__setattr__(self, "_prepared", (loader, reference, progress))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._prepared[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prepared[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._prepared[0], name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._prepared[0].__reduce_ex__(protocol)

    def __len__(self) -> int:
        return len(self._prepared[0])

    def __bool__(self) -> bool:
        return bool(self._prepared[0])

    def __getitem__(self, key: Any) -> Any:
        return _to_device(self._prepared[0][key], _live_trial(self))

    def __iter__(self) -> PreparedLoader:
        (loader, reference, progress), trial = self._prepared, _live_trial(self)
        if trial is not None:
            if trial.is_here:  # a thread of the script's that fetches batches ahead may come within a step
                trial.boundary()
            if progress is not None and trial.resumption is not None:
                trial.resumption.before_iteration(progress)
        with gate.one_at_a_time:  # `iter` is called now and not at the first batch, for it may draw a seed
            batches = iter(loader) if progress is None else progress.iterate()
        iteration = _Iteration(batches, reference, progress)
        if progress is not None:
            progress.follow(iteration)
        return iteration

    def __next__(self) -> Any:
        """The next batch, if the loader is an iterator. A checkpoint of all before this batch is written once the batch
        is there."""
        (loader, _, progress), trial = self._prepared, _live_trial(self)
        if trial is not None and trial.is_here:
            trial.boundary()
        if trial is None or trial.resumption is None or progress is None:
            return _to_device(next(loader), trial)
        states = trial.resumption.before_batch(progress)
        try:
            batch = next(loader)
        except StopIteration:
            progress.has_ended()
            raise
        if states is not None:
            trial.checkpoint(states)
        progress.has_given()
        return _to_device(batch, trial)


class _Iteration(PreparedLoader):
    """An iterator over a prepared loader."""

    __slots__ = ()

    def __iter__(self) -> PreparedLoader:
        return self


def _live_trial(loader: PreparedLoader) -> Trial | None:
    """The loader's trial; None once it has ended. Then the model is plain on the host, and batches stay there."""
    trial = loader._prepared[1]()
    return None if trial is None or trial.ended else trial


def _to_device(batch: Any, trial: Trial | None) -> Any:
    return batch if trial is None else trial.residency.to_device(batch)


def plain_loader(loader: Any) -> Any:
    """The loader itself; of one that an earlier `prepare` has returned, the loader that was given to that."""
    return loader._prepared[0] if isinstance(loader, PreparedLoader) else loader


def refuse_what_is_no_loader(loaders: Sequence[Any]) -> None:
    """Raise if an argument is no loader. The `prepare` of accelerate and of DeepSpeed takes other objects here, too: a
    schedule, a second optimizer or model, a loss."""
    for place, given in enumerate(loaders, 3):
        gives_batches = any(hasattr(type(given), name) for name in ("__iter__", "__next__", "__getitem__"))
        if not gives_batches or isinstance(given, nn.Module):
            raise PrepareError(
                f"what follows the optimizer are loaders, but argument {place} is a {type(given).__name__}. Leave it "
                "out, and use it as it is: a call of prepare takes one model and one of its optimizers. For "
                "checkpoints to hold a schedule or a scaler, write extra_state=[scheduler]."
            )
