"""`prepare` puts a model, its optimizer and its loaders under a pool, `release` undoes that; and `resume_step`."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import nn

from hydra_tune.blocks.root import trial_of
from hydra_tune.blocks.stand_ins import end_orphans
from hydra_tune.checkpoints.extra_state import extra_states
from hydra_tune.devices.tensor_bytes import tensor_bytes, weights_of
from hydra_tune.errors import ConfigError, PrepareError
from hydra_tune.planning.optimizer_memory import training_bytes
from hydra_tune.planning.refusals import refuse_unsupported
from hydra_tune.pool.registration import add_trial, grow_trial
from hydra_tune.pool.shard_pool import ShardPool, default_pool
from hydra_tune.process.fork import gate, new_in_child
from hydra_tune.process.interrupts import interrupts
from hydra_tune.sharing.shared_parameter import make_plain
from hydra_tune.show.control_socket import control_server
from hydra_tune.trials.context import current_context
from hydra_tune.trials.prepared_loader import PreparedLoader, plain_loader, refuse_what_is_no_loader
from hydra_tune.trials.trial import Trial

logger = logging.getLogger("hydra_tune")
ModelT = TypeVar("ModelT", bound=nn.Module)


def prepare(
    model: ModelT,
    optimizer: torch.optim.Optimizer | None = None,
    *loaders: Any,
    pool: ShardPool | None = None,
    name: str | None = None,
    total_steps: int | None = None,
    epochs: int | None = None,
    extra_state: Any = None,
) -> Any:
    """Train `model` within the pool's budget from here on. The numbers are those of plain PyTorch.

    Call it on a model in host memory, after the optimizer was made from its parameters. The first batch is measured,
    then the model is cut. Model and optimizer come back as the same objects. Loaders come back wrapped: their batches
    are on the trial's device, and all else is as before. In the calling thread autograd's device threads are turned
    off, so that a backward runs in the thread that calls it.

    Args:
        model: any module whose layers are reached by calling them.
        optimizer: the one that steps `model`'s parameters, or one of several; None if the parameters that are stepped
            are not the model's.
        loaders: any iterables of batches.
        pool: by default the runner's pool inside an objective, else the default pool. A trial of Ray Tune that has
            no `HydraExecutor` must name one.
        name: the trial's name in reports.
        total_steps: how many mini-batches it will train. The scheduler computes from it what remains.
        epochs: in place of `total_steps`: how often it will go through the first loader, if that has a length.
        extra_state: other objects that belong into a checkpoint and have `state_dict` and `load_state_dict`: a
            learning rate schedule, a GradScaler, an average of the model. One object, or several in a list.

    If the trial goes on from a checkpoint, all of these are set to their state in it. The loop begins at
    `resume_step()`.

    Returns:
        `model` alone if nothing else was given, else a tuple in the order of the arguments.

    Raises:
        PrepareError: the model or the optimizer cannot be prepared, or an argument is no loader. The message says
            which part and why.
        PoolClosedError: the pool is closed.
        BudgetError: the model, its gradients and its optimizer state do not fit the pool's host memory.
        ConfigError: `total_steps` or `epochs` is no positive whole number, an object of `extra_state` has no state,
            or `pool` is not the runner's, or was made in another process.
    """
    context = current_context()
    if pool is not None and context.pool is not None and pool is not context.pool:
        raise ConfigError("inside an objective the runner's pool is used. Leave pool= out, or pass the runner's.")
    if pool is not None and not isinstance(pool, ShardPool):
        raise ConfigError(f"pool is a ShardPool or None, got {type(pool).__name__}.")
    refuse_what_is_no_loader(loaders)
    extra, resumption = extra_states(extra_state), context.resumption
    num_steps = _num_steps(total_steps, epochs, loaders)
    if num_steps is not None and resumption is not None:
        num_steps = max(1, num_steps - resumption.next_steps_behind)
    if isinstance(model, nn.Module):
        make_plain(model.parameters())
    _refuse(model, optimizer)
    end_orphans(model)
    chosen = pool or context.pool or _own_pool()
    if chosen.devices[0].process != gate.process:
        raise ConfigError("a pool works in the process that has made it. Make a new ShardPool in a forked one.")
    chosen.events.check_usable()
    joined = context.live_trial(chosen)
    host_bytes = training_bytes(model, optimizer) - sum(
        tensor_bytes(p) for p in model.parameters() if not p.requires_grad
    )
    host_weights = chosen.shared_weights.numbered(w for w in weights_of(model) if not w.requires_grad)
    if joined is None:
        trial = add_trial(chosen, Trial, num_steps, host_bytes, name or context.name, context.stop, host_weights)
    else:
        trial = joined
        grow_trial(trial, host_bytes, host_weights)
    with _bind_lock:
        try:
            _refuse_shared(model)
            if any(p.device.type != "cpu" for p in model.parameters()):
                logger.warning("%s is not in host memory; moving it there", type(model).__name__)
                model.to("cpu")
            plain = list(map(plain_loader, loaders))
            progress = [] if resumption is None else resumption.begin(model, optimizer, plain, extra)
            trial.bind(model, optimizer)
        except BaseException:
            if joined is None:
                trial.end()
            else:
                grow_trial(trial, -host_bytes)
            raise
        _prepared_models[id(model)] = model
    trial.resumption = resumption
    if joined is None:
        context.register(trial)
        if not trial.of_runner:  # a search shows itself
            control_server.show(chosen)
    interrupts.install()
    wrapped = [
        PreparedLoader(loader, weakref.ref(trial), its_progress)
        for loader, its_progress in zip_longest(plain, progress)
    ]
    return (model, optimizer, *wrapped) if optimizer is not None or loaders else model


def release(model: nn.Module) -> None:
    """Make a prepared model plain again: in host memory, with its current weights. Its bytes go back to the pool.

    `model` may also be a module that wraps prepared ones.

    Raises:
        PrepareError: the model is not prepared, or is no module.
    """
    gate.leave()  # a Ctrl-C may have ended a visit without this
    if not isinstance(model, nn.Module):
        raise PrepareError(
            f"release takes a model, a torch.nn.Module; got {type(model).__name__}. Pass one model at a time."
        )
    found = end_orphans(model)
    for module in model.modules():
        if (trial := trial_of(module)) is not None:
            trial.release(module)
            found = True
    interrupts.check()
    if not found:
        raise PrepareError(f"only a prepared model can be released; this {type(model).__name__} is not prepared.")


def resume_step() -> int:
    """The number of the mini-batch at which the calling objective goes on.

    It is 0, unless the objective was interrupted and its runner has a checkpoint of it, or Ray Tune has paused it, or
    lets it exploit another trial. Write ``for step in range(hydra_tune.resume_step(), STEPS)``, or with epochs over a
    prepared loader ``for epoch in range(hydra_tune.resume_step() // len(loader), EPOCHS)``. The loader skips the
    batches that were seen before.

    Call it after `prepare`, right before the loop: from there on random numbers are those of the uninterrupted run. A
    runner writes checkpoints only of objectives that call it.
    """
    resumption = current_context().resumption
    return 0 if resumption is None else resumption.resume_step()


def _own_pool() -> ShardPool:
    """The process's, which no trial of Ray Tune means: its process is Tune's, and others train beside it."""
    if "TUNE_ORIG_WORKING_DIR" in os.environ:  # set in each process that Tune starts for a trial
        raise PrepareError(
            "in a trial of Ray Tune prepare uses the pool of a HydraExecutor, but this trial was given none, as by "
            "stock ray.tune, or a restore without resources=. Write `from hydra_tune import tune` and "
            "tune.Tuner(train, resources=HydraExecutor(...)), likewise in tune.Tuner.restore. If the trial has its own "
            "GPU, pass prepare(..., pool=ShardPool())."
        )
    return default_pool()


def _num_steps(total_steps: int | None, epochs: int | None, loaders: Sequence[Any]) -> int | None:
    """How many mini-batches the trial will train; None if that is not known."""
    for name, value in (("total_steps", total_steps), ("epochs", epochs)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} is a whole number of at least 1, or None if it is not known; got {value!r}.")
    if total_steps is None and epochs is not None:
        if not loaders:
            raise ConfigError("epochs are counted in a loader's lengths, but no loader was given. Write total_steps=.")
        with suppress(TypeError):  # a loader over an iterable data set has no length
            return epochs * len(loaders[0])
    return total_steps


def _refuse(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise `PrepareError` if the model or the optimizer cannot be prepared."""
    if not isinstance(model, nn.Module):
        raise PrepareError(f"the first argument is the model, a torch.nn.Module; got {type(model).__name__}.")
    if trial_of(model) is not None:
        raise PrepareError("this model is prepared already. Use it as it is, or call hydra_tune.release(model) first.")
    refuse_unsupported(model)
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PrepareError(
            f"the second argument is the model's optimizer or None; got {type(optimizer).__name__}. "
            "Write prepare(model, None, loader) for a loader without an optimizer."
        )
    try:
        optimizer.state_dict()  # some wrappers of optimizers do not have what this reads
    except AttributeError as error:
        raise PrepareError(
            f"the state of an optimizer moves with its weights, but the state_dict of {type(optimizer).__name__} fails "
            f"({error}). Where it wraps another optimizer, give prepare that one, and step this one as before."
        ) from None
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if stepped.isdisjoint(map(id, model.parameters())):
        raise PrepareError(
            "the optimizer steps the model's parameters, but this one holds none of them. Make it from "
            "model.parameters(), before prepare and after any change of the model. Or do not give it to prepare, and "
            "step it as before."
        )


_prepared_models: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()  # of all pools, by id
_bind_lock = new_in_child(threading.Lock())  # held from the look for shared weights until the model is bound


def _refuse_shared(model: nn.Module) -> None:
    """Raise `PrepareError` if the model shares a weight with another prepared model."""
    names = {id(p): name for name, p in model.named_parameters()}
    for other in [ref() for ref in _prepared_models.valuerefs()]:
        shared = [] if other is None or trial_of(other) is None else [p for p in other.parameters() if id(p) in names]
        if shared:
            raise PrepareError(
                f"a weight may be in one prepared model only, but {names[id(shared[0])]} is also in a "
                f"{type(other).__name__} that is prepared already. Call hydra_tune.release on that model first, or "
                "give this one a copy of the weight."
            )
