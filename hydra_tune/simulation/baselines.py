"""Makespans, in seconds, of what people do without shard parallelism, on the same trials.

Each baseline is favoured: copies between devices cost nothing, no pipeline has to fill, and weights fit wherever the
baseline puts them. To be read beside the lower bound and the optimum of `exact.py`.
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
    """Makespans by the names of the baselines. The longest trial goes first, which serves them best."""
    return {
        "model parallelism": model_parallelism(trials, devices),
        "model parallelism, activations kept": model_parallelism(trials, devices, recompute=False),
        "task parallelism, as if each trial fitted": task_parallelism(trials, devices),
        "one spilled trial at a time, prefetched": one_spilled_at_a_time(trials, cost),
        "one spilled trial a device, prefetched": one_spilled_at_a_time(trials, cost, devices=devices),
    }


def model_parallelism(trials: Sequence[TrialWork], devices: int, *, recompute: bool = True) -> float:
    """One trial at a time. Its shards are spread over all `devices`: one computes while the others wait.

        device 0   F0 .. .. B0
        device 1   .. F1 B1 ..        3 trials x 4 tasks on 2 devices: 12 task times

    More devices give more room, and change no time. Optimizers step on the devices and cost nothing. Without
    `recompute` activations stay on the devices, as where they fit: a backward task is shorter by a forward task.
    """
    check_devices(devices)
    return _schedule_whole(trials, [_device_s(trial, recompute) for trial in trials], 1, longest_first=False)


def task_parallelism(
    trials: Sequence[TrialWork], devices: int, *, longest_first: bool = True, recompute: bool = True
) -> float:
    """Whole trials side by side, one on each device, as if each fitted there. A free device takes the longest trial
    that has arrived, or without `longest_first` the first in the list that has.

        device 0   F0 F1 B1 B0 F0 F1 B1 B0
        device 1   F0 F1 B1 B0                 3 trials x 4 tasks on 2 devices: 8 task times

    `recompute` as for `model_parallelism`.
    """
    return _schedule_whole(
        trials, [_device_s(trial, recompute) for trial in trials], devices, longest_first=longest_first
    )


def one_spilled_at_a_time(
    trials: Sequence[TrialWork], cost: CostModel, *, prefetch: bool = True, devices: int = 1
) -> float:
    """One spilled trial at a time on each device: what an offloading engine does. Each device has its own link, and
    takes the longest trial that has arrived.

    Every task promotes its shard. A backward task also promotes its boundary input, and sends gradients to the host.
    With `prefetch` both directions of the link work while the device computes, and a task takes
    max(compute, promotion, gradients). Without it a task takes their sum. After each step the device waits for the
    host's optimizer, since a lone trial has nothing else to compute.
    """
    totals_s = [_spilled_step_s(trial, cost, prefetch) * trial.steps_run for trial in trials]
    return _schedule_whole(trials, totals_s, devices, longest_first=True)


def _device_s(trial: TrialWork, recompute: bool) -> float:
    """Device seconds of the whole trial."""
    if recompute:
        return trial.total_s
    backward_s = sum(max(0.0, b - f) for f, b in zip(trial.forward_s, trial.backward_s, strict=True))
    return trial.steps_run * (sum(trial.forward_s) + backward_s)


def _spilled_step_s(trial: TrialWork, cost: CostModel, prefetch: bool) -> float:
    combine = max if prefetch else _add
    step_s = trial.optimizer_s + trial.loop_s
    for direction, shard in trial.tasks():
        is_backward = direction is Direction.BACKWARD
        promote_s = cost.promote_s(trial.shard_bytes[shard] + is_backward * trial.boundary_bytes)
        spill_s = cost.spill_s(is_backward * trial.shard_gradient_bytes[shard])
        step_s += combine(trial.task_s(direction, shard), promote_s, spill_s)
    return step_s


def _add(*seconds: float) -> float:
    return sum(seconds)


def _schedule_whole(trials: Sequence[TrialWork], totals_s: list[float], devices: int, *, longest_first: bool) -> float:
    """The makespan if whole trials take `totals_s` each, by list scheduling (Graham, 1969): no device is idle while a
    trial that has arrived waits."""
    check_devices(devices)
    to_arrive = deque(sorted(range(len(trials)), key=lambda number: trials[number].arrival_s))
    arrived: list[tuple[float, int]] = []  # a heap
    free_s = [0.0] * devices  # a heap: when each device is free
    now_s = 0.0
    while to_arrive or arrived:
        now_s = max(now_s, free_s[0])
        if not arrived:
            now_s = max(now_s, trials[to_arrive[0]].arrival_s)
        while to_arrive and trials[to_arrive[0]].arrival_s <= now_s:
            number = to_arrive.popleft()
            heappush(arrived, (-totals_s[number] if longest_first else 0.0, number))
        _, chosen = heappop(arrived)
        heapreplace(free_s, now_s + totals_s[chosen])
    return max(free_s)
