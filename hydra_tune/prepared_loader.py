"""What `prepare` gives back for a loader: the same in everything, its batches on the trial's device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hydra_tune.fork import gate
from hydra_tune.trial import Trial


class PreparedLoader:
    """Stands for the loader in everything; its batches arrive on the trial's device. A copy is one of the plain loader.

    Attributes are read from the loader and set on it. Special methods Python looks up on the class; `standing_for`
    makes one with those that the loader has.
    """

    __slots__ = ("__weakref__", "_prepared_loader", "_prepared_trial")
    _prepared_loader: Any
    _prepared_trial: Trial

    def __init__(self, loader: Any, trial: Trial) -> None:
        object.__setattr__(self, "_prepared_loader", loader)
        object.__setattr__(self, "_prepared_trial", trial)

    @classmethod
    def standing_for(cls, loader: Any, trial: Trial) -> PreparedLoader:
        if isinstance(loader, PreparedLoader):  # for an earlier model
            loader = loader._prepared_loader
        special = (*_GIVE_BATCHES, *_GIVE_OTHERS)
        return _with_methods(tuple(name for name in special if hasattr(type(loader), name)))(loader, trial)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._prepared_loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prepared_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._prepared_loader, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._prepared_loader, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._prepared_loader.__reduce_ex__(protocol)

    def __iter__(self) -> PreparedLoader:
        _between_tasks(self._prepared_trial)
        with gate.one_at_a_time:
            batches = iter(self._prepared_loader)  # now, not at the first batch: it may draw a seed
        return PreparedLoader.standing_for(batches, self._prepared_trial)


_GIVE_BATCHES = ("__next__", "__getitem__")
_GIVE_OTHERS = ("__len__", "__bool__", "__contains__", "__setitem__", "__delitem__", "__call__")


@functools.cache
def _with_methods(names: tuple[str, ...]) -> type[PreparedLoader]:
    return type("PreparedLoader", (PreparedLoader,), {"__slots__": (), **{name: _method(name) for name in names}})


def _method(name: str) -> Callable[..., Any]:
    def method(self: PreparedLoader, *args: Any, **kwargs: Any) -> Any:
        loader, trial = self._prepared_loader, self._prepared_trial
        if name == "__next__":
            _between_tasks(trial)
        result = getattr(type(loader), name)(loader, *args, **kwargs)
        return trial.residency.to_device(result) if name in _GIVE_BATCHES else result

    return method


def _between_tasks(trial: Trial) -> None:
    if not trial.ended:
        trial.boundary()
