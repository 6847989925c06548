"""Eight adapters over one frozen base: one base shared by all, eight bases, and one trial after another.

A stack of frozen linear layers with low-rank adapters, on one virtual device. Three parts:

    link      the base is spilled, at a quarter of it, and each copy to the device is slowed until a shard's copy takes
              as long as so many visits compute: wall time of the whole search, first steps included. Goal: with copies
              that take as long as the eight visits they are for, a third of that of eight bases
    resident  the base fits: seconds of a search of eight trials over those of eight plain trainings over one base, one
              after another. Goal: 1.05
    memory    growth of the process's memory while eight spilled trials live, without the virtual device, over the bytes
              of one base and of the trials' own parts. Goal: 1.15

Steps are real, so that trials train with what they compute.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import psutil
import torch
from torch import nn

import hydra_tune
from benchmarks.measure import interleaved, ratio, save
from hydra_tune.devices.device import Device

LAYERS, WIDTH, BATCH, TRIALS, STEPS, RESIDENT_STEPS = 16, 768, 8, 8, 12, 60
LAYER_BYTES = WIDTH * (WIDTH + 1) * 4
BASE_BYTES = LAYERS * LAYER_BYTES


def set_width(width: int) -> None:
    global WIDTH, LAYER_BYTES, BASE_BYTES
    WIDTH, LAYER_BYTES = width, width * (width + 1) * 4
    BASE_BYTES = LAYERS * LAYER_BYTES


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(0.1)
        self.a = nn.Parameter(torch.randn(rank, WIDTH) / 32)
        self.b = nn.Parameter(torch.zeros(WIDTH, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.base(x) + self.dropout(x) @ self.a.t() @ self.b.t())


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def adapted(base: nn.Module, rank: int) -> nn.Module:
    return nn.Sequential(*(Lora(layer, rank) for layer in base.children()))  # type: ignore[arg-type]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- a search over a slow link ------------------------------------------------------------------------


@contextmanager
def slowed(seconds_per_byte: float) -> Iterator[None]:
    """A link that copies one shard at a time, each as long as its bytes take. Small adapters pass it."""
    promote, link = Device.promote, threading.Lock()

    def slow(device: Device, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], **options: bool) -> None:
        with link:
            start = time.perf_counter()
            promote(device, copies, **options)
            took_s = sum(to.nbytes for to, _ in copies) * seconds_per_byte
            time.sleep(max(0.0, start + took_s - time.perf_counter()))

    with mock.patch.object(Device, "promote", slow):
        yield


def search(concurrency: int, *, share: bool, number: int = TRIALS) -> dict[str, float]:
    """Seconds of a search of `number` trials, and the bytes that it has promoted, in bases."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pool = hydra_tune.ShardPool(["cpu"], BASE_BYTES // 4, seed=0)

    def objective(trial: optuna.Trial) -> float:
        base = hydra_tune.share(build) if share else build().requires_grad_(False)
        model = adapted(base, 2 * (trial.number + 1))
        model, optimizer = hydra_tune.prepare(model, optimizer_of(model), total_steps=STEPS)
        for _ in range(STEPS):
            step(model, optimizer, torch.randn(BATCH, WIDTH))
        return 0.0

    start = time.perf_counter()
    hydra_tune.HydraTrialRunner(pool, concurrency).optimize(optuna.create_study(), objective, number)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "promoted_bases": pool.report()["devices"][0]["promoted_bytes"] / BASE_BYTES}


def visit_s() -> float:
    """Seconds that a visit computes: a step of a plain model over its visits."""
    model = adapted(build().requires_grad_(False), 8)
    optimizer, x = optimizer_of(model), torch.randn(BATCH, WIDTH)
    seconds = interleaved({"step": lambda: step(model, optimizer, x)}, rounds=15, warm_up=3)["step"]
    return statistics.median(seconds) / (2 * LAYERS)


def over_a_slow_link(visits: float, rounds: int) -> dict[str, object]:
    set_width(2 * WIDTH)  # a visit of some milliseconds, beside which what a task costs the host is small
    copy_s = visits * visit_s()
    found: dict[str, list[dict[str, float]]] = {"shared": [], "eight bases": [], "one after another": []}
    with slowed(copy_s / LAYER_BYTES):
        for _ in range(rounds):
            found["shared"].append(search(TRIALS, share=True))
            found["eight bases"].append(search(TRIALS, share=False))
            found["one after another"].append(search(1, share=True))
    medians = {name: {k: statistics.median(r[k] for r in runs) for k in runs[0]} for name, runs in found.items()}
    shared_s = medians["shared"]["seconds"]
    return {
        "copy of a shard, in visits": visits,
        **medians,
        "eight bases over shared": medians["eight bases"]["seconds"] / shared_s,
        "one after another over shared": medians["one after another"]["seconds"] / shared_s,
    }


