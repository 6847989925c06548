"""What a framework's callback tells the search whose trial it trains: a value at each evaluation. The search may answer
that the trial is pruned.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hydra_tune.integrations.frameworks.current_trial import current_trial

logger = logging.getLogger("hydra_tune")
_warned: dict[str, object] = {}  # studies


def report(value: float | None, step: int, metrics: Mapping[str, Any], *, larger_is_better: bool | None) -> None:
    """To Optuna `value`, of one objective; to Ray Tune all of `metrics`. Does nothing outside of a search.

    Args:
        value: None if there is none.
        larger_is_better: whether it is to be maximized; None if nobody knows.

    Raises:
        optuna.TrialPruned: the study's pruner says so.
    """
    trial = current_trial()
    if trial is None:
        return
    if trial.optuna is None:
        from ray import tune

        tune.report({**metrics, "step": step})
        return
    import optuna

    directions = trial.optuna.study.directions
    if value is None or len(directions) > 1:
        return
    if larger_is_better not in (None, directions[0] is optuna.study.StudyDirection.MAXIMIZE):
        _warn_of_direction(trial.optuna.study.study_name, directions[0].name.lower(), bool(larger_is_better))
        return
    trial.optuna.report(value, step)
    if trial.optuna.should_prune():
        raise optuna.TrialPruned(f"after step {step}, at {value:g}.")


def reports_here() -> bool:
    return current_trial() is not None


def _warn_of_direction(study: str, direction: str, larger_is_better: bool) -> None:
    """Once a study."""
    mine = object()
    if _warned.setdefault(study, mine) is mine:
        better = "larger" if larger_is_better else "smaller"
        logger.warning(
            "study %s is to %s, but of the metric that is evaluated the %s is better: nothing is reported to the "
            "pruner. Name the metric that the objective returns (metric_for_best_model, monitor).",
            study,
            direction,
            better,
        )
