"""What a model will need, before a run: `hydra_tune.plan`.

    budgets          the least one, a comfortable one, and the one from which on a trial is resident
    at a budget      shards, what is held, kept and repeated, bytes over the link, seconds of a step
    on the host      bytes of a trial, and how many trials fit
    refused          what `prepare`, the first step or the budget would refuse, in their own words

All figures come from rehearsals of a copy of the model in host memory (`rehearsal.py`). No device is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from hydra_tune.blocks.root import trial_of
from hydra_tune.config import format_bytes, parse_bytes
from hydra_tune.devices.open_devices import host_free_bytes
from hydra_tune.errors import ConfigError, PrepareError
from hydra_tune.planning.optimizer_memory import training_bytes
from hydra_tune.planning.refusals import refuse_unsupported
from hydra_tune.pool.registration import host_refusal
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.preview.feeding import batch_copy, copies_of, refuse_unfeedable
from hydra_tune.preview.least_budget import least_rehearsal, resident_rehearsal
from hydra_tune.preview.plan_table import rows_of, text_of
from hydra_tune.preview.rehearsal import Carried, Rehearsal, Script
from hydra_tune.preview.step_time import StepTime, forward_flops, repeats, step_time, training_plan
from hydra_tune.sharing.base_storages import is_base
from hydra_tune.simulation.cost import CostModel

HOW = "real first steps of a copy of the model on the host, on a virtual device"


@dataclass(frozen=True)
class Placement:
    """A trial alone in a budget. `kept` has the reason for each block that keeps its activations.

    `step_bytes`   reserved from a step's forward to the end of its backward, for training or evaluation
    `reserved_bytes`   the most that a device reserves for it, first steps included
    `peak_bytes`       the most that its tensors take there at once
    `step`, `evaluation`   bytes over the link in each of them, after the first ones
    """

    budget_bytes: int
    resident: bool
    shards: int
    held_bytes: int
    held: dict[str, int]
    step_bytes: int
    task_bytes: int
    reserved_bytes: int
    peak_bytes: int
    kept: dict[str, str]
    repeated: tuple[str, ...]
    step: Carried
    evaluation: Carried


@dataclass(frozen=True)
class HostNeed:
    """Host memory of a trial: weights, gradients and optimizer state, as `prepare` counts them.

    `shared_bytes`   frozen weights from `hydra_tune.share`, which all trials have together
    `trials`         how many trials fit the host memory
    """

    trial_bytes: int
    shared_bytes: int
    host_memory_bytes: int
    trials: int


@dataclass(frozen=True)
class Plan:
    """What a trial will need. `print` shows a table, `to_dict` gives plain data. A figure that could not be found,
    because the model was refused before, is None.

    `how`   how the figures were found, and for which kind of device
    """

    model: str
    how: str
    least_bytes: int | None
    comfortable_bytes: int | None
    resident_bytes: int | None
    at_budget: Placement | None
    host: HostNeed
    time: StepTime | None
    refused: tuple[str, ...]
    notes: tuple[str, ...]

    def table(self) -> str:
        """The plan as text of at most 80 columns."""
        return text_of(rows_of(self), title=f"Plan for {self.model}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return self.table()

    def __rich__(self) -> str:
        return self.table()


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    batch: Any,
    eval_batch: Any = None,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    pool: ShardPool | None = None,
    memory: int | str | None = None,
    cost: CostModel | None = None,
) -> Plan:
    """What a trial with this model will need, without a byte of device memory.

    Some steps of a copy of the model are made on the host, alone and in several budgets. The model, the optimizer, the
    batches and all random states stay as they are.

    Args:
        model: a plain model, as it is given to `prepare`.
        optimizer: the one that will step it; None if it is not known.
        batch: of a training step. A mapping is fed as ``model(**batch)``, a tuple or list as ``model(*batch)``, all
            else as ``model(batch)``. None to plan for evaluation only.
        eval_batch: of an evaluation, fed likewise, with the model in eval mode and without gradients.
        loss: a function of the model and the batch that returns what backward is called on. By default the outputs'
            ``loss``, else the sum of the means of all outputs.
        pool: whose budget, kind of device and host memory are meant. Nothing runs in it.
        memory: a budget such as ``"20GiB"``, in place of `pool`. By default the comfortable budget.
        cost: the rates of a machine, by `calibrate`. Without it no seconds are predicted.

    Raises:
        ConfigError: no batch is given, the model does not take it so, both `pool` and `memory` are given, the loss is
            no number, or the model cannot be copied.
    """
    budget_bytes = _checked(model, batch, eval_batch, pool, memory)
    _check_feeding(model, optimizer, batch, eval_batch, loss)
    as_gpu = pool is not None and any(device.counts_as_gpu for device in pool.devices)
    host = _host_need(model, optimizer, pool)
    how = f"{HOW}; needs counted as on {'a GPU' if as_gpu else 'the CPU'}"
    refused: list[str] = []
    notes = _notes(as_gpu, optimizer, cost)
    if host.trials == 0:
        need_bytes = host.trial_bytes + host.shared_bytes
        refused.append(f"prepare: {host_refusal('a trial', need_bytes, host.host_memory_bytes)}")

    def finished(**found: Any) -> Plan:
        empty = dict.fromkeys(("least_bytes", "comfortable_bytes", "resident_bytes", "at_budget", "time"))
        return Plan(type(model).__name__, how, **empty | found, host=host, refused=tuple(refused), notes=tuple(notes))

    try:
        refuse_unsupported(model)  # the copy may lack what is refused, as memory that two weights share
        script = _script(model, optimizer, batch, eval_batch, loss, as_gpu)
        ample = script.at(max(1, host_free_bytes() // 4), briefly=True)
        if ample.refusal is not None or ample.needs is None:
            refused.append(f"in {format_bytes(ample.budget_bytes)}: {ample.refusal}")
            return finished()
        least = least_rehearsal(script, ample)
        resident = resident_rehearsal(script, ample)
        comfortable_bytes = max(least.budget_bytes, ample.needs.comfortable_bytes)
        at = _rehearsal_in(script, budget_bytes or comfortable_bytes, resident, least)
    except PrepareError as error:
        refused.append(str(error))
        return finished()
    if at.refusal is not None:
        refused.append(f"in {format_bytes(at.budget_bytes)}: {at.refusal}")
    if not at.settles:
        notes.append("in this budget evaluation is measured anew again and again; a little more memory ends that")
    placement = None if at.refusal is not None else _placement(at, script)
    time = None
    if cost is not None and batch is not None and placement is not None:
        flops = forward_flops(script.model, script.batch, loss)
        source = cost.measured_on or "the given cost model"
        time = step_time(cost, training_plan(at.plans), placement.step, model, batch, flops=flops, source=source)
    return finished(
        least_bytes=least.budget_bytes,
        comfortable_bytes=comfortable_bytes,
        resident_bytes=resident.budget_bytes if resident is not ample else None,
        at_budget=placement,
        time=time,
    )


def _checked(model: Any, batch: Any, eval_batch: Any, pool: Any, memory: int | str | None) -> int | None:
    """The budget; None if none is given."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"plan takes a model, a torch.nn.Module; got {type(model).__name__}. Pass the plain model.")
    if trial_of(model) is not None:
        raise ConfigError(
            "plan takes a plain model, but this one is prepared already. Plan before prepare, or read pool.report()."
        )
    if batch is None and eval_batch is None:
        raise ConfigError("a plan needs a batch to measure with, but batch and eval_batch are None. Give one of them.")
    if pool is not None and not isinstance(pool, ShardPool):
        raise ConfigError(f"pool is a ShardPool or None, got {type(pool).__name__}. For a budget alone write memory=.")
    if pool is not None and memory is not None:
        raise ConfigError("a budget is given by one of pool= and memory=, got both. Leave one out.")
    if pool is not None:
        return pool.budget_bytes
    return None if memory is None else parse_bytes(memory)


