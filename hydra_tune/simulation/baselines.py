"""Makespans, in seconds, of what people do without shard parallelism, on the same trials.

Each is given the benefit of the doubt: no copy between devices costs anything, no pipeline has to fill, and weights
fit wherever they are said to be. Lower bound and optimum, to be read beside them, are `exact`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace

from hydra_tune.schedule.plan import Direction
from hydra_tune.simulation.cost import CostModel
from hydra_tune.simulation.exact import check_devices, lower_bound, optimum
from hydra_tune.simulation.workload import TrialWork

__all__ = ["baselines_s", "lower_bound", "model_parallelism", "one_spilled_at_a_time", "optimum", "task_parallelism"]


def baselines_s(trials: Sequence[TrialWork], devices: int, cost: CostModel) -> dict[str, float]:
    """All of them by name, each in the order of trials that serves it best."""
    return {
        "model parallelism": model_parallelism(trials, devices),
        "model parallelism, activations kept": model_parallelism(trials, devices, recompute=False),
        "task parallelism, as if each trial fitted": task_parallelism(trials, devices),
        "one spilled trial at a time, prefetched": one_spilled_at_a_time(trials, cost),
        "one spilled trial a device, prefetched": one_spilled_at_a_time(trials, cost, devices=devices),
    }


def model_parallelism(trials: Sequence[TrialWork], devices: int, *, recompute: bool = True) -> float:
    """One trial at a time, its shards spread over all `devices`, of which one computes while the others wait.

        device 0   F0 .. .. B0
        device 1   .. F1 B1 ..        3 trials x 4 tasks on 2 devices: 12 task times

    The number of devices only makes room: it changes no time. Optimizers step on the devices, for nothing.
    Without `recompute` activations stay there as well, and a backward task is shorter by a forward task; that is
    how model parallelism runs where they fit.
    """
    check_devices(devices)
    return _in_lists(trials, [_device_s(trial, recompute) for trial in trials], 1, longest_first=False)


def task_parallelism(
    trials: Sequence[TrialWork], devices: int, *, longest_first: bool = True, recompute: bool = True
) -> float:
    """Whole trials side by side, one a device, as if each fitted there: whenever a device is free, it takes the longest
    trial that has arrived, or without `longest_first` the first in the list.

        device 0   F0 F1 B1 B0 F0 F1 B1 B0
        device 1   F0 F1 B1 B0                 3 trials x 4 tasks on 2 devices: 8 task times

    `recompute` as for `model_parallelism`.
    """
    return _in_lists(trials, [_device_s(trial, recompute) for trial in trials], devices, longest_first=longest_first)


def one_spilled_at_a_time(
    trials: Sequence[TrialWork], cost: CostModel, *, prefetch: bool = True, devices: int = 1
) -> float:
    """One trial at a time a device, spilled: what an offloading engine does. One device unless said; with more, each
    has its own link and takes the longest trial that has arrived.

    Every task promotes its shard; a backward task also promotes its boundary input, and returns gradients to the
    host. With `prefetch` both directions of the link work while the device computes, so that a task takes
    max(compute, promotion, return); without, one after another, their sum. After each step the host's optimizer runs
    alone: a lone trial has nothing else to compute meanwhile.
    """
    totals_s = [_spilled_step_s(trial, cost, prefetch) * trial.steps_run for trial in trials]
    return _in_lists(trials, totals_s, devices, longest_first=True)


def _device_s(trial: TrialWork, recompute: bool) -> float:
    if recompute:
        return trial.total_s
    backward_s = sum(max(0.0, b - f) for f, b in zip(trial.forward_s, trial.backward_s, strict=True))
    return trial.steps_run * (sum(trial.forward_s) + backward_s)


def _spilled_step_s(trial: TrialWork, cost: CostModel, prefetch: bool) -> float:
    combine = max if prefetch else _sum
    step_s = trial.optimizer_s + trial.loop_s
    for direction, shard in trial.tasks():
        backward = direction is Direction.BACKWARD
        down_s = cost.promote_s(trial.shard_bytes[shard] + backward * trial.boundary_bytes)
        up_s = cost.spill_s(backward * trial.shard_gradient_bytes[shard])
        step_s += combine(trial.task_s(direction, shard), down_s, up_s)
    return step_s


def _sum(*seconds: float) -> float:
    return sum(seconds)


def _in_lists(trials: Sequence[TrialWork], totals_s: list[float], devices: int, *, longest_first: bool) -> float:
    """List scheduling (Graham, 1969): no device is idle while a trial that has arrived waits."""
    check_devices(devices)
    coming = deque(sorted(range(len(trials)), key=lambda number: trials[number].arrival_s))
    arrived: list[tuple[float, int]] = []
    free_s = [0.0] * devices
    now_s = 0.0
    while coming or arrived:
        now_s = max(now_s, free_s[0])
        if not arrived:
            now_s = max(now_s, trials[coming[0]].arrival_s)
        while coming and trials[coming[0]].arrival_s <= now_s:
            number = coming.popleft()
            heappush(arrived, (-totals_s[number] if longest_first else 0.0, number))
        _, chosen = heappop(arrived)
        heapreplace(free_s, now_s + totals_s[chosen])
    return max(free_s)
