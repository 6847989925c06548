"""Adds trials to a pool, as far as its host memory has room.

Spilled trials keep weights, gradients and optimizer state in host memory. A trial that does not fit beside the others
waits in `prepare`. A trial that would not fit even alone is refused.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hydra_tune.config import format_bytes
from hydra_tune.errors import BudgetError, does_not_fit
from hydra_tune.pool.lease import Lease
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.process.interrupts import Stop
from hydra_tune.schedule.events import Place, TrialAdded
from hydra_tune.schedule.ledger import HeldWeights

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial


def add_trial(
    pool: ShardPool,
    kind: type[Trial],
    steps: int | None,
    host_bytes: int,
    name: str | None,
    stop: Stop,
    host_weights: HeldWeights = (),
) -> Trial:
    """Wait until host memory has room for a trial, then give it a home device and return it.

    `steps`        how many mini-batches it has; None if unknown
    `host_bytes`   the host memory that it needs, beside `host_weights`, frozen weights that other trials may have, too
    `stop`         ends the wait

    Raises:
        BudgetError: the trial needs more host memory than all trials together may have.
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
        need_bytes = host_bytes + bytes_of(host_weights)
        _check_host_bytes(pool, name, need_bytes)
        table.summaries[number] = {"name": name, "state": f"waits for {format_bytes(need_bytes)} of host memory"}
        table.leases[number] = Lease(number, events.report.trace.now_s, threading.Condition(events.lock))
        try:
            events.tell(TrialAdded(number, steps, host_bytes, pool.homes_move, host_weights))
            home = events.devices[events.await_answer(number, Place, check).device]
            trial = kind(number, home, pool=pool, name=name, stop=stop)
        except BaseException:
            events.forget(number)
            del table.summaries[number]
            raise
        table.enter(trial)
        return trial


def grow_trial(trial: Trial, host_bytes: int, host_weights: HeldWeights = ()) -> None:
    """Add the host memory of another model to a trial. The trial does not wait for room, since it holds memory that
    others may wait for.

    Raises:
        BudgetError: the trial would need more host memory than all trials together may have.
    """
    events = trial.pool.events
    with events.lock:
        state = events.machine.trials[trial.id]
        weights = tuple(dict([*state.host_weights, *host_weights]).items())
        _check_host_bytes(trial.pool, trial.name, state.host_bytes + host_bytes + bytes_of(weights))
        state.host_bytes += host_bytes
        state.host_weights = weights


def bytes_of(weights: HeldWeights) -> int:
    return sum(num_bytes for _, num_bytes in weights)


def _check_host_bytes(pool: ShardPool, name: str, num_bytes: int) -> None:
    if num_bytes > pool.host_memory_bytes:
        raise host_refusal(name, num_bytes, pool.host_memory_bytes)


def host_refusal(name: str, need_bytes: int, budget_bytes: int) -> BudgetError:
    """Of a trial that needs so much host memory, in a pool of so much."""
    need, budget = format_bytes(need_bytes, up=True), format_bytes(budget_bytes)
    refusal = does_not_fit(
        name,
        f"{need} of host memory for its weights, gradients and optimizer state",
        f"all trials of this pool may have {budget}",
        (f'host_memory="{need}"', "half precision or an optimizer with less state", "adapters over a frozen base"),
    )
    return refusal.lacking(need_bytes, budget_bytes, argument="host_memory")
