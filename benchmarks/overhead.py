"""Overhead of one task outside its arithmetic: lease, promotion, substitution, random state, autograd node.

64 blocks of 8 x 8 weights, each a shard of its own, so that hardly anything but the overhead takes time. The
baseline does the same arithmetic in plain PyTorch: a forward without gradients, then a forward again and its
backward. A task is one visit to a shard; the figure is (spilled - baseline) / tasks, of medians. Beside it, what
`torch.utils.checkpoint` costs a block. "runner" is the same inside of a runner's trial, where a mode sees every
operator, over the same baseline without the mode; its operators and their number are those of the block. The
goal is 150 microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

import hydra_tune
from benchmarks.measure import interleaved, save
from hydra_tune import call, local_backward
from hydra_tune.block import Block
from hydra_tune.context import TrialContext
from hydra_tune.residency import Residency
from hydra_tune.visit import Visit

BLOCKS, WIDTH, BATCH = 64, 8, 8
ROOMY = 80_000  # bytes; too few to be resident
GOAL_US = 150
Steps = dict[str, Callable[[], None]]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))


class Training:
    """Forwards and backwards of one model, apart."""

    def __init__(self, model: nn.Module, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.model = model
        self.around = around
        self.x = torch.randn(BATCH, WIDTH)
        self.loss = torch.zeros(())

    def forward(self) -> None:
        with self.around():
            self.loss = self.model(self.x).sum()

    def forward_without_gradients(self) -> None:
        with self.around(), torch.no_grad():
            self.model(self.x)

    def backward(self) -> None:
        with self.around():
            self.loss.backward()
            for p in self.model.parameters():
                p.grad = None

    def forward_and_backward(self) -> None:
        self.forward()
        self.backward()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def least_budget() -> int:
    """Bytes for one block at a time, and the boundary that a runner's first step may need beside what its pilot saw."""
    with hydra_tune.ShardPool(["cpu"], ROOMY) as pool:
        training = Training(hydra_tune.prepare(build(), pool=pool))
        training.forward_and_backward()
        (plan,) = pool.plans.values()
        hydra_tune.release(training.model)
    work = max(max(b.forward_work_bytes, b.backward_work_bytes) + b.weight_bytes for b in plan.blocks)
    return plan.held_bytes + plan.step_bytes + max(b.boundary_bytes for b in plan.blocks) + work


def prepared(pool: hydra_tune.ShardPool) -> Training:
    training = Training(hydra_tune.prepare(build(), pool=pool))
    training.forward_and_backward()
    (trial,) = pool.report()["trials"]
    assert [len(shard["blocks"]) for shard in trial["shards"]] == [1] * BLOCKS, trial["shards"]
    return training


def measured(pool: hydra_tune.ShardPool, around: Callable[[], AbstractContextManager[Any]], rounds: int) -> Any:
    """Seconds by step, and the prepared model."""
    spilled, plain, checkpointed = prepared(pool), Training(build(), around), Training(Checkpointed(), around)
    steps: Steps = {
        "plain forward": plain.forward_without_gradients,
        "spilled forward": spilled.forward,
        "checkpointed forward": checkpointed.forward,
        "plain backward": plain.forward_and_backward,
        "spilled backward": spilled.backward,
        "checkpointed backward": checkpointed.backward,
    }
    return interleaved(steps, rounds=rounds, warm_up=rounds // 10), spilled


def microseconds_a_task(seconds: dict[str, list[float]], name: str) -> dict[str, float]:
    medians = {step: statistics.median(values) for step, values in seconds.items()}
    forward, backward = (
        (medians[f"{name} {way}"] - medians[f"plain {way}"]) / BLOCKS * 1e6 for way in ("forward", "backward")
    )
    return {"forward": forward, "backward": backward, "both": (forward + backward) / 2}


# ---- where it goes ----


class Parts:
    """Seconds spent in functions, without those spent in others of them that they call."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[part] += elapsed - self._inner.pop()
            self._inner[-1] += elapsed

    def function(self, part: str, owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._timed(part):
                return original(*args, **kwargs)

        return mock.patch.object(owner, name, timed)


def parts_of(spilled: Training, rounds: int) -> dict[str, float]:
    """Microseconds a task, inflated a little by the clock; "arithmetic" is a block's forward and local backward."""
    parts = Parts()
    with ExitStack() as stack:
        for part, owner, name in (
            ("lease", hydra_tune.ShardPool, "acquire"),
            ("lease", hydra_tune.ShardPool, "release"),
            ("promotion", Residency, "promote_shard"),
            ("gradients to host", Residency, "spill_gradients"),
            ("substitution", Visit, "__enter__"),
            ("substitution", Visit, "__exit__"),
            ("random state", call, "generator_states"),
            ("random state", call, "set_generator_states"),
            ("arithmetic", Block, "forward"),
            ("arithmetic", local_backward, "gradients_of"),
        ):
            stack.enter_context(parts.function(part, owner, name))
        start = time.perf_counter()
        for _ in range(rounds):
            spilled.forward_and_backward()
        total = time.perf_counter() - start
    parts.seconds["the rest: node, outer graph"] = total - sum(parts.seconds.values())
    return {part: seconds / rounds / (2 * BLOCKS) * 1e6 for part, seconds in parts.seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {}
    budget = least_budget()
    for where in ("script", "runner"):
        with hydra_tune.ShardPool(["cpu"], budget) as pool, ExitStack() as stack:
            if where == "runner":
                stack.enter_context(TrialContext(pool, 0))
            around = _disable_current_modes if where == "runner" else nullcontext
            seconds, spilled = measured(pool, around, options.rounds)
            figures[where] = {
                "spilled_us_a_task": microseconds_a_task(seconds, "spilled"),
                "checkpointed_us_a_block": microseconds_a_task(seconds, "checkpointed"),
                "parts_us_a_task": parts_of(spilled, options.rounds // 2),
                "median_seconds": {step: statistics.median(values) for step, values in seconds.items()},
            }
            if where == "script":
                hydra_tune.release(spilled.model)
    result = {"blocks": BLOCKS, "width": WIDTH, "batch": BATCH, "budget_bytes": budget, "goal_us": GOAL_US, **figures}
    path = save("overhead_cpu", result)
    for where in ("script", "runner"):
        us = figures[where]["spilled_us_a_task"]
        print(f"{where}: {us['forward']:.0f} us forward, {us['backward']:.0f} us backward (goal {GOAL_US})")
        print("   ", ", ".join(f"{part} {us:.0f}" for part, us in figures[where]["parts_us_a_task"].items()))
    print(path.relative_to(path.parents[2]))


if __name__ == "__main__":
    main()
