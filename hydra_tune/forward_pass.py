"""One forward of a prepared model, whose graph may still be used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hydra_tune.block import Block
from hydra_tune.casts import context_number
from hydra_tune.graph import Cast
from hydra_tune.late_gradients import Edges, Gate
from hydra_tune.process_state import casts_to, remembers_casts


class AbandonedForward(Exception):
    """Ends a forward that is to be started anew, or to be given up."""


@dataclass(eq=False)
class ForwardPass:
    """Lives as long as the graph of one forward of the root module; done once that graph was used up.

    `ended_by` is what a block raised to end it. A model may catch all exceptions, and would go on without the block.
    `joined_casts` are kept here, and no hook of a node behind the outputs keeps the pass.
    """

    done: bool = False
    adds_uses: str | None = None  # a block that did, by the plan of that forward
    ended_by: Exception | None = None
    joined_casts: list[Any] = field(default_factory=list)
    gates: dict[Block, tuple[Gate, Edges]] = field(default_factory=dict)  # of blocks that were not called yet
    _casts: dict[tuple[int, torch.dtype, int], torch.Tensor] = field(default_factory=dict)

    def casts_of(self, block: Block) -> dict[int, torch.Tensor]:
        """What stands for autocast's copies of the block's weights, one for all uses in a context, by their numbers."""
        edges = block.edges
        if not any(edges.casts) or not remembers_casts():
            return {}
        around, context, casts = casts_to(), context_number(), {}
        weights = zip(block.parameters, edges.casts, edges.casts_to, strict=False)
        for i, (parameter, count, others) in enumerate(weights):
            dtype = dict(others).get(around, around)
            if count and dtype and parameter.requires_grad and parameter.dtype is torch.float32:
                casts[i] = self._cast(parameter, dtype, context)
        return casts

    def _cast(self, parameter: torch.Tensor, dtype: torch.dtype, context: int) -> torch.Tensor:
        key = (id(parameter), dtype, context)
        if key not in self._casts:
            with torch.enable_grad():
                self._casts[key] = Cast.apply(parameter, dtype)  # type: ignore[no-untyped-call]
        return self._casts[key]
