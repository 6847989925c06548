"""Logs a pool's figures where a user logs his own: TensorBoard, MLflow, or any function."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from hydra_tune.errors import ConfigError
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.show.snapshot import PoolSnapshot

logger = logging.getLogger("hydra_tune")
Log = Callable[[dict[str, float], int], None]


@contextmanager
def log_figures(pool: ShardPool, to: Any, *, every_s: float = 10.0) -> Iterator[None]:
    """While the block lasts, log what the pool's devices and live trials do, as numbers::

        with hydra_tune.log_figures(pool, SummaryWriter()):
            runner.optimize(study, objective, n_trials=64)

    For each device ``hydra/cuda:0/used_mib``, ``busy_pct`` and ``stalled_pct``, both of the time since the figures
    before; for each live trial ``hydra/trial 3/steps``, ``step_ms`` and ``value``. The step is the second since the
    pool was made.

    Args:
        to: a TensorBoard ``SummaryWriter``; the module ``mlflow``, with a run that is active; or a function that is
            given a dict of numbers and the second.
        every_s: seconds between two times, at most: a trial's first step and its end are logged when they come.

    Raises:
        ConfigError: `to` is none of these, MLflow has no active run, or `every_s` is not positive.
    """
    if not every_s > 0:
        raise ConfigError(f"every_s is how many seconds pass between figures, more than 0; got {every_s!r}.")
    log = _log_to(to)
    told: SimpleQueue[PoolSnapshot | bool] = SimpleQueue()  # True: a first step was made; False: the block is over

    def listen(ends: bool) -> None:
        told.put(pool.snapshot() if ends else True)

    def run() -> None:
        before: dict[str, Any] = {}
        goes_on = True
        while goes_on:
            news = _told_within(every_s, told)
            goes_on = False not in news
            try:
                snapshots = [*(each for each in news if isinstance(each, PoolSnapshot)), pool.snapshot()]
                figures = {key: n for snapshot in snapshots for key, n in _of_trials(snapshot).items()}
                log({**_of_devices(snapshots[-1], before), **figures}, int(snapshots[-1].elapsed_s))
            except Exception as error:
                logger.warning("figures of the pool are no longer logged (%s)", error)
                return

    thread = threading.Thread(target=run, name="hydra_tune figures", daemon=True)
    listeners = pool.events.report.listeners
    listeners.append(listen)
    thread.start()
    try:
        yield
    finally:
        listeners.remove(listen)
        told.put(False)
        thread.join()


def _told_within(seconds: float, told: SimpleQueue[PoolSnapshot | bool]) -> list[PoolSnapshot | bool]:
    """Waits until something is told, or for so long. Returns all that has been told."""
    found: list[PoolSnapshot | bool] = []
    with suppress(Empty):
        found.append(told.get(timeout=seconds))
        while True:
            found.append(told.get_nowait())
    return found


def _log_to(to: Any) -> Log:
    if hasattr(to, "add_scalar"):
        return partial(_to_tensorboard, to)
    if hasattr(to, "log_metrics") and hasattr(to, "active_run"):
        if (run := to.active_run()) is None:
            raise ConfigError("figures are logged to MLflow's active run, but there is none. Call mlflow.start_run().")
        return partial(_to_mlflow, to, run.info.run_id)
    if callable(to):
        return to  # type: ignore[no-any-return]
    raise ConfigError(f"figures are logged to a SummaryWriter, to mlflow or by a function; got {type(to).__name__}.")


def _to_tensorboard(writer: Any, figures: dict[str, float], second: int) -> None:
    for name, value in figures.items():
        writer.add_scalar(name, value, second)


def _to_mlflow(mlflow: Any, run_id: str, figures: dict[str, float], second: int) -> None:
    """The run is named, for the active one is a thread's. MLflow takes no colons."""
    mlflow.log_metrics({name.replace(":", "_"): value for name, value in figures.items()}, step=second, run_id=run_id)


def _of_devices(snapshot: PoolSnapshot, before: dict[str, Any]) -> dict[str, float]:
    """`before` has the sums at the time before, by device, and gets those of now."""
    found: dict[str, float] = {}
    elapsed_s = snapshot.elapsed_s - before.get("", 0.0)
    before[""] = snapshot.elapsed_s
    for device in snapshot.devices:
        now = device.busy_s, sum(device.stalled_by.values())
        busy_s, stalled_s = (a - b for a, b in zip(now, before.get(device.name, (0.0, 0.0)), strict=True))
        before[device.name] = now
        found[f"hydra/{device.name}/used_mib"] = device.used_bytes / 2**20
        found[f"hydra/{device.name}/busy_pct"] = 100 * busy_s / elapsed_s if elapsed_s else 0.0
        # it may have been told late of a stall before this time
        found[f"hydra/{device.name}/stalled_pct"] = (
            min(100 * stalled_s, 100 * (elapsed_s - busy_s)) / elapsed_s if elapsed_s else 0.0
        )
    return found


def _of_trials(snapshot: PoolSnapshot) -> dict[str, float]:
    found: dict[str, float] = {}
    for trial in snapshot.trials:
        found[f"hydra/{trial.name}/steps"] = float(trial.steps)
        if trial.step_s is not None:
            found[f"hydra/{trial.name}/step_ms"] = 1e3 * trial.step_s
        if trial.value is not None:
            found[f"hydra/{trial.name}/value"] = trial.value
    return found
