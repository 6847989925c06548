"""Trains hyperparameter trials that do not fit the device side by side, with plain PyTorch's numbers.

model, optimizer, loader = hydra_tune.prepare(model, optimizer, loader)
hydra_tune.HydraTrialRunner(hydra_tune.ShardPool(memory="20GiB")).optimize(study, objective, n_trials=64)
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra_tune.calibration import calibrate
    from hydra_tune.errors import BudgetError, ConfigError, HydraTuneError, PoolClosedError, PrepareError, TrialStopped
    from hydra_tune.integrations.frameworks.figure_logger import log_figures
    from hydra_tune.integrations.frameworks.study_report import plot_timeline, save_report
    from hydra_tune.integrations.hugging_face.trainer_callback import HydraTrainerCallback
    from hydra_tune.integrations.hugging_face.trainer_search import hyperparameter_search
    from hydra_tune.integrations.lightning_trainer.lightning_callback import HydraLightningCallback
    from hydra_tune.integrations.optuna_runner.outcome import memory_constraint
    from hydra_tune.integrations.optuna_runner.rung_pruner import RungPruner
    from hydra_tune.integrations.optuna_runner.runner import HydraTrialRunner, optimize
    from hydra_tune.integrations.ray_tune import tune
    from hydra_tune.integrations.ray_tune.executor import HydraExecutor
    from hydra_tune.integrations.ray_tune.run_pools import report
    from hydra_tune.integrations.ray_tune.trainable import trainable
    from hydra_tune.pool.shard_pool import ShardPool
    from hydra_tune.preview.budget_plan import plan
    from hydra_tune.simulation.simulate import simulate
    from hydra_tune.trials.preparation import prepare, release, resume_step
    from hydra_tune.trials.shared_base import share

__version__ = "0.1.0"
__all__ = [
    "BudgetError",
    "ConfigError",
    "HydraExecutor",
    "HydraLightningCallback",
    "HydraTrainerCallback",
    "HydraTrialRunner",
    "HydraTuneError",
    "PoolClosedError",
    "PrepareError",
    "RungPruner",
    "ShardPool",
    "TrialStopped",
    "calibrate",
    "hyperparameter_search",
    "log_figures",
    "memory_constraint",
    "optimize",
    "plan",
    "plot_timeline",
    "prepare",
    "release",
    "report",
    "resume_step",
    "save_report",
    "share",
    "simulate",
    "trainable",
    "tune",
]
_HOME = {
    "HydraExecutor": "hydra_tune.integrations.ray_tune.executor",
    "HydraLightningCallback": "hydra_tune.integrations.lightning_trainer.lightning_callback",
    "HydraTrainerCallback": "hydra_tune.integrations.hugging_face.trainer_callback",
    "HydraTrialRunner": "hydra_tune.integrations.optuna_runner.runner",
    "RungPruner": "hydra_tune.integrations.optuna_runner.rung_pruner",
    "ShardPool": "hydra_tune.pool.shard_pool",
    "calibrate": "hydra_tune.calibration",
    "hyperparameter_search": "hydra_tune.integrations.hugging_face.trainer_search",
    "log_figures": "hydra_tune.integrations.frameworks.figure_logger",
    "memory_constraint": "hydra_tune.integrations.optuna_runner.outcome",
    "optimize": "hydra_tune.integrations.optuna_runner.runner",
    "plan": "hydra_tune.preview.budget_plan",
    "plot_timeline": "hydra_tune.integrations.frameworks.study_report",
    "prepare": "hydra_tune.trials.preparation",
    "release": "hydra_tune.trials.preparation",
    "report": "hydra_tune.integrations.ray_tune.run_pools",
    "resume_step": "hydra_tune.trials.preparation",
    "save_report": "hydra_tune.integrations.frameworks.study_report",
    "share": "hydra_tune.trials.shared_base",
    "simulate": "hydra_tune.simulation.simulate",
    "trainable": "hydra_tune.integrations.ray_tune.trainable",
    "tune": "hydra_tune.integrations.ray_tune.tune",
}

_checkout = Path(__file__).parent.parent
if (_checkout / "integrations" / "__init__.py").exists() and (_checkout / "setup.cfg").exists():
    __path__.append(str(_checkout))  # a checkout keeps integrations/ beside the package


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(_HOME.get(name, "hydra_tune.errors"))
    globals()[name] = value = home if name == "tune" else getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
