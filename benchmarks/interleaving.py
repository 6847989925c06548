"""What trials that do not fit gain by training side by side: tokens per second of several, of one, and of none spilled.

Each trial is a GPT whose budget has room for a third of its weights, trained under bfloat16 autocast on a GPU, with
AdamW on the host. In the same run, interleaved:

    together   the trials, each in a thread, share one device
    alone      one of them, for as many steps as all of those
    resident   plain PyTorch with activation checkpointing and everything on the device, likewise: what more memory buys
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import hydra_tune
from benchmarks.checkpointed import CheckpointedGPT
from benchmarks.measure import RESULTS, interleaved, ratio, save
from hydra_tune.demo.gpt import GPT


@dataclass(frozen=True)
class Size:
    depth: int
    width: int
    context: int
    batch: int


SIZES = {"cuda": Size(12, 2048, 1024, 8), "cpu": Size(8, 256, 64, 4)}


def build(size: Size) -> GPT:
    torch.manual_seed(0)
    return GPT(size.depth, size.width, size.width // 64, size.context, dropout=0.1)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, size: Size, device: torch.device) -> Callable[[], None]:
    x = torch.randint(0, 256, (size.batch, size.context), device=device)
    y = torch.randint(0, 256, (size.batch, size.context), device=device)
    lower = device.type == "cuda"

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16) if lower else nullcontext():
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def budget_bytes(template: GPT, size: Size, device: torch.device, trials: int) -> tuple[int, int]:
    """Room for a third of the weights beside what the steps of all trials and the largest task need; the weights."""
    model = copy.deepcopy(template)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    most = 4 * weights if device.type == "cuda" else 3 * weights
    with hydra_tune.ShardPool([str(device)], most) as pool:
        hydra_tune.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), pool=pool)
        step_of(model, torch.optim.SGD(model.parameters()), size, device)()
        (trial,) = pool.report()["trials"]
        assert not trial["resident"], trial
        hydra_tune.release(model)
    work = max(max(s["forward_work_bytes"], s["backward_work_bytes"]) for s in trial["shards"])
    return weights // 3 + trials * int(trial["held_bytes"] + trial["step_bytes"]) + work, weights


class Spilled:
    """Trials of one pool, each in a thread of its own for life."""

    def __init__(
        self, template: GPT, trials: int, size: Size, device: torch.device, budget: int, num_threads: int
    ) -> None:
        self.pool = hydra_tune.ShardPool([str(device)], budget)
        self._threads = [ThreadPoolExecutor(1) for _ in range(trials)]

        def prepare() -> Callable[[], None]:
            torch.set_num_threads(num_threads)
            model = copy.deepcopy(template)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            hydra_tune.prepare(model, optimizer, pool=self.pool)
            step = step_of(model, optimizer, size, device)
            step()
            return step

        self._steps = [thread.submit(prepare).result() for thread in self._threads]

    def run(self, steps: int) -> None:
        def several(step: Callable[[], None]) -> None:
            for _ in range(steps):
                step()

        futures = [t.submit(several, step) for t, step in zip(self._threads, self._steps, strict=True)]
        for future in futures:
            future.result()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument(
        "--steps", type=int, default=10 if torch.cuda.is_available() else 3, help="of each trial a round"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=8 if torch.cuda.is_available() else 1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    size, trials = SIZES[device.type], options.trials
    template = build(size)
    budget, weights = budget_bytes(template, size, device, trials)
    gc.collect()
    together = Spilled(template, trials, size, device, budget, options.threads)
    alone = Spilled(template, 1, size, device, budget, options.threads)
    plain = copy.deepcopy(template).to(device)
    plain.__class__ = CheckpointedGPT
    resident = step_of(plain, torch.optim.AdamW(plain.parameters(), fused=True), size, device)
    every = trials * options.steps

    def run_resident() -> None:
        for _ in range(every):
            resident()

    seconds = interleaved(
        {
            "together": lambda: together.run(options.steps),
            "alone": lambda: alone.run(every),
            "resident": run_resident,
        },
        rounds=options.rounds,
        warm_up=1,
    )
    tokens = every * size.batch * size.context
    rates = {name: tokens / statistics.median(values) for name, values in seconds.items()}
    result = {
        "size": vars(size),
        "trials": trials,
        "weight_bytes": weights,
        "budget_bytes": budget,
        "tokens_per_s": rates,
        "together_over_alone": ratio(seconds, "alone", "together"),
        "together_over_resident": ratio(seconds, "resident", "together"),
        "alone_over_resident": ratio(seconds, "resident", "alone"),
    }
    path = save(f"interleaving_{device.type}", result)
    together.pool.save_timeline(RESULTS / f"interleaving_{device.type}_timeline.json")
    for name, rate in rates.items():
        print(f"{name:10} {rate:10.0f} tokens/s")
    for name in ("together_over_alone", "together_over_resident", "alone_over_resident"):
        print(f"{name:24} {result[name]['ratio_of_medians']:.2f}")
    print(path.relative_to(path.parents[2]))


if __name__ == "__main__":
    main()
