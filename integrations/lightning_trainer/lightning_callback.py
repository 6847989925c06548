"""Lightning's Trainer over a pool: `lightning.Trainer(..., callbacks=[hydra_tune.HydraLightningCallback()])`.

A Trainer moves its module to the GPU, and what comes before that knows no callback. So what has this callback becomes,
as it is made, a `PooledLightningTrainer` with a `PooledStrategy` and a `PooledFitLoop`: each of its own class, but the
module stays in host memory, is prepared for as long as it trains or evaluates, and runs each step within its own
forward.

    Trainer._run   setup hooks | strategy.setup      | restored state | batches ... | strategy.teardown
                                 optimizers, prepare   of optimizers    steps         release
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torchmetrics
import wrapt
from torch import nn
from torch.utils._pytree import tree_map_only

from hydra_tune.blocks.root import trial_of
from hydra_tune.blocks.tree import tensors_in
from hydra_tune.errors import ConfigError, PrepareError
from hydra_tune.integrations.frameworks import guards
from hydra_tune.integrations.frameworks.current_trial import current_trial, runs_beside_others
from hydra_tune.integrations.frameworks.framework_checkpoints import FrameworkCheckpoints, trial_folder
from hydra_tune.integrations.frameworks.process_settings import warn_of
from hydra_tune.integrations.frameworks.trial_reports import report, reports_here
from hydra_tune.integrations.lightning_trainer.several_optimizers import SeveralOptimizers
from hydra_tune.integrations.lightning_trainer.step_forward import StepForward
from hydra_tune.planning.refusals import refuse_unsupported
from hydra_tune.pool.shard_pool import ShardPool, default_pool
from hydra_tune.trials.context import current_context
from hydra_tune.trials.preparation import prepare, release

logger = logging.getLogger("hydra_tune")
_CPU = torch.device("cpu")
_KEY = "hydra_tune"  # of a checkpoint
_PRECISIONS = {"HalfPrecision", "DoublePrecision", "BitsandbytesPrecision", "TransformerEnginePrecision"}
_FOR_THE_PROCESS = ("deterministic", "benchmark", "detect_anomaly")
_REPORTERS = ("optuna", "optuna_integration", "ray")  # packages whose callbacks report by themselves


_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _base() -> Any:
    """A Callback of each of the packages that are imported; of the first that is installed, where none is."""
    names = [name for name in _PACKAGES if name in sys.modules]
    names = names or [name for name in _PACKAGES if find_spec(name.partition(".")[0]) is not None][:1]
    return type("Callback", tuple(import_module(name).Callback for name in names), {})


_Callback: Any = _base()


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


@dataclass
class _PooledFit:
    """What a trainer with the callback has more than others."""

    pool: ShardPool | None
    checkpoints: FrameworkCheckpoints | None = None
    goes_on: bool = False  # this training does, from a checkpoint of the trial's
    random_states: Sequence[torch.Tensor] | None = None  # of that checkpoint, until they are drawn from


class _Interrupted(BaseException):
    """A Ctrl-C in a search's trial. Lightning would answer KeyboardInterrupt by ignoring the signal from then on."""


@contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except _Interrupted:
        raise KeyboardInterrupt from None


