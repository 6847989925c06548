"""The simulator's makespan over the measured one: a sweep of six unequal GPTs on two CPU virtual devices, spilled.

Two predictions, of what follows each trial's first step, which the pilot and the measuring of the step belong to:

    from the machine   rates as `hydra_tune.calibrate` finds them, and each model's sizes
    from the trials    what a pool has recorded of each trial alone, a few steps of it

Both know the budget, the policy and the number of steps. Virtual devices share the cores with all that the host does
for trials: optimizers, copies, loops. So a simulated device is as fast as a core of which that takes its part.
The goal is 15%. Beside it, how busy the devices were while
at least two trials lived, in the sweep and in the simulation of what the sweep itself has recorded: the goal is 90%.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import optuna
import torch
import torch.nn.functional as F

import hydra_tune
from benchmarks.measure import save
from hydra_tune.demo.gpt import GPT
from hydra_tune.simulation.cost import CostModel, transformer_trial
from hydra_tune.simulation.simulate import Simulation
from hydra_tune.simulation.workload import TrialWork

GOAL, GOAL_BUSY = 0.15, 0.90
CONTEXT, VOCABULARY = 128, 256
STEPS_ALONE = 4


@dataclass(frozen=True)
class Size:
    depth: int
    width: int
    batch: int
    steps: int


SWEEP = (
    Size(6, 512, 4, 9),
    Size(8, 384, 4, 12),
    Size(4, 512, 8, 10),
    Size(6, 384, 8, 8),
    Size(8, 512, 4, 6),
    Size(10, 384, 4, 10),
)
BUDGET = "96MiB"


class Sweep:
    """Trains each size of it once; seconds from when all have made their first step to the end of each."""

    def __init__(self, sizes: Sequence[Size], devices: list[str]) -> None:
        self.sizes = sizes
        self.devices = devices
        self.start_s = 0.0
        self.ended_s: list[float] = []
        self._together = threading.Barrier(len(sizes), self._begin)

    def _begin(self) -> None:
        self.start_s = time.perf_counter()

    def run(self) -> hydra_tune.ShardPool:
        with hydra_tune.ShardPool(self.devices, BUDGET) as pool:
            study = optuna.create_study()
            hydra_tune.HydraTrialRunner(pool, len(self.sizes)).optimize(study, self._train, n_trials=len(self.sizes))
            return pool

    def _train(self, trial: optuna.Trial) -> float:
        size = self.sizes[trial.number]
        model: torch.nn.Module = GPT(size.depth, size.width, size.width // 64, CONTEXT)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = hydra_tune.prepare(model, optimizer, total_steps=size.steps)
        for step in range(size.steps):
            if step == 1:
                self._together.wait()
            x, y = torch.randint(0, VOCABULARY, (2, size.batch, CONTEXT))
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        self.ended_s.append(time.perf_counter() - self.start_s)
        return loss.item()

    @property
    def makespan_s(self) -> float:
        return max(self.ended_s)


def after_the_first_step(works: Sequence[TrialWork], sizes: Sequence[Size]) -> list[TrialWork]:
    return [replace(work, steps=size.steps - 1) for work, size in zip(works, sizes, strict=True)]


def recorded_alone(size: Size) -> TrialWork:
    (work,) = Sweep([replace(size, steps=STEPS_ALONE)], ["cpu"]).run().workload()
    return work


def from_sizes(cost: CostModel, size: Size) -> TrialWork:
    return transformer_trial(
        cost, layers=size.depth, width=size.width, feed_forward=4 * size.width, sequence=CONTEXT, batch=size.batch,
        vocabulary=VOCABULARY, steps=size.steps, memory=BUDGET,
    )  # fmt: skip


def cores_left(works: Sequence[TrialWork], cost: CostModel) -> float:
    """For tasks, of as many cores as there are devices."""
    device_s = host_s = 0.0
    for work in works:
        copies_s = cost.promote_s(2 * sum(work.shard_bytes)) + cost.spill_s(sum(work.shard_gradient_bytes))
        device_s += work.total_s
        host_s += work.steps_run * (work.optimizer_s + work.loop_s + copies_s)
    return device_s / (device_s + host_s)


def predict(works: Sequence[TrialWork], devices: int, cost: CostModel) -> Simulation:
    device = {"memory": BUDGET, "link_bytes_per_s": cost.h2d_bytes_per_s, "speed": cores_left(works, cost)}
    return hydra_tune.simulate(works, [device] * devices)


def busy_while_two_live(spans: Sequence[dict[str, Any]], from_s: float, devices: int) -> float:
    """The share of the devices' time in which they computed, until but one trial was left."""
    runs = [span for span in spans if span["kind"] == "run"]
    last: dict[int, float] = {}
    for span in runs:
        last[span["trial"]] = max(last.get(span["trial"], 0.0), span["end_s"])
    to_s = sorted(last.values())[-2]
    busy_s = sum(max(0.0, min(span["end_s"], to_s) - max(span["start_s"], from_s)) for span in runs)
    return float(busy_s / (devices * (to_s - from_s)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each device")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    devices = ["cpu", "cpu"]
    rounds: list[dict[str, float]] = []
    for _ in range(options.rounds):
        cost = hydra_tune.calibrate(devices)
        machine = after_the_first_step([from_sizes(cost, size) for size in SWEEP], SWEEP)
        alone = after_the_first_step([recorded_alone(size) for size in SWEEP], SWEEP)
        sweep = Sweep(SWEEP, devices)
        pool = sweep.run()
        predicted = {
            "from the machine": predict(machine, len(devices), cost),
            "from the trials": predict(alone, len(devices), cost),
        }
        replayed = hydra_tune.simulate(
            pool.workload(), len(devices), memory=BUDGET, link_bytes_per_s=cost.h2d_bytes_per_s, timeline=True
        )
        begins_s = sweep.start_s - (time.perf_counter() - pool.report()["elapsed_s"])
        rates = {key: value for key, value in cost.to_dict().items() if isinstance(value, float)}
        rounds.append(
            {
                "measured makespan_s": sweep.makespan_s,
                **{f"{name}, over measured": s.makespan_s / sweep.makespan_s for name, s in predicted.items()},
                "busy, measured": busy_while_two_live(pool.timeline(), begins_s, len(devices)),
                "busy, simulated": busy_while_two_live(replayed.timeline, 0.0, len(devices)),
                "tasks away from home": tasks_away(pool),
                **{f"calibrated {key}": value for key, value in rates.items()},
            }
        )
        print({key: float(f"{value:.4g}") for key, value in rounds[-1].items()}, flush=True)
    medians = {key: statistics.median(round_[key] for round_ in rounds) for key in rounds[0]}
    path = save("prediction_cpu", {"goal": GOAL, "goal_busy": GOAL_BUSY, "rounds": rounds, "medians": medians})
    for key, value in medians.items():
        print(f"{key:40} {value:12.4g}")
    print(path.relative_to(path.parents[2]))


def tasks_away(pool: hydra_tune.ShardPool) -> float:
    """The share of tasks that ran on another device than most of their trial's."""
    count: dict[int, dict[int, int]] = {}
    for span in pool.timeline():
        if span["kind"] == "run":
            of = count.setdefault(span["trial"], {})
            of[span["device"]] = of.get(span["device"], 0) + 1
    return sum(sum(of.values()) - max(of.values()) for of in count.values()) / sum(
        sum(of.values()) for of in count.values()
    )


if __name__ == "__main__":
    main()
