"""Optuna's ask-and-tell over a pool: a trial that lives as long as a `with` block of the thread that asked for it.

study.ask | block, in the trial's surroundings           | after it
          |     study.tell(trial, value)                 |     a trial that raised is told as pruned or failed
          |     ^ figures and constraint are noted first |

A study takes no attributes of a trial that was told. `optimize` sets them between the objective's end and the tell; a
block tells by itself. So `optuna.Study.tell` is replaced, once a process: for an open block's trial it sets them
first; for all others it is Optuna's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from hydra_tune.integrations.optuna_runner.search import Attempt, Search

_stock_tell = optuna.Study.tell


class AskedBlock:
    """An open one. Its `attempt` begins once it is known that no other block has the same trial."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self.attempt: Attempt | None = None

    def note(self, values: Any, state: TrialState | None) -> tuple[Any, TrialState | None]:
        """Set the trial's attributes; what the study is to be told."""
        assert self.attempt is not None
        self.attempt.note_figures()
        if state in (TrialState.PRUNED, TrialState.FAIL):
            self.attempt.note_constraint()
            return values, state
        self.attempt.value = values
        try:
            return self._search.end(self.attempt), state
        except optuna.TrialPruned:
            return None, TrialState.PRUNED


_open: dict[tuple[int, int], AskedBlock] = {}  # by the study's id and the trial's number


@contextmanager
def asked_trial(search: Search, study: optuna.Study, options: Mapping[str, Any]) -> Iterator[optuna.Trial]:
    block = AskedBlock(search)
    trial = study.ask(**options)
    while _open.setdefault((id(study), trial.number), block) is not block:  # on SQLite two threads may get the same
        trial = study.ask(**options)
    try:
        with search.attempt(trial) as attempt:
            block.attempt = attempt
            try:
                yield trial
            finally:
                attempt.told = attempt.told or not _is_running(study, trial)  # by another Study object
        if not attempt.told:
            _refuse_untold(attempt)
            _stock_tell(study, trial, search.end(attempt))
    except optuna.TrialPruned:
        _stock_tell(study, trial, state=TrialState.PRUNED, skip_if_finished=True)
    except BaseException:
        _stock_tell(study, trial, state=TrialState.FAIL, skip_if_finished=True)
        raise
    finally:
        del _open[id(study), trial.number]


def _is_running(study: optuna.Study, trial: optuna.Trial) -> bool:
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return any(each.number == trial.number for each in running)


def _refuse_untold(attempt: Attempt) -> None:
    if not attempt.reason:
        raise RuntimeError(
            f"a trial is told within its block, but that of trial {attempt.trial.number} has ended without: it has "
            "failed. Call study.tell(trial, value) in the block, or raise optuna.TrialPruned there."
        )


@wraps(_stock_tell)
def _tell(
    self: optuna.Study,
    trial: optuna.Trial | int,
    values: float | Sequence[float] | None = None,
    state: TrialState | None = None,
    skip_if_finished: bool = False,
) -> FrozenTrial:
    number: Any = trial if isinstance(trial, int) else getattr(trial, "number", None)
    block = _open.get((id(self), number))
    if block is None or block.attempt is None or block.attempt.told:
        return _stock_tell(self, trial, values, state, skip_if_finished)
    values, state = block.note(values, state)
    told = _stock_tell(self, trial, values, state, skip_if_finished)
    block.attempt.told = True
    return told


optuna.Study.tell = _tell  # type: ignore[method-assign]
