"""What tells forwards of one model apart that may need other bytes: their inputs, and what is switched on."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from hydra_tune.partition import covers
from hydra_tune.shard import BlockProfile, Cut

Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True)
class Kind:
    """`trains`: gradients are on. `setting` is all that is equal for forwards of one kind; a measure of inputs of one
    `signature` holds for smaller ones."""

    trains: bool
    setting: Hashable
    signature: Signature

    def covers(self, other: Kind) -> bool:
        same = (self.trains, self.setting) == (other.trains, other.setting)
        return same and covers(self.signature, other.signature)


@dataclass(frozen=True)
class StepMeasure:
    """What a first step with forwards of these kinds has shown: blocks in the order in which they ran."""

    kinds: tuple[Kind, ...]
    trains: bool
    cut: Cut
    blocks: dict[str, BlockProfile]
    step_bytes: int
    kept_bytes: int = 0  # what a training loop keeps from one step to the next: batches and outputs

    def covers(self, kind: Kind) -> bool:
        return any(own.covers(kind) for own in self.kinds)

    def replaces(self, other: StepMeasure) -> bool:
        """Whether it tells all that the other one does, and later."""
        return self.trains == other.trains and all(map(self.covers, other.kinds))


def larger_of(a: BlockProfile, b: BlockProfile) -> BlockProfile:
    """Enough for both."""
    figures = {k: max(v, getattr(b, k)) for k, v in vars(a).items() if isinstance(v, (int, float))}
    casts, counts = a.casts | b.casts, a.saved_counts | b.saved_counts
    return replace(a, **figures, keeps=a.keeps or b.keeps, casts=casts, saved_counts=counts)
