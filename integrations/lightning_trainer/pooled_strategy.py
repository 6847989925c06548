"""Where a Lightning Trainer over a pool has its module and its batches, and how it runs a step.

A strategy moves the module to the GPU at once, and calls `training_step`, which may call any part of the module. Over a
pool the module stays in host memory, and a block's weights are there in the module's forward alone. So the strategy
prepares the module, and runs each step within its forward.
"""

from __future__ import annotations

import functools
from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torchmetrics
from torch import nn
from torch.utils._pytree import tree_map_only

from hydra_tune.blocks.root import trial_of
from hydra_tune.blocks.tree import tensors_in
from hydra_tune.integrations.lightning_trainer.packages import is_a
from hydra_tune.integrations.lightning_trainer.several_optimizers import SeveralOptimizers
from hydra_tune.integrations.lightning_trainer.step_forward import StepForward
from hydra_tune.planning.refusals import refuse_unsupported
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.sharing.shared_parameter import make_plain
from hydra_tune.trials.preparation import prepare, release

CPU = torch.device("cpu")


def _in_forward(name: str, context: str) -> Callable[..., Any]:
    """The module's step of this name, in this context of the precision plugin, as the module's forward. DDP's strategy
    does likewise."""

    def run(self: PooledStrategy, *args: Any, **kwargs: Any) -> Any:
        with getattr(self.precision_plugin, context)():
            step = getattr(self.lightning_module, name)
            if self._step is None:
                return step(*args, **kwargs)
            return self._step.run(functools.partial(step, *args, **kwargs), step.__name__, tensors_in((args, kwargs)))

    return run


class PooledStrategy(ABC):  # as Lightning's is: else its object could not become one
    """Comes before a `SingleDeviceStrategy`'s own class. Its `root_device` is where batches go: the home of the trial
    while the module is prepared, else host memory."""

    pool: ShardPool | None
    lightning_module: Any
    optimizers: list[Any]
    precision_plugin: Any
    _step: StepForward | None = None  # while the module is prepared, and has host memory and perhaps a device
    _summaries: Sequence[Any] = ()  # that were made before

    def setup_environment(self) -> None:
        """Which of several GPUs it uses is the pool's business."""

    def model_to_device(self) -> None:
        """It stays in host memory."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)  # type: ignore[misc]
        self._summarize(trainer)
        self._prepare(trainer)

    def _summarize(self, trainer: Any) -> None:
        """Before the module is prepared: a ModelSummary runs its example with hooks on all modules of the process."""
        module = self.lightning_module
        if trainer.state.fn == "fit" and getattr(module, "example_input_array", None) is not None:
            summaries = [each for each in trainer.callbacks if is_a("ModelSummary", each)]
            for each in summaries:
                each.on_fit_start(trainer, module)
                each.on_fit_start = lambda *_: None
            self._summaries = summaries

    def _prepare(self, trainer: Any) -> None:
        module, trains = self.lightning_module, trainer.state.fn == "fit"
        optimizers = [each for each in self.optimizers if type(each).__name__ != "_MockOptimizer"] if trains else []
        make_plain(module.parameters())
        with _without_trainer(module):  # which has all the data
            refuse_unsupported(module)
        self._step = StepForward(module)
        steps = _total_steps(trainer) if trains else None
        prepare(self._step.root, SeveralOptimizers.of(optimizers), pool=self.pool, total_steps=steps)
        trial = trial_of(self._step.root)
        assert trial is not None
        self._step.guard(trial)
        self._place(trial.device.torch_device)

    def release(self) -> None:
        if self._step is not None:
            step, self._step = self._step, None
            if trial_of(step.root) is not None:  # a trial that has ended has let go of it
                release(step.root)
            step.give_back()
            self._place(CPU, step.module)
        for each in self._summaries:
            vars(each).pop("on_fit_start", None)
        self._summaries = ()

    def _place(self, device: torch.device, module: nn.Module | None = None) -> None:
        """Where batches go, and what a module that is asked says."""
        self._root_device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        for each in (module or self.lightning_module).modules():
            if isinstance(each, torchmetrics.Metric):
                _move_metric(each, device)
            elif is_a("_DeviceDtypeModuleMixin", each):  # a LightningModule, perhaps within one
                each._device = device

    def teardown(self) -> None:
        self.release()
        super().teardown()  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Each state stays where its weights are."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    training_step = _in_forward("training_step", "train_step_context")
    validation_step = _in_forward("validation_step", "val_step_context")
    test_step = _in_forward("test_step", "test_step_context")
    predict_step = _in_forward("predict_step", "predict_step_context")


def _total_steps(trainer: Any) -> int | None:
    """Mini-batches of a training, where they are known before its loaders are made."""
    known, loader, limit = [], trainer.fit_loop._data_source.instance, trainer.limit_train_batches
    if trainer.max_steps > 0 and trainer.lightning_module.automatic_optimization:
        known.append(trainer.max_steps * trainer.accumulate_grad_batches)
    if (trainer.max_epochs or 0) > 0 and isinstance(loader, torch.utils.data.DataLoader):
        with suppress(TypeError):  # an iterable data set has no length
            length = len(loader)
            known.append(trainer.max_epochs * (min(length, limit) if isinstance(limit, int) else int(length * limit)))
    return min(known, default=0) or None


def _move_metric(metric: Any, device: torch.device) -> None:
    """What it has added up, in attributes; a metric that has weights keeps them where the pool has them."""
    for name in metric._defaults:
        setattr(metric, name, tree_map_only(torch.Tensor, lambda x: x.to(device), getattr(metric, name)))
    metric._device = device


@contextmanager
def _without_trainer(module: Any) -> Iterator[None]:
    trainer, module._trainer = module._trainer, None
    try:
        yield
    finally:
        module._trainer = trainer
