"""What the scheduler's decisions cost on one core: a large simulation whole, and each `Machine.handle` of one.

A decision is one event handled: a task is done, a copy has arrived, a step is ready. They are timed with 1,000 trials
live on 64 devices, all of about 1,000 s so that longest remaining time first gives each its turns, after 20 events a
trial; once with free links and no limit of memory, once with 2 GB a device over 12e9 bytes/s, where shards make way
for each other. Goals: 10,000 trials on 64 devices in 60 s, and 50 microseconds a decision in the median.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from typing import Any
from unittest import mock

from benchmarks.measure import save
from hydra_tune.schedule.machine import Machine
from hydra_tune.simulation.simulate import simulate
from hydra_tune.simulation.workload import TrialWork

GOALS = {"simulation_s": 60, "decision_us": 50}
SETTINGS: dict[str, dict[str, Any]] = {
    "free links": {},
    "12e9 bytes/s, 2 GB": {"link_bytes_per_s": 12e9, "memory": "2GB"},
}


def sweep(trials: int, steps: int | None) -> list[TrialWork]:
    """Trials unlike each other: 1 to 4 shards of 50 to 500 MB, forwards of 10 to 100 ms, backwards three times that;
    without `steps`, as many as take 1,000 s."""
    rng = random.Random(0)
    drawn = []
    for _ in range(trials):
        forward_s = tuple(rng.uniform(0.01, 0.1) for _ in range(rng.randint(1, 4)))
        shard_bytes = tuple(rng.randint(50 * 10**6, 500 * 10**6) for _ in forward_s)
        count = round(1000 / (4 * sum(forward_s))) if steps is None else steps
        drawn.append(TrialWork(count, forward_s, tuple(3 * seconds for seconds in forward_s), shard_bytes))
    return drawn


def whole(trials: int, devices: int, steps: int) -> dict[str, float]:
    work = sweep(trials, steps)
    tasks = sum(2 * trial.num_shards * trial.steps_run for trial in work)
    start_s = time.perf_counter()
    simulation = simulate(work, devices)
    seconds = time.perf_counter() - start_s
    return {"tasks": tasks, "seconds": seconds, "us_a_task": seconds / tasks * 1e6, "over_bound": simulation.ratio}


class Enough(Exception):
    """So many decisions were timed."""


def decisions_us(trials: int, devices: int, count: int, **options: Any) -> dict[str, list[float]]:
    """By event."""
    us: dict[str, list[float]] = defaultdict(list)
    handle, handled = Machine.handle, 0

    def timed(machine: Machine, event: Any) -> Any:
        nonlocal handled
        start_s = time.perf_counter()
        instructions = handle(machine, event)
        elapsed_s = time.perf_counter() - start_s
        handled += 1
        if handled > 20 * trials:
            assert len(machine.trials) == trials, "all are live"
            us[type(event).__name__].append(elapsed_s * 1e6)
        if handled == 20 * trials + count:
            raise Enough
        return instructions

    with mock.patch.object(Machine, "handle", timed):
        try:
            simulate(sweep(trials, None), devices, **options)
        except Enough:
            return us
    raise AssertionError("the simulation ended first")


def summary(us: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(us, n=100)
    return {"count": len(us), "median": statistics.median(us), "mean": statistics.mean(us), "p99": cuts[98]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000, help="of the whole simulation (%(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="of each of them (%(default)s)")
    parser.add_argument("--live", type=int, default=1_000, help="while decisions are timed (%(default)s)")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--decisions", type=int, default=50_000, help="that are timed (%(default)s)")
    options = parser.parse_args()
    simulation = whole(options.trials, options.devices, options.steps)
    print(
        f"{options.trials} trials on {options.devices} devices, {simulation['tasks']} tasks: "
        f"{simulation['seconds']:.1f} s (goal {GOALS['simulation_s']}), {simulation['us_a_task']:.0f} us a task"
    )
    decided: dict[str, Any] = {}
    for setting, links in SETTINGS.items():
        by_event = decisions_us(options.live, options.devices, options.decisions, **links)
        every = [value for values in by_event.values() for value in values]
        decided[setting] = {"all": summary(every), **{event: summary(by_event[event]) for event in sorted(by_event)}}
        print(f"\n{options.live} trials live on {options.devices} devices, {setting}: us (goal {GOALS['decision_us']})")
        for event, us in decided[setting].items():
            figures = "  ".join(f"{key} {us[key]:7.1f}" for key in ("median", "mean", "p99"))
            print(f"  {event:<14}{us['count']:>8}  {figures}")
    sizes = {"trials": options.trials, "steps": options.steps, "live": options.live, "devices": options.devices}
    path = save("scheduler", {"goals": GOALS, "sizes": sizes, "simulation": simulation, "decisions_us": decided})
    print(path.relative_to(path.parents[2]))


if __name__ == "__main__":
    main()
