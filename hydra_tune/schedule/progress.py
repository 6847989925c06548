"""How far each trial is, and what it will still take: seconds of device time, mini-batches, its objective.

A mini-batch takes the moving average of those before it, so that the estimate follows the trial without drifting from
epoch to epoch (Hydra divides a sum by a count that each epoch resets). A trial that does not say how many it has is
thought to take what those that have ended took.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from hydra_tune.schedule.plan import Direction, TrialPlan

_WEIGHT_OF_LAST = 0.1  # in the moving average
Place = tuple[int, Direction]


@dataclass
class Neighbours:
    """The trials that have ended: how many, and their seconds on devices."""

    ended: int = 0
    device_s: float = 0.0

    @property
    def mean_s(self) -> float | None:
        return self.device_s / self.ended if self.ended else None


@dataclass
class Progress:
    """One trial's, as policies see it. `step_s` is a mini-batch's device time."""

    trial: int
    neighbours: Neighbours
    total_steps: int | None = None
    steps_done: int = 0
    step_s: float = 0.0
    device_s: float = 0.0
    value: float | None = None
    maximizes: bool = False
    _now_s: float = 0.0  # of the step under way
    _is_timed: bool = False  # a step was, in turns

    @property
    def remaining_s(self) -> float:
        """Longest remaining time first: Hydra, section 4."""
        if self.total_steps is not None:
            return max(self.total_steps - self.steps_done, 0) * self.step_s - min(self._now_s, self.step_s)
        if self.neighbours.mean_s is None:
            return inf
        return max(self.neighbours.mean_s - self.device_s, self.step_s)

    def expect(self, plan: TrialPlan) -> None:
        """Until a step has run in turns, it takes what its blocks have been measured to."""
        if not self._is_timed:
            self.step_s = sum(block.forward_s + block.backward_s for block in plan.blocks)

    def spend(self, seconds: float) -> None:
        self.device_s += seconds
        self._now_s += seconds

    def end_steps(self, number: int) -> None:
        """So many mini-batches, which have taken the same time each."""
        if number:
            each_s, weight = self._now_s / number, 1.0 - (1.0 - _WEIGHT_OF_LAST) ** number
            self.step_s += (weight if self._is_timed else 1.0) * (each_s - self.step_s)
            self.steps_done += number
            self._is_timed = True
            self._now_s = 0.0

    def end_step(self, *, trained: bool) -> None:
        if trained:
            weight = _WEIGHT_OF_LAST if self._is_timed else 1.0
            self.step_s += weight * (self._now_s - self.step_s)
            self.steps_done += 1
            self._is_timed = True
        self._now_s = 0.0

    def end(self) -> None:
        self.neighbours.ended += 1
        self.neighbours.device_s += self.device_s


@dataclass
class VisitOrder:
    """The shards that a step visits, in the order of the trial's last one: a hint, from which a step may deviate."""

    _last: list[Place] = field(default_factory=list)
    _now: list[Place] = field(default_factory=list)
    _at: int | None = 0  # how many of the last step's this one has made; None where it has left them

    def make(self, place: Place) -> None:
        self._now.append(place)
        if self._at is not None and (self._at >= len(self._last) or self._last[self._at] != place):
            self._at = self._last.index(place, self._at) if place in self._last[self._at :] else None
        if self._at is not None:
            self._at += 1

    @property
    def next(self) -> Place | None:
        return self._last[self._at] if self._at is not None and self._at < len(self._last) else None

    def end_step(self) -> None:
        self._last, self._now, self._at = self._now, [], 0

    def forget(self) -> None:
        self._last, self._now, self._at = [], [], 0
