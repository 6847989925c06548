"""How a block's forward uses its weights, read off the graph that autograd has made of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

_CHECKPOINT = "CheckpointFunctionBackward"  # of a reentrant one, in a graph


@dataclass
class WeightUses:
    """Of the weights with gradients, by their numbers, what each use casts the weight to; None where it casts nothing.
    A reentrant checkpoint within hides the uses that it has."""

    casts: dict[int, list[torch.dtype | None]] = field(default_factory=dict)
    has_checkpoint: bool = False


def weight_uses(
    weights: Sequence[torch.Tensor], given: Iterable[torch.Tensor], made: Iterable[torch.Tensor]
) -> WeightUses:
    """From the tensors that it has made back to those that it was given; `weights` come through one node."""
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
