"""How often a trial writes a checkpoint, and whether the next one is due.

A checkpoint costs a copy of all that a trial has. A user says how much work may be lost at most, in mini-batches or in
time, and one is written no oftener than that.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

from hydra_tune.errors import ConfigError


@dataclass(frozen=True)
class Interval:
    """Between two checkpoints of a trial: so many mini-batches, or so much time. Neither: a checkpoint is never due."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, every: int | timedelta | None) -> Interval:
        """Five minutes if None.

        Raises:
            ConfigError: neither a positive whole number of mini-batches nor a positive `datetime.timedelta`.
        """
        if every is None:
            every = timedelta(minutes=5)
        if isinstance(every, timedelta) and every > timedelta(0):
            return cls(seconds=every.total_seconds())
        if isinstance(every, int) and not isinstance(every, bool) and every > 0:
            return cls(steps=every)
        raise ConfigError(
            f"checkpoint_every is a positive number of mini-batches or a positive datetime.timedelta, got {every!r}."
        )


class CheckpointTimer:
    """When the last checkpoint of a training was written, in mini-batches and on the clock.

    Args:
        every: the most that may pass until the next one.
        step: mini-batches after which the training begins, or goes on.
    """

    def __init__(self, every: Interval, step: int = 0) -> None:
        self._every = every
        self.restart(step)

    def restart(self, step: int) -> None:
        """A checkpoint was written after `step` mini-batches."""
        self.last_step, self._last_s = step, time.monotonic()

    def is_due(self, step: int) -> bool:
        if self._every.steps is not None:
            return step - self.last_step >= self._every.steps
        return self._every.seconds is not None and time.monotonic() - self._last_s >= self._every.seconds