def _check_feeding(model: nn.Module, optimizer: Any, batch: Any, eval_batch: Any, loss: Any) -> None:
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ConfigError(f"optimizer is a torch.optim.Optimizer or None, got {type(optimizer).__name__}.")
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss is a function of the model and the batch, or None; got {type(loss).__name__}.")
    if batch is not None and loss is None:
        otherwise = (
            "For a batch of inputs and targets write loss=lambda model, batch: loss_fn(model(batch[0]), batch[1])."
        )
        refuse_unfeedable(model, batch, "batch", otherwise)
    if eval_batch is not None:
        refuse_unfeedable(model, eval_batch, "eval_batch", "Give the model's inputs alone; loss= is for training.")


def _script(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batch: Any,
    eval_batch: Any,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None,
    as_gpu: bool,
) -> Script:
    twin, stepped_by = copies_of(model, optimizer)
    return Script(twin, stepped_by, batch_copy(batch), batch_copy(eval_batch), loss, as_gpu)


def _rehearsal_in(script: Script, budget_bytes: int, resident: Rehearsal, least: Rehearsal) -> Rehearsal:
    """A rehearsal in this budget. In a larger one than a trial needs to be resident nothing is different."""
    if budget_bytes == least.budget_bytes:
        return least
    if budget_bytes >= resident.budget_bytes and resident.is_resident:
        return replace(resident, budget_bytes=budget_bytes)
    return script.at(budget_bytes)


def _placement(rehearsal: Rehearsal, script: Script) -> Placement:
    plan, num_bytes = training_plan(rehearsal.plans), rehearsal.budget_bytes
    counted = script.at(min(num_bytes, rehearsal.device["budget_bytes"]), counting=True)
    reserved_bytes = rehearsal.device["peak_bytes"]
    return Placement(
        budget_bytes=rehearsal.budget_bytes,
        resident=plan.resident,
        shards=len(plan.shards),
        held_bytes=plan.all_held_bytes,
        held=rehearsal.held,
        step_bytes=max(p.step_bytes for p in rehearsal.plans),
        task_bytes=max(p.task_bytes for p in rehearsal.plans),
        reserved_bytes=reserved_bytes,
        peak_bytes=min(reserved_bytes, counted.device["measured_peak_bytes"] + rehearsal.state_bytes),
        kept={} if plan.resident else {p.name: p.keeps for p in plan.blocks if p.keeps},
        repeated=() if plan.resident else tuple(p.name for p in plan.blocks if repeats(p)),
        step=rehearsal.step,
        evaluation=rehearsal.evaluation,
    )


def _host_need(model: nn.Module, optimizer: torch.optim.Optimizer | None, pool: ShardPool | None) -> HostNeed:
    total_bytes = training_bytes(model, optimizer)
    shared_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad and is_base(p))
    memory_bytes = host_free_bytes() if pool is None else pool.host_memory_bytes
    own_bytes = total_bytes - shared_bytes
    return HostNeed(own_bytes, shared_bytes, memory_bytes, max(0, memory_bytes - shared_bytes) // max(1, own_bytes))


def _notes(as_gpu: bool, optimizer: torch.optim.Optimizer | None, cost: CostModel | None) -> list[str]:
    notes = []
    if as_gpu:
        notes.append("a GPU's kernels may keep and use other bytes than the host's, with which this was measured")
    if optimizer is None:
        notes.append("without an optimizer the device counts Adam's state, the host none")
    if cost is None:
        notes.append("no seconds: pass cost=hydra_tune.calibrate(), or a CostModel")
    return notes
