"""Hugging Face's Trainer over a pool: `Trainer(model, args, ..., callbacks=[hydra_tune.HydraTrainerCallback()])`.

A Trainer moves its model to the GPU before the first callback is called. So what has this callback becomes a
`PooledTrainer` as it is made: of its own class, but its model stays in host memory, and is prepared for as long as it
trains or evaluates.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer_utils import default_compute_objective

from hydra_tune.blocks.root import trial_of
from hydra_tune.errors import ConfigError, PrepareError
from hydra_tune.integrations.frameworks import guards
from hydra_tune.integrations.frameworks.framework_checkpoints import FrameworkCheckpoints, trial_folder
from hydra_tune.integrations.frameworks.trial_reports import report, reports_here
from hydra_tune.pool.shard_pool import ShardPool, default_pool
from hydra_tune.trials.context import current_context
from hydra_tune.trials.preparation import prepare, release

logger = logging.getLogger("hydra_tune")
_CPU = torch.device("cpu")
_local = threading.local()
_DEVICE_CACHES = ("_setup_devices", "__cached__setup_devices")  # of TrainingArguments.device, in transformers 5 and 4


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
        if not getattr(_local, "trains", False):
            raise ConfigError(
                "a trainer is told of the pool as it is made, but this one got HydraTrainerCallback later. Write "
                "Trainer(..., callbacks=[hydra_tune.HydraTrainerCallback()])."
            )


@dataclass
class _PooledRun:
    """What a trainer with the callback has more than others."""

    pool: ShardPool | None
    prepared: list[nn.Module] = field(default_factory=list)
    checkpointed: list[nn.Module] = field(default_factory=list)  # whose gradient checkpointing is switched off
    checkpoints: FrameworkCheckpoints | None = None
    has_own_folder: bool = False  # of the trial that has made the trainer
    is_training: bool = False
    was_due: bool = False  # the checkpoint that is written


class PooledTrainer:
    """Comes before a trainer's own class."""

    args: Any
    model: nn.Module
    pooling: _PooledRun

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self).__mro__[2],), vars(self)

    # ---- placement ----

    def create_accelerator_and_postprocess(self) -> None:
        with _precision_of(self.args):
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        _place_batches_only(self.accelerator)  # type: ignore[attr-defined]

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """It stays in host memory."""

    def _prepare(self, optimizer: Any = None, total_steps: int | None = None) -> None:
        model, pooling = self.model, self.pooling
        _refuse_model(model)
        _refuse_device(self.accelerator.device, pooling.pool or current_context().pool or default_pool())  # type: ignore[attr-defined]
        for module in model.modules():
            if vars(module).get("gradient_checkpointing"):
                module.gradient_checkpointing = False  # type: ignore[assignment]
                pooling.checkpointed.append(module)
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wraps it
        try:
            for each in (*self._other_models(model), model):
                prepare(each, _if_it_steps(optimizer, each), pool=pooling.pool, total_steps=total_steps)
                pooling.prepared.append(each)
        except BaseException:
            self._release()
            raise
        trial = trial_of(model)
        assert trial is not None
        _place(self.args, trial.device.torch_device)

    def _other_models(self, model: nn.Module) -> list[nn.Module]:
        """Of the trainer, with weights of their own: a reference model, reward models, layers of a loss."""
        values = [value for name, value in vars(self).items() if name not in ("train_dataset", "eval_dataset")]
        several = [v for v in values if isinstance(v, (list, tuple, dict))]
        values += [each for v in several for each in (v.values() if isinstance(v, dict) else v)]
        left = [value for value in values if isinstance(value, nn.Module)]
        found, seen = list[nn.Module](), {id(p) for p in model.parameters()}
        for value in left:  # which grows meanwhile
            weights = {id(p) for p in value.parameters()}
            if weights and weights.isdisjoint(seen):
                found.append(value)
                seen |= weights
            elif not weights <= seen:
                left += value.children()  # it has the model within
        return found

    def _release(self) -> None:
        while self.pooling.prepared:
            if trial_of(model := self.pooling.prepared.pop()) is not None:  # a trial that has ended has let go of it
                release(model)
        while self.pooling.checkpointed:
            self.pooling.checkpointed.pop().gradient_checkpointing = True  # type: ignore[assignment]
        _place(self.args, _CPU)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        if self.pooling.prepared:
            yield
            return
        self._prepare()
        try:
            yield
        finally:
            self._release()

    # ---- what a Trainer does ----

    def _get_output_dir(self, trial: Any) -> str:
        if self.pooling.has_own_folder:
            return str(self.args.output_dir)
        return str(super()._get_output_dir(trial))  # type: ignore[misc]

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.pooling.checkpoints = FrameworkCheckpoints.of_running_trial()
        if self.pooling.checkpoints is not None and resume_from_checkpoint in (None, False):
            resume_from_checkpoint = self.pooling.checkpoints.newest_of_training()
        events = _Events(self)
        self.add_callback(events)  # type: ignore[attr-defined]
        _local.trains = True
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        finally:
            _local.trains = False
            self.remove_callback(events)  # type: ignore[attr-defined]

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.pooling.is_training = False
            self._release()

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        return loss.to(_CPU)  # where the trainer adds them up

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating():
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def prediction_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating():
            return super().prediction_loop(*args, **kwargs)  # type: ignore[misc]


