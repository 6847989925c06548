"""What the live view and the live figures cost a search: its time with both over its time without. Goal: 1.01.

The view draws into a terminal that is not there, and figures go to a SQLite file, as a dashboard reads it. Searches are
small ones that fit, whose every step is the interpreter's: what takes it from them is seen most. They take about a
minute: the first figures, which come at once, cost a shorter one more than 1%. A B A B, each a new study; the first
pair is thrown away. Beside the ratio of wall times, which neighbours on a machine make noisy, it tells
the share of one core that the threads of the view and of the figures took.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import optuna
import torch
from torch import nn

import hydra_tune
from benchmarks.measure import interleaved, ratio, save
from hydra_tune.integrations.optuna_runner.live_attributes import LiveAttributes
from hydra_tune.show.live_view import LiveView

TRIALS, CONCURRENCY, STEPS, WIDTH = 8, 4, 10_000, 64
_cpu_s: defaultdict[str, float] = defaultdict(float)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def objective(trial: optuna.Trial) -> float:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1e-2, log=True))
    model, optimizer = hydra_tune.prepare(model, optimizer, total_steps=STEPS)
    x = torch.randn(32, WIDTH)
    for step in range(STEPS):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 1000 == 0:
            trial.report(loss.item(), step)
    return loss.item()


def search(*, shown: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, _shown() if shown else _hidden():
        study = optuna.create_study(storage=f"sqlite:///{folder}/study.db")
        runner = hydra_tune.HydraTrialRunner(hydra_tune.ShardPool(["cpu"], "256MiB", seed=0), CONCURRENCY)
        runner.optimize(study, objective, TRIALS, show_progress_bar=None if shown else False)


@contextmanager
def _shown() -> Iterator[None]:
    with (
        mock.patch.object(sys, "stderr", Terminal()),
        mock.patch.dict("os.environ", {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}),
        mock.patch.object(LiveView, "_run", _timed(LiveView._run, "view")),
        mock.patch.object(LiveAttributes, "_run", _timed(LiveAttributes._run, "figures")),
    ):
        yield


@contextmanager
def _hidden() -> Iterator[None]:
    with mock.patch.object(LiveAttributes, "_run", return_value=None):
        yield


def _timed(run: Callable[[Any], None], name: str) -> Callable[[Any], None]:
    @wraps(run)
    def timed(self: Any) -> None:
        try:
            run(self)
        finally:
            _cpu_s[name] += time.thread_time()  # of this thread, from its beginning

    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    steps = {"shown": lambda: search(shown=True), "hidden": lambda: search(shown=False)}
    seconds = interleaved(steps, rounds=options.rounds, warm_up=1)
    with_view_s = sum(seconds["shown"]) * (options.rounds + 1) / options.rounds  # as the warm-up's is not told
    found = {
        "sizes": {"trials": TRIALS, "at a time": CONCURRENCY, "steps": STEPS},
        "over_hidden": ratio(seconds, "shown", "hidden"),
        "share_of_a_core": {name: cpu_s / with_view_s for name, cpu_s in _cpu_s.items()},
    }
    print(found)
    print(save("view_cpu", found))


if __name__ == "__main__":
    main()
