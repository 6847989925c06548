"""Promotes shards ahead of their tasks: each device has a thread that copies them, one after another (`copier.py`).

    trial's thread       ... computes shard 1 .............. | computes shard 2 ...
    copy thread          ... copies shard 2 to the device .. | copies shard 3 ...

The machine has reserved the slot. A copy that fails raises nothing here: the task then copies the shard itself, and
meets the error. While a copy is under way, neither its slot nor the trial's host memory may change.
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

Copied: TypeAlias = Callable[[PromoteShard, float, int], None]  # given when the copy began (s), and the bytes copied


class Promotions:
    """The promotions ahead of one pool. The pool's lock guards `under_way`; copies are made without the lock."""

    def __init__(self, devices: Sequence[Device], table: TrialTable, trace: Trace, num_threads: int) -> None:
        self._table = table
        self._trace = trace
        self.under_way: dict[int, list[PromoteShard]] = {}  # by trial
        self.copiers = [start_copier(self, device.name, num_threads) for device in devices]
        os.register_at_fork(after_in_child=self.under_way.clear)  # a forked child has no copy threads

    def begin(self, promote: PromoteShard, copied: Copied) -> None:
        """Give a promotion to its device's copy thread. That thread then calls `copied`, also after a failed copy, and
        `copied` must call `end`."""
        self.under_way.setdefault(promote.task.trial, []).append(promote)
        self.copiers[promote.device](partial(self._copy, promote, copied))

    def end(self, promote: PromoteShard) -> None:
        """Note that the copy is no longer under way."""
        of_trial = self.under_way[promote.task.trial]
        of_trial.remove(promote)
        if not of_trial:
            del self.under_way[promote.task.trial]

    def await_copies(self, trial: Trial) -> None:
        """Wait for the trial's copies that are under way. A caller that holds the pool's lock keeps new copies from
        beginning."""
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
