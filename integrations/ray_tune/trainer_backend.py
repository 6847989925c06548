"""Hugging Face's `Trainer.hyperparameter_search(backend="ray", resources_per_trial=HydraExecutor(...))`.

transformers hands the resources on to stock `ray.tune.run`, which gives each trial a process of its own. So the `run`
of its backend is replaced, once transformers is imported, by one that understands a `HydraExecutor`.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import wrapt


def install() -> None:
    """Now, or once transformers' searches are imported."""
    wrapt.register_post_import_hook(_understand_executors, "transformers.hyperparameter_search")


def _understand_executors(module: Any) -> None:
    stock = module.RayTuneBackend.run

    def run(self: Any, trainer: Any, n_trials: int, direction: str, **options: Any) -> Any:
        import ray.tune

        from hydra_tune.integrations.ray_tune.executor import HydraExecutor
        from hydra_tune.integrations.ray_tune.pool_table import seen_pools
        from hydra_tune.integrations.ray_tune.trainable import trainable

        executor = options.get("resources_per_trial")
        if not isinstance(executor, HydraExecutor):
            return stock(self, trainer, n_trials, direction, **options)
        stock_run = ray.tune.run

        def run_on_pools(train: Any, *, resources_per_trial: Any, **rest: Any) -> Any:
            on_pools = trainable(train, executor)
            with seen_pools(executor.spec, on_pools.__name__):
                return stock_run(on_pools, **rest)

        if not ray.is_initialized():
            ray.init()
        with patch.object(ray.tune, "run", run_on_pools):
            return stock(self, trainer, n_trials, direction, **{**options, "resources_per_trial": {"cpu": 1}})

    module.RayTuneBackend.run = run
