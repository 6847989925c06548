"""What a pilot has seen of one call of a block, which is one node of the model's graph."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hydra_tune.block import Block
from hydra_tune.edges import Places


@dataclass(frozen=True, eq=False)
class SeenCall:
    """Uses are those in the block's own graph, direct and by autocast's copy.

    remembers_casts, under_autocast  what autocast was around it, perhaps one that is switched off
    sources         of each tensor that it was given; source_bytes and tensor_uses likewise
    weight_uses     of each parameter; casts_to and may_be_cast likewise: see `WeightEdges`; a weight that is
                    cast by hand may not be
    """

    block: Block
    places: Places
    remembers_casts: bool
    under_autocast: bool
    sources: Sequence[weakref.ref[torch.Tensor]]
    source_bytes: Sequence[int]
    tensor_uses: Sequence[tuple[int, int]]
    weight_uses: Sequence[tuple[int, int]]
    casts_to: Sequence[frozenset[tuple[Any, Any]]]
    may_be_cast: Sequence[bool]
