"""Says what trials wait for, and helps a trial that would wait for ever.

A script may drop a model that something else still refers to: an optimizer, a loss, an exception's frames. Then its
trial keeps memory that nobody uses, and others wait for it without end. So a trial that waits has garbage collected, at
intervals that double. If no trial was seen to compute for a minute, a warning says what the trial waits for, and which
trials hold memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from hydra_tune.devices.device import Device
from hydra_tune.pool.long_leases import LongLeases
from hydra_tune.pool.trial_table import TrialTable
from hydra_tune.process.garbage import collect
from hydra_tune.schedule.machine import Machine

logger = logging.getLogger("hydra_tune")
# The wait before the first collection; then twice, four times .. as long. One collection is not enough: autograd's
# nodes hide what they refer to from the collector until they are freed themselves.
_COLLECT_S = 1.0
_WARN_S = 60.0  # a warning comes after so long without a trial that computes


@dataclass
class Wait:
    """One trial's wait, which has not ended yet."""

    trial: int
    waited_s: float = 0.0  # an upper bound
    idle_s: float = 0.0  # how long no trial was seen to compute; minus infinity once the warning was given
    collect_s: float = _COLLECT_S  # the next collection comes after so long a wait


class WaitingTrials:
    """The waiting trials of one pool. Called under the pool's lock."""

    def __init__(self, devices: Sequence[Device], machine: Machine, table: TrialTable, long_leases: LongLeases) -> None:
        self._devices = devices
        self._machine = machine
        self._table = table
        self._long_leases = long_leases

    def goes_on(self, wait: Wait, wait_s: float) -> None:
        """Called when a trial has waited for at most `wait_s` more seconds, and goes on waiting."""
        wait.waited_s += wait_s
        if wait.waited_s >= wait.collect_s:
            wait.collect_s *= 2
            if any(not t.of_runner and t.id != wait.trial for t in self._table.live.values()):
                # in another thread: what is freed may need locks that this thread holds
                threading.Thread(target=collect, name="hydra_tune garbage").start()
        wait.idle_s = 0.0 if self.anybody_computes() else wait.idle_s + wait_s
        if wait.idle_s >= _WARN_S and not self._table.leases[wait.trial].granted:
            wait.idle_s = -inf  # warn once, until a trial computes again
            self._warn(wait.trial)

    def anybody_computes(self) -> bool:
        """Whether a trial computes, or is in a pilot, on any device."""
        devices = zip(self._machine.devices, self._long_leases.of_devices, strict=True)
        return any(d.ledger.pilot is not None or (d.running and (lease is None or lease.busy)) for d, lease in devices)

    def _warn(self, number: int) -> None:
        logger.warning(
            "%s %s, and no task has begun for a while, beside %s. What is not busy elsewhere (loading, validation, a "
            "pause) is kept for nothing: by its optimizer, a loss, or an exception that came through its frame. Drop "
            "that, or call hydra_tune.release(model).",
            self._table.summaries[number]["name"],
            self.state_of(number),
            ", ".join(trial.name for trial in self._table.live.values() if trial.id != number),
        )

    def state_of(self, number: int) -> str:
        """The trial's state for the report. For a live trial that waits, it says for what."""
        trial, state = self._table.live.get(number), str(self._table.summaries[number]["state"])
        if trial is None or state != "live":
            return state
        if trial.stop.is_paused:
            return "paused"
        device, measured = self._machine.awaits(number) or (None, None)
        if measured is not None:
            return f"waits for {self._table.summaries[measured]['name']}'s first step"
        return state if device is None else f"waits for memory of {self._devices[device].name}"
