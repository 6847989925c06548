"""Where shards lie on devices, and which of them make room for others. Plain data; each change is a `Drop`.

A slot belongs to one shard of one trial, or to frozen weights that several trials have: one slot, which the shard of
each of these trials uses. It lasts from step to step, until its room is needed or the last of its trials is gone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import neg

from hydra_tune.schedule.events import Drop, Instruction
from hydra_tune.schedule.ledger import SHARED, SlotKey
from hydra_tune.schedule.plan import Direction, Task
from hydra_tune.schedule.ready import ReadyTasks
from hydra_tune.schedule.state import DeviceState, TrialState


class Slots:
    """The slots of all trials on all devices.

    A trial's last shards, as many as the arena holds together, have reserved offsets side by side, from the bottom of
    the arena up. So the free bytes alone decide which of them stay until their backward, never the gaps between them.

        trial with shards 0 1 2 3      arena | 1 | 2 | 3 |      0 |      0 does not fit beside the others: no reserved
                                                                         offset, it goes into the highest gap
    """

    def __init__(self, trials: Mapping[int, TrialState], devices: Sequence[DeviceState], ready: ReadyTasks) -> None:
        self.trials = trials
        self.devices = devices
        self.users: dict[int, set[int]] = {}  # the trials that share weights, by their number
        self._ready = ready

    def key(self, task: Task) -> SlotKey:
        """Of the slot with the task's shard."""
        return self.trials[task.trial].slot_key(task)

    def share(self, trial: int, weights: tuple[int | None, ...]) -> list[Instruction]:
        """From here on the trial's shards use the slots of weights of these numbers. Drops slots that no trial uses any
        more, but none of the trial's own."""
        state = self.trials[trial]
        before, state.weights = state.weights, weights if any(number is not None for number in weights) else ()
        for number in state.weights:
            if number is not None:
                self.users.setdefault(number, set()).add(trial)
        dropped: list[Instruction] = []
        for number in set(before).difference(state.weights):
            if number is not None:
                self.users[number].remove(trial)
                if not self.users[number]:
                    del self.users[number]
                    key = SHARED, number
                    dropped += [d for on in self.devices if key in on.ledger.slots for d in self.drop(on, [key])]
        return dropped

    def place(self, device: DeviceState, task: Task, size: int) -> tuple[int | None, list[Instruction]]:
        """Make a slot of `size` bytes for the task's shard, dropping others as needed.

        Returns:
            Its offset, and the drops. The offset is None if what remains in the way is busy or on its way.
        """
        key, ledger = self.key(task), device.ledger
        at, dropped = self._clear_reserved(device, task, size)
        while (offset := ledger.place(key, size, at)) is None:
            evicted = next(self.evictable(device), None)
            if evicted is None:
                return None, dropped
            dropped += self.drop(device, (evicted,))
        self._note(device, key)
        return offset, dropped

    def place_ahead(self, device: DeviceState, task: Task, size: int) -> tuple[int | None, list[Instruction]]:
        """As `place`, but slots that can stay until they are needed again are kept (see `evictable`). The offset is
        None where these are in the way."""
        ledger, evictable = device.ledger, list(self.evictable(device, ahead=task))
        if ledger.free_bytes + sum(ledger.slots[key][1] for key in evictable) < size:
            return None, []
        at = self._reserved_offset(device, task)
        if at is not None and not set(ledger.slots_overlapping(at, size)).issubset(evictable):
            return None, []
        dropped = [] if at is None else self.drop(device, ledger.slots_overlapping(at, size))
        evictable = [key for key in evictable if key in ledger.slots]
        while True:
            offset = ledger.place(self.key(task), size, at)
            if offset is not None:
                self._note(device, self.key(task))
                return offset, dropped
            if not evictable:
                return None, dropped
            dropped += self.drop(device, [evictable.pop(0)])

    def _note(self, device: DeviceState, key: SlotKey) -> None:
        if key[0] != SHARED:
            self.trials[key[0]].slots.add((device.index, key[1]))

    def _shard_of(self, key: SlotKey, trial: int) -> int | None:
        """The trial's shard that uses the slot; None if none does."""
        if key[0] != SHARED:
            return key[1] if key[0] == trial else None
        weights = self.trials[trial].weights
        return weights.index(key[1]) if key[1] in weights else None

    def _clear_reserved(self, device: DeviceState, task: Task, size: int) -> tuple[int | None, list[Instruction]]:
        """Drop slots of the same trial that are at the shard's reserved offset.

        Returns:
            That offset, and the drops. The offset is None if the shard has none, or if another trial's slot or a copy
            on its way is there.
        """
        at, to_end = self._reserved_offset(device, task), self.trials[task.trial].plan.bytes_to_end
        if at is None:
            return None, []
        ledger = device.ledger
        occupants, arena_bytes = ledger.slots_overlapping(at, size), ledger.budget_bytes
        shards = [self._shard_of(key, task.trial) for key in occupants]
        if any(shard is None or to_end[shard] <= arena_bytes for shard in shards):
            return None, []
        dropped: list[Instruction] = []
        for key in self.evictable(device) if occupants else ():
            if ledger.slots.keys().isdisjoint(occupants):
                break
            if self._shard_of(key, task.trial) is not None:
                dropped += self.drop(device, (key,))
        return at if ledger.slots.keys().isdisjoint(occupants) else None, dropped

    def _reserved_offset(self, device: DeviceState, task: Task) -> int | None:
        """None for a shard that is not among the last ones that fit the arena together."""
        to_end, arena_bytes = self.trials[task.trial].plan.bytes_to_end, device.ledger.budget_bytes
        if to_end[task.shard] > arena_bytes:
            return None
        return to_end[bisect_left(to_end, -arena_bytes, key=neg)] - to_end[task.shard]

    def evictable(self, device: DeviceState, *, ahead: Task | None = None) -> Iterator[SlotKey]:
        """Slots that may be dropped; first those that will be needed last (Belady's rule).

        A step visits the trial's shards forwards, then backwards. So the slot used last is needed first, and a slot
        whose backward is over is not needed again in the step:

            visits           F0  F1  F2  B2  B1  B0
            order of drops   after F2: 0, 1, 2         after B2: 2, 0, 1

        The ledger's order, oldest use first and retired slots before all, is that order. Never dropped: the running
        task's slot, and slots whose copy is on its way. The last choices are slots that ready tasks of several trials
        wait for, then the promised task's slot. Before a promotion `ahead`, the former are left alone; before one for a
        forward, also slots of its own trial that can stay until their backward.
        """
        used = None if device.running is None else self.key(device.running)
        spared = None if device.promised is None else self.key(device.promised)
        awaited = self._ready.at_shared.keys()
        to_end: tuple[int, ...] = ()
        room_bytes = device.ledger.budget_bytes - device.ledger.held_bytes - device.ledger.step_bytes
        if ahead is not None and ahead.direction is Direction.FORWARD:
            to_end = self.trials[ahead.trial].plan.bytes_to_end
        for key in list(device.ledger.slots):
            if key in (used, spared) or key in awaited or key in device.in_flight:
                continue
            shard = None if ahead is None or not to_end else self._shard_of(key, ahead.trial)
            if shard is None or to_end[shard] > room_bytes:
                yield key
        if awaited and ahead is None:
            keys = [key for key in device.ledger.slots if key in awaited and key != spared]
            yield from (key for key in keys if not self._is_busy(device, key))
        if spared is not None and spared in device.ledger.slots and not self._is_busy(device, spared):
            yield spared

    def _is_busy(self, device: DeviceState, key: SlotKey) -> bool:
        """Whether the slot is the running task's, or its copy is on its way."""
        return key in device.in_flight or (device.running is not None and key == self.key(device.running))

    def has_room(self, device: DeviceState, num_bytes: int) -> bool:
        """Whether so many bytes are free, or would be if all slots were dropped that may be."""
        return num_bytes <= device.ledger.free_bytes + device.ledger.slot_bytes - self._undroppable_bytes(device)

    def _undroppable_bytes(self, device: DeviceState) -> int:
        slots, undroppable = device.ledger.slots, set(device.in_flight)
        if device.running is not None and (used := self.key(device.running)) in slots:
            undroppable.add(used)
        return sum(slots[key][1] for key in undroppable)

    def make_room(self, device: DeviceState, num_bytes: int) -> list[Instruction]:
        """Drop slots until `num_bytes` are free, or no other may be dropped."""
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
            device.in_flight.pop(key, None)
            if key[0] != SHARED:
                self.trials[key[0]].slots.discard((device.index, key[1]))
            dropped.append(Drop(*key, device.index, *device.ledger.remove(key)))
        return dropped

    def drop_all_of(self, trial: int) -> list[Instruction]:
        """The trial's own, on all devices."""
        return [
            drop
            for index, shard in sorted(self.trials[trial].slots)
            for drop in self.drop(self.devices[index], [(trial, shard)])
        ]
