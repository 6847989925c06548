"""A visit to a block on the device where its trial has the lease, counted there."""

from __future__ import annotations

from typing import Protocol

import torch

from hydra_tune.block import Block
from hydra_tune.fork import gate
from hydra_tune.meter import TrialMeter
from hydra_tune.mode import Counted
from hydra_tune.residency import Residency
from hydra_tune.shard import Direction
from hydra_tune.spill import DeviceCopy
from hydra_tune.steps import Steps
from hydra_tune.unseen_writes import UnseenWrites
from hydra_tune.visit import Visit


class Leaser(Protocol):
    """What a visit needs of the trial whose block it is."""

    meter: TrialMeter
    residency: Residency
    steps: Steps

    @property
    def has_pre_hooks(self) -> bool: ...

    @property
    def unseen_writes(self) -> UnseenWrites: ...

    def take_lease(self, block: Block, direction: Direction, *, at_home: bool) -> DeviceCopy: ...

    def leave_after_error(self) -> None: ...

    def counted(self) -> Counted: ...


class LeasedVisit:
    """A context manager, once: the lease, and the block's device copy under its module's names. The lease lingers
    after, for the next block of the same shard. No generator: one that is interrupted while it is entered or left
    cleans up when the exception is forgotten, too late for who saves the model in between."""

    __slots__ = ("_block", "_copy", "_counted", "_direction", "_evaluates", "_outermost", "_trial", "_visit")

    def __init__(self, trial: Leaser, block: Block, direction: Direction, *, evaluates: bool) -> None:
        self._trial = trial
        self._block = block
        self._direction = direction
        self._evaluates = evaluates

    def __enter__(self) -> Visit:
        trial, block = self._trial, self._block
        if trial.steps.measures:
            trial.steps.check_room(self._direction)
        if gate.is_inside:  # another visit: who waits for a lease holds up no fork
            with gate.stepped_out():
                self._copy = copy = trial.take_lease(block, self._direction, at_home=self._evaluates)
        else:
            self._copy = copy = trial.take_lease(block, self._direction, at_home=self._evaluates)
        self._outermost = gate.enter()
        trial.meter.outside_ends()
        trial.meter.here = copy.device.meter
        self._counted, self._visit = trial.counted(), trial.residency.inside(block, copy)
        try:
            goes_forward = self._direction is Direction.FORWARD
            is_new = goes_forward and trial.unseen_writes.look_at(block)
            may_be_written = is_new or block.rewritten or (self._evaluates and trial.has_pre_hooks)
            trial.residency.refresh(copy, block, again=may_be_written and goes_forward)
            self._counted.__enter__()
            try:
                return self._visit.__enter__()
            except BaseException:
                self._counted.__exit__(None, None, None)
                raise
        except BaseException:
            self._end_in_error()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._visit.__exit__()
            self._counted.__exit__(*error)
        except BaseException:
            self._end_in_error()
            raise
        if isinstance(error[1], torch.OutOfMemoryError):
            self._trial.residency.close_visits()  # the lease stays: it may run again
        elif error[0] is not None:
            self._end_in_error()
            return
        self._copy.used = self._copy.device.mark()
        self._leave_place()

    def _end_in_error(self) -> None:
        self._copy.used = self._copy.device.mark()  # before the lease goes, and with it perhaps the slot
        self._trial.residency.close_visits()
        self._leave_place()
        self._trial.leave_after_error()

    def _leave_place(self) -> None:
        if self._outermost:
            gate.leave()
        meter = self._trial.meter
        meter.here = meter.meter
        meter.outside_starts()
