"""Hugging Face's Trainer over a pool: `Trainer(model, args, ..., callbacks=[hydra_tune.HydraTrainerCallback()])`.

`Trainer.__init__` is replaced, once a process: a trainer that is given this callback becomes a `PooledTrainer` first;
all others are made as ever.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers

from hydra_tune.errors import ConfigError
from hydra_tune.integrations.frameworks import guards
from hydra_tune.integrations.frameworks.framework_checkpoints import trial_folder
from hydra_tune.integrations.hugging_face.placement import CPU, place
from hydra_tune.integrations.hugging_face.pooled_trainer import (
    PooledTrainer,
    TrainerPoolState,
    pooled_kind,
    pooled_trainer_trains,
)
from hydra_tune.integrations.hugging_face.refusals import refuse_arguments, refuse_model
from hydra_tune.pool.shard_pool import ShardPool

_local = threading.local()


class HydraTrainerCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Trains a `transformers.Trainer`, or a trainer derived from it, within the pool's budget, with the numbers that it
    gives by itself.

    Model and optimizer are prepared as the training begins and released as it ends, after an error, too; an evaluation
    or a prediction outside of it prepares the model for as long as it takes. Other models of the trainer (`ref_model`
    and reward models of TRL) are prepared beside it. Gradient checkpointing is switched off meanwhile: the pool drops
    activations itself, and plain arithmetic is the same.

    In a search each evaluation reports to Optuna the metric `metric_for_best_model`, else the loss, and prunes where
    the study says so; to Ray Tune it reports all metrics. Each trial writes to its own folder, `run-<number>` in
    `output_dir`. With the runner's `checkpoint_dir` a trial whose process has died goes on from its newest checkpoint,
    as `resume_from_checkpoint` does.

    Args:
        pool: the runner's pool inside an objective, else the default pool, if None.
        report: whether evaluations report to the search; not where the script does so itself.

    Raises:
        ConfigError: by the trainer that it is given to, if an argument places the model or splits it over processes.
    """

    def __init__(self, pool: ShardPool | None = None, *, report: bool = True) -> None:
        if pool is not None and not isinstance(pool, ShardPool):
            raise ConfigError(f"pool is a ShardPool or None, got {type(pool).__name__}.")
        self.pool = pool
        self.report = report

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if not pooled_trainer_trains():
            raise ConfigError(
                "a trainer is told of the pool as it is made, but this one got HydraTrainerCallback later. Write "
                "Trainer(..., callbacks=[hydra_tune.HydraTrainerCallback()])."
            )


# ---- as a trainer is made ----

_stock_init = transformers.Trainer.__init__
_NAMES = list(inspect.signature(_stock_init).parameters)[1:]


@functools.wraps(_stock_init)
def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    ours = [each for each in given.get("callbacks") or () if _is_ours(each)]
    if (ours or getattr(_local, "all_are_pooled", False)) and not isinstance(self, PooledTrainer):
        guards.install()
        kind: Any = type(self)
        self.__class__ = pooled_kind(kind)
        folder = trial_folder()
        self.pool_state = TrainerPoolState(
            getattr(ours[0], "pool", None) if ours else None, has_own_folder=folder is not None
        )
        given["args"] = _own_arguments(given.get("args"), folder)
        refuse_model(given.get("model"))
    _stock_init(self, **given)


transformers.Trainer.__init__ = _init


@contextmanager
def pooled_trainers() -> Iterator[None]:
    """Those that the calling thread makes within are, with the callback or without."""
    _local.all_are_pooled = True
    try:
        yield
    finally:
        _local.all_are_pooled = False


def _is_ours(callback: Any) -> bool:
    return callback is HydraTrainerCallback or isinstance(callback, HydraTrainerCallback)


def _own_arguments(given: Any, folder: str | None) -> Any:
    """A copy, in which a trial has an output folder of its own, and tensors go where the model is."""
    args = copy.copy(given or transformers.TrainingArguments("tmp_trainer"))
    refuse_arguments(args)
    place(args, CPU)
    args._n_gpu = min(args.n_gpu, 1)
    if folder is not None:
        args.output_dir = str(Path(args.output_dir) / folder)
    return args
