"""Visits to blocks: a block's weights are on the device for its forward, or for the repetition of that.

What a visit computes may pass what was reserved for it. If all is still as it was before the visit, everything that can
go from the device goes, and the visit is made again: at most once.
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
    """One at a time. `under_way` is true within a block's forward, or its repetition."""

    def __init__(self, trial: Trial, tasks: Tasks, *, planner: Planner, residency: Residency) -> None:
        self._trial: Trial = weakref.proxy(trial)
        self._tasks = tasks
        self._planner = planner
        self._residency = residency
        self._meter: TrialMeter = residency.meter
        self.under_way = False
        self.is_measuring = False  # in a pilot, a block's first run: what it keeps may be dropped yet

    def begin(self, block: Block, direction: Direction) -> DeviceCopy:
        """The block's weights are on the device from here on, until `end`."""
        copy = self.be_at(block, direction)
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

    def be_at(self, block: Block, direction: Direction) -> DeviceCopy:
        """Be where the block's shard is; its copy there."""
        planner, residency = self._planner, self._residency
        copy: DeviceCopy | None
        if planner.pilot is not None:
            copy = planner.pilot.copy_of(block)
            if copy is not self._tasks.backward.copy:  # which is gone: a checkpoint has called other blocks meanwhile
                self._tasks.backward.end()
        elif planner.plan is not None and planner.plan.resident:
            copy = DeviceCopy(residency.device, residency.device.slot(None, 0), [], None)
        else:
            copy = self._tasks.go_to(planner.cut.shard_of(block), direction)
        assert copy is not None, f"{block.name} has a shard, which is on the device"
        residency.refresh(copy, block)
        return copy

    # ---- room ----

    def with_room(self, block: Block, run: Callable[[], ResultT], rewound: Callable[[], bool]) -> ResultT:
        """Run a visit to the block. Where that runs out of memory, and all is as if it had not run, drop what can be
        dropped and run it again.

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
            clear_frames(error)  # which keep what it has computed
            can_repeat = rewound()
            if is_pilot and self._trial.backwards.under_way:
                raise self._meter.no_room(error) from None
            if is_pilot:  # which has nothing to drop
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
                f"block {block.name} of {self._trial.name} ran out of memory, again when all that could go from "
                f"{self._residency.device.name} had gone: {error} Its first batch needed less. Raise the pool's "
                "memory=, or lower the batch size."
            ) from None

    def _drop_others(self, block: Block) -> None:
        trial, residency = self._trial, self._residency
        logger.warning("%s: block %s ran out of memory; all other shards are dropped", trial.name, block.name)
        self._tasks.backward.end()
        if self._tasks.current is not None:
            residency.drop_shard(self._tasks.current.shard)
        trial.events.tell(OutOfMemory(trial.id))
        residency.await_gradients()  # which are on the device until then
        collect()
        residency.device.free_cache()
