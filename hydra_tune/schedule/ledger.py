"""Who holds which bytes of one device. Pure, so that no reservation depends on timing.

    budget = held by trials + reserved by steps + slots of shards + work of the running task + free

Weights that several trials have are held once, and have one slot: they count once, for as long as a trial has them.

A slot also has an offset in an arena as large as the budget: it goes into the highest gap that is large enough. Offsets
are aligned if the slots' sizes are. This matters for exact numbers: kernels add in another order where data begins
elsewhere in a vector register. On CUDA the allocator chooses the addresses: such a device uses the sizes alone.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

SlotKey = tuple[int, int]  # (trial, shard); of weights that trials share (SHARED, their number)
SHARED = -1
HeldWeights = tuple[tuple[int, int], ...]  # for each of the weights its number and its bytes


@dataclass
class Ledger:
    budget_bytes: int
    alignment_bytes: int = 1  # of slots
    held: dict[int, int] = field(default_factory=dict)  # bytes that a trial holds until it ends, by trial
    steps: dict[int, int] = field(default_factory=dict)  # bytes that a trial's step reserves, by trial
    slots: OrderedDict[SlotKey, tuple[int, int]] = field(default_factory=OrderedDict)  # offset, bytes; oldest use first
    holders: dict[int, set[int]] = field(default_factory=dict)  # trials that hold shared weights, by their number
    shared: dict[int, int] = field(default_factory=dict)  # bytes of these weights, by their number
    held_bytes: int = 0  # sum of `held` and `shared`
    step_bytes: int = 0  # sum of `steps`
    slot_bytes: int = 0  # sum of `slots`
    work_bytes: int = 0  # of the running task
    peak_bytes: int = 0
    pilot: int | None = None  # the trial whose step is a pilot; that has all that was free

    @property
    def used_bytes(self) -> int:
        return self.held_bytes + self.step_bytes + self.slot_bytes + self.work_bytes

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.held_bytes - self.step_bytes - self.slot_bytes - self.work_bytes

    def hold(self, trial: int, num_bytes: int, weights: HeldWeights = ()) -> None:
        """Hold so many bytes for the trial, and these weights, unless another trial holds them already."""
        self.held_bytes += self.more_bytes(num_bytes, weights)
        self.held[trial] = num_bytes
        for number, its_bytes in weights:
            self.shared[number] = its_bytes
            self.holders.setdefault(number, set()).add(trial)
        self.note_peak()

    def more_bytes(self, num_bytes: int, weights: HeldWeights) -> int:
        """By how much `held_bytes` would grow with a trial that holds this."""
        return num_bytes + sum(its_bytes for number, its_bytes in weights if number not in self.shared)

    def enter_step(self, trial: int, num_bytes: int) -> None:
        self.steps[trial] = num_bytes
        self.step_bytes += num_bytes
        self.note_peak()

    def leave_step(self, trial: int) -> None:
        self.step_bytes -= self.steps.pop(trial, 0)
        if trial == self.pilot:
            self.pilot = None

    def start_work(self, num_bytes: int) -> None:
        assert self.work_bytes == 0, "one task at a time works on a device"
        self.work_bytes = num_bytes
        self.note_peak()

    def end_work(self) -> None:
        self.work_bytes = 0

    def place(self, key: SlotKey, num_bytes: int, at: int | None = None) -> int | None:
        """Make a slot and return its offset; None if too few bytes are free, or no gap is large enough.

        Args:
            at: the offset to use, which the caller knows to be free; None for the highest gap.
        """
        if num_bytes > self.free_bytes:
            return None
        offset = self._highest_gap(num_bytes) if at is None else at
        if offset < 0 or offset + num_bytes > self.budget_bytes:
            return None
        self.slots[key] = (offset, num_bytes)
        self.slot_bytes += num_bytes
        self.note_peak()
        return offset

    def _highest_gap(self, num_bytes: int) -> int:
        """The highest free offset, negative if there is none. Slots with a reserved offset are at the lowest ones."""
        end = self.budget_bytes - self.budget_bytes % self.alignment_bytes
        for start, size in sorted(self.slots.values(), reverse=True):
            if end - start - size >= num_bytes:
                break
            end = start
        return end - num_bytes

    def slots_overlapping(self, offset: int, num_bytes: int) -> list[SlotKey]:
        """The slots that overlap these bytes of the arena."""
        return [k for k, (start, size) in self.slots.items() if start < offset + num_bytes and offset < start + size]

    def touch(self, key: SlotKey) -> None:
        """Make `key` the most recently used slot."""
        self.slots.move_to_end(key)

    def retire(self, key: SlotKey) -> None:
        """Make `key` the first slot to go."""
        self.slots.move_to_end(key, last=False)

    def remove(self, key: SlotKey) -> tuple[int, int]:
        """Free a slot; returns its offset and bytes."""
        offset, num_bytes = self.slots.pop(key)
        self.slot_bytes -= num_bytes
        return offset, num_bytes

    def forget(self, trial: int) -> None:
        """Free what the trial and its step hold, but not its slots."""
        self.held_bytes -= self.held.pop(trial, 0)
        for number in [number for number, trials in self.holders.items() if trial in trials]:
            self.holders[number].remove(trial)
            if not self.holders[number]:
                del self.holders[number]
                self.held_bytes -= self.shared.pop(number)
        self.leave_step(trial)

    def start_pilot(self, trial: int) -> int:
        """Reserve all free bytes, since nobody knows yet how many the pilot needs; returns how many these are."""
        num_bytes, self.pilot = self.free_bytes, trial
        self.enter_step(trial, num_bytes)
        return num_bytes

    def end_pilot(self, peak_bytes: int) -> None:
        """The pilot used `peak_bytes`. If it failed, it would have needed them: they may be more than it had."""
        assert self.pilot is not None
        unused_bytes = max(0, self.steps[self.pilot] - peak_bytes)
        self.peak_bytes = max(self.peak_bytes, self.budget_bytes - unused_bytes)
        self.leave_step(self.pilot)

    @property
    def counted_bytes(self) -> tuple[int, int, int]:
        """`held_bytes`, `step_bytes` and `slot_bytes`, added up anew."""
        held_bytes = sum(self.held.values()) + sum(self.shared.values())
        return held_bytes, sum(self.steps.values()), sum(size for _, size in self.slots.values())

    def note_peak(self) -> None:
        """Keep the largest `used_bytes`. A pilot has reserved everything, and `end_pilot` says what it used."""
        if self.pilot is None:
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def validate(self) -> None:
        counted = self.held_bytes, self.step_bytes, self.slot_bytes
        assert counted == self.counted_bytes, (counted, self.counted_bytes)
        assert self.holders.keys() == self.shared.keys(), (self.holders, self.shared)
        assert all(trial in self.held for trials in self.holders.values() for trial in trials), self.holders
        assert 0 <= self.used_bytes <= self.budget_bytes, (self.used_bytes, self.budget_bytes)
        assert self.peak_bytes <= self.budget_bytes, (self.peak_bytes, self.budget_bytes)
        end = 0
        for start, size in sorted(self.slots.values()):
            assert start >= end, "slots overlap"
            end = start + size
        assert end <= self.budget_bytes, "a slot lies beyond the arena"
