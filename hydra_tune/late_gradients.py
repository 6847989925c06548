"""Gradients that are on their way to the host while the device goes on: autograd meets them last.

    at once    p ------------> BlockFunction     what the node returns is added to `p.grad` as soon as it is there
    late       p --> Gate ---> BlockFunction     ... when every block has run its backward

Autograd runs the newest ready node first. A gate is older than all blocks of its forward, so that it comes after
them; there it waits for its block's gradients. Sums keep their order: a gate passes one use of each weight on, and
a weight with several uses in the model has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from hydra_tune.block import Block, grad_dtype_of, owners_of
from hydra_tune.device import Arrival


class Gate:
    """Of one call of a block. `arrival` is that of its gradients, once its backward has run."""

    def __init__(self) -> None:
        self.arrival: Arrival | None = None


Edges = dict[int, torch.Tensor]  # of a gate into a block's node, by the id of the parameter


def gates_for(blocks: Sequence[Block]) -> dict[Block, tuple[Gate, Edges]]:
    """One for the first call of each block whose gradients may come late. Call it where gradients are on."""
    owners = owners_of(blocks)
    gates = {}
    for block in blocks:
        weights = [p for p in block.slot_parameters if p.requires_grad]
        if weights and _may_be_late(block, weights, owners):
            gate = Gate()
            edges = _GateFunction.apply(gate, *weights)  # type: ignore[no-untyped-call]
            gates[block] = gate, {id(p): edge for p, edge in zip(weights, edges, strict=True)}
    return gates


def _may_be_late(block: Block, weights: Sequence[torch.Tensor], owners: Counter[int]) -> bool:
    """Each weight is used once in the model, nobody looks at its gradient before the others are there, and there is
    none yet to add it to, nor another dtype to cast it to: the host has room for one of each."""
    single = max(block.edges.counts, default=0) <= 1 and not block.edges.recast
    return single and all(
        p.is_leaf
        and p.grad is None
        and owners[id(p)] == 1
        and not (p._backward_hooks or p._post_accumulate_grad_hooks)
        and grad_dtype_of(p) == p.dtype
        for p in weights
    )


class _GateFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Gate, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.gate = gate
        ctx.set_materialize_grads(False)
        return tuple(w.detach() for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if ctx.gate.arrival is not None:
            ctx.gate.arrival.wait()
        return (None, *grads)
