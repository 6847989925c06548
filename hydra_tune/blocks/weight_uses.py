"""Finds how a block's forward uses its weights, from the graph that autograd has recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

_CHECKPOINT = "CheckpointFunctionBackward"  # the node of a reentrant checkpoint


@dataclass
class WeightUses:
    """The uses of weights that require a gradient.

    `casts`            by a weight's number: for each use the dtype that it casts the weight to, or None if it does not
    `has_checkpoint`   the forward has a reentrant checkpoint, which hides the uses within it
    """

    casts: dict[int, list[torch.dtype | None]] = field(default_factory=dict)
    has_checkpoint: bool = False


def weight_uses(
    weights: Sequence[torch.Tensor], given: Iterable[torch.Tensor], made: Iterable[torch.Tensor]
) -> WeightUses:
    """Find the uses of `weights`: follow the graph from the tensors that the forward has `made` back to those that it
    was `given`. All weights are outputs of one node, `Promote`."""
    numbers = [i for i, weight in enumerate(weights) if weight.requires_grad]
    promoted = weights[numbers[0]].grad_fn if numbers else None
    uses = WeightUses()
    met = {x.grad_fn for x in given if x.grad_fn is not None}
    left = [x.grad_fn for x in made if x.grad_fn is not None]
    while left:
        node = left.pop()
        if node in met or node is promoted:
            continue
        met.add(node)
        if node.name() == _CHECKPOINT:
            uses.has_checkpoint = True
            return uses
        for child, place in node.next_functions:
            if child is not None and child is promoted:
                is_cast = node.name() == "ToCopyBackward0"
                to = node._input_metadata[0].dtype if is_cast else None
                uses.casts.setdefault(numbers[place], []).append(to)
            elif child is not None:
                left.append(child)
    return uses
