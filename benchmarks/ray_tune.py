"""A sweep of short trials under Ray Tune, over stock Tune with the same scheduler: seconds from start to end.

    FIFO, ASHA          sixteen trials of about two seconds each, which report eight times
    new, reused         actors: with `reuse_actors` a trial goes on in the process of one that has ended
    resident, spilled   whether a model, its gradients and its optimizer's state fit the device

Stock Tune gives a trial a process and one of two CPUs. Ours train in one pool of two virtual devices, each of which
computes with one of them. Rounds of stock and ours alternate, in one cluster; a ratio is of one round, and figures are
their medians. The goal is 1.15 for each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from itertools import product
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import ray
from ray.tune.schedulers import ASHAScheduler

from benchmarks.measure import save
from hydra_tune import HydraExecutor, prepare, tune

TRIALS, REPORTS, STEPS, ROWS, WIDTH, GOAL = 16, 8, 3, 512, 512, 1.15
BUDGETS = {"resident": "256MiB", "spilled": "40MiB"}  # the least is 27 MiB; from 69 MiB on a trial is resident


def train(config: dict[str, Any]) -> None:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    if config["pool"]:
        model, optimizer = prepare(model, optimizer)
    inputs = torch.randn(ROWS, WIDTH)
    for _ in range(REPORTS):
        for _ in range(STEPS):
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        tune.report({"loss": loss.item()})


def sweep(scheduler: str, reuse: bool, budget: str | None) -> float:
    """Seconds of one, over a pool with this budget, or of stock Tune if it is None."""
    asha = ASHAScheduler(max_t=REPORTS, grace_period=2, reduction_factor=2) if scheduler == "ASHA" else None
    executor = None if budget is None else HydraExecutor(budget, devices=["cpu", "cpu"])
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.perf_counter()
        analysis = tune.run(
            train,
            {"lr": tune.grid_search([1e-5 * 2**n for n in range(TRIALS)]), "pool": budget is not None},
            resources=executor,
            resources_per_trial={"cpu": 1} if executor is None else None,
            metric="loss",
            mode="min",
            scheduler=asha,
            reuse_actors=reuse,
            storage_path=folder,
            verbose=0,
        )
        seconds = time.perf_counter() - start_s
        assert all(trial.status == "TERMINATED" for trial in analysis.trials)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    seconds: dict[str, list[float]] = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        for scheduler, reuse in product(("FIFO", "ASHA"), (False, True)):
            name = f"{scheduler}, {'reused' if reuse else 'new'} actors"
            stock_s = sweep(scheduler, reuse, None)
            seconds[f"{name}, stock"].append(stock_s)
            for placement, budget in BUDGETS.items():
                ours_s = sweep(scheduler, reuse, budget)
                seconds[f"{name}, {placement}"].append(ours_s)
                ratios[f"{name}, {placement}"].append(ours_s / stock_s)
    ray.shutdown()
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    result = {
        "ray": ray.__version__,
        "rounds": options.rounds,
        "sizes": {"trials": TRIALS, "reports": REPORTS, "steps": REPORTS * STEPS, "rows": ROWS, "width": WIDTH},
        "goal": GOAL,
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "over_stock": medians,
        "over_stock_of_rounds": dict(ratios),
    }
    path = save("ray_tune", result)
    for name, over in medians.items():
        print(f"{name}: {result['seconds'][name]:.1f} s, {over:.2f} times stock")
    print(path.relative_to(path.parents[2]))


if __name__ == "__main__":
    main()
