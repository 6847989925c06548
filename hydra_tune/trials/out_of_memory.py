"""What happens when a block runs out of memory in its forward, or in the repetition of it.

A plan reserves what forwards like those measured need. A later batch may need more. If the block's run can be undone,
all that can be promoted again is dropped from the device, and the block runs once more; else its trial ends, or the
runner runs the trial again, spilled and alone on its device.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from hydra_tune.blocks.block import Block
from hydra_tune.devices.meter import told
from hydra_tune.errors import LARGER, SMALLER_STEP, clear_frames, does_not_fit
from hydra_tune.process.garbage import collect
from hydra_tune.schedule.events import OutOfMemory

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

logger = logging.getLogger("hydra_tune")
ResultT = TypeVar("ResultT")


class OutOfMemoryRetry:
    """Of one trial."""

    def __init__(self, trial: Trial) -> None:
        self._trial: Trial = weakref.proxy(trial)
        self._planner = trial.planner
        self._residency = trial.residency
        self._tasks = trial.tasks

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
                raise self._residency.meter.refusal(error) from None
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
            raise does_not_fit(
                f"a later batch of {self._trial.name}, in block {block.name},",
                f"more than was measured ({told(error)})",
                f"all that could be dropped from {self._residency.device.name} was dropped",
                (LARGER, "the longest batch first, so that the plan has room for it", SMALLER_STEP),
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
