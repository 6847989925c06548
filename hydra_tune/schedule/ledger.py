"""Who holds which bytes of one device; pure, so that no reservation depends on timing.

    budget = held by trials + reserved by steps + slots of shards + work of the running task + free

Slots also have a place: offsets in an arena of the budget's size, the last gap that fits; all aligned, if their sizes
are, for kernels add in another order where data begins elsewhere in a vector register. A device without an
arena of ours (CUDA, whose allocator finds the place) uses the sizes and ignores the offsets.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

SlotKey = tuple[int, int]  # (trial, shard)


@dataclass
class Ledger:
    budget_bytes: int
    alignment_bytes: int = 1  # of slots
    held: dict[int, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    slots: OrderedDict[SlotKey, tuple[int, int]] = field(default_factory=OrderedDict)  # offset, bytes; oldest use first
    held_bytes: int = 0  # of all trials
    step_bytes: int = 0  # of all steps
    slot_bytes: int = 0  # of all slots
    work_bytes: int = 0
    peak_bytes: int = 0
    pilot: int | None = None  # the trial whose step is a pilot: it has all that is free, and says how much it used

    @property
    def used_bytes(self) -> int:
        return self.held_bytes + self.step_bytes + self.slot_bytes + self.work_bytes

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.held_bytes - self.step_bytes - self.slot_bytes - self.work_bytes

    def hold(self, trial: int, num_bytes: int) -> None:
        self.held[trial] = num_bytes
        self.held_bytes += num_bytes
        self.note_peak()

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
        """Offset of a new slot; None where bytes, or a gap of the arena, are too few. `at` is known to be free."""
        if num_bytes > self.free_bytes:
            return None
        offset = self._last_gap(num_bytes) if at is None else at
        if offset < 0 or offset + num_bytes > self.budget_bytes:
            return None
        self.slots[key] = (offset, num_bytes)
        self.slot_bytes += num_bytes
        self.note_peak()
        return offset

    def _last_gap(self, num_bytes: int) -> int:
        """The highest offset that is free; negative if none is. Slots with a place begin at the lowest."""
        end = self.budget_bytes - self.budget_bytes % self.alignment_bytes
        for start, size in sorted(self.slots.values(), reverse=True):
            if end - start - size >= num_bytes:
                break
            end = start
        return end - num_bytes

    def slots_at(self, offset: int, num_bytes: int) -> list[SlotKey]:
        """The slots that lie there, wholly or in part."""
        return [k for k, (start, size) in self.slots.items() if start < offset + num_bytes and offset < start + size]

    def touch(self, key: SlotKey) -> None:
        """Make `key` the most recently used slot."""
        self.slots.move_to_end(key)

    def retire(self, key: SlotKey) -> None:
        """Make `key` the first slot to go."""
        self.slots.move_to_end(key, last=False)

    def remove(self, key: SlotKey) -> tuple[int, int]:
        offset, num_bytes = self.slots.pop(key)
        self.slot_bytes -= num_bytes
        return offset, num_bytes

    def forget(self, trial: int) -> None:
        """Return what a trial holds beside its slots."""
        self.held_bytes -= self.held.pop(trial, 0)
        self.leave_step(trial)

    def start_pilot(self, trial: int) -> int:
        """Reserve all that is free, of which nobody knows yet how much will be used; how many bytes that is."""
        num_bytes, self.pilot = self.free_bytes, trial
        self.enter_step(trial, num_bytes)
        return num_bytes

    def end_pilot(self, peak_bytes: int) -> None:
        """It has used so many; one that failed says what it lacked."""
        assert self.pilot is not None
        unused_bytes = max(0, self.steps[self.pilot] - peak_bytes)
        self.peak_bytes = max(self.peak_bytes, self.budget_bytes - unused_bytes)
        self.leave_step(self.pilot)

    @property
    def sums(self) -> tuple[int, int, int]:
        """Of what trials hold, steps reserve and slots take, counted one by one."""
        return sum(self.held.values()), sum(self.steps.values()), sum(size for _, size in self.slots.values())

    def note_peak(self) -> None:
        if self.pilot is None:  # which says itself how much it has used
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def validate(self) -> None:
        counted = self.held_bytes, self.step_bytes, self.slot_bytes
        assert counted == self.sums, (counted, self.sums)
        assert 0 <= self.used_bytes <= self.budget_bytes, (self.used_bytes, self.budget_bytes)
        assert self.peak_bytes <= self.budget_bytes, (self.peak_bytes, self.budget_bytes)
        end = 0
        for start, size in sorted(self.slots.values()):
            assert start >= end, "slots overlap"
            end = start + size
        assert end <= self.budget_bytes, "a slot lies beyond the arena"
