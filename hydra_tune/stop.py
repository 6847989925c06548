"""What others ask of a trial, from any thread: to end at its next task boundary, to pause between two steps, to do
something there."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

from hydra_tune.errors import TrialStopped


class Waited(Protocol):
    """Where trials wait: on its call who waits looks again."""

    def wake_all(self) -> None: ...


class Stop:
    """Of one trial: called with a reason, it has the trial's thread raise `TrialStopped` where it next checks."""

    def __init__(self) -> None:
        self.reason = ""
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._asked: deque[Callable[[], None]] = deque()
        self._waited: WeakSet[Waited] = WeakSet()  # a script's is never called, and outlives its pools

    def __call__(self, reason: str) -> None:
        self.reason = reason
        self.go_on()
        for waited in self._waited:
            waited.wake_all()

    def reaches(self, waited: Waited) -> None:
        """Whoever waits there is to hear of it."""
        self._waited.add(waited)

    def pause(self) -> None:
        """Hold the trial where it next is between two steps, until `go_on`."""
        self._goes_on.clear()

    def go_on(self) -> None:
        self._goes_on.set()

    @property
    def is_paused(self) -> bool:
        return not self._goes_on.is_set()

    def between_steps(self, call: Callable[[], None]) -> None:
        """Have the trial's thread call this where it next is between two steps."""
        self._asked.append(call)

    def check_between_steps(self) -> None:
        """As `check`; what was asked is done, and the trial waits while it is paused."""
        while self._asked:
            self._asked.popleft()()
        if self.is_paused:
            self._goes_on.wait()
        self.check()

    def check(self) -> None:
        """Raises `TrialStopped` if the trial is to end."""
        if self.reason:
            raise TrialStopped(self.reason)
