"""Columns of the pool in Tune's table.

Tune has two kinds of output. The default one is a callback, of a class that Ray calls experimental. Notebooks, and
scripts with `RAY_AIR_NEW_OUTPUT=0`, have the classic one, a progress reporter. Neither takes columns that are not in a
result, so where Tune chooses its reporter for a run over pools, it gets one of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import ray.tune
import ray.tune.tune
from ray.tune.experimental import output

from hydra_tune.integrations.ray_node.pool_spec import PoolSpec
from hydra_tune.integrations.ray_tune.pool_figures import PoolFigures
from hydra_tune.integrations.ray_tune.run_pools import pools_for

_pools: ContextVar[tuple[PoolSpec, ...]] = ContextVar("pools of the run under way", default=())


@contextmanager
def seen_pools(spec: PoolSpec, name: str) -> Iterator[None]:
    """`pools_for` a run, whose table has columns of these pools, unless the run has a reporter of its own."""
    _install()
    token = _pools.set((*_pools.get(), spec))
    try:
        with pools_for(spec, name):
            yield
    finally:
        _pools.reset(token)


@functools.cache
def _install() -> None:
    modules: list[tuple[Any, Any]] = [(output, _default_reporter), (ray.tune.tune, _classic_reporter)]
    for module, detect in modules:
        module._detect_reporter = functools.partial(detect, module._detect_reporter)


def _default_reporter(stock: Any, *arguments: Any, entrypoint: Any = None, **options: Any) -> Any:
    if _pools.get():
        return PoolTable(*arguments, **options)
    return stock(*arguments, entrypoint=entrypoint, **options)


def _classic_reporter(stock: Any, **options: Any) -> Any:
    reporter = stock(**options)
    return ClassicTable(reporter) if _pools.get() else reporter


class PoolTable(output.TuneTerminalReporter):
    """Tune's default table, every 30 s and at the end, with a line for each node's pool, and a trial's state, its bytes
    on devices, its shards and since when it waits."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._figures = PoolFigures(_pools.get())

    def print_heartbeat(self, trials: Any, *system: str, force: bool = False) -> None:
        if self.verbosity >= self._heartbeat_threshold:
            self._figures.look()
        super().print_heartbeat(trials, *system, force=force)

    def _print_heartbeat(self, trials: Any, *system: str, force: bool = False) -> None:
        rows, columns = self._figures.over(trials)
        self._inferred_metric = [*output._infer_user_metrics(rows), *columns]  # type: ignore[assignment]
        super()._print_heartbeat(rows, *system, *([] if force else self._figures.lines()), force=force)


class ClassicTable(ray.tune.ProgressReporter):
    """The same in Tune's classic output, of a terminal or a notebook."""

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter
        self._figures = PoolFigures(_pools.get())

    def setup(self, *arguments: Any, **run: Any) -> None:
        self._reporter.setup(*arguments, **run)

    def should_report(self, trials: Any, done: bool = False) -> bool:
        self._figures.look()
        return bool(self._reporter.should_report(trials, done))

    def report(self, trials: Any, done: bool, *system: str) -> None:
        rows, columns = self._figures.over(trials)
        self._reporter._metric_columns |= dict(zip(columns, columns, strict=True))
        self._reporter.report(rows, done, *system, *([] if done else self._figures.lines()))
