"""The task that a trial runs now. The trial has the device's lease for it, and the task's shard is on the device.

    forward    | F0 | F1 | F2 |                    to go on to the next shard gives the lease of the last one back
    backward                   | B2 | B1 | B0 |
               ^ go_to(0) ... ^ go_to(2)           ^ leave

A task lasts for the visits to its shard's blocks: in a visit the block's weights are on the device, for its forward or
for the repetition of its forward.

A resident trial has one shard. Its lease may last for many steps (`pool/lease.py`); then the pool is not asked.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from hydra_tune.blocks.block import Block
from hydra_tune.blocks.call import Call
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.devices.meter import TrialMeter
from hydra_tune.planning.planner import Planner
from hydra_tune.pool.event_loop import EventLoop
from hydra_tune.pool.lease import Lease
from hydra_tune.process.fork import gate
from hydra_tune.randomness import hold
from hydra_tune.schedule.plan import Direction, Task
from hydra_tune.trials.residency import Residency
from hydra_tune.trials.steps import Steps

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial


class OpenBackward:
    """The call whose backward is under way, and its block's copy on the device; at most one at a time."""

    def __init__(self, meter: TrialMeter) -> None:
        self._meter = meter
        self._call: weakref.ref[Call] | None = None  # its graph keeps it alive
        self.copy: DeviceCopy | None = None

    def begin(self, call: Call, copy: DeviceCopy) -> weakref.ref[Call]:
        self.copy = copy
        self._call = weakref.ref(call)
        return self._call

    def copy_of(self, call: Call) -> DeviceCopy | None:
        """The copy for this call; None if its backward is not under way."""
        return self.copy if self._call is not None and self._call() is call else None

    def end(self) -> None:
        """The call's backward is over, or that of another call begins."""
        if self.copy is not None:
            self.copy.note_use(self._meter.trial)
            self.copy.drop_riders()
            self._meter.outside_starts(later=True)
        self._call = self.copy = None


class Tasks:
    """Runs the tasks of one trial. `current` is None between two tasks; then the trial has no lease, unless that lasts
    for many steps."""

    def __init__(
        self, trial: Trial, events: EventLoop, *, lease: Lease, steps: Steps, planner: Planner, residency: Residency
    ) -> None:
        self._trial = weakref.ref(trial)
        self._events = events
        self._lease = lease
        self._steps = steps
        self._planner = planner
        self._residency = residency
        self.current: Task | None = None
        self.backward = OpenBackward(residency.meter)

    def go_to(self, shard: int, direction: Direction) -> DeviceCopy | None:
        """Wait for the lease of a task, and have its shard on the device. Returns the shard's copy; None if the trial
        is resident."""
        plan, residency = self._planner.plan, self._residency
        trial = self._trial()
        assert plan is not None and trial is not None
        if plan.resident and self._lease.begin(self._steps.number, direction):
            self.current = self._lease.task
            self._events.check_open(trial)
            return None
        task = Task(trial.id, self._steps.number, shard, direction)
        if self.current != task:
            self.backward.end()
            ended, self.current = self.current, None
            self._events.acquire(trial, task, ended)
            hold(residency.device.generators, trial.random_state)
            self.current = task
        if plan.resident:
            return None
        copy = residency.copy_of(shard)
        if copy is None:
            # (offset, bytes) of the slot; (0, 0) if the shard needs none, or the machine could not give one
            place = residency.device.ledger.slots.get(residency.shared.slot_key(shard), (0, 0))
            residency.promote_shard(shard, *place)
            copy = residency.copy_of(shard)
        return copy

    def leave(self) -> None:
        """End the task, if one is under way, and give back its lease, unless that lasts for many steps."""
        if self.backward.copy is not None:
            self.backward.end()
        if self.current is not None:
            task, self.current = self.current, None
            keeps_lease = self._lease.end()
            if keeps_lease is None:
                self._events.release(task)
            elif not keeps_lease:
                trial = self._trial()
                assert trial is not None
                self._events.hear(trial)


class Visits:
    """The visits of one trial, one at a time. `under_way` is true within a block's forward or its repetition."""

    def __init__(self, tasks: Tasks, *, planner: Planner, residency: Residency) -> None:
        self._tasks = tasks
        self._planner = planner
        self._residency = residency
        self._meter: TrialMeter = residency.meter
        self.under_way = False
        self.is_measuring = False  # in a pilot, a block's first run: activations that it keeps may still be dropped

    def begin(self, block: Block, direction: Direction) -> DeviceCopy:
        """Begin a visit: the block's weights are on the device from here on, until `end`."""
        copy = self.promoted_copy(block, direction)
        gate.enter()
        self.under_way = True
        self._meter.inside += 1
        if self._meter.counting and direction is Direction.FORWARD:
            self._meter.outside_ends()
        return copy

    def end(self, copy: DeviceCopy, direction: Direction) -> None:
        self.under_way = False
        self._meter.inside -= 1
        copy.note_use(self._meter.trial)
        if direction is Direction.FORWARD:  # in a backward, operators may still ask for them
            copy.drop_riders()
        if self._meter.counting and direction is Direction.FORWARD and not self.is_measuring:
            self._meter.outside_starts()
        gate.leave()

    def promoted_copy(self, block: Block, direction: Direction) -> DeviceCopy:
        """Have the block's shard on the device, in the task of this direction. Returns the copy of its weights."""
        planner, residency = self._planner, self._residency
        copy: DeviceCopy | None
        if planner.pilot is not None:
            copy = planner.pilot.copy_of(block)
            # a checkpoint has called other blocks since, which has dropped the copy of the backward under way
            if copy is not self._tasks.backward.copy:
                self._tasks.backward.end()
        elif planner.plan is not None and planner.plan.resident:
            copy = DeviceCopy(residency.device, residency.device.slot(None, 0), [], None)
        else:
            copy = self._tasks.go_to(planner.cut.shard_of(block), direction)
        assert copy is not None, f"{block.name} has a shard, which is on the device"
        residency.refresh(copy, block)
        if block.riders:
            residency.bring_riders(copy, block)
        return copy
