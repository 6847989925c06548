"""What no schedule beats: the lower bound of a sweep's makespan, and for small sweeps the optimum itself.

Links cost nothing here and memory is no limit, so that every policy's schedule is among those compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import TypeAlias

from hydra_tune.errors import ConfigError
from hydra_tune.schedule.plan import Task
from hydra_tune.simulation.milp import Solution, Timed, solve
from hydra_tune.simulation.workload import TrialWork

MOST_TASKS = 120
_ROUNDING = 1e-9  # relative; sums of seconds are exact to less


def check_devices(devices: int) -> None:
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ConfigError(f"devices is a whole number of at least 1, got {devices!r}. Write how many there are.")


def lower_bound(trials: Sequence[TrialWork], speeds: Sequence[float] = (1.0,)) -> float:
    """Seconds that every schedule takes: from any arrival on, the device seconds of all who arrive then or later, over
    the sum of `speeds` (one a device); or a trial's arrival and its own seconds on the fastest device. The host's
    optimizers are left out."""
    check_devices(len(speeds))
    if not all(0 < speed < inf for speed in speeds):
        raise ConfigError(f"a device's speed is positive and finite, got {list(speeds)}. Write 1.0 for a usual one.")
    bound_s = asked_s = 0.0
    for trial in sorted(trials, key=lambda trial: -trial.arrival_s):
        asked_s += trial.total_s
        alone_s = max(asked_s / sum(speeds), trial.total_s / max(speeds))
        bound_s = max(bound_s, trial.arrival_s + alone_s)
    return bound_s


@dataclass(frozen=True)
class Placed:
    """When and where a task runs."""

    task: Task
    device: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Optimum:
    """The best schedule found. Unless `proven`, time ran out: a better one may exist, down to `bound_s`."""

    makespan_s: float
    bound_s: float
    proven: bool
    schedule: tuple[Placed, ...]


def optimum(trials: Sequence[TrialWork], devices: int, time_limit_s: float = 60.0) -> Optimum:
    """The least makespan of `trials` on so many devices of speed 1, exact to a millionth.

    Tasks are not merged: between any two a trial may change device, and the optimum needs that. Three trials of
    four tasks on two devices take 6 task times, but 8 if each trial's tasks stay together. So there is a binary for
    each pair of tasks, and only small sweeps are accepted. A longest-remaining-first schedule comes before the
    solver, for its horizon; where that reaches the lower bound it is the answer.

    Raises:
        ConfigError: too many tasks, no device, no time, or scipy is needed and not installed.
    """
    check_devices(devices)
    count = sum(2 * trial.num_shards * trial.steps_run for trial in trials)
    if not 1 <= count <= MOST_TASKS:
        raise ConfigError(
            f"the exact optimum is for sweeps of 1 to {MOST_TASKS} tasks, got {count}. "
            "Lower steps, or compare with lower_bound()."
        )
    if not time_limit_s > 0:
        raise ConfigError(f"time_limit_s is positive, got {time_limit_s!r}. Write seconds, such as 60.")
    best = _lay(trials, devices, _longest_remaining_first)
    bound_s = lower_bound(trials, [1.0] * devices)
    if _makespan(best) <= bound_s * (1 + _ROUNDING):
        return Optimum(_makespan(best), bound_s, True, best)
    horizon_s = _makespan(best) * (1 + _ROUNDING)
    windows = [_windows(number, trial, horizon_s) for number, trial in enumerate(trials)]
    solution = solve(windows, _alike(trials), devices, bound_s / horizon_s, time_limit_s)
    if solution is None:
        return Optimum(_makespan(best), bound_s, False, best)
    best = min(best, _lay(trials, devices, _as_solved(solution)), key=_makespan)
    bound_s = _makespan(best) if solution.proven else min(solution.bound * horizon_s, _makespan(best))
    return Optimum(_makespan(best), bound_s, solution.proven, best)


# ---- schedules ----------------------------------------------------------------------------------------

_Schedule: TypeAlias = tuple[Placed, ...]


@dataclass(frozen=True)
class _Ready:
    """A trial's next task, since when it is ready, and the trial's seconds from there to its end."""

    task: Task
    seconds: float
    ready_s: float
    remaining_s: float


def _sequence(number: int, trial: TrialWork) -> list[_Ready]:
    """All tasks of a trial, each ready as early as can be."""
    steps = [(step, way, shard) for step in range(trial.steps_run) for way, shard in trial.tasks()]
    seconds = [trial.task_s(way, shard) for _, way, shard in steps]
    from_end = list(accumulate(reversed(seconds)))[::-1]
    return [
        _Ready(Task(number, step, shard, way), seconds[i], trial.arrival_s + from_end[0] - from_end[i], from_end[i])
        for i, (step, way, shard) in enumerate(steps)
    ]


def _lay(
    trials: Sequence[TrialWork], devices: int, choose: Callable[[list[_Ready], list[float]], tuple[_Ready, int]]
) -> _Schedule:
    """Task by task, in the order and on the device chosen, each as early as its trial and that device allow."""
    waiting = [deque(_sequence(number, trial)) for number, trial in enumerate(trials)]
    ready_s = [trial.arrival_s for trial in trials]
    free_s = [0.0] * devices
    schedule = []
    while any(waiting):
        nexts = [replace(queue[0], ready_s=ready_s[number]) for number, queue in enumerate(waiting) if queue]
        chosen, device = choose(nexts, free_s)
        start_s = max(chosen.ready_s, free_s[device])
        schedule.append(Placed(chosen.task, device, start_s, start_s + chosen.seconds))
        ready_s[chosen.task.trial] = free_s[device] = start_s + chosen.seconds
        waiting[chosen.task.trial].popleft()
    return tuple(schedule)


def _longest_remaining_first(nexts: list[_Ready], free_s: list[float]) -> tuple[_Ready, int]:
    device = free_s.index(min(free_s))
    return min(nexts, key=lambda ready: (max(ready.ready_s, free_s[device]), -ready.remaining_s)), device


def _as_solved(solution: Solution) -> Callable[[list[_Ready], list[float]], tuple[_Ready, int]]:
    """In the solver's order and on its devices, without what its tolerance added to the starts."""

    def choose(nexts: list[_Ready], free_s: list[float]) -> tuple[_Ready, int]:
        ready = min(nexts, key=lambda ready: solution.starts[ready.task])
        return ready, solution.devices[ready.task]

    return choose


def _makespan(schedule: _Schedule) -> float:
    return max(placed.end_s for placed in schedule)


def _windows(number: int, trial: TrialWork, horizon_s: float) -> list[Timed]:
    return [
        Timed(r.task, r.seconds / horizon_s, r.ready_s / horizon_s, 1 - r.remaining_s / horizon_s)
        for r in _sequence(number, trial)
    ]


def _alike(trials: Sequence[TrialWork]) -> list[tuple[int, int]]:
    """Each trial with the one before it that asks for the same."""
    last: dict[tuple[object, ...], int] = {}
    pairs = []
    for number, trial in enumerate(trials):
        asked = (trial.forward_s, trial.backward_s, trial.steps_run, trial.arrival_s)
        if asked in last:
            pairs.append((last[asked], number))
        last[asked] = number
    return pairs