class _Events(transformers.TrainerCallback):  # type: ignore[misc]
    """What happens in one trainer's loop."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        trainer = self._trainer
        known = 0 < state.max_steps < sys.maxsize
        steps = (state.max_steps - state.global_step) * args.gradient_accumulation_steps if known else 0
        trainer._prepare(optimizer, steps if steps > 0 else None)
        trainer.pooling.is_training = True
        if trainer.pooling.checkpoints is not None and state.global_step:
            trainer.pooling.checkpoints.goes_on_from(state.global_step * args.gradient_accumulation_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        pooling = self._trainer.pooling
        pooling.was_due = False
        checkpoints = pooling.checkpoints
        if checkpoints is None or control.should_save or checkpoints.is_behind:
            return
        if checkpoints.is_due(state.global_step * args.gradient_accumulation_steps):
            control.should_save = pooling.was_due = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        checkpoints = trainer.pooling.checkpoints
        if checkpoints is not None and not checkpoints.is_behind:
            path = Path(trainer._get_output_dir(trainer._trial)) / f"checkpoint-{state.global_step}"
            step = state.global_step * args.gradient_accumulation_steps
            checkpoints.note(path, step, was_due=trainer.pooling.was_due)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        trainer = self._trainer
        if not trainer.pooling.is_training or not reports_here() or not metrics or _reports_itself(trainer):
            return
        if args.metric_for_best_model is not None:
            name = args.metric_for_best_model
            value, larger = metrics.get(name if name.startswith("eval_") else f"eval_{name}"), args.greater_is_better
        elif "eval_loss" in metrics:
            value, larger = default_compute_objective(metrics), False if _is_loss(metrics) else None
        else:
            return  # one of several data sets
        report(value, state.global_step, metrics, larger_is_better=larger)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer.pooling.checkpoints is not None:
            self._trainer.pooling.checkpoints.end()


def _is_loss(metrics: dict[str, float]) -> bool:
    """Whether Hugging Face's objective of these metrics is their loss: it is, where there is no other one."""
    return bool(default_compute_objective(metrics) == metrics["eval_loss"])


def _reports_itself(trainer: Any) -> bool:
    """A `Trainer.hyperparameter_search` does, Ray Train's callback, and a script that says so."""
    callbacks = trainer.callback_handler.callbacks
    told = any(type(each).__module__.startswith("ray.train") or not getattr(each, "report", True) for each in callbacks)
    return told or trainer.hp_search_backend is not None


def _place_batches_only(accelerator: Any) -> None:
    """Not by its `device_placement`, by which accelerate also decides how it reads data without a length."""
    accelerator.prepare_model = functools.partial(_where_it_is, accelerator.prepare_model)
    accelerator.prepare_optimizer = functools.partial(_where_it_is, accelerator.prepare_optimizer)


