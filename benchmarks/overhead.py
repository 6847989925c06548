"""What a block costs outside of its arithmetic, beside PyTorch's own checkpoint around the same block.

64 blocks of 8 x 8 weights, each a shard of its own, so that hardly anything but the overhead takes time. Both run a
forward, and in the backward the forward once more; the arithmetic is the same in plain PyTorch. A figure is
(step - plain) / blocks, of medians, interleaved in one run; "calls" are the Python functions that a block calls,
forward and backward together. "runner" is the same within a runner's trial. The goal is twice the checkpoint.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hydra_tune
from benchmarks.measure import interleaved, save
from hydra_tune.trials.context import trial_context

BLOCKS, WIDTH, BATCH = 64, 8, 8
ROOMY = 80_000  # bytes; too few to be resident
GOAL = 2.0
KINDS = ("plain", "checkpointed", "spilled")


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Training:
    """Forwards and backwards of one model, apart."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.x = torch.randn(BATCH, WIDTH)
        self.loss = torch.zeros(())

    def forward(self) -> None:
        self.loss = self.model(self.x).sum()

    def backward(self) -> None:
        self.loss.backward()
        for p in self.model.parameters():
            p.grad = None

    def both(self) -> None:
        self.forward()
        self.backward()


def least_budget() -> int:
    """Bytes for one block at a time, beside what a step holds."""
    with hydra_tune.ShardPool(["cpu"], ROOMY) as pool:
        training = Training(hydra_tune.prepare(build(), pool=pool))
        training.both()
        (plan,) = pool.plans.values()
        hydra_tune.release(training.model)
    return plan.held_bytes + plan.step_bytes + max(b.weight_bytes + b.work_bytes for b in plan.blocks)


def prepared(pool: hydra_tune.ShardPool) -> Training:
    training = Training(hydra_tune.prepare(build(), pool=pool))
    for _ in range(3):
        training.both()
    (trial,) = pool.report()["trials"]
    assert [len(shard["blocks"]) for shard in trial["shards"]] == [1] * BLOCKS, trial["shards"]
    return training


def calls_a_block(training: Training) -> float:
    """Python functions, those of the loop and of the model around the blocks among them."""
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        training.both()
    finally:
        sys.setprofile(None)
    return count / BLOCKS


def figures_of(trainings: dict[str, Training], rounds: int) -> dict[str, Any]:
    steps: dict[str, Callable[[], None]] = {}
    for kind, training in trainings.items():
        steps |= {f"{kind} forward": training.forward, f"{kind} backward": training.backward}
    seconds = interleaved(steps, rounds=rounds, warm_up=rounds // 10)
    medians = {step: statistics.median(values) for step, values in seconds.items()}
    forward_s = medians["plain forward"]
    arithmetic_s = {"forward": forward_s, "backward": forward_s + medians["plain backward"]}
    us = {
        kind: {way: (medians[f"{kind} {way}"] - arithmetic_s[way]) / BLOCKS * 1e6 for way in arithmetic_s}
        for kind in KINDS[1:]
    }
    return {
        "us_a_block": us,
        "over_checkpoint": {way: us["spilled"][way] / us["checkpointed"][way] for way in arithmetic_s},
        "calls_a_block": {kind: calls_a_block(training) for kind, training in trainings.items()},
        "median_seconds": medians,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    options = parser.parse_args()
    rounds = 10 if options.quick else options.rounds
    torch.set_num_threads(options.threads)
    os.environ["HYDRA_TUNE_CHECKS"] = "0"
    budget, figures = least_budget(), dict[str, Any]()
    for where in ("script", "runner"):
        with hydra_tune.ShardPool(["cpu"], budget) as pool, ExitStack() as stack:
            if where == "runner":
                stack.enter_context(trial_context(pool, 0))
            spilled = prepared(pool)
            trainings = dict(zip(KINDS, (Training(build()), Training(Checkpointed()), spilled), strict=True))
            figures[where] = figures_of(trainings, rounds)
            hydra_tune.release(spilled.model)
    shape = {"blocks": BLOCKS, "width": WIDTH, "batch": BATCH, "budget_bytes": budget}
    path = save("overhead_cpu", {**shape, "goal_over_checkpoint": GOAL, **figures})
    for where, found in figures.items():
        for kind in KINDS[1:]:
            us, calls = found["us_a_block"][kind], found["calls_a_block"][kind]
            print(f"{where}, {kind}: {us['forward']:.0f} us forward, {us['backward']:.0f} backward, {calls:.0f} calls")
        ratios = found["over_checkpoint"]
        print(f"    {ratios['forward']:.2f} and {ratios['backward']:.2f} times the checkpoint (goal {GOAL})")
    print(path.relative_to(path.parents[2]))


if __name__ == "__main__":
    main()
