"""The steps of a trial. A step lasts from its first forward until no backward of it can come any more, and its memory
is reserved as a whole.

    forward | backward | optimizer, loader |  forward | backward | ...
    ^ waits until all of the step fits        ^ here the step before is over, if its graphs are gone
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
# A step may have several backwards: of two networks, of several losses. After this many it is ended in any case.
_MAX_BACKWARDS = 8


class Steps:
    """The steps of one trial. A step whose bytes are reserved is `under_way`. In a pilot's step these are the bytes
    that the `Pilot` has reserved."""

    def __init__(self, trial: Trial) -> None:
        self._trial: Trial = weakref.proxy(trial)
        self.number = 0
        self.under_way = False
        self.trains = False  # the step has had a backward
        self.num_forwards = self.num_backwards = 0
        # forwards of the last step. Not in a WeakSet, whose callbacks swallow a KeyboardInterrupt
        self.forwards: list[weakref.ref[ForwardPass]] = []
        self.forward: ForwardPass | None = None  # the one under way
        self.are_simple: bool | None = None  # whether steps have one forward and one backward; None: not known yet
        self._has_warned = False  # the script keeps an activation, and was warned

    def open(self) -> None:
        """Wait until a step fits, and begin it. A step that is under way goes on, up to `_MAX_BACKWARDS`."""
        if self.under_way:
            if self.num_backwards >= _MAX_BACKWARDS:
                self._end_overlong()
            return
        if not self._trial.lease.enter_step():
            self._trial.events.ask(self._trial, StepReady(self._trial.id), Enter)
        self.begin()

    def begin(self) -> None:
        """Begin a step that has room."""
        self.trains, self.num_forwards, self.num_backwards, self.under_way = False, 0, 0, True

    def leave(self) -> None:
        """End the step, and give back what it has reserved, unless the lease lasts for the next step, too."""
        trial = self._trial
        self.under_way = False
        trial.residency.await_gradients()
        lease = trial.lease
        if trial.planner.pilot is None and (not lease.leave_step(trained=self.trains) or lease.revoked):
            trial.events.leave_step(trial, trained=self.trains)
        if self.trains and trial.resumption is not None:
            trial.resumption.has_trained()

    def leave_if_done(self) -> bool:
        """End the step if no backward may use a graph of its forwards any more. Returns whether that is so."""
        if self.forwards:
            self.forwards = [ref for ref in self.forwards if (forward := ref()) is not None and not forward.done]
            if self.forwards:
                return False
        if self.under_way:
            self.leave()
        return True

    def learn_whether_simple(self) -> None:
        """Called after each backward: learn whether the trial's steps are simple."""
        if self.are_simple is None:
            self.are_simple = (self.num_forwards, self.num_backwards) == (1, 1) or None

    def _end_overlong(self) -> None:
        """End a step that has had too many backwards.

        The script keeps an activation on which it may still call backward. So the step does not end by itself, and all
        later ones would be a part of it. The activation's bytes stay reserved. The machine is told that a step was
        done, for other trials may wait to learn what was measured.
        """
        trial = self._trial
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s keeps an output of an earlier forward, on which backward may still be called: its bytes stay on "
                "the device, and checkpoints and pauses wait until it is gone. Compute what needs no gradient under "
                "torch.no_grad(), or keep output.detach().",
                trial.name,
            )
        trial.residency.await_gradients()
        self.num_backwards -= 1  # so that after the next backward this happens again
        trial.events.tell_between_tasks(trial, StepDone(trial.id, keeps_bytes=True))

    @property
    def latest_forward(self) -> ForwardPass | None:
        """The last forward whose graph still exists."""
        return next((found for ref in reversed(self.forwards) if (found := ref()) is not None), None)

    @property
    def has_one_forward(self) -> bool:
        """Whether just one forward has a graph that a backward uses or may still use."""
        return sum((forward := ref()) is not None and not forward.done for ref in self.forwards) == 1