def _where_it_is(prepare: Any, each: Any, device_placement: Any = None, **options: Any) -> Any:
    return prepare(each, device_placement=False, **options)


def _if_it_steps(optimizer: Any, model: nn.Module) -> Any:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer is not None else set()
    return None if stepped.isdisjoint(map(id, model.parameters())) else optimizer


_environment = threading.Lock()


@contextmanager
def _precision_of(args: Any) -> Iterator[None]:
    """Transformers 4 tells accelerate by the process's environment, where the precision of one trainer stays for all
    that come after it."""
    if hasattr(args, "mixed_precision"):
        yield
        return
    name, wanted = "ACCELERATE_MIXED_PRECISION", "fp16" if args.fp16 else "bf16" if args.bf16 else "no"
    with _environment:
        before = os.environ.get(name)
        os.environ[name] = wanted
        try:
            yield
        finally:
            os.environ[name] = before or "no"


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
        self.__class__ = _pooled(kind)
        folder = trial_folder()
        self.pooling = _PooledRun(getattr(ours[0], "pool", None) if ours else None, has_own_folder=folder is not None)
        given["args"] = _own_arguments(given.get("args"), folder)
        _refuse_model(given.get("model"))
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


@functools.cache
def _pooled(kind: Any) -> type:
    return type(kind.__name__, (PooledTrainer, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _unpickled(kind: type) -> Any:
    return object.__new__(_pooled(kind))


def _own_arguments(given: Any, folder: str | None) -> Any:
    """A copy, in which a trial has an output folder of its own, and tensors go where the model is."""
    args = copy.copy(given or transformers.TrainingArguments("tmp_trainer"))
    _refuse_arguments(args)
    _place(args, _CPU)
    args._n_gpu = min(args.n_gpu, 1)
    if folder is not None:
        args.output_dir = str(Path(args.output_dir) / folder)
    return args


def _place(args: Any, device: torch.device) -> None:
    """Where its trainer puts batches."""
    assert args.device is not None  # which fills the cache
    for name in _DEVICE_CACHES:
        if name in vars(args):
            vars(args)[name] = device


def _refuse_arguments(args: Any) -> None:
    """Raises:
    ConfigError: an argument says where the model is to be, or how it is split.
    """
    ways = {
        "deepspeed": bool(args.deepspeed),
        "fsdp": bool(args.fsdp),
        "torch_compile": args.torch_compile,
        "fp16_full_eval": args.fp16_full_eval,
        "bf16_full_eval": args.bf16_full_eval,
        "place_model_on_device": "place_model_on_device" in vars(args) and args.place_model_on_device,
        "several processes": args.parallel_mode.value == "distributed",
    }
    if found := [name for name, is_set in ways.items() if is_set]:
        raise ConfigError(
            f"the pool decides where a model and its parts are, and runs it as it is written, but TrainingArguments "
            f"has {', '.join(found)}. Leave that out, or leave HydraTrainerCallback out."
        )


def _refuse_device(wanted: torch.device, pool: ShardPool) -> None:
    """Raises:
    ConfigError: the trainer computes on another kind of device than the pool.
    """
    there = pool.devices[0].torch_device.type
    if wanted.type != there:
        raise ConfigError(
            f"a trainer and its pool use one kind of device, but the pool has {there} and the trainer {wanted.type}. "
            f"Write TrainingArguments(use_cpu={there == 'cpu'}), or give the pool other devices=."
        )


def _refuse_model(model: Any) -> None:
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None) is not None:
        raise PrepareError(
            f"a block's weights are plain tensors, which the pool copies and drops, but this {type(model).__name__} is "
            "quantized. Load it without quantization_config, in bfloat16 (dtype=torch.bfloat16): adapters train on a "
            "base that the pool spills."
        )
    if getattr(model, "hf_device_map", None):
        raise PrepareError(
            f"the pool decides where a model is, but this {type(model).__name__} was loaded with a device_map. Load it "
            "without device_map, to host memory."
        )
