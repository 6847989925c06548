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

from hydra_tune.errors import ConfigError
from hydra_tune.integrations.frameworks.trial_attributes import INFEASIBLE, LACK, PRUNED, figures_of
from hydra_tune.trials.context import Context, current_context

if TYPE_CHECKING:
    import optuna

    from hydra_tune.planning.known_steps import RefusedStep
    from hydra_tune.preview.rehearsal import Script

logger = logging.getLogger("hydra_tune")


@dataclass(slots=True)
class Outcome:
    """Of one attempt: what its objective gave, or the `reason` for which it is pruned; `lack`, `need_bytes`,
    `argument` and `step` as in `BudgetError`."""

    trial: optuna.Trial
    context: Context = field(init=False)
    prepared: bool = False
    value: Any = None
    reason: str = ""
    lack: float = 0.0
    need_bytes: int | None = None
    argument: str = "memory"
    step: RefusedStep | None = None
    script: Script | None = None  # of the step, if this attempt has made it
    did_not_fit: bool = False
    ran_out_of_memory: bool = False
    told: bool = False  # to the study, which takes nothing more of it

    def note_figures(self) -> None:
        """Set them as the trial's attributes."""
        self.prepared = bool(self.context.trials)
        if self.prepared and not self.told:
            for key, value in figures_of(self.context.trials).items():
                if value is not None:
                    self.trial.set_user_attr(key, value)

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
    if outcome.reason:  # which Optuna logs
        trial.set_user_attr(PRUNED, outcome.reason)
        import optuna

        raise optuna.TrialPruned(outcome.reason)
    if not outcome.prepared:
        _warn_of_unprepared(study)
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


def memory_constraint(trial: optuna.trial.FrozenTrial | optuna.Trial) -> tuple[float]:
    """By how much a trial lacked memory that could never fit: 0.5 if it needed half as much again as there is; where
    its first step found no room, a guess that grows with the model and its batch; 0 if it fitted.

    From Optuna 5 on, call ``hydra_tune.memory_constraint(trial)`` in the objective, before `prepare`: the runner sets
    the constraint when the trial ends, and tells one that could never fit, or has diverged to NaN, as complete but
    infeasible, with the worst values so far and the reason in its `user_attrs`: some samplers learn nothing of pruned
    ones. While none has finished there is no value to tell, and it is pruned. Before Optuna 5, it is a sampler's:
    ``constraints_func=hydra_tune.memory_constraint``.

    Raises:
        ConfigError: no trial, or one of Optuna 4 that still runs.
    """
    import optuna

    if isinstance(trial, optuna.trial.FrozenTrial):
        return (float(trial.user_attrs.get(LACK, 0.0)),)
    if not isinstance(trial, optuna.trial.BaseTrial):
        raise ConfigError(f"memory_constraint takes the trial that the objective is given, got {trial!r}.")
    if not hasattr(trial, "set_constraint"):
        raise ConfigError(
            f"trials have constraints from Optuna 5 on, this is {optuna.__version__}. Give the sampler "
            "constraints_func=hydra_tune.memory_constraint instead."
        )
    current_context().notes_memory = True
    return (0.0,)


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
