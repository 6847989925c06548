"""Lets trials into a pool, as far as its host memory goes.

Spilled trials keep weights, gradients and optimizer state in host memory. A trial that the host has no room for beside
the others waits in `prepare`; one that is larger than all of it is refused.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hydra_tune.config import format_bytes
from hydra_tune.errors import BudgetError
from hydra_tune.pool.lease import Lease
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.process.interrupts import Stop
from hydra_tune.schedule.events import Place, TrialAdded

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial


def add_trial(
    pool: ShardPool, kind: type[Trial], steps: int | None, host_bytes: int, name: str | None, stop: Stop
) -> Trial:
    """Place a trial, once host memory has room for it. It has so many mini-batches, if that is known; `stop` ends
    the waiting.

    Raises:
        BudgetError: it needs more than all trials together may have.
    """
    events, table = pool.events, pool.events.table

    def check() -> None:
        events.check_usable()
        stop.check()

    with events.lock:
        events.check_usable()
        events.end_abandoned()
        number = next(table.numbers)
        name = name or f"trial {number}"
        _check_host_bytes(pool, name, host_bytes)
        table.summaries[number] = {"name": name, "state": f"waits for {format_bytes(host_bytes)} of host memory"}
        table.leases[number] = Lease(number, events.report.trace.now_s, threading.Condition(events.lock))
        try:
            events.tell(TrialAdded(number, steps, host_bytes, pool.homes_move))
            home = events.devices[events.await_answer(number, Place, check).device]
            trial = kind(number, home, pool=pool, name=name, stop=stop)
        except BaseException:
            events.forget(number)
            del table.summaries[number]
            raise
        table.enter(trial)
        return trial


def grow_trial(trial: Trial, host_bytes: int) -> None:
    """It has another model, of so many bytes of host memory. It does not wait for them, since it holds others.

    Raises:
        BudgetError: all trials together may not have so many.
    """
    events = trial.pool.events
    with events.lock:
        state = events.machine.trials[trial.id]
        _check_host_bytes(trial.pool, trial.name, state.host_bytes + host_bytes)
        state.host_bytes += host_bytes


def _check_host_bytes(pool: ShardPool, name: str, num_bytes: int) -> None:
    if num_bytes > pool.host_memory_bytes:
        raise BudgetError(
            f"{name} needs {format_bytes(num_bytes)} of host memory for its weights, gradients and optimizer "
            f"state, but all trials of this pool may have {format_bytes(pool.host_memory_bytes)}. Raise its "
            "host_memory=, or train a smaller model."
        ).lacking(num_bytes, pool.host_memory_bytes)
