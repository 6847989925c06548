"""Tells samplers that take constraints which trials have not fitted, so that they suggest smaller ones."""

from __future__ import annotations

from optuna.trial import FrozenTrial

from hydra_tune.integrations.optuna_runner import LACK


def memory_constraint(trial: FrozenTrial) -> tuple[float]:
    """For ``TPESampler(constraints_func=hydra_tune.memory_constraint)`` and its kin: above 0 for a trial that could
    never fit, by how much it lacked memory (0.5: it needed half as much again as there is)."""
    return (float(trial.user_attrs.get(LACK, 0.0)),)
