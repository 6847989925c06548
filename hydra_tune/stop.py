"""Ends a trial at its next task boundary, from any thread."""

from __future__ import annotations

from collections.abc import Callable

from hydra_tune.errors import TrialStopped


class Stop:
    """Of one trial: called with a reason, it has the trial's thread raise `TrialStopped` where it next checks."""

    def __init__(self) -> None:
        self.reason = ""
        self._wake: list[Callable[[], None]] = []

    def __call__(self, reason: str) -> None:
        self.reason = reason
        for wake in self._wake:
            wake()

    def wakes(self, wake: Callable[[], None]) -> None:
        """Who waits is to look again."""
        self._wake.append(wake)

    def check(self) -> None:
        """Raises `TrialStopped` if the trial is to end."""
        if self.reason:
            raise TrialStopped(self.reason)
