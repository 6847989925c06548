"""The steps of a trial, each reserved as a whole: from its first forward until no backward of it may come any more.

forward | backward | optimizer, loader |  forward | backward | ...
^ waits until all of the step fits                ^ the last step is over, where its graphs are gone
"""

from __future__ import annotations

import logging
import weakref
from typing import Protocol

import torch

from hydra_tune.fork import gate
from hydra_tune.forward_pass import ForwardPass
from hydra_tune.lease import Lease
from hydra_tune.meter import TrialMeter
from hydra_tune.planner import Planner
from hydra_tune.pool import Client, ShardPool
from hydra_tune.residency import Residency
from hydra_tune.resumption import Resumption
from hydra_tune.shard import Direction, TrialPlan

logger = logging.getLogger("hydra_tune")
_MOST_BACKWARDS = 8  # in a step, whose forwards are all done with after them: those of two networks, of several losses


class Stepping(Client, Protocol):
    """What steps need of their trial."""

    name: str
    pool: ShardPool
    lease: Lease
    meter: TrialMeter
    planner: Planner
    residency: Residency
    resumption: Resumption | None

    def leave(self) -> None: ...


class Steps:
    """`under_way` is the step of that `number`; `measures`, that its bytes are an estimate, and `alone`, that they were
    too few: the device is its own."""

    def __init__(self, trial: Stepping) -> None:
        self._trial = trial
        self.number = 0
        self.under_way = False
        self.measures = False
        self.alone = False
        self.trains = False  # it has seen a backward
        self._num_backwards = 0
        self._forwards: list[weakref.ref[ForwardPass]] = []  # not a WeakSet, whose callbacks swallow interruptions
        self._keeps = False  # an activation, of which the script was told

    def close(self) -> None:
        """Let go of the trial, so that no cycle keeps it."""
        self.__dict__.pop("_trial", None)

    def open(self, plan: TrialPlan) -> None:
        """Wait until the step fits. One that is under way goes on, but not for ever."""
        if self.under_way:
            if self._num_backwards >= _MOST_BACKWARDS:
                self._leave_endless()
            return
        trial = self._trial
        if trial.stop.is_paused:
            trial.pool.give_back(trial)
        trial.stop.check_between_steps()
        self.measures = self._may_measure(plan)
        self.trains, self._num_backwards = False, 0
        if not trial.lease.enter_step():
            trial.pool.enter_step(trial, estimated=self.measures)
        self.under_way = True
        if self.measures:
            trial.meter.counting = True
            trial.meter.watch_outside(plan.step_bytes, self._outgrow)

    def leave(self) -> None:
        trial = self._trial
        self.under_way = False
        trial.residency.await_gradients()
        if not trial.lease.leave_step(trained=self.trains):
            trial.pool.leave_step(trial, trained=self.trains)
        if self.trains and trial.resumption is not None:
            trial.resumption.has_trained()
        self.alone = False
        self._end_measuring()

    def leave_if_done(self) -> bool:
        """Whether no backward may come: then no step is under way."""
        if self._forwards:
            self._forwards = [ref for ref in self._forwards if (forward := ref()) is not None and not forward.done]
            if self._forwards:
                return False
        if self.under_way:
            self.leave()
        return True

    def forget(self) -> None:
        """The one that was under way, interrupted, had not begun."""
        self.under_way = self.measures = self.alone = False

    # ---- its forwards and backwards ----

    def add_forward(self, forward: ForwardPass) -> None:
        self._forwards.append(weakref.ref(forward))

    def add_backward(self) -> None:
        self._num_backwards += 1

    # ---- its bytes ----

    def check_room(self, direction: Direction) -> None:
        """See that what a visit may leave fits, too: before it, for after it others may have the bytes."""
        plan, residency = self._trial.planner.plan, self._trial.residency
        assert plan is not None
        made = max((block.boundary_bytes for block in plan.blocks), default=0)
        late = plan.late_bytes - residency.late_bytes if direction is Direction.BACKWARD else 0
        self._trial.meter.check_outside(made + late)

    def leave_unmeasured(self) -> bool:
        """One that has only just begun, if another trial has made such a step while this one waited to."""
        if not self.measures or self._forwards or not self._trial.planner.step_is_measured:
            return False
        self.measures = False
        self._trial.meter.counting = self._trial.meter.always
        self._trial.meter.outside_peak()
        self.leave()
        return True

    def _may_measure(self, plan: TrialPlan) -> bool:
        """Only a runner's mode sees the operators of user code, and only a step of training has them all."""
        return (
            not plan.resident
            and not self._trial.planner.step_is_measured
            and self._trial.mode is not None
            and torch.is_grad_enabled()
        )

    def _outgrow(self) -> None:
        """The step needs more than was estimated: the others make way until it is done."""
        trial = self._trial
        with gate.stepped_out():
            trial.leave()
            trial.pool.have_alone(trial)
            trial.residency.device.free_cache()
        self.alone = True

    def _leave_endless(self) -> None:
        """An activation that the script keeps, and may still call backward on, would make one step of all. Its bytes
        stay reserved; but what is measured is known, for which others may wait."""
        trial = self._trial
        if not self._keeps:
            self._keeps = True
            logger.warning(
                "%s keeps an output of an earlier forward, on which backward may still be called: its bytes stay on "
                "the device, and checkpoints and pauses wait until it is gone. Compute what needs no gradient under "
                "torch.no_grad(), or keep output.detach().",
                trial.name,
            )
        trial.residency.await_gradients()
        self._num_backwards -= 1  # the next one ends a step, too
        self._end_measuring()
        self.alone = trial.pool.keep_step(trial, trial.planner.known_step_bytes)

    def _end_measuring(self) -> None:
        if self.measures:
            meter = self._trial.meter
            self.measures = False
            meter.counting = meter.always
            step_bytes = meter.outside_peak()
            if self.trains:
                self._trial.planner.use_measured_step(step_bytes)
