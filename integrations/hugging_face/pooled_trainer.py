"""A `transformers.Trainer`, or one derived from it, that trains and evaluates within a pool.

A Trainer moves its model to the GPU before the first callback is called. A callback alone would come too late for a
model that does not fit. So a trainer that has `HydraTrainerCallback` becomes a `PooledTrainer` as it is made: of its
own class, but its model stays in host memory, and is prepared for as long as it trains or evaluates.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hydra_tune.blocks.root import trial_of
from hydra_tune.integrations.frameworks.framework_checkpoints import FrameworkCheckpoints
from hydra_tune.integrations.hugging_face.placement import CPU, place, place_batches_only, precision_of
from hydra_tune.integrations.hugging_face.refusals import refuse_device, refuse_model
from hydra_tune.integrations.hugging_face.trainer_events import TrainerEvents
from hydra_tune.pool.shard_pool import ShardPool, default_pool
from hydra_tune.trials.context import current_context
from hydra_tune.trials.preparation import prepare, release

_local = threading.local()


def pooled_trainer_trains() -> bool:
    """Whether one does in the calling thread."""
    return getattr(_local, "trains", False)


@dataclass
class TrainerPoolState:
    """What a trainer with the callback has more than others. Between two trainings it holds nothing of the pool's."""

    pool: ShardPool | None
    prepared: list[nn.Module] = field(default_factory=list)  # each reserves host memory until it is released
    checkpointed: list[nn.Module] = field(default_factory=list)  # whose gradient checkpointing is switched off
    checkpoints: FrameworkCheckpoints | None = None  # of the training, in a search that keeps some
    has_own_folder: bool = False  # of the trial that has made the trainer
    is_training: bool = False  # an evaluation reports to the search then
    was_due: bool = False  # the checkpoint that is written, and is removed when the next one is


class PooledTrainer:
    """Comes before a trainer's own class, in a class that is made of both: see `pooled_kind`."""

    args: Any
    model: nn.Module
    pool_state: TrainerPoolState

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self).__mro__[2],), vars(self)

    # ---- placement ----

    def create_accelerator_and_postprocess(self) -> None:
        with precision_of(self.args):
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        place_batches_only(self.accelerator)  # type: ignore[attr-defined]

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """It stays in host memory."""

    def prepare_in_pool(self, optimizer: Any = None, total_steps: int | None = None) -> None:
        """The model, and all others that the trainer has. Batches go to the trial's device from here on.

        Raises:
            PrepareError, BudgetError: as `hydra_tune.prepare`; none of them is prepared then.
        """
        model, pool_state = self.model, self.pool_state
        refuse_model(model)
        refuse_device(self.accelerator.device, pool_state.pool or current_context().pool or default_pool())  # type: ignore[attr-defined]
        for module in model.modules():
            if vars(module).get("gradient_checkpointing"):
                module.gradient_checkpointing = False  # type: ignore[assignment]
                pool_state.checkpointed.append(module)
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wraps it
        try:
            for each in (*self._other_models(model), model):
                prepare(each, _if_it_steps(optimizer, each), pool=pool_state.pool, total_steps=total_steps)
                pool_state.prepared.append(each)
        except BaseException:
            self._release()
            raise
        trial = trial_of(model)
        assert trial is not None
        place(self.args, trial.device.torch_device)

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
        while self.pool_state.prepared:
            if trial_of(model := self.pool_state.prepared.pop()) is not None:  # a trial that has ended has let go of it
                release(model)
        while self.pool_state.checkpointed:
            self.pool_state.checkpointed.pop().gradient_checkpointing = True  # type: ignore[assignment]
        place(self.args, CPU)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        if self.pool_state.prepared:
            yield
            return
        self.prepare_in_pool()
        try:
            yield
        finally:
            self._release()

    # ---- what a Trainer does ----

    def _get_output_dir(self, trial: Any) -> str:
        if self.pool_state.has_own_folder:
            return str(self.args.output_dir)
        return str(super()._get_output_dir(trial))  # type: ignore[misc]

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.pool_state.checkpoints = FrameworkCheckpoints.of_running_trial()
        if self.pool_state.checkpoints is not None and resume_from_checkpoint in (None, False):
            resume_from_checkpoint = self.pool_state.checkpoints.newest_of_training()
        events = TrainerEvents(self)
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
            self.pool_state.is_training = False
            self._release()

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        return loss.to(CPU)  # where the trainer adds them up

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating():
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def prediction_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating():
            return super().prediction_loop(*args, **kwargs)  # type: ignore[misc]


def _if_it_steps(optimizer: Any, model: nn.Module) -> Any:
    """The optimizer, or None for a model none of whose weights it steps."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer is not None else set()
    return None if stepped.isdisjoint(map(id, model.parameters())) else optimizer


@functools.cache
def pooled_kind(kind: Any) -> type:
    """The class that a trainer of class `kind` gets: under the same name, with `PooledTrainer` before its own."""
    return type(kind.__name__, (PooledTrainer, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _unpickled(kind: type) -> Any:
    return object.__new__(pooled_kind(kind))
