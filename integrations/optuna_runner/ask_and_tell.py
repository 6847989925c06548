"""Optuna's ask-and-tell over a pool: a trial that lives as long as a `with` block of the thread that asked for it.

A study takes no attributes of a trial that was told. `optimize` sets them between the objective's end and the tell, but
a block tells by itself. So `optuna.Study.tell` is replaced, once a process: for an open block's trial it sets the
attributes first; for all others it is Optuna's own.

study.ask | block, an attempt at the trial               | after it
          |     study.tell(trial, value)                 |     a trial that raised is told as pruned or failed
          |     ^ figures and constraint are noted first |
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from hydra_tune.integrations.optuna_runner.attempt import Attempts
from hydra_tune.integrations.optuna_runner.outcome import Outcome, value_to_tell

logger = logging.getLogger("hydra_tune")
_stock_tell = optuna.Study.tell


class AskedBlock:
    """An open one. Its `outcome` begins once it is known that no other block has the same trial."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None


def _noted(
    outcome: Outcome, study: optuna.Study, values: Any, state: TrialState | None
) -> tuple[Any, TrialState | None]:
    """Set the trial's attributes; what the study is to be told."""
    outcome.note_figures()
    if state in (TrialState.PRUNED, TrialState.FAIL):
        outcome.note_constraint()
        return values, state
    outcome.value = values
    try:
        return value_to_tell(outcome, study), state
    except optuna.TrialPruned:
        return None, TrialState.PRUNED


_open: dict[tuple[int, int], AskedBlock] = {}  # by the study's id and the trial's number


@contextmanager
def asked_trial(attempts: Attempts, study: optuna.Study, options: Mapping[str, Any]) -> Iterator[optuna.Trial]:
    block = AskedBlock()
    trial = study.ask(**options)
    while _open.setdefault((id(study), trial.number), block) is not block:  # on SQLite two threads may get the same
        trial = study.ask(**options)
    try:
        with attempts.attempt(trial) as outcome:
            block.outcome = outcome
            try:
                yield trial
            finally:
                outcome.told = outcome.told or not _is_running(study, trial)  # by another Study object
        if not outcome.told:
            _refuse_untold(outcome)
            _stock_tell(study, trial, value_to_tell(outcome, study))
    except optuna.TrialPruned as pruned:
        if str(pruned):  # `optimize` leaves that to Optuna, which logs nothing of a trial that is told
            logger.warning("trial %d: pruned, %s", trial.number, pruned)
        _stock_tell(study, trial, state=TrialState.PRUNED, skip_if_finished=True)
    except BaseException:
        _stock_tell(study, trial, state=TrialState.FAIL, skip_if_finished=True)
        raise
    finally:
        del _open[id(study), trial.number]


def _is_running(study: optuna.Study, trial: optuna.Trial) -> bool:
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return any(each.number == trial.number for each in running)


def _refuse_untold(outcome: Outcome) -> None:
    if not outcome.reason:
        raise RuntimeError(
            f"a trial is told within its block, but that of trial {outcome.trial.number} has ended without: it has "
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
    if block is None or block.outcome is None or block.outcome.told:
        return _stock_tell(self, trial, values, state, skip_if_finished)
    values, state = _noted(block.outcome, self, values, state)
    told = _stock_tell(self, trial, values, state, skip_if_finished)
    block.outcome.told = True
    return told


optuna.Study.tell = _tell  # type: ignore[method-assign]
