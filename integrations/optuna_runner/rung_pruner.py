"""Successive halving among trials that run together: whoever reached a rung is compared with all that did.

rung k is at min_resource * reduction_factor ** k steps; of n trials there the best ceil(n / reduction_factor) go on
"""

from __future__ import annotations

from math import ceil, isnan

import optuna
from optuna.trial import FrozenTrial, TrialState

from hydra_tune.errors import ConfigError

_REACH = (TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED)


class RungPruner(optuna.pruners.BasePruner):
    """Asynchronous successive halving (Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020,
    arXiv 1810.05934), for trials that live side by side and none of which may have finished.

    A trial has reached a rung with its first report at or beyond that step, whose value counts there. Each time it is
    asked, it is compared at the highest rung that it has reached with all trials that have reached it, running or not;
    so one that was early, and went on for lack of others, is still stopped once enough better ones have come. What is
    decided depends on the reports alone.

    Args:
        min_resource: steps of the first rung, in the unit of ``trial.report(value, step)``.
        reduction_factor: one of so many goes on.
        min_trials: as many must have reached a rung before anyone is stopped there; `reduction_factor` if None.

    Raises:
        ConfigError: not whole numbers, `min_resource` below 1, or one of the others below 2.
    """

    def __init__(self, min_resource: int = 1, reduction_factor: int = 3, min_trials: int | None = None) -> None:
        for name, value, least in (
            ("min_resource", min_resource, 1),
            ("reduction_factor", reduction_factor, 2),
            ("min_trials", reduction_factor if min_trials is None else min_trials, 2),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} of a RungPruner is a whole number of at least {least}, got {value!r}.")
        self._min_resource = min_resource
        self._reduction_factor = reduction_factor
        self._min_trials = reduction_factor if min_trials is None else min_trials

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        rung = self._rung(trial)
        if rung is None:
            return False
        sign = -1.0 if study.direction is optuna.study.StudyDirection.MAXIMIZE else 1.0
        own = _cost(trial, rung, sign)
        peers = [t for t in study.get_trials(deepcopy=False, states=_REACH) if t.number != trial.number]
        costs = [own, *(_cost(t, rung, sign) for t in peers if t.last_step is not None and t.last_step >= rung)]
        if isnan(own) or len(costs) < self._min_trials:
            return isnan(own)
        better = sum(cost < own for cost in costs)
        return better >= ceil(len(costs) / self._reduction_factor)

    def _rung(self, trial: FrozenTrial) -> int | None:
        """The highest that it has reached; None if it has reached none."""
        if trial.last_step is None or trial.last_step < self._min_resource:
            return None
        rung = self._min_resource
        while rung * self._reduction_factor <= trial.last_step:
            rung *= self._reduction_factor
        return rung


def _cost(trial: FrozenTrial, rung: int, sign: float) -> float:
    """At the rung; smaller is better, nan is nan."""
    step = min(step for step in trial.intermediate_values if step >= rung)
    return sign * trial.intermediate_values[step]
