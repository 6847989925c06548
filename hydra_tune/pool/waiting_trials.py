"""What trials wait for; and help for one that waits for what nobody will give back.

A script may drop a model that something else still refers to: an optimizer, a loss, an exception's frames. Then its
trial keeps memory that nobody uses, and others wait for it without end. So a trial that waits has garbage collected,
ever more seldom; and where nobody was seen to compute for a minute, a warning says what it waits for, and beside whom.
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
_COLLECT_S = 1.0  # and twice, four times ..: autograd's nodes hide what they refer to until they are gone
_WARN_S = 60.0  # in which nobody was seen to compute


@dataclass
class Wait:
    """One trial's, which has not ended yet."""

    trial: int
    waited_s: float = 0.0  # at most
    idle_s: float = 0.0  # in which nobody was seen to compute; without end once it was warned of
    collect_s: float = _COLLECT_S


class WaitingTrials:
    """Of one pool. Called under its lock."""

    def __init__(self, devices: Sequence[Device], machine: Machine, table: TrialTable, long_leases: LongLeases) -> None:
        self._devices = devices
        self._machine = machine
        self._table = table
        self._long_leases = long_leases

    def goes_on(self, wait: Wait, wait_s: float) -> None:
        """It has waited for so many seconds more, at most, and goes on waiting."""
        wait.waited_s += wait_s
        if wait.waited_s >= wait.collect_s:
            wait.collect_s *= 2
            if any(not t.of_runner and t.id != wait.trial for t in self._table.live.values()):
                # in a thread of its own: what ends with the garbage may want the locks that this thread holds
                threading.Thread(target=collect, name="hydra_tune garbage").start()
        wait.idle_s = 0.0 if self.anybody_computes() else wait.idle_s + wait_s
        if wait.idle_s >= _WARN_S and not self._table.leases[wait.trial].granted:
            wait.idle_s = -inf  # once, until somebody computes
            self._warn(wait.trial)

    def anybody_computes(self) -> bool:
        """Or measures a pilot."""
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
        """What the trial says itself; if it is live, what it waits for."""
        trial, state = self._table.live.get(number), str(self._table.summaries[number]["state"])
        if trial is None or state != "live":
            return state
        if trial.stop.is_paused:
            return "paused"
        device, measured = self._machine.awaits(number) or (None, None)
        if measured is not None:
            return f"waits for the pilot or first step of {self._table.summaries[measured]['name']}"
        return state if device is None else f"waits for memory of {self._devices[device].name}"
