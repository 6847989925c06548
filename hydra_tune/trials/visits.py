"""Visits to blocks: a block's weights are on the device for its forward, or for the repetition of its forward.

A visit may need more memory than was reserved for it, and run out of it. If it has changed nothing, all that can be
dropped from the device is dropped, and the visit is made once more.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from hydra_tune.blocks.block import Block
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.devices.meter import TrialMeter
from hydra_tune.errors import BudgetError, clear_frames
from hydra_tune.planning.planner import Planner
from hydra_tune.process.fork import gate
from hydra_tune.process.garbage import collect
from hydra_tune.schedule.events import OutOfMemory
from hydra_tune.schedule.plan import Direction
from hydra_tune.trials.residency import Residency
from hydra_tune.trials.tasks import Tasks

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

logger = logging.getLogger("hydra_tune")
ResultT = TypeVar("ResultT")


class Visits:
    """The visits of one trial, one at a time. `under_way` is true within a block's forward or its repetition."""

    def __init__(self, trial: Trial, tasks: Tasks, *, planner: Planner, residency: Residency) -> None:
        self._trial: Trial = weakref.proxy(trial)
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
        copy.used = copy.device.mark()
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
        return copy

    # ---- room ----

    def with_room(self, block: Block, run: Callable[[], ResultT], undo: Callable[[], bool]) -> ResultT:
        """Return `run()`, a visit to the block. If it runs out of memory, drop what can be dropped and run it again.

        `undo` undoes what the visit has done, and returns whether that succeeded; if not, it is not run again.

        Raises:
            BudgetError: it has run out of memory again.
        """
        planner = self._planner
        is_pilot = planner.pilot is not None
        if not is_pilot and (planner.plan is None or planner.plan.resident):
            return run()
        try:
            return run()
        except torch.OutOfMemoryError as error:
            clear_frames(error)  # they keep what the visit has computed
            can_repeat = undo()
            if is_pilot and self._trial.backwards.under_way:
                raise self._meter.no_room(error) from None
            if is_pilot:  # a pilot has nothing on the device that can be dropped
                raise
            if not can_repeat:
                self._trial.leave_after_error()
                raise
        self._drop_others(block)
        try:
            return run()
        except torch.OutOfMemoryError as error:
            self._trial.leave_after_error()
            raise BudgetError(
                f"block {block.name} of {self._trial.name} ran out of memory, and again after all that could be "
                f"dropped from {self._residency.device.name} was dropped: {error} Its first batch needed less. Raise "
                "the pool's memory=, or lower the batch size."
            ) from None

    def _drop_others(self, block: Block) -> None:
        """Drop everything from the device that can be promoted again."""
        trial, residency = self._trial, self._residency
        logger.warning("%s: block %s ran out of memory; all other shards are dropped", trial.name, block.name)
        self._tasks.backward.end()
        if self._tasks.current is not None:
            residency.drop_shard(self._tasks.current.shard)
        trial.events.tell(OutOfMemory(trial.id))
        residency.await_gradients()  # until they have arrived, they are on the device as well
        collect()
        residency.device.free_cache()
