"""How good a schedule can be: a lower bound of a sweep's makespan, and for small sweeps the optimum itself.

Both ignore the cost of links and the limit of memory. So no schedule of any policy is shorter.
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
from hydra_tune.simulation.milp import Solution, TaskWindow, solve
from hydra_tune.simulation.workload import TrialWork

MOST_TASKS = 120
_ROUNDING = 1e-9  # relative; more than the rounding errors of sums of seconds


def check_devices(devices: int) -> None:
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ConfigError(f"devices is a whole number of at least 1, got {devices!r}. Write how many there are.")


def lower_bound(trials: Sequence[TrialWork], speeds: Sequence[float] = (1.0,)) -> float:
    """Seconds that every schedule takes at least; `speeds` has one entry for each device. It is the largest of:

    - for each arrival: its time, and then the device seconds of all trials that arrive then or later, over the sum of
      speeds;
    - for each trial: its arrival, and then its own device seconds on the fastest device.

    The host's optimizers are left out.
    """
    check_devices(len(speeds))
    if not all(0 < speed < inf for speed in speeds):
        raise ConfigError(f"a device's speed is positive and finite, got {list(speeds)}. Write 1.0 for a usual one.")
    bound_s = later_s = 0.0
    for trial in sorted(trials, key=lambda trial: -trial.arrival_s):
        later_s += trial.total_s
        needed_s = max(later_s / sum(speeds), trial.total_s / max(speeds))
        bound_s = max(bound_s, trial.arrival_s + needed_s)
    return bound_s


@dataclass(frozen=True)
class ScheduledTask:
    """When and where a task runs."""

    task: Task
    device: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Optimum:
    """The best schedule found. Unless `proven`, time ran out: a shorter one may exist, but none below `bound_s`."""

    makespan_s: float
    bound_s: float
    proven: bool
    schedule: tuple[ScheduledTask, ...]


def optimum(trials: Sequence[TrialWork], devices: int, time_limit_s: float = 60.0) -> Optimum:
    """The least makespan of `trials` on so many devices of speed 1, exact to a millionth.

    Between any two tasks a trial may change its device, and the optimum needs that. Three trials of four tasks on two
    devices take 6 task times, but 8 if each trial stays on one device. So the program has a binary variable for each
    pair of tasks, and only small sweeps are accepted. A schedule by longest remaining time first comes before the
    solver. If it reaches the lower bound, it is the answer; else it gives the solver a horizon.

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
    best = _list_schedule(trials, devices, _longest_remaining_first)
    bound_s = lower_bound(trials, [1.0] * devices)
    if _makespan(best) <= bound_s * (1 + _ROUNDING):
        return Optimum(_makespan(best), bound_s, True, best)
    horizon_s = _makespan(best) * (1 + _ROUNDING)
    windows = [_windows(number, trial, horizon_s) for number, trial in enumerate(trials)]
    solution = solve(windows, _equal_pairs(trials), devices, bound_s / horizon_s, time_limit_s)
    if solution is None:
        return Optimum(_makespan(best), bound_s, False, best)
    best = min(best, _list_schedule(trials, devices, _in_order_of(solution)), key=_makespan)
    bound_s = _makespan(best) if solution.proven else min(solution.bound * horizon_s, _makespan(best))
    return Optimum(_makespan(best), bound_s, solution.proven, best)


# ---- schedules ----------------------------------------------------------------------------------------

_Schedule: TypeAlias = tuple[ScheduledTask, ...]


@dataclass(frozen=True)
class _TimedTask:
    """A task that takes `seconds`. It is ready at `ready_s`, and `remaining_s` are its trial's device seconds from its
    start to the trial's end."""

    task: Task
    seconds: float
    ready_s: float
    remaining_s: float


def _tasks_of(number: int, trial: TrialWork) -> list[_TimedTask]:
    """All tasks of a trial in order. Each is ready at the earliest time possible."""
    tasks = [(step, direction, shard) for step in range(trial.steps_run) for direction, shard in trial.tasks()]
    seconds = [trial.task_s(direction, shard) for _, direction, shard in tasks]
    left_s = list(accumulate(reversed(seconds)))[::-1]
    return [
        _TimedTask(Task(number, step, shard, direction), seconds[i], trial.arrival_s + left_s[0] - left_s[i], left_s[i])
        for i, (step, direction, shard) in enumerate(tasks)
    ]


def _list_schedule(
    trials: Sequence[TrialWork],
    devices: int,
    choose: Callable[[list[_TimedTask], list[float]], tuple[_TimedTask, int]],
) -> _Schedule:
    """Each task starts as early as its trial and its device allow.

    Args:
        choose: given each trial's next task, and when each device is free, returns the task that is scheduled next, and
            its device.
    """
    waiting = [deque(_tasks_of(number, trial)) for number, trial in enumerate(trials)]
    ready_s = [trial.arrival_s for trial in trials]
    free_s = [0.0] * devices
    schedule = []
    while any(waiting):
        candidates = [replace(queue[0], ready_s=ready_s[number]) for number, queue in enumerate(waiting) if queue]
        chosen, device = choose(candidates, free_s)
        start_s = max(chosen.ready_s, free_s[device])
        schedule.append(ScheduledTask(chosen.task, device, start_s, start_s + chosen.seconds))
        ready_s[chosen.task.trial] = free_s[device] = start_s + chosen.seconds
        waiting[chosen.task.trial].popleft()
    return tuple(schedule)


def _longest_remaining_first(candidates: list[_TimedTask], free_s: list[float]) -> tuple[_TimedTask, int]:
    """On the device that is free first, the task that can start there first; of several the longest remaining."""
    device = free_s.index(min(free_s))
    return min(candidates, key=lambda timed: (max(timed.ready_s, free_s[device]), -timed.remaining_s)), device


def _in_order_of(solution: Solution) -> Callable[[list[_TimedTask], list[float]], tuple[_TimedTask, int]]:
    """In the solver's order and on its devices. The starts are computed anew, without the solver's tolerance."""

    def choose(candidates: list[_TimedTask], free_s: list[float]) -> tuple[_TimedTask, int]:
        first = min(candidates, key=lambda timed: solution.starts[timed.task])
        return first, solution.devices[first.task]

    return choose


def _makespan(schedule: _Schedule) -> float:
    return max(scheduled.end_s for scheduled in schedule)


def _windows(number: int, trial: TrialWork, horizon_s: float) -> list[TaskWindow]:
    return [
        TaskWindow(t.task, t.seconds / horizon_s, t.ready_s / horizon_s, 1 - t.remaining_s / horizon_s)
        for t in _tasks_of(number, trial)
    ]


def _equal_pairs(trials: Sequence[TrialWork]) -> list[tuple[int, int]]:
    """Numbers of trials with the same tasks and arrival: each such trial, after the last one before it."""
    last: dict[tuple[object, ...], int] = {}
    pairs = []
    for number, trial in enumerate(trials):
        key = (trial.forward_s, trial.backward_s, trial.steps_run, trial.arrival_s)
        if key in last:
            pairs.append((last[key], number))
        last[key] = number
    return pairs
