"""One forward of a prepared model, whose graph may still be used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hydra_tune.autocast_context import AutocastContext
from hydra_tune.block import Block
from hydra_tune.late_gradients import Edges, Gate
from hydra_tune.process_state import casts_to, remembers_casts


class AbandonedForward(Exception):
    """Ends a forward that is to be started anew, or to be given up."""


@dataclass(eq=False)
class ForwardPass:
    """Lives as long as the graph of one forward of the root module; done once that graph was used up.

    `ended_by` is what a block raised to end it. A model may catch all exceptions, and would go on without the block.
    `may_join`: some block uses a tensor several times, whose gradients are one if nothing else uses it.
    `may_repeat`: some block was called as within a checkpoint.
    `undone`: it was a pilot's, whose changes were put back.
    `joined_casts` are kept here, and no hook of a node behind the outputs keeps the pass.
    """

    done: bool = False
    undone: bool = False
    may_join: bool = False
    may_repeat: bool = False
    ended_by: Exception | None = None
    joined_casts: list[Any] = field(default_factory=list)
    gates: dict[Block, tuple[Gate, Edges]] = field(default_factory=dict)  # of blocks that were not called yet
    autocast: AutocastContext = field(default_factory=AutocastContext)  # around it

    def casts_of(self, block: Block) -> dict[int, torch.Tensor]:
        """What stands for autocast's copies of the block's weights, one for all uses in a context, by their numbers."""
        if not block.edges.recast or not remembers_casts():
            return {}
        outside = {i: block.edges.weights[i].is_cast_outside for i in block.edges.recast}
        weights = _cast(block, block.edges.recast)
        return {i: self.autocast.cast_of(p, dtype, is_own=outside[i]) for i, p, dtype in weights}


def castable_by(block: Block) -> dict[int, torch.dtype]:
    """What becomes of the block's weights if they are cast within it, and have no edge for that, by their numbers."""
    if not block.edges.castable or not remembers_casts():
        return {}
    return {i: dtype for i, _, dtype in _cast(block, block.edges.castable)}


def _cast(block: Block, numbers: Iterable[int]) -> Iterator[tuple[int, torch.Tensor, torch.dtype]]:
    """Of these weights those that can be, with what autocast makes of them here."""
    around = casts_to()
    for i in numbers:
        parameter = block.parameters[i]
        dtype = dict(block.edges.weights[i].casts_to).get(around, around)
        if dtype and parameter.requires_grad and parameter.dtype is torch.float32:
            yield i, parameter, dtype
