"""Trials in several threads begin, or train an epoch, one at a time, in an order that is the same in every run.

A turn is given when as many wait as run at a time: who has just trained is back, or another trial has come in its
place. The smallest rank goes first, of equal ones the oldest trial.
"""

from __future__ import annotations

import threading


class Turns:
    def __init__(self, at_a_time: int, epochs: int) -> None:
        self._at_a_time = at_a_time
        self._epochs = epochs  # for all trials together
        self._waiting: dict[int, float] = {}  # trials, and how they rank
        self._changed = threading.Condition()
        self.spent = 0

    def take(self, trial: int, rank: float) -> bool:
        """Wait until it is this trial's turn; False if all epochs have been spent."""
        with self._changed:
            self._waiting[trial] = rank
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over or self._next() == trial)
            del self._waiting[trial]
            return not self._is_over

    def note_epoch(self) -> None:
        with self._changed:
            self.spent += 1
            self._changed.notify_all()

    @property
    def _is_over(self) -> bool:
        return self.spent >= self._epochs

    def _next(self) -> int | None:
        if len(self._waiting) < self._at_a_time:
            return None
        return min(self._waiting, key=lambda trial: (self._waiting[trial], trial))
