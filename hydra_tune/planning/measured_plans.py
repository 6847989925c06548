"""Makes a trial's plans from its measured steps: one plan for training, one for evaluation.

Both plans hold the same bytes from admission to the trial's end. So both are resident, or neither is. A plan depends on
the trial's own steps alone. So the trial's neighbours cannot change its plan, nor its numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from hydra_tune.blocks.block import Block
from hydra_tune.devices.tensor_bytes import storage_bytes
from hydra_tune.planning import partition
from hydra_tune.planning.model_cut import ModelCut
from hydra_tune.planning.optimizer_memory import stepping_bytes
from hydra_tune.planning.step_kind import StepMeasure, larger_of
from hydra_tune.schedule.plan import BlockProfile, TrialPlan

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

# A training step reserves more than its pilot has measured: in addition a 32nd of the sum of its own bytes and the
# largest work of a block.
MARGIN = 32


def make_plans(
    trial: Trial, model_cut: ModelCut, measures: Sequence[StepMeasure], *, may_be_resident: bool
) -> dict[bool, TrialPlan]:
    """Return plans by whether they train (True, False), for the kinds of steps that the trial has made.

    Raises:
        BudgetError: no plan fits the budget.
    """
    kinds = sorted({m.trains for m in measures}, reverse=True)
    if may_be_resident:
        plans = {trains: _make_plan(trial, model_cut, measures, trains, may_be_resident=True) for trains in kinds}
        if all(plan.resident for plan in plans.values()):
            return plans
    return {trains: _make_plan(trial, model_cut, measures, trains, may_be_resident=False) for trains in kinds}


def _make_plan(
    trial: Trial, model_cut: ModelCut, measures: Sequence[StepMeasure], trains: bool, *, may_be_resident: bool
) -> TrialPlan:
    blocks, alike = model_cut.blocks, [m for m in measures if m.trains == trains]
    profiles: dict[str, BlockProfile] = {}
    for measure in alike:
        for name, profile in measure.blocks.items():
            profiles[name] = larger_of(profiles[name], profile) if name in profiles else profile
    uncalled, names = _uncalled(blocks, profiles), {block.name for block in blocks}
    known = [profile for name, profile in profiles.items() if name in names]
    ever_trains = any(m.trains for m in measures)  # over all measures: both plans hold the same bytes
    kept = max(m.kept_bytes for m in measures) + sum(map(storage_bytes, trial.model.buffers()))
    step_bytes = max(m.step_bytes for m in alike) + sum(p.boundary_bytes + p.saved_bytes for p in uncalled)
    work_bytes = max((p.work_bytes for p in (*uncalled, *known)), default=0)
    loose = [p for p in trial.model.parameters() if id(p) not in model_cut.uses]  # in no block's slot
    gradients = (sum(storage_bytes(p) for p in b.slot_parameters if p.requires_grad) for b in blocks)
    plan = partition.make_plan(
        [*uncalled, *known],
        budget_bytes=trial.pool.budget_bytes,
        loose_bytes=held_bytes(trial, loose, trains=ever_trains) + kept,
        resident_bytes=held_bytes(trial, list(trial.model.parameters()), trains=ever_trains) + kept,
        step_bytes=step_bytes + ((step_bytes + work_bytes) // MARGIN if trains else 0),
        late_bytes=max(gradients, default=0) if ever_trains and trial.pool.spills_behind else 0,
        may_be_resident=may_be_resident,
        cut=model_cut.choices,
    )
    if trial.alone:
        plan = replace(plan, held_bytes=trial.pool.budget_bytes - plan.step_bytes - plan.task_bytes)
    return plan


def _uncalled(blocks: Sequence[Block], known: Mapping[str, BlockProfile]) -> list[BlockProfile]:
    """Profiles of the blocks that no forward has called yet. Each has the numbers of a called block of its kind. If
    there is no such block, only the bytes of its weights are known."""
    of_kind = {_kind_of(b): known[b.name] for b in blocks if b.name in known}
    return [
        replace(of_kind.get(_kind_of(b)) or BlockProfile("", b.weight_bytes), name=b.name, visits=0)
        for b in blocks
        if b.name not in known
    ]


def _kind_of(block: Block) -> Hashable:
    return type(block.module), tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in block.slot_parameters)


def held_bytes(trial: Trial, parameters: Sequence[nn.Parameter], *, trains: bool) -> int:
    """Bytes of these parameters; in training also of gradients, optimizer state, and temporaries of an optimizer's
    step. A trial without an optimizer may still get one, so Adam's bytes are assumed for it."""
    total = sum(map(storage_bytes, parameters))
    if not trains:
        return total
    total += sum(storage_bytes(p) for p in parameters if p.requires_grad)
    foreach, left = not trial.device.is_virtual, {id(p): p for p in parameters}
    taken = []
    for optimizer in trial.optimizers:
        own = [left.pop(id(p)) for group in optimizer.param_groups for p in group["params"] if id(p) in left]
        taken.append(stepping_bytes(optimizer, own, foreach_by_default=foreach))
    taken = taken or [stepping_bytes(None, parameters, foreach_by_default=foreach)]
    return total + sum(state for state, _ in taken) + max(scratch for _, scratch in taken)
