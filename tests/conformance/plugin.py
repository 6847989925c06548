"""A pytest plug-in: `Study.optimize` goes through `HydraTrialRunner`, in tests that know nothing of it.

--through stock   Optuna's own loop, with n_jobs
--through hydra   HydraTrialRunner(pool, concurrency).optimize(study, ...), with one pool a process
--at N            n_jobs, or concurrency. A test that asks for more n_jobs itself gets as many; -1 is one a core.
                  Where it is more than 1, each objective begins with a pause, as if it built a model: Optuna's tests
                  have some that are over before the next trial begins, so that n_jobs=4 is one after another
--outcomes FILE   a JSON line for each test: its id, its outcome, and how often it has called `optimize`; forked
                  children count, other processes have Optuna as it is
--only FILE       the ids of the tests to run, one a line
"""

from __future__ import annotations

import functools
import inspect
import json
import multiprocessing
import os
import time
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import optuna
import pytest

import hydra_tune

stock_optimize = optuna.Study.optimize
signature = inspect.signature(stock_optimize)
PAUSE_S = 0.01
calls = multiprocessing.get_context("fork").Value("L", 0)
called_by_runner = ContextVar("called_by_runner", default=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--through", choices=("stock", "hydra"), default="hydra")
    group.addoption("--at", type=int, default=1)
    group.addoption("--outcomes", type=Path)
    group.addoption("--only", type=Path)


@functools.cache
def pool_of(process: int) -> hydra_tune.ShardPool:
    """A forked child has its own: a pool's threads stay behind."""
    return hydra_tune.ShardPool(["cpu"], "1MiB")


def jobs(at: int, asked: int) -> int:
    return max(at, (os.cpu_count() or 1) if asked == -1 else asked)


def paused(objective: Any) -> Any:
    def pause_and_run(trial: optuna.Trial) -> Any:
        time.sleep(PAUSE_S)
        return objective(trial)

    return pause_and_run


def redirected(through: str, at: int) -> Any:
    @functools.wraps(stock_optimize)
    def optimize(study: optuna.Study, *args: Any, **kwargs: Any) -> None:
        if called_by_runner.get():
            called_by_runner.set(False)  # an objective may call it too
            return stock_optimize(study, *args, **kwargs)
        with calls.get_lock():
            calls.value += 1
        arguments = signature.bind(study, *args, **kwargs).arguments
        study, objective = arguments.pop("self"), arguments.pop("func")
        number = jobs(at, arguments.pop("n_jobs", 1))
        if at > 1:
            objective = paused(objective)
        if through == "stock":
            return stock_optimize(study, objective, n_jobs=number, **arguments)
        runner = hydra_tune.HydraTrialRunner(pool_of(os.getpid()), concurrency=number)
        token = called_by_runner.set(True)
        try:
            return runner.optimize(study, objective, **arguments)
        finally:
            called_by_runner.reset(token)

    return optimize


def pytest_configure(config: pytest.Config) -> None:
    optuna.Study.optimize = redirected(config.getoption("through"), config.getoption("at"))  # type: ignore[method-assign]
    outcomes = config.getoption("outcomes")
    if outcomes:
        config.pluginmanager.register(Outcomes(outcomes), "conformance outcomes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if only := config.getoption("only"):
        kept = set(only.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]


class Outcomes:
    """Each test's line is written as it ends, so that a run that hangs or dies leaves those before it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcome, self.message = "passed", ""

    def pytest_runtest_logstart(self) -> None:
        self.outcome, self.message, calls.value = "passed", "", 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" and self.outcome != "failed":
            self.outcome = report.outcome
            crash = getattr(report.longrepr, "reprcrash", None)
            self.message = crash.message.splitlines()[0] if crash and crash.message else ""

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        line = {"test": nodeid, "outcome": self.outcome, "calls": calls.value, "message": self.message}
        with self.path.open("a") as file:
            print(json.dumps(line), file=file)
