"""How far each trial is, and how much device time it still needs: what policies rank by.

The time of a mini-batch is a moving average, so that the estimate follows the trial and does not drift from epoch to
epoch (Hydra divides a sum by a count that each epoch resets). If a trial does not say how many mini-batches it has, it
is expected to take as long as the trials that have ended took on average.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from hydra_tune.schedule.plan import Direction, TrialPlan

_WEIGHT_OF_LAST = 0.1  # of the last mini-batch in the moving average
ShardVisit = tuple[int, Direction]


@dataclass
class EndedTrials:
    """How many trials have ended, and the device seconds that they took together."""

    ended: int = 0
    device_s: float = 0.0

    @property
    def mean_s(self) -> float | None:
        return self.device_s / self.ended if self.ended else None


@dataclass
class Progress:
    """Of one trial, for policies.

    `total_steps`  mini-batches from its start in the pool to its end, None if unknown
    `steps_done`   mini-batches that have ended
    `step_s`       device seconds of a mini-batch, estimated
    `device_s`     device seconds so far
    `value`        the last objective that was reported, None before; larger is better if `maximizes`
    """

    trial: int
    ended_trials: EndedTrials
    total_steps: int | None = None
    steps_done: int = 0
    step_s: float = 0.0
    device_s: float = 0.0
    value: float | None = None
    maximizes: bool = False
    _this_step_s: float = 0.0  # device seconds of the step under way
    _has_timed_step: bool = False  # `step_s` comes from a step, no longer from the pilot

    @property
    def remaining_s(self) -> float:
        """Device seconds until the trial ends, estimated; infinite if its length is unknown and no trial has ended."""
        if self.total_steps is not None:
            return max(self.total_steps - self.steps_done, 0) * self.step_s - min(self._this_step_s, self.step_s)
        if self.ended_trials.mean_s is None:
            return inf
        return max(self.ended_trials.mean_s - self.device_s, self.step_s)

    def estimate_from(self, plan: TrialPlan) -> None:
        """Until a step has been timed, it is expected to take what the pilot measured of its blocks."""
        if not self._has_timed_step:
            self.step_s = sum(block.forward_s + block.backward_s for block in plan.blocks)

    def spend(self, seconds: float) -> None:
        """The step under way has used so much more device time."""
        self.device_s += seconds
        self._this_step_s += seconds

    def end_steps(self, number: int) -> None:
        """So many mini-batches ended; the time spent since the last end is divided equally among them."""
        if number:
            each_s, weight = self._this_step_s / number, 1.0 - (1.0 - _WEIGHT_OF_LAST) ** number
            self.step_s += (weight if self._has_timed_step else 1.0) * (each_s - self.step_s)
            self.steps_done += number
            self._has_timed_step = True
            self._this_step_s = 0.0

    def end_step(self, *, trained: bool) -> None:
        """A step ended. Only a mini-batch counts: the time of an evaluation changes no estimate."""
        if trained:
            weight = _WEIGHT_OF_LAST if self._has_timed_step else 1.0
            self.step_s += weight * (self._this_step_s - self.step_s)
            self.steps_done += 1
            self._has_timed_step = True
        self._this_step_s = 0.0

    def end(self) -> None:
        """The trial ended."""
        self.ended_trials.ended += 1
        self.ended_trials.device_s += self.device_s


@dataclass
class VisitOrder:
    """Predicts which shard a step visits next: the one that the trial's last step visited there. A step may differ."""

    _last: list[ShardVisit] = field(default_factory=list)  # of the last step
    _current: list[ShardVisit] = field(default_factory=list)  # of the step under way
    _position: int | None = 0  # in the last step, of the visit that is expected next; None if this step differs

    def note(self, visit: ShardVisit) -> None:
        """The step under way makes this visit now."""
        self._current.append(visit)
        if self._position is not None and (self._position >= len(self._last) or self._last[self._position] != visit):
            self._position = self._last.index(visit, self._position) if visit in self._last[self._position :] else None
        if self._position is not None:
            self._position += 1

    @property
    def next(self) -> ShardVisit | None:
        """The visit that is expected next; None if unknown, or if the step is expected to end."""
        return self._last[self._position] if self._position is not None and self._position < len(self._last) else None

    def end_step(self) -> None:
        self._last, self._current, self._position = self._current, [], 0

    def forget(self) -> None:
        self._last, self._current, self._position = [], [], 0
