"""A plan as plain data, for reports."""

from __future__ import annotations

from typing import Any

from hydra_tune.partition import promotions
from hydra_tune.shard import TrialPlan


def summary_of(plan: TrialPlan | None, budget_bytes: int) -> dict[str, Any]:
    """On a device of this budget; before there is a plan, the same without figures."""
    blocks = plan.blocks if plan else ()
    shards = list(zip(plan.shards, promotions(plan, budget_bytes), strict=True)) if plan else []
    return {
        "resident": plan is not None and plan.resident,
        "held_bytes": plan.held_bytes if plan else 0,
        "step_bytes": plan.step_bytes if plan else 0,
        "weight_bytes": sum(p.weight_bytes for p in blocks),
        "promoted_bytes_per_step": sum(shard.slot_bytes * times for shard, times in shards),
        "shards": [
            {
                "blocks": [blocks[i].name for i in shard.blocks],
                "slot_bytes": shard.slot_bytes,
                "boundary_bytes": shard.boundary_bytes,
                "promotions_per_step": times,
                "forward_work_bytes": shard.forward_work_bytes,
                "backward_work_bytes": shard.backward_work_bytes,
            }
            for shard, times in shards
        ],
        "cut": {
            "opened": dict(plan.cut.opened) if plan else {},
            "kept": dict(plan.cut.kept) if plan else {},
            "held": dict(plan.cut.held) if plan else {},
        },
        "keeps": {p.name: p.keeps for p in blocks if p.keeps},
    }