# ---- resident -----------------------------------------------------------------------------------------


def resident(rounds: int) -> dict[str, object]:
    import optuna

    x, held = torch.randn(BATCH, WIDTH), []
    pool = hydra_tune.ShardPool(["cpu"], 8 * BASE_BYTES, seed=0)

    def train(base: nn.Module, rank: int, *, prepared: bool) -> None:
        model = adapted(base, rank)
        optimizer = optimizer_of(model)
        if prepared:
            model, optimizer = hydra_tune.prepare(model, optimizer, total_steps=RESIDENT_STEPS)
        for _ in range(RESIDENT_STEPS):
            step(model, optimizer, x)
        if prepared:
            held.append(pool.events.machine.devices[0].ledger.held_bytes)

    def objective(trial: optuna.Trial) -> float:
        train(hydra_tune.share(build), 2 * (trial.number + 1), prepared=True)
        return 0.0

    def together() -> None:
        hydra_tune.HydraTrialRunner(pool, TRIALS).optimize(optuna.create_study(), objective, TRIALS)

    def plain() -> None:
        base = build().requires_grad_(False)
        for number in range(TRIALS):
            train(base, 2 * (number + 1), prepared=False)

    seconds = interleaved({"plain": plain, "pool": together}, rounds=rounds, warm_up=1)
    assert all(trial["resident"] for trial in pool.report()["trials"])
    return {"held on the device at most, in bases": max(held) / BASE_BYTES, **ratio(seconds, "pool", "plain")}


# ---- host memory --------------------------------------------------------------------------------------


def memory(share: bool) -> float:
    """In a process of its own, with a base of 268 MB: by how much its memory has grown while eight spilled trials live,
    over one base and the trials' own adapters, gradients and moments."""
    code = f"import benchmarks.shared_base as b; b.set_width(2048); print(b.grown({share}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def grown(share: bool) -> float:
    import optuna

    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pool = hydra_tune.ShardPool(["cpu"], BASE_BYTES // 4, seed=0)
    small, found = torch.randn(1, WIDTH), []
    barrier = threading.Barrier(TRIALS)

    def tiny(_: optuna.Trial) -> float:  # so that libraries and threads are there before
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        model, optimizer = hydra_tune.prepare(model, optimizer_of(model))
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        barrier.wait()
        return 0.0

    few = hydra_tune.ShardPool(["cpu"], 1 << 20)
    hydra_tune.HydraTrialRunner(few, TRIALS).optimize(optuna.create_study(), tiny, TRIALS)
    gc.collect()
    before = psutil.Process().memory_info().rss

    def objective(trial: optuna.Trial) -> float:
        base = hydra_tune.share(build) if share else build().requires_grad_(False)
        model = adapted(base, 2 * (trial.number + 1))
        model, optimizer = hydra_tune.prepare(model, optimizer_of(model))
        for _ in range(3):
            step(model, optimizer, small)
        if barrier.wait() == 0:
            found.append(psutil.Process().memory_info().rss - before)
        barrier.wait()
        return 0.0

    hydra_tune.HydraTrialRunner(pool, TRIALS).optimize(optuna.create_study(), objective, TRIALS)
    own = sum(16 * 2 * WIDTH * 2 * (n + 1) * LAYERS for n in range(TRIALS))  # adapters, gradients and moments in fp32
    return (found[0] - BASE_BYTES // 4) / (BASE_BYTES + own)  # the device is in host memory, too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="*", choices=["resident", "memory", "link"])
    parser.add_argument("--visits", type=float, nargs="*", default=[1.0, 8.0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = options.parts or ["resident", "memory", "link"]
    parts: dict[str, Callable[[], object]] = {
        "resident": lambda: resident(2 * options.rounds),
        "memory": lambda: {"shared": memory(True), "eight bases": memory(False)},
        **{
            f"link, a copy takes {visits:g} visits": lambda visits=visits: over_a_slow_link(visits, options.rounds)
            for visits in options.visits
        },
    }
    found = {}
    for name, part in parts.items():
        if name.split(",")[0] not in wanted:
            continue
        found[name] = part()
        print(name, found[name], flush=True)
    sizes = {"layers": LAYERS, "width": WIDTH, "batch": BATCH, "trials": TRIALS, "steps": STEPS}
    name = "_".join(["shared_base", *(options.parts or ()), "cpu"])
    print(save(name, {"sizes": sizes, "base_bytes": BASE_BYTES, **found}))


if __name__ == "__main__":
    main()