class PooledLightningTrainer:
    """Comes before a Trainer's own class."""

    pooling: _PooledFit
    state: Any
    strategy: Any
    fit_loop: Any

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        with _interruptible():
            return super().fit(*args, **kwargs)  # type: ignore[misc]

    def validate(self, *args: Any, **kwargs: Any) -> Any:
        with _interruptible():
            return super().validate(*args, **kwargs)  # type: ignore[misc]

    def test(self, *args: Any, **kwargs: Any) -> Any:
        with _interruptible():
            return super().test(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with _interruptible():
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    def _run(self, model: Any, ckpt_path: Any = None, **kwargs: Any) -> Any:
        _refuse_module(model)
        pooling = self.pooling
        pooling.checkpoints = FrameworkCheckpoints.of_running_trial() if self.state.fn == "fit" else None
        newest = None if pooling.checkpoints is None else pooling.checkpoints.newest_of_training()
        pooling.goes_on, pooling.random_states = newest is not None, None
        if newest is not None:
            ckpt_path = newest
            if "weights_only" in kwargs:
                kwargs["weights_only"] = False  # it is our own
        try:
            return super()._run(model, ckpt_path=ckpt_path, **kwargs)  # type: ignore[misc]
        except KeyboardInterrupt:
            if current_trial() is None:
                raise
            raise _Interrupted from None
        finally:
            self.strategy.release()

    def _run_stage(self) -> Any:
        self._draw_on()
        return super()._run_stage()  # type: ignore[misc]

    def _draw_on(self) -> None:
        """As the training would have that this one continues."""
        random_state = current_context().random_state
        if self.pooling.random_states is not None and random_state is not None:
            random_state.set_states(self.pooling.random_states)
            self.fit_loop._combined_loader = None  # `estimated_stepping_batches` has drawn an order of the data


class PooledStrategy(ABC):  # as Lightning's is: else its object could not become one
    """Comes before a `SingleDeviceStrategy`'s own class. Its `root_device` is where batches go: the home of the trial
    while the module is prepared, else host memory."""

    pool: ShardPool | None
    lightning_module: Any
    optimizers: list[Any]
    precision_plugin: Any
    _step: StepForward | None = None  # while the module is prepared
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
            summaries = [each for each in trainer.callbacks if _is_a("ModelSummary", each)]
            for each in summaries:
                each.on_fit_start(trainer, module)
                each.on_fit_start = lambda *_: None
            self._summaries = summaries

    def _prepare(self, trainer: Any) -> None:
        module, trains = self.lightning_module, trainer.state.fn == "fit"
        optimizers = [each for each in self.optimizers if type(each).__name__ != "_MockOptimizer"] if trains else []
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
            self._place(_CPU, step.module)
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
            elif _is_a("_DeviceDtypeModuleMixin", each):  # a LightningModule, perhaps within one
                each._device = device

    def teardown(self) -> None:
        self.release()
        super().teardown()  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Each state stays where its weights are."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    # ---- steps, within the module's own forward ----

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._in_forward(self.lightning_module.training_step, args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._in_forward(self.lightning_module.validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._in_forward(self.lightning_module.test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._in_forward(self.lightning_module.predict_step, args, kwargs)

    def _in_forward(self, step: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """As DDP's strategy does. A step may call any part of the module, which has its blocks in its forward alone."""
        if self._step is None:
            return step(*args, **kwargs)
        name, tensors = step.__name__, tensors_in((args, kwargs))
        return self._step.run(functools.partial(step, *args, **kwargs), name, tensors)


class PooledFitLoop:
    """Comes before a fit loop's own class."""

    trainer: Any
    epoch_loop: Any

    def on_advance_end(self) -> None:
        """An epoch has ended, with all callbacks and schedules. Lightning goes on exactly from here alone: in the
        middle of an epoch it would begin a new order of the data."""
        super().on_advance_end()  # type: ignore[misc]
        checkpoints, step = self.trainer.pooling.checkpoints, self.epoch_loop.batch_progress.total.ready
        if checkpoints is not None and not checkpoints.is_behind and checkpoints.is_due(step):
            path = checkpoints.folder / f"training-{checkpoints.number}-step-{step}.ckpt"
            try:
                self.trainer.save_checkpoint(path)
                checkpoints.note(path, step, was_due=True)
            except OSError as error:  # a full disk
                logger.warning("no checkpoint could be written to %s (%s); the training goes on", path, error)


class PooledEvents:
    """What happens in one trainer: a callback of its own package, in the place of the user's."""

    state_key = "HydraLightningCallback"
    report: bool

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Lightning runs forward and backward within the optimizer's step, whose own hooks come before them."""
        trial = trial_of(pl_module)
        if trial is not None and pl_module.automatic_optimization:
            trial.before_optimizer_step()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        random_state = current_context().random_state
        if trainer.pooling.checkpoints is not None and random_state is not None:
            checkpoint[_KEY] = {"random_states": random_state.states()}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.pooling.goes_on and trainer.pooling.random_states is None:  # not of a search for a learning rate
            trainer.pooling.random_states = checkpoint[_KEY]["random_states"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.pooling.goes_on:
            trainer.pooling.checkpoints.goes_on_from(trainer.fit_loop.epoch_loop.batch_progress.total.ready)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if not hasattr(trainer.fit_loop, "is_resuming"):  # of Lightning before 2.6, which iterates over its loader anew
            trainer._draw_on()
        trainer.pooling.random_states = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.pooling.checkpoints is not None:
            trainer.pooling.checkpoints.end()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not self.report or trainer.sanity_checking or trainer.state.fn != "fit" or not reports_here():
            return
        if _reports_itself(trainer):
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if torch.numel(value) == 1}
        name, larger = _monitored(trainer)
        if metrics:
            report(metrics.get(name), trainer.global_step, metrics, larger_is_better=larger)


def _monitored(trainer: Any) -> tuple[str, bool]:
    """Of a ModelCheckpoint, else of an EarlyStopping; and whether larger is better."""
    for callback in (*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks):
        if getattr(callback, "monitor", None) is not None:
            return callback.monitor, callback.mode == "max"
    return "val_loss", False


def _reports_itself(trainer: Any) -> bool:
    kinds = [kind for callback in trainer.callbacks for kind in type(callback).__mro__]
    return any(kind.__module__.partition(".")[0] in _REPORTERS for kind in kinds)


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


# ---- as a trainer is made ----


@functools.cache
def _comes_before(kind: Any, own: Any) -> type:
    return type(own.__name__, (kind, own), {"__module__": own.__module__, "__doc__": own.__doc__})


def _is_a(name: str, value: Any) -> bool:
    """Of that class, of whichever of the two packages."""
    return any(kind.__name__ == name for kind in type(value).__mro__)


def _is_ours(callback: Any) -> bool:
    return callback is HydraLightningCallback or isinstance(callback, HydraLightningCallback)


def _watch(module: Any) -> None:
    """`module` has a Trainer."""
    stock = module.Trainer.__init__
    bases = (PooledEvents, HydraLightningCallback, module.Callback)
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
            kwargs["default_root_dir"] = _own_folder(kwargs.get("default_root_dir") or Path.cwd(), folder)
        for name in _FOR_THE_PROCESS:
            if kwargs.get(name) and runs_beside_others():
                warn_of(f"Trainer({name}=...)", "Set it once, before the search")
        stock(self, *args, **kwargs)
        _refuse_trainer(self, pool or current_context().pool or default_pool())
        _pool_trainer(self, pool)
        if folder is not None:
            _give_own_folders(self, folder)

    module.Trainer.__init__ = init


def _pool_trainer(trainer: Any, pool: ShardPool | None) -> None:
    trainer.pooling = _PooledFit(pool)
    strategy = trainer.strategy
    strategy.pool, strategy._root_device = pool, _CPU
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


def _own_folder(path: Any, folder: str) -> str:
    path = os.fspath(path)
    return path if folder in Path(path).parts else f"{path.rstrip('/')}/{folder}"  # it may be an address


def _give_own_folders(trainer: Any, folder: str) -> None:
    """To those that the user has given a folder, which trials share."""
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "dirpath", None) is not None:
            callback.dirpath = _own_folder(callback.dirpath, folder)
    for logger in trainer.loggers:
        for name in ("_root_dir", "_save_dir"):  # of CSV files, or of TensorBoard
            if isinstance(vars(logger).get(name), (str, os.PathLike)):
                setattr(logger, name, _own_folder(getattr(logger, name), folder))


def _refuse_trainer(trainer: Any, pool: ShardPool) -> None:
    """Raises:
    ConfigError: an argument says where the module is to be, how it is split, or what its weights are made.
    """
    strategy, precision = trainer.strategy, type(trainer.precision_plugin)
    is_single = _is_a("SingleDeviceStrategy", strategy)
    wanted, there = strategy.root_device.type, pool.devices[0].torch_device.type
    if not is_single or trainer.num_devices > 1:
        raise ConfigError(
            f"the pool decides where a module and its parts are, in one process, but the Trainer has "
            f"{type(strategy).__name__} and {trainer.num_devices} device(s). Write Trainer(devices=1), and give the "
            "pool the devices: ShardPool(devices=...)."
        )
    if wanted != there:
        advice = "cpu" if there == "cpu" else "gpu"
        raise ConfigError(
            f"a Trainer and its pool use one kind of device, but the pool has {there} and the Trainer {wanted}. Write "
            f'Trainer(accelerator="{advice}", devices=1), or give the pool other devices=.'
        )
    if named := _PRECISIONS.intersection(kind.__name__ for kind in precision.__mro__):
        raise ConfigError(
            "a module's weights are plain tensors of the dtype that they have, and the default dtype is the whole "
            f'process\'s, but the Trainer has {named.pop()} (precision="{trainer.precision}"). Write '
            'precision="bf16-mixed"; or convert the module and its batches, and leave precision out.'
        )


def _refuse_module(module: Any) -> None:
    if getattr(module, "_compiler_ctx", None) is not None:
        raise PrepareError(
            f"a prepared module runs operator by operator, but this {type(module).__name__} was given to "
            "torch.compile. Give the Trainer the plain module."
        )
    if trial_of(module) is not None:
        raise PrepareError(
            f"a Trainer with HydraLightningCallback prepares its module, but this {type(module).__name__} is prepared "
            "already. Leave hydra_tune.prepare out, or call hydra_tune.release(module) first."
        )


for _package in _PACKAGES:
    wrapt.register_post_import_hook(_watch, _package)
