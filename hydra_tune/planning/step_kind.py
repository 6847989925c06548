"""The kind of a step, and what a pilot has measured for it.

Two forwards of one model are of different kinds if their inputs or switches may make them need different bytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from operator import ge
from typing import Any

from hydra_tune.planning.partition import Signature
from hydra_tune.schedule.plan import BlockProfile, Cut


@dataclass(frozen=True)
class StepKind:
    """The kind of a forward.

    `trains`       gradients are on
    `setting`      all that must be equal: switches, flags among the inputs, autocast, buffers
    `signature`    shapes and dtypes of the inputs; what is measured for some sizes holds for smaller ones
    `parameters`   the identities of one model's parameters; None for any model of the architecture
    """

    trains: bool
    setting: Hashable
    signature: Signature
    parameters: tuple[tuple[int, str, bool, int], ...] | None = None  # as in `fingerprint.ModelState`

    def covers(self, other: StepKind) -> bool:
        """Whether what was measured for this kind holds for the other."""
        same = (self.trains, self.setting, self.parameters) == (other.trains, other.setting, other.parameters)
        return (
            same and len(self.signature) == len(other.signature) and all(map(_bounds, self.signature, other.signature))
        )

    @property
    def of_any(self) -> StepKind:
        """The same kind for any model of the architecture."""
        return replace(self, parameters=None)


@dataclass(frozen=True)
class StepMeasure:
    """What a pilot has measured of a step with forwards of these kinds. `blocks` is in the order in which they ran."""

    kinds: tuple[StepKind, ...]
    cut: Cut
    blocks: dict[str, BlockProfile]
    step_bytes: int
    kept_bytes: int = 0  # what a training loop keeps from one step to the next: batches and outputs

    @property
    def trains(self) -> bool:
        return any(kind.trains for kind in self.kinds)

    def covers(self, kind: StepKind) -> bool:
        return any(own.covers(kind) for own in self.kinds)

    def put_among(self, measures: list[StepMeasure]) -> list[StepMeasure]:
        """The list with this measure at its end, without those of another cut and those that this one covers."""
        same_cut = [m for m in measures if m.cut == self.cut]
        return [*(m for m in same_cut if m.trains != self.trains or not all(map(self.covers, m.kinds))), self]


def _bounds(a: Any, b: Any) -> bool:
    (sizes, dtype), (others, other) = a, b
    return dtype == other and len(sizes) == len(others) and all(map(ge, sizes, others))


def larger_of(a: BlockProfile, b: BlockProfile) -> BlockProfile:
    """A profile that is enough for both: the larger of each figure."""
    figures = {k: max(v, getattr(b, k)) for k, v in vars(a).items() if isinstance(v, (int, float))}
    casts, counts = a.casts | b.casts, a.saved_counts | b.saved_counts
    return replace(a, **figures, keeps=a.keeps or b.keeps, casts=casts, saved_counts=counts)
