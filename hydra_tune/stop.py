"""Ends a trial at its next task boundary, from any thread."""

from __future__ import annotations

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
        self._waited: WeakSet[Waited] = WeakSet()  # a script's is never called, and outlives its pools

    def __call__(self, reason: str) -> None:
        self.reason = reason
        for waited in self._waited:
            waited.wake_all()

    def reaches(self, waited: Waited) -> None:
        """Whoever waits there is to hear of it."""
        self._waited.add(waited)

    def check(self) -> None:
        """Raises `TrialStopped` if the trial is to end."""
        if self.reason:
            raise TrialStopped(self.reason)
