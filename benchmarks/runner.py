"""What the runner costs a trial beside `Study.optimize`, of an objective that suggests one float and returns it.

`RandomSampler` and the storage in memory are the hardest case: nothing else in Optuna is as quick. Each round is a new
study and a new runner, A B A B. "quiet" logs warnings only, of Optuna and of hydra_tune alike; "as it comes" leaves
both as they are, a line a trial from the one and two from the other, written to the null device. The goal is 1.5 times
at concurrency 1, quiet; at 4 beside `n_jobs=4`, as it comes, and on SQLite it is for information.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import torch

import hydra_tune
from benchmarks.measure import ratio, save

GOAL = 1.5
Optimize = Callable[[optuna.Study, int], None]


def objective(trial: optuna.Trial) -> float:
    return trial.suggest_float("x", 0.0, 1.0)


def optimizers(pool: hydra_tune.ShardPool, jobs: int) -> dict[str, Optimize]:
    def stock(study: optuna.Study, trials: int) -> None:
        study.optimize(objective, n_trials=trials, n_jobs=jobs)

    def runner(study: optuna.Study, trials: int) -> None:
        hydra_tune.HydraTrialRunner(pool, concurrency=jobs).optimize(study, objective, n_trials=trials)

    return {"runner": runner, "stock": stock}


def seconds_a_trial(arms: dict[str, Optimize], storage: str, *, trials: int, rounds: int) -> dict[str, list[float]]:
    """Of each arm, round by round; the first round is thrown away. The study is made before the clock starts."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(1 + rounds):
            for name, optimize in arms.items():
                url = f"sqlite:///{Path(folder) / f'{name}-{i}.db'}" if storage == "sqlite" else None
                study = optuna.create_study(storage=url, sampler=optuna.samplers.RandomSampler(seed=i))
                start_s = time.perf_counter()
                optimize(study, trials)
                if i:
                    seconds[name].append((time.perf_counter() - start_s) / trials)
                assert len(study.trials) == trials
    return seconds


@contextmanager
def logs(how: str) -> Iterator[None]:
    """To the null device. Handlers keep the stream that they found, so its number is diverted."""
    ours, verbosity = logging.getLogger("hydra_tune"), optuna.logging.get_verbosity()
    level, kept = ours.level, os.dup(2)
    with Path(os.devnull).open("w") as null:
        os.dup2(null.fileno(), 2)
        if how == "quiet":
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            ours.setLevel(logging.WARNING)
        try:
            yield
        finally:
            optuna.logging.set_verbosity(verbosity)
            ours.setLevel(level)
            os.dup2(kept, 2)
            os.close(kept)


def figures(seconds: dict[str, list[float]]) -> dict[str, Any]:
    us = {name: [value * 1e6 for value in values] for name, values in seconds.items()}
    return {
        "us_a_trial": {
            name: dict(zip(("quartile_low", "median", "quartile_high"), statistics.quantiles(values, n=4), strict=True))
            for name, values in us.items()
        },
        "runner_over_stock": ratio(seconds, "runner", "stock"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200, help="of each study in memory; a fifth on SQLite")
    parser.add_argument("--rounds", type=int, default=60, help="in memory; a sixth on SQLite")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = [("memory", jobs, how) for jobs in (1, 4) for how in ("quiet", "as it comes")]
    settings += [("sqlite", jobs, "quiet") for jobs in (1, 4)]
    result: dict[str, Any] = {}
    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
        for storage, jobs, how in settings:
            trials, rounds = options.trials, options.rounds
            if storage == "sqlite":
                trials, rounds = max(1, trials // 5), max(2, rounds // 6)
            with logs(how):
                seconds = seconds_a_trial(optimizers(pool, jobs), storage, trials=trials, rounds=rounds)
            name = f"{storage}, {jobs} at a time, {how}"
            result[name] = {"trials": trials, "rounds": rounds, **figures(seconds)}
            us, over = result[name]["us_a_trial"], result[name]["runner_over_stock"]
            print(
                f"{name:<32} {us['runner']['median']:7.1f} us, stock {us['stock']['median']:7.1f} us:"
                f"{over['ratio_of_medians']:6.2f} ({over['quartile_low']:.2f} to {over['quartile_high']:.2f})",
                flush=True,
            )
    path = save("runner", {"goal": {"memory, 1 at a time, quiet": GOAL}, **result})
    print(path.relative_to(path.parents[2]))


if __name__ == "__main__":
    main()
