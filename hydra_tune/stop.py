"""What others ask of a trial, from any thread: to end at its next task boundary, to pause between two steps, to do
something there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol
from weakref import ref

from hydra_tune.errors import TrialStopped
from hydra_tune.interrupts import interrupts

_LOOK_AROUND_S = 0.5


class Waited(Protocol):
    """Where trials wait: on its call who waits looks again."""

    def wake_all(self) -> None: ...


class Stop:
    """Of one trial: called with a reason, it has the trial's thread raise `TrialStopped` where it next checks."""

    def __init__(self) -> None:
        self.reason = ""
        self._paused: threading.Event | None = None  # until it is set
        self._asked: list[Callable[[], None]] = []
        self._waited: list[ref[Waited]] = []  # a script's is never called, and outlives its pools

    def __call__(self, reason: str) -> None:
        self.reason = reason
        self.go_on()
        for each in self._waited:
            waited = each()
            if waited is not None:
                waited.wake_all()

    def pause(self) -> None:
        """Hold the trial where it next is between two steps, until `go_on`."""
        if self._paused is None:
            self._paused = threading.Event()
        if self.reason:  # looked at last: another thread may say it meanwhile
            self.go_on()

    def go_on(self) -> None:
        paused, self._paused = self._paused, None
        if paused is not None:
            paused.set()

    @property
    def is_paused(self) -> bool:
        return self._paused is not None

    def between_steps(self, call: Callable[[], None]) -> None:
        """Have the trial's thread call this where it next is between two steps."""
        self._asked.append(call)

    def reaches(self, waited: Waited) -> None:
        """Whoever waits there is to hear of it."""
        self._waited = [*(each for each in self._waited if each() not in (None, waited)), ref(waited)]

    @property
    def is_quiet(self) -> bool:
        """There is nothing for `check_between_steps` to do."""
        return not (self.reason or self._paused or self._asked)

    def check(self) -> None:
        """Raises `TrialStopped` if the trial is to end."""
        if self.reason:
            raise TrialStopped(self.reason)

    def check_between_steps(self) -> None:
        """As `check`; what was asked is done, and the trial waits while it is paused."""
        while self._asked:
            self._asked.pop(0)()
        paused = self._paused
        while paused is not None and not paused.wait(_LOOK_AROUND_S):
            interrupts.check()
        self.check()
