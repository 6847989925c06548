"""Which trial of a search the calling thread runs.

Libraries keep state for the whole process, but trials run side by side in threads of one process. So Optuna's runner
and Ray's pool say around each objective which trial it is: what a library keeps is then kept for each trial, and what
cannot be is warned of.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna

_local = threading.local()
_live: set[int] = set()  # their ids
_live_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class CurrentTrial:
    """`optuna` is the study's trial, None under Ray. `library_states` are the trial's own, by the id of what they stand
    for in the process."""

    optuna: optuna.Trial | None = None
    library_states: dict[int, dict[str, Any]] = field(default_factory=dict)


def current_trial() -> CurrentTrial | None:
    trial: CurrentTrial | None = getattr(_local, "trial", None)
    return trial


def runs_beside_others() -> bool:
    """Whether the calling thread runs a trial, and others run, too."""
    return current_trial() is not None and len(_live) > 1


@contextmanager
def running(trial: optuna.Trial | None = None) -> Iterator[None]:
    """Around an objective, in its thread."""
    current = CurrentTrial(trial)
    outer, _local.trial = current_trial(), current
    with _live_lock:
        _live.add(id(current))
    try:
        yield
    finally:
        with _live_lock:
            _live.discard(id(current))
        _local.trial = outer
