"""Visits to blocks: a block's weights are on the device for its forward, or for the repetition of its forward."""

from __future__ import annotations

from hydra_tune.blocks.block import Block
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.devices.meter import TrialMeter
from hydra_tune.planning.planner import Planner
from hydra_tune.process.fork import gate
from hydra_tune.schedule.plan import Direction
from hydra_tune.trials.residency import Residency
from hydra_tune.trials.tasks import Tasks


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
