"""Makes a trial's plans from its measured steps: one plan for training, one for evaluation.

Both plans hold the same bytes from admission to the trial's end. So both are resident, or neither is. A plan depends on
the trial's own steps alone. So the trial's neighbours cannot change its plan, nor its numbers.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from hydra_tune.blocks.block import Block
from hydra_tune.devices.tensor_bytes import storage_bytes, weights_of
from hydra_tune.planning import partition
from hydra_tune.planning.adapters import over_frozen
from hydra_tune.planning.known_steps import StepMeasure, larger_of
from hydra_tune.planning.model_cut import ModelCut
from hydra_tune.planning.optimizer_memory import held_bytes
from hydra_tune.schedule.ledger import HeldWeights
from hydra_tune.schedule.plan import BlockProfile, TrialPlan

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

# A training step reserves more than its pilot has measured: in addition a 32nd of the sum of its own bytes and the
# largest work of a block.
MARGIN = 32


def make_plans(
    trial: Trial,
    model_cut: ModelCut,
    measures: Sequence[StepMeasure],
    trained: Container[int],
    *,
    may_be_resident: bool,
) -> dict[bool, TrialPlan]:
    """Return plans by whether they train (True, False), for the kinds of steps that the trial has made. `trained` has
    the ids of parameters that require a gradient in any of these steps.

    Raises:
        BudgetError: no plan fits the budget.
    """
    kinds = sorted({m.trains for m in measures}, reverse=True)
    if may_be_resident:
        plans = {t: _make_plan(trial, model_cut, measures, trained, t, may_be_resident=True) for t in kinds}
        if all(plan.resident for plan in plans.values()):
            return plans
    return {t: _make_plan(trial, model_cut, measures, trained, t, may_be_resident=False) for t in kinds}


def _make_plan(
    trial: Trial,
    model_cut: ModelCut,
    measures: Sequence[StepMeasure],
    trained: Container[int],
    trains: bool,
    *,
    may_be_resident: bool,
) -> TrialPlan:
    blocks, alike = model_cut.blocks, [m for m in measures if m.trains == trains]
    profiles: dict[str, BlockProfile] = {}
    for measure in alike:
        for name, profile in measure.blocks.items():
            profiles[name] = larger_of(profiles[name], profile) if name in profiles else profile
    named = {block.name: block for block in blocks}
    uncalled = [over_frozen(p, named[p.name], trained) for p in _uncalled(blocks, profiles)]
    known = [over_frozen(p, named[name], trained) for name, p in profiles.items() if name in named]
    ever_trains = any(m.trains for m in measures)  # over all measures: both plans hold the same bytes
    every: list[nn.Parameter] = weights_of(trial.model)  # type: ignore[assignment]
    buffers = set(trial.model.buffers()).difference(every)
    kept = max(m.kept_bytes for m in measures) + sum(map(storage_bytes, buffers))
    step_bytes = max(m.step_bytes for m in alike) + sum(p.boundary_bytes + p.saved_bytes for p in uncalled)
    work_bytes = max((p.work_bytes for p in (*uncalled, *known)), default=0)
    loose = [p for p in every if id(p) not in model_cut.uses]  # in no block's slot
    (loose_own, loose_weights), (own, weights) = (_parted(trial, ps, trained) for ps in (loose, every))
    gradients = (sum(storage_bytes(p) for p in b.slot_parameters if p.requires_grad) for b in blocks)
    plan = partition.make_plan(
        [*uncalled, *known],
        budget_bytes=trial.pool.budget_bytes,
        loose_bytes=held_bytes(trial, loose_own, trains=ever_trains) + kept,
        resident_bytes=held_bytes(trial, own, trains=ever_trains) + kept,
        loose_weights=loose_weights,
        resident_weights=weights,
        step_bytes=step_bytes + ((step_bytes + work_bytes) // MARGIN if trains else 0),
        late_bytes=max(gradients, default=0) if ever_trains and trial.pool.spills_behind else 0,
        may_be_resident=may_be_resident,
        cut=model_cut.choices,
    )
    if trial.alone:
        weights_bytes = plan.all_held_bytes - plan.held_bytes
        held = trial.pool.budget_bytes - plan.step_bytes - plan.task_bytes - weights_bytes
        plan = replace(plan, held_bytes=held)
    return plan


def _parted(
    trial: Trial, parameters: Sequence[nn.Parameter], trained: Container[int]
) -> tuple[list[nn.Parameter], HeldWeights]:
    """The trained ones among these parameters, and the frozen ones as numbered weights."""
    frozen = [p for p in parameters if id(p) not in trained]
    return [p for p in parameters if id(p) in trained], trial.pool.shared_weights.held(frozen)


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
