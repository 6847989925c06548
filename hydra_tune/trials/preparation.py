"""`prepare`, `release` and `resume_step`: a model, its optimizer and loaders under the pool, and back."""

from __future__ import annotations

import logging
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
from hydra_tune.errors import ConfigError, PrepareError
from hydra_tune.planning.optimizer_memory import training_bytes
from hydra_tune.planning.refusals import refuse_unsupported
from hydra_tune.pool.registration import add_trial, grow_trial
from hydra_tune.pool.shard_pool import ShardPool, default_pool
from hydra_tune.process.fork import gate, new_in_child
from hydra_tune.process.interrupts import interrupts
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
    """Train `model` within the pool's budget from here on, with the numbers plain PyTorch gives.

    Call it on a model in host memory, after the optimizer was made from its parameters. The first batch
    is measured, then the model is cut. Model and optimizer come back as the same objects; loaders come
    back wrapped, their batches on the trial's device, all else as it was. In the calling thread
    autograd's device threads are turned off: a backward runs in the thread that called it.

    Args:
        model: any module whose layers are reached by calling them.
        optimizer: the one that steps `model`'s parameters, or one of several; none, where those that are stepped are
            not the model's.
        loaders: any iterables of batches.
        pool: the runner's pool inside an objective, else the default pool, if None.
        name: how the trial is called in reports.
        total_steps: how many mini-batches it will train, by which the scheduler knows what remains.
        epochs: how often it will go through the first of the loaders; says the same, if that has a length and
            `total_steps` does not say it.
        extra_state: what else belongs to a checkpoint, with `state_dict` and `load_state_dict`: a learning rate
            schedule, a GradScaler, an average of the model; one, or several in a list.

    In a trial that goes on from a checkpoint all of these are as they were then; the loop begins at `resume_step()`.

    Returns:
        `model` alone if nothing else was given, else a tuple in the order of the arguments.

    Raises:
        PrepareError: the model or the optimizer cannot be prepared, or a loader is none; says which part and why.
        PoolClosedError: the pool is closed.
        BudgetError: the pool's host memory does not hold the model, its gradients and optimizer state.
        ConfigError: `total_steps` or `epochs` is no positive whole number, `extra_state` has no state, or `pool` is
            another than the runner's, or another process's.
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
    _refuse(model, optimizer)
    end_orphans(model)
    chosen = pool or context.pool or default_pool()
    if chosen.devices[0].process != gate.process:
        raise ConfigError("a pool works in the process that has made it. Make a new ShardPool in a forked one.")
    chosen.events.check_usable()
    beside, host_bytes = context.live_trial(chosen), training_bytes(model, optimizer)
    if beside is None:
        trial = add_trial(chosen, Trial, num_steps, host_bytes, name or context.name, context.stop)
    else:
        trial = beside
        grow_trial(trial, host_bytes)
    with _binding:
        try:
            _refuse_shared(model)
            if any(p.device.type != "cpu" for p in model.parameters()):
                logger.warning("%s is not in host memory; moving it there", type(model).__name__)
                model.to("cpu")
            plain = list(map(plain_loader, loaders))
            progress = [] if resumption is None else resumption.begin(model, optimizer, plain, extra)
            trial.bind(model, optimizer)
        except BaseException:
            if beside is None:
                trial.end()
            else:
                grow_trial(trial, -host_bytes)
            raise
        _bound[id(model)] = model
    trial.resumption = resumption
    if beside is None:
        context.register(trial)
    interrupts.install()
    wrapped = [PreparedLoader(loader, weakref.ref(trial), of_it) for loader, of_it in zip_longest(plain, progress)]
    return (model, optimizer, *wrapped) if optimizer is not None or loaders else model


def release(model: nn.Module) -> None:
    """Make a prepared model plain again, or one that `model` wraps: on the host, with its current weights. Its bytes go
    back to the pool.

    Raises:
        PrepareError: the model is not prepared, or is none.
    """
    gate.leave()  # where an interruption has left it inside
    if not isinstance(model, nn.Module):
        raise PrepareError(
            f"a model is released, a torch.nn.Module; got {type(model).__name__}. Pass it one at a time."
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
    """The mini-batch at which the calling objective goes on: 0, unless it was interrupted and its runner has a
    checkpoint of it, or Tune has paused it or has it exploit another trial.
    ``for step in range(hydra_tune.resume_step(), STEPS)``, or with epochs over a prepared loader
    ``for epoch in range(hydra_tune.resume_step() // len(loader), EPOCHS)``: the loader skips what was seen.

    Call it once the model is prepared, right before the loop: from there on random numbers are those of the
    uninterrupted run. A runner writes checkpoints of objectives that call it.
    """
    resumption = current_context().resumption
    return 0 if resumption is None else resumption.resume_step()


def _num_steps(total_steps: int | None, epochs: int | None, loaders: Sequence[Any]) -> int | None:
    """None if nobody knows."""
    for name, value in (("total_steps", total_steps), ("epochs", epochs)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} is a whole number of at least 1, or None if it is not known; got {value!r}.")
    if total_steps is None and epochs is not None:
        if not loaders:
            raise ConfigError("epochs are counted in a loader's lengths, but no loader was given. Write total_steps=.")
        with suppress(TypeError):  # an iterable data set has no length
            return epochs * len(loaders[0])
    return total_steps


def _refuse(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
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
        optimizer.state_dict()  # by which its state follows its weights
    except AttributeError as error:
        raise PrepareError(
            f"the state of an optimizer moves with its weights, but the state_dict of {type(optimizer).__name__} fails "
            f"({error}). Where it wraps another optimizer, give prepare that one, and step this one as before."
        ) from None
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if stepped.isdisjoint(map(id, model.parameters())):
        raise PrepareError(
            "the optimizer steps the model's parameters, but this one holds none of them. Make it from "
            "model.parameters(), before prepare and after any change of the model; or leave it out, and step it."
        )


_bound: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()  # in any pool, by id
_binding = new_in_child(threading.Lock())


def _refuse_shared(model: nn.Module) -> None:
    names = {id(p): name for name, p in model.named_parameters()}
    for other in [ref() for ref in _bound.valuerefs()]:
        shared = [] if other is None or trial_of(other) is None else [p for p in other.parameters() if id(p) in names]
        if shared:
            raise PrepareError(
                f"a weight is in one prepared model, but {names[id(shared[0])]} is in a {type(other).__name__} that is "
                "prepared already. Call hydra_tune.release on that model first, or give this one a copy."
            )
