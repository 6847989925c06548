"""Where shards lie on devices, and which of them make way. Plain data; each change is told as `Drop`s."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import neg

from hydra_tune.schedule.events import Drop, Instruction
from hydra_tune.schedule.ledger import SlotKey
from hydra_tune.schedule.plan import Direction, Task
from hydra_tune.schedule.state import DeviceState, TrialState


class Slots:
    """Of all trials on all devices."""

    def __init__(self, trials: Mapping[int, TrialState], devices: Sequence[DeviceState]) -> None:
        self.trials = trials
        self.devices = devices

    def place(self, device: DeviceState, task: Task, size: int) -> tuple[int | None, list[Instruction]]:
        """Where the slot goes, after others have made way; None if a copy on its way is there.

        A trial's last shards, as many as the arena holds, have places side by side, so that the bytes that are
        free alone decide which of them stay until their backward, never the gaps between them.
        """
        key, ledger = (task.trial, task.shard), device.ledger
        at, dropped = self._clearplace(device, task, size)
        while (offset := ledger.place(key, size, at)) is None:
            key_to_go = next(self.evictable(device), None)
            if key_to_go is None:
                return None, dropped
            dropped += self.drop(device, (key_to_go,))
        self.trials[task.trial].slots.add((device.index, task.shard))
        return offset, dropped

    def place_ahead(self, device: DeviceState, task: Task, size: int) -> tuple[int | None, list[Instruction]]:
        """As `place`, but nothing makes way that may stay until it is needed again; None if the place is taken."""
        ledger, evictable = device.ledger, list(self.evictable(device, ahead=task))
        if ledger.free_bytes + sum(ledger.slots[key][1] for key in evictable) < size:
            return None, []
        at = self._reserved_offset(device, task)
        if at is not None and not set(ledger.slots_at(at, size)).issubset(evictable):
            return None, []
        dropped = [] if at is None else self.drop(device, ledger.slots_at(at, size))
        evictable = [key for key in evictable if key in ledger.slots]
        while True:
            offset = ledger.place((task.trial, task.shard), size, at)
            if offset is not None:
                self.trials[task.trial].slots.add((device.index, task.shard))
                return offset, dropped
            if not evictable:
                return None, dropped
            dropped += self.drop(device, [evictable.pop(0)])

    def _clearplace(self, device: DeviceState, task: Task, size: int) -> tuple[int | None, list[Instruction]]:
        """Where the shard has its place, after its trial's own slots have made way; None if it has none, or
        another trial's slot is there, or a copy on its way."""
        at, to_end = self._reserved_offset(device, task), self.trials[task.trial].plan.bytes_to_end
        if at is None:
            return None, []
        ledger = device.ledger
        there, arena_bytes = ledger.slots_at(at, size), ledger.budget_bytes
        if any(trial != task.trial or to_end[shard] <= arena_bytes for trial, shard in there):
            return None, []
        dropped: list[Instruction] = []
        for key in self.evictable(device) if there else ():
            if ledger.slots.keys().isdisjoint(there):
                break
            if key[0] == task.trial:
                dropped += self.drop(device, (key,))
        return at if ledger.slots.keys().isdisjoint(there) else None, dropped

    def _reserved_offset(self, device: DeviceState, task: Task) -> int | None:
        """None for a shard that does not belong to the last ones which fit the arena together."""
        to_end, arena_bytes = self.trials[task.trial].plan.bytes_to_end, device.ledger.budget_bytes
        if to_end[task.shard] > arena_bytes:
            return None
        return to_end[bisect_left(to_end, -arena_bytes, key=neg)] - to_end[task.shard]

    def evictable(self, device: DeviceState, *, ahead: Task | None = None) -> Iterator[SlotKey]:
        """Slots that may be dropped, those first that will be needed last.

        Within one step a trial visits its shards forwards, then backwards, so the slot used last is
        the one needed first, and after its backward it is not needed: in this order, with those retired
        first, goes what is needed last (Belady). For a promotion `ahead` goes none of the same trial's that
        may stay until its backward.
        """
        busy, promised = device.busy, device.promised
        last = (promised.trial, promised.shard) if promised is not None else None
        to_end: tuple[int, ...] = ()
        room_bytes = device.ledger.budget_bytes - device.ledger.held_bytes - device.ledger.step_bytes
        if ahead is not None and ahead.direction is Direction.FORWARD:
            to_end = self.trials[ahead.trial].plan.bytes_to_end
        for key in list(device.ledger.slots):
            if key in (busy, last) or key in device.in_flight:
                continue
            if ahead is None or key[0] != ahead.trial or not to_end or to_end[key[1]] > room_bytes:
                yield key
        if last is not None and last in device.ledger.slots and last != busy and last not in device.in_flight:
            yield last

    def has_room(self, device: DeviceState, num_bytes: int) -> bool:
        """Whether enough is free, or would be if all that can go went."""
        return num_bytes <= device.ledger.free_bytes + device.ledger.slot_bytes - self._staying_bytes(device)

    def _staying_bytes(self, device: DeviceState) -> int:
        """Of slots that may not be dropped."""
        slots, staying = device.ledger.slots, set(device.in_flight)
        if device.busy is not None and device.busy in slots:
            staying.add(device.busy)
        return sum(slots[key][1] for key in staying)

    def make_room(self, device: DeviceState, num_bytes: int) -> list[Instruction]:
        """Drop idle slots until `num_bytes` are free, or none is left to drop."""
        dropped: list[Instruction] = []
        if device.ledger.free_bytes >= num_bytes:
            return dropped
        for key in self.evictable(device):
            dropped += self.drop(device, (key,))
            if device.ledger.free_bytes >= num_bytes:
                break
        return dropped

    def drop(self, device: DeviceState, keys: Iterable[SlotKey]) -> list[Instruction]:
        dropped: list[Instruction] = []
        for key in keys:
            device.in_flight.discard(key)
            self.trials[key[0]].slots.discard((device.index, key[1]))
            dropped.append(Drop(*key, device.index, *device.ledger.remove(key)))
        return dropped

    def drop_all_of(self, number: int) -> list[Instruction]:
        return [
            drop
            for index, shard in sorted(self.trials[number].slots)
            for drop in self.drop(self.devices[index], [(number, shard)])
        ]
