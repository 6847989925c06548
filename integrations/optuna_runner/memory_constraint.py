"""Tells samplers that take constraints which trials have not fitted, so that they suggest smaller ones."""

from __future__ import annotations

import optuna
from optuna.trial import FrozenTrial

from hydra_tune.errors import ConfigError
from hydra_tune.integrations.frameworks.trial_attributes import LACK
from hydra_tune.trials.context import current_context


def memory_constraint(trial: FrozenTrial | optuna.Trial) -> tuple[float]:
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
    if isinstance(trial, FrozenTrial):
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
