"""Promotes shards ahead of their tasks: each device has a thread that copies them, one after another (`copier.py`).

    trial's thread       ... computes shard 1 .............. | computes shard 2 ...
    copy thread          ... copies shard 2 to the device .. | copies shard 3 ...

The machine has reserved the slot. A copy that fails is no error: its task copies the shard itself, and meets whatever
was wrong. Until a copy is made, neither its slot nor the trial's host memory may change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from hydra_tune.devices.device import Device
from hydra_tune.pool.copier import start_copier
from hydra_tune.pool.trace import Trace
from hydra_tune.pool.trial_table import TrialTable
from hydra_tune.schedule.events import PromoteShard

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

Copied: TypeAlias = Callable[[PromoteShard, float, int], None]  # with when it began, and the bytes that were copied


class Promotions:
    """Those of one pool. The pool's lock guards which are under way; copies are made without it."""

    def __init__(self, devices: Sequence[Device], table: TrialTable, trace: Trace, num_threads: int) -> None:
        self._table = table
        self._trace = trace
        self.under_way: dict[int, list[PromoteShard]] = {}  # by trial
        self.copiers = [start_copier(self, device.name, num_threads) for device in devices]
        os.register_at_fork(after_in_child=self.under_way.clear)  # the threads stay behind

    def begin(self, promote: PromoteShard, copied: Copied) -> None:
        """`copied` is called in the copy thread, also where the copy has failed; it calls `end`."""
        self.under_way.setdefault(promote.task.trial, []).append(promote)
        self.copiers[promote.device](partial(self._copy, promote, copied))

    def end(self, promote: PromoteShard) -> None:
        of_trial = self.under_way[promote.task.trial]
        of_trial.remove(promote)
        if not of_trial:
            del self.under_way[promote.task.trial]

    def await_copies(self, trial: Trial) -> None:
        """Those of this trial that are under way. Who has the lock keeps others from beginning one meanwhile."""
        if trial.id in self.under_way:  # seldom
            with trial.lease.wake:  # the pool's lock
                trial.lease.wake.wait_for(lambda: trial.id not in self.under_way)

    def _copy(self, promote: PromoteShard, copied: Copied) -> None:
        """In a device's copy thread."""
        task, start_s, copied_bytes = promote.task, self._trace.now_s(), 0
        trial = self._table.live.get(task.trial)
        try:
            if trial is not None and not trial.ended:
                copied_bytes = trial.residency.promote_shard(task.shard, promote.offset, promote.num_bytes, ahead=True)
        finally:
            del trial
            copied(promote, start_s, copied_bytes)
