"""The vocabulary as plain data: measured blocks, the shards packed from them, tasks, and a trial's plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple


class Direction(str, Enum):
    FORWARD = "F"
    BACKWARD = "B"


class Task(NamedTuple):
    """One visit to a shard. It lasts while consecutive calls of blocks stay inside the shard."""

    trial: int
    step: int
    shard: int
    direction: Direction


TOO_LARGE = "it does not fit the budget"  # the reason in `Cut.opened`


@dataclass(frozen=True)
class Cut:
    """Where a model is not cut by size alone: names of its parts, each with the reason.

    `opened`    modules that are split: their children are the blocks
    `kept`      modules that stay on the device as a whole
    `held`      parameters that stay on the device while the rest of their block is spilled
    """

    opened: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, str] = field(default_factory=dict)

    def adding(self, kind: str, names: Sequence[str], reason: str) -> Cut:
        """This cut and these names; `kind` is "opened", "kept" or "held". A name that it has keeps its reason."""
        return replace(self, **{kind: dict.fromkeys(names, reason) | {**getattr(self, kind)}})

    def staying(self) -> str:
        """A sentence for a refusal: what takes the room on the device; "" if nothing stays there."""
        reasons = [*self.opened.items(), *self.kept.items(), *self.held.items()]
        staying = [f"{name}: {reason}" for name, reason in reasons if not reason.startswith(TOO_LARGE)]
        if not staying:
            return ""
        return f" On the device stays what {len(staying)} parts of the model need until backward, as {staying[0]}."


@dataclass(frozen=True)
class BlockProfile:
    """What the pilot measured of one block on the first batch. Bytes on the device, times in seconds.

    `weight_bytes`         of its weights in a slot, aligned
    `..._work_bytes`       scratch beyond the slot and the inputs
    `saved_bytes`          what plain autograd keeps of it between forward and backward
    `boundary_bytes`       of its outputs
    `is_frozen`            none of its weights in the slot is ever trained
    `rides`                small trained weights are promoted for each visit, beside the slot
    `visits`               in a step: 2, forward and backward; 1 if nothing requires a gradient; 0 if it was not called
    `keeps` and all after  as in `Block`
    """

    name: str
    weight_bytes: int
    forward_work_bytes: int = 0
    backward_work_bytes: int = 0
    saved_bytes: int = 0
    boundary_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    visits: int = 2
    is_frozen: bool = False
    rides: bool = False
    keeps: str = ""
    clones: bool = False
    writes_buffers: bool = True
    casts: frozenset[tuple[int, Any]] = frozenset()
    saved_counts: frozenset[int] = frozenset()

    @property
    def work_bytes(self) -> int:
        return max(self.forward_work_bytes, self.backward_work_bytes)


@dataclass(frozen=True)
class Shard:
    """Consecutive blocks that share a slot.

    `blocks`          their numbers in `TrialPlan.blocks`
    `slot_bytes`      their weights
    `..._work_bytes`  the most scratch that one of them needs, since they run one after another
    `boundary_bytes`  the largest output of one of them
    """

    blocks: tuple[int, ...]
    slot_bytes: int
    forward_work_bytes: int
    backward_work_bytes: int
    boundary_bytes: int = 0

    def work_bytes(self, direction: Direction) -> int:
        return self.forward_work_bytes if direction is Direction.FORWARD else self.backward_work_bytes


@dataclass(frozen=True)
class TrialPlan:
    """How one architecture is cut for one budget, and what that costs. Trials with one `fingerprint.plan_key` share it.

    `held_bytes`  from admission to the trial's end: what is never promoted or dropped
    `step_bytes`  from a step's forward to the end of its backward: boundary tensors, operators between blocks, the
                  loss; if spilled, also gradients on their way to the host

    `held_weights`  frozen weights on the device for the trial's life, beside `held_bytes`: number and bytes of each.
                    Trials that have the same weights hold them once

    A resident plan has one shard, the root module. It has no slot: all weights are held.
    """

    resident: bool = False
    shards: tuple[Shard, ...] = ()
    blocks: tuple[BlockProfile, ...] = ()
    held_bytes: int = 0
    step_bytes: int = 0
    cut: Cut = Cut()
    held_weights: tuple[tuple[int, int], ...] = ()

    @cached_property
    def all_held_bytes(self) -> int:
        """What the trial holds on the device for life if no other trial holds a part of it."""
        return self.held_bytes + sum(num_bytes for _, num_bytes in self.held_weights)

    @cached_property
    def task_bytes(self) -> int:
        """The most that one task needs beyond what the trial and its step hold: a slot and scratch."""
        return max((shard.slot_bytes + shard.work_bytes(d) for shard in self.shards for d in Direction), default=0)

    def task_s(self, shard: int, direction: Direction) -> float:
        """Seconds that the pilot measured for the shard's blocks."""
        blocks = [self.blocks[i] for i in self.shards[shard].blocks]
        return sum(b.forward_s if direction is Direction.FORWARD else b.backward_s for b in blocks)

    @cached_property
    def bytes_to_end(self) -> tuple[int, ...]:
        """For each shard: the slots of it and of all shards after it."""
        return tuple(accumulate(shard.slot_bytes for shard in reversed(self.shards)))[::-1]

    @property
    def need_bytes(self) -> int:
        """The least budget in which a trial with this plan runs alone."""
        return self.all_held_bytes + self.step_bytes + self.task_bytes
