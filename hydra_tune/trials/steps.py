"""The steps of a trial, each reserved as a whole: from its first forward until no backward of it may come any more.

forward | backward | optimizer, loader |  forward | backward | ...
^ waits until all of the step fits                ^ the last step is over, where its graphs are gone
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

from hydra_tune.blocks.engine import ForwardPass
from hydra_tune.schedule.events import Enter, StepDone, StepReady

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

logger = logging.getLogger("hydra_tune")
_MOST_BACKWARDS = 8  # in a step, whose forwards are all done with after them: those of two networks, of several losses


class Steps:
    """`under_way` is the step of that `number`; the first of a kind has what its `Pilot` has reserved."""

    def __init__(self, trial: Trial) -> None:
        self._trial: Trial = weakref.proxy(trial)
        self.number = 0
        self.under_way = False
        self.trains = False  # it has seen a backward
        self.num_forwards = self.num_backwards = 0
        # of the last step; some may have gone since. Not a WeakSet, whose callbacks swallow interruptions
        self.forwards: list[weakref.ref[ForwardPass]] = []
        self.forward: ForwardPass | None = None  # under way
        self.are_simple: bool | None = None  # one forward, one backward; None as long as nobody has seen
        self._keeps = False  # an activation, of which the script was told

    def open(self) -> None:
        """Wait until the step fits. One that is under way goes on, but not for ever."""
        if self.under_way:
            if self.num_backwards >= _MOST_BACKWARDS:
                self._leave_endless()
            return
        if not self._trial.lease.enter_step():
            self._trial.events.ask(self._trial, StepReady(self._trial.id), Enter)
        self.begin()

    def begin(self) -> None:
        """One that has room."""
        self.trains, self.num_forwards, self.num_backwards, self.under_way = False, 0, 0, True

    def leave(self) -> None:
        trial = self._trial
        self.under_way = False
        trial.residency.await_gradients()
        lease = trial.lease
        if trial.planner.pilot is None and (not lease.leave_step(trained=self.trains) or lease.revoked):
            trial.events.leave_step(trial, trained=self.trains)
        if self.trains and trial.resumption is not None:
            trial.resumption.has_trained()

    def leave_if_done(self) -> bool:
        """Whether no backward may come: then no step is under way."""
        if self.forwards:
            self.forwards = [ref for ref in self.forwards if (forward := ref()) is not None and not forward.done]
            if self.forwards:
                return False
        if self.under_way:
            self.leave()
        return True

    def note_whether_simple(self) -> None:
        """A step has had its backward."""
        if self.are_simple is None:
            self.are_simple = (self.num_forwards, self.num_backwards) == (1, 1) or None

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
        self.num_backwards -= 1  # the next one ends a step, too
        trial.events.tell_between_tasks(trial, StepDone(trial.id, keeps_bytes=True))

    @property
    def latest_forward(self) -> ForwardPass | None:
        """The last one whose graph may still be used."""
        return next((found for ref in reversed(self.forwards) if (found := ref()) is not None), None)

    @property
    def has_one_forward(self) -> bool:
        """Whether no other one's backward may be under way, or be still to come."""
        return sum((forward := ref()) is not None and not forward.done for ref in self.forwards) == 1
