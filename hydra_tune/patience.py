"""Of a trial that waits: when to look whether what it waits for is garbage, and when to say whom it waits for."""

from __future__ import annotations

import time

COLLECT_S, SELDOM_COLLECT_S = 1.0, 60.0  # more than once: autograd's nodes hide what they refer to until they are gone
WARN_S, SELDOM_WARN_S = 60.0, 3600.0  # without a task that begins in the pool


class Patience:
    """Over after so many seconds, then after twice as many, up to the longest."""

    def __init__(self, wait_s: float, longest_s: float) -> None:
        self._wait_s = wait_s
        self._longest_s = longest_s
        self._ends_s = time.monotonic() + wait_s

    def is_over(self) -> bool:
        """It begins anew then."""
        now_s = time.monotonic()
        if now_s < self._ends_s:
            return False
        self._wait_s = min(2 * self._wait_s, self._longest_s)
        self._ends_s = now_s + self._wait_s
        return True


class Wait:
    """One wait."""

    def __init__(self) -> None:
        self._collecting = Patience(COLLECT_S, SELDOM_COLLECT_S)
        self._warning = Patience(WARN_S, SELDOM_WARN_S)
        self._tasks = 0

    def shall_collect(self) -> bool:
        return self._collecting.is_over()

    def shall_warn(self, tasks: int) -> bool:
        """`tasks` have begun so far."""
        if tasks != self._tasks:
            self._tasks, self._warning = tasks, Patience(WARN_S, SELDOM_WARN_S)
        return self._warning.is_over()
