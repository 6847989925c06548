"""Predicts the seconds of a step, and at how many tokens a step its transfers hide behind computing.

For n tokens computing takes seconds in proportion to n, and copies take the same seconds whatever n is. Both directions
of a link work at the same time. With C seconds of computing, L of copies, of the forward f and the backward b:

    alone       max(C_f, L_f) + max(C_b, L_b) + the optimizer on the host      one trial, each copy beside computing
    together    max(C, L, optimizer)                                          a trial of several that take turns
    n at which transfers hide: n now, times the larger of L_f / C_f and L_b / C_b
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hydra_tune.preview.feeding import Loss, outputs_of, size_of
from hydra_tune.preview.rehearsal import Carried, process_untouched
from hydra_tune.schedule.plan import TrialPlan
from hydra_tune.simulation.cost import ADAMW_BYTES_PER_WEIGHT, CostModel


@dataclass(frozen=True)
class StepTime:
    """Seconds of one training step. `amount` and `unit` are what the batch has, such as 4096 tokens.

    `hides_at`   the least amount at which copies take no longer than computing; 0 if nothing is copied
    `source`     where the rates are from
    """

    alone_s: float
    together_s: float
    compute_s: float
    copies_s: float
    optimizer_s: float
    amount: int
    unit: str
    hides_at: int
    source: str


def forward_flops(model: nn.Module, batch: Any, loss: Loss | None) -> int:
    """Floating-point operations of a forward, as PyTorch's counter counts them."""
    with process_untouched(), FlopCounterMode(display=False) as counter, torch.no_grad():
        if loss is None:
            outputs_of(model, batch)
        else:
            loss(model, batch)
    return int(counter.get_total_flops())


def step_time(
    cost: CostModel, plan: TrialPlan, carried: Carried, model: nn.Module, batch: Any, *, flops: int, source: str
) -> StepTime:
    """From a machine's rates. A backward takes twice the forward's arithmetic, for frozen weights once; where blocks
    repeat, the forward's once more."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    share = trained / max(1, sum(p.numel() for p in model.parameters()))
    tasks_s, forward_s = cost.task_s * len(plan.blocks), flops / cost.flops_per_s
    backward_s = forward_s * (1 + share + (0 if plan.resident else _repeated_share(plan))) + tasks_s
    forward_s += tasks_s
    optimizer_s = 0.0 if plan.resident else ADAMW_BYTES_PER_WEIGHT * trained / cost.host_bytes_per_s
    down_f, down_b = cost.promote_s(carried.forward_bytes), cost.promote_s(carried.backward_bytes)
    up = cost.spill_s(carried.gradient_bytes)
    copies_s = max(down_f + down_b, up)
    amount, unit = size_of(batch)
    hides = max(down_f / forward_s, max(down_b, up) / backward_s) if forward_s else 0.0
    return StepTime(
        alone_s=max(forward_s, down_f) + max(backward_s, down_b, up) + optimizer_s,
        together_s=max(forward_s + backward_s, copies_s, optimizer_s),
        compute_s=forward_s + backward_s,
        copies_s=copies_s,
        optimizer_s=optimizer_s,
        amount=amount,
        unit=unit,
        hides_at=math.ceil(amount * hides),
        source=source,
    )


def _repeated_share(plan: TrialPlan) -> float:
    """The part of a forward that runs again in the backward, by the seconds of the blocks."""
    every = sum(p.forward_s for p in plan.blocks)
    return sum(p.forward_s for p in plan.blocks if repeats(p)) / every if every else 0.0


def repeats(profile: Any) -> bool:
    return bool(profile.visits == 2 and not profile.keeps)


def training_plan(plans: Sequence[TrialPlan]) -> TrialPlan:
    """The plan of training steps, if there are any: its blocks are visited twice a step."""
    return max(plans, key=lambda plan: max((p.visits for p in plan.blocks), default=0))
