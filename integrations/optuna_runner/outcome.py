"""What one attempt at a trial has come to, and what the study is told of it.

A study takes no attributes of a trial that was told, and learns of a trial by one value alone. So figures and
constraints are noted first. A trial that could never fit, or has diverged, is told as pruned with the reason in its
attributes; or as infeasible with the worst values so far, where the objective has asked for a constraint, for some
samplers learn nothing of pruned trials.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from math import isnan
from typing import TYPE_CHECKING, Any

from hydra_tune.integrations.frameworks.trial_attributes import FIGURES, INFEASIBLE, LACK, PRUNED
from hydra_tune.trials.context import Context

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger("hydra_tune")


@dataclass(slots=True)
class Outcome:
    """Of one attempt: what its objective gave, or the `reason` for which it is pruned; `lack` as in `BudgetError`."""

    trial: optuna.Trial
    context: Context = field(init=False)
    prepared: bool = False
    value: Any = None
    reason: str = ""
    lack: float = 0.0
    ran_out_of_memory: bool = False
    told: bool = False  # to the study, which takes nothing more of it

    def note_figures(self) -> None:
        """Of the model that has made the most steps, the last of such: others were prepared to evaluate it."""
        self.prepared = bool(self.context.trials)
        if self.prepared and not self.told:
            longest = max(reversed(self.context.trials), key=lambda each: each.summary["steps"])
            self.trial.set_user_attr(FIGURES, longest.pool.figures(longest))

    def note_constraint(self) -> None:
        """For an objective that has called `memory_constraint`."""
        if self.context.notes_memory and not self.told:
            self.trial.set_constraint(LACK, self.lack)


def value_to_tell(outcome: Outcome, study: optuna.Study) -> Any:
    """The objective's value, or the worst so far for a trial that broke its constraint.

    Raises:
        optuna.TrialPruned: with the reason.
    """
    trial = outcome.trial
    if outcome.lack:
        trial.set_user_attr(LACK, outcome.lack)
    if _has_nan(outcome.value):
        outcome.reason, outcome.lack = f"its value is {outcome.value}", 1.0
    outcome.note_constraint()
    if outcome.lack and outcome.context.notes_memory and (worst := _worst_values(study)):
        logger.warning("trial %d: infeasible, %s", trial.number, outcome.reason)
        trial.set_user_attr(INFEASIBLE, outcome.reason)
        return worst
    if outcome.lack:
        _warn_at_first_lack(study, outcome.context)
    if outcome.reason:
        logger.warning("trial %d: pruned, %s", trial.number, outcome.reason)
        trial.set_user_attr(PRUNED, outcome.reason)
        import optuna

        raise optuna.TrialPruned(outcome.reason)
    if not outcome.prepared:
        _warn_of_unprepared(study)
    if logger.isEnabledFor(logging.INFO):
        logger.info("trial %d: finished with %s", trial.number, outcome.value)
    return outcome.value


def _has_nan(value: Any) -> bool:
    """An objective's value, or one of several; what is no number Optuna refuses."""
    if isinstance(value, float):
        return isnan(value)
    with suppress(TypeError, ValueError, RuntimeError):
        return any(isnan(float(each)) for each in (value if isinstance(value, (list, tuple)) else (value,)))
    return False


def _worst_values(study: optuna.Study) -> list[float]:
    """Of each objective so far; empty where no trial is complete."""
    import optuna

    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    known = zip(*(trial.values for trial in complete), strict=True)
    maximizes = [each is optuna.study.StudyDirection.MAXIMIZE for each in study.directions]
    return [min(values) if larger else max(values) for values, larger in zip(known, maximizes, strict=False)]


# ---- warnings, once a study ----

_warned: dict[tuple[str, str], object] = {}  # studies, and of what


def _is_first(study: optuna.Study, what: str) -> bool:
    mine = object()
    return _warned.setdefault((study.study_name, what), mine) is mine  # trials end in several threads


def _warn_at_first_lack(study: optuna.Study, context: Context) -> None:
    if not context.notes_memory and _is_first(study, "lack"):
        from hydra_tune.integrations.optuna_runner.search_warnings import warn_of_unlearned

        warn_of_unlearned(study)


def _warn_of_unprepared(study: optuna.Study) -> None:
    """Of an objective that has come to its end: one that is pruned before may have had nothing to prepare yet."""
    if _is_first(study, "unprepared"):
        logger.warning(
            "a trial of study %s has ended without a call of hydra_tune.prepare: whatever it has computed was beside "
            "the pool, and beyond its budgets. Give prepare its model, optimizer and loaders. A Trainer "
            "of Hugging Face or Lightning does that with HydraTrainerCallback, or HydraLightningCallback.",
            study.study_name,
        )
