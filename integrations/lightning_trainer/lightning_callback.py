"""Lightning's Trainer over a pool: `lightning.Trainer(..., callbacks=[hydra_tune.HydraLightningCallback()])`.

A Trainer moves its module to the GPU, and what comes before that knows no callback. So what has this callback becomes,
as it is made, a `PooledLightningTrainer` with a `PooledStrategy` and a `PooledFitLoop`: each of its own class, but the
module stays in host memory, is prepared for as long as it trains or evaluates, and runs each step within its own
forward.

`Trainer.__init__` is replaced, once a process and package; a Trainer without this callback is made as ever.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import wrapt

from hydra_tune.errors import ConfigError
from hydra_tune.integrations.frameworks import guards
from hydra_tune.integrations.frameworks.current_trial import runs_beside_others
from hydra_tune.integrations.frameworks.framework_checkpoints import trial_folder
from hydra_tune.integrations.frameworks.process_settings import warn_of
from hydra_tune.integrations.lightning_trainer.packages import PACKAGES, callback_base
from hydra_tune.integrations.lightning_trainer.pooled_fit_loop import PooledFitLoop
from hydra_tune.integrations.lightning_trainer.pooled_strategy import CPU, PooledStrategy
from hydra_tune.integrations.lightning_trainer.pooled_trainer import LightningPoolState, PooledLightningTrainer
from hydra_tune.integrations.lightning_trainer.refusals import refuse_trainer
from hydra_tune.integrations.lightning_trainer.trainer_events import LightningEvents
from hydra_tune.integrations.lightning_trainer.trial_folders import give_own_folders, own_folder
from hydra_tune.pool.shard_pool import ShardPool, default_pool
from hydra_tune.trials.context import current_context

_FOR_THE_PROCESS = ("deterministic", "benchmark", "detect_anomaly")
_Callback: Any = callback_base()


class HydraLightningCallback(_Callback):  # type: ignore[misc]
    """Trains a LightningModule within the pool's budget, with the numbers that its Trainer gives by itself: of
    `lightning`, or of `pytorch_lightning`.

    Module and optimizers are prepared as a training begins and released as it ends, after an error, too; validation,
    test and prediction outside of it prepare the module for as long as they take.

    In a search each validation reports to Optuna what a ModelCheckpoint or EarlyStopping monitors, else `val_loss`, and
    prunes where the study says so; to Ray Tune it reports all metrics. Each trial writes to its own folder,
    `run-<number>` in `default_root_dir`, or in a `dirpath` or `save_dir` that is given. With the runner's
    `checkpoint_dir` a trial whose process has died goes on from the last epoch's end at which a checkpoint was due.

    Args:
        pool: the runner's pool inside an objective, else the default pool, if None.
        report: whether validations report to the search; not where the script does so itself.

    Raises:
        ConfigError: by the Trainer that it is given to, if that places the module or splits it over processes.
    """

    def __init__(self, pool: ShardPool | None = None, *, report: bool = True) -> None:
        if pool is not None and not isinstance(pool, ShardPool):
            raise ConfigError(f"pool is a ShardPool or None, got {type(pool).__name__}.")
        self.pool = pool
        self.report = report

    @property
    def state_key(self) -> str:
        """A Trainer that has been told of this callback has put one of its own package in its place."""
        raise ConfigError(
            "a Trainer is told of the pool as it is made, but this one got HydraLightningCallback later, perhaps from "
            "configure_callbacks. Write Trainer(callbacks=[hydra_tune.HydraLightningCallback()])."
        )


# ---- as a trainer is made ----


def _is_ours(callback: Any) -> bool:
    return callback is HydraLightningCallback or isinstance(callback, HydraLightningCallback)


def _watch(module: Any) -> None:
    """A package with a Trainer was imported: see to Trainers that get the callback."""
    stock = module.Trainer.__init__
    bases = (LightningEvents, HydraLightningCallback, module.Callback)
    of_package = type("HydraLightningCallback", bases, {"__module__": __name__})

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = kwargs.get("callbacks") or ()
        callbacks = list(given) if isinstance(given, (list, tuple)) else [given]
        ours = [each for each in callbacks if _is_ours(each)]
        if not ours:
            stock(self, *args, **kwargs)
            return
        guards.install()
        pool = None if isinstance(ours[0], type) else ours[0].pool
        kwargs["callbacks"] = others = [each for each in callbacks if not _is_ours(each)]
        others.insert(callbacks.index(ours[0]), of_package(pool, report=getattr(ours[0], "report", True)))
        if (folder := trial_folder()) is not None:
            kwargs["default_root_dir"] = own_folder(kwargs.get("default_root_dir") or Path.cwd(), folder)
        for name in _FOR_THE_PROCESS:
            if kwargs.get(name) and runs_beside_others():
                warn_of(f"Trainer({name}=...)", "Set it once, before the search")
        stock(self, *args, **kwargs)
        refuse_trainer(self, pool or current_context().pool or default_pool())
        _pool_trainer(self, pool)
        if folder is not None:
            give_own_folders(self, folder)

    module.Trainer.__init__ = init


def _pool_trainer(trainer: Any, pool: ShardPool | None) -> None:
    """Trainer, strategy and fit loop change their class, for nobody else can make them."""
    trainer.pool_state = LightningPoolState(pool)
    strategy = trainer.strategy
    strategy.pool, strategy._root_device = pool, CPU
    # CUDA's free the workspaces of cuBLAS in the whole process, which kernels of other trials may be about to use
    strategy.accelerator.setup = strategy.accelerator.teardown = lambda *_: None
    for each, kind in (
        (strategy, PooledStrategy),
        (trainer.fit_loop, PooledFitLoop),
        (trainer, PooledLightningTrainer),
    ):
        own: Any = type(each)
        if not issubclass(own, kind):  # a strategy may be given to several trainers
            each.__class__ = _comes_before(kind, own)


@functools.cache
def _comes_before(kind: Any, own: Any) -> type:
    """A class under the name of `own`, with `kind` before it."""
    return type(own.__name__, (kind, own), {"__module__": own.__module__, "__doc__": own.__doc__})


for _package in PACKAGES:
    wrapt.register_post_import_hook(_watch, _package)
