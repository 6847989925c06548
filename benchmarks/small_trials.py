"""What the runner costs trials that fit, beside stock Optuna: small models, for which all that is ours weighs most.

Stock is `Study.optimize` with `n_jobs=1`, plain PyTorch; "runner" the same objective with `prepare`, one trial at a
time and eight. Each round is a new study, a new pool and a new runner, A B C A B C; the first is thrown away. A study
takes seconds: the pilot of each architecture is in it. What is printed is the median of the rounds' ratios: where a
machine changes its speed within minutes, medians of seconds are of different speeds. The goals are those of a trial
that fits: 1.10 and 1.15 for the smallest models, 1.03 and 1.05 for small ones.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import optuna
import torch
from torch import nn

import hydra_tune
from benchmarks.measure import ratio, save
from benchmarks.runner import logs

GOALS = {"mlp": {1: 1.10, 8: 1.15}, "transformer": {1: 1.03, 8: 1.05}}
WIDTH, TRIALS, BATCH, CONCURRENCY = 64, 8, 32, (1, 8)
STEPS = {"mlp": 300, "transformer": 60}
INPUTS, TARGETS = torch.zeros(1797, 64), torch.zeros(1797, dtype=torch.long)


def build(kind: str) -> nn.Sequential:
    if kind == "mlp":
        layers = (nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        return nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    encoders = (nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.1, batch_first=True) for _ in range(4))
    return nn.Sequential(
        nn.Unflatten(1, (8, 8)), nn.Linear(8, WIDTH), *encoders, nn.Flatten(1), nn.Linear(8 * WIDTH, 10)
    )


def objective(trial: optuna.Trial, *, kind: str, steps: int, prepares: bool) -> float:
    torch.manual_seed(trial.number)
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1e-2, log=True))
    if prepares:
        model, optimizer = hydra_tune.prepare(model, optimizer)
    loss = torch.zeros(())
    for _ in range(steps):
        batch = torch.randint(0, len(INPUTS), (BATCH,))
        loss = nn.functional.cross_entropy(model(INPUTS[batch]), TARGETS[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def stock(study: optuna.Study, *, kind: str, steps: int) -> None:
    study.optimize(partial(objective, kind=kind, steps=steps, prepares=False), n_trials=TRIALS)


def runner(study: optuna.Study, *, kind: str, steps: int, concurrency: int) -> None:
    with hydra_tune.ShardPool(["cpu"], "2GiB") as pool:
        train = partial(objective, kind=kind, steps=steps, prepares=True)
        hydra_tune.HydraTrialRunner(pool, concurrency=concurrency).optimize(study, train, n_trials=TRIALS)


def seconds_a_study(arms: dict[str, Callable[[optuna.Study], None]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(1 + rounds):
        for name, optimize in arms.items():
            study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
            start_s = time.perf_counter()
            optimize(study)
            if i:
                seconds[name].append(time.perf_counter() - start_s)
            assert len(study.get_trials(states=[optuna.trial.TrialState.COMPLETE])) == TRIALS
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, two rounds: whether it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    INPUTS.normal_()
    TARGETS.random_(10)
    result: dict[str, Any] = {}
    for kind, most_steps in STEPS.items():
        steps, rounds = (most_steps // 10, 2) if options.quick else (most_steps, options.rounds)
        arms: dict[str, Callable[[optuna.Study], None]] = {"stock": partial(stock, kind=kind, steps=steps)}
        for number in CONCURRENCY:
            arms[f"runner, {number} at a time"] = partial(runner, kind=kind, steps=steps, concurrency=number)
        with logs("quiet"):
            seconds = seconds_a_study(arms, rounds)
        result[kind] = {
            "steps": steps,
            "rounds": rounds,
            "median_us_a_step": {
                name: statistics.median(values) / TRIALS / steps * 1e6 for name, values in seconds.items()
            },
            "over_stock": {name: ratio(seconds, name, "stock") for name in arms if name != "stock"},
        }
        for name, us in result[kind]["median_us_a_step"].items():
            over = result[kind]["over_stock"].get(name)
            quartiles = "" if over is None else f"quartiles {over['quartile_low']:.2f} to {over['quartile_high']:.2f}"
            beside = "" if over is None else f", {over['median_of_ratios']:.2f} times stock ({quartiles})"
            print(f"{kind:<12} {name:<22} {us:8.1f} us a step{beside}", flush=True)
    path = save("small_trials_cpu", {"goals": GOALS, "trials": TRIALS, "width": WIDTH, "batch": BATCH, **result})
    print(path.relative_to(path.parents[2]))


if __name__ == "__main__":
    main()
