"""What one trial moves, written down in its pool's trace."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hydra_tune.device import Device
from hydra_tune.schedule import Machine
from hydra_tune.task_clock import TaskClock
from hydra_tune.trace import During, Trace


class TrialLog:
    """Totals of the trial and its devices; a span of time, of the task that it runs."""

    def __init__(
        self, trial: int, trace: Trace, clocks: Sequence[TaskClock], machine: Machine, lock: threading.RLock
    ) -> None:
        self._trial = trial
        self._trace = trace
        self._clocks = clocks
        self._machine = machine
        self._lock = lock

    def now_s(self) -> float:
        return self._trace.now_s()

    def count(self, what: str, device: Device, num_bytes: int, during: During | None = None) -> None:
        with self._lock:
            self._trace.count(what, device.number, self._trial, num_bytes)
            task = self._machine.devices[device.number].running
            if during is None or task is None or task.trial != self._trial:
                return
            if isinstance(during, tuple):
                self._clocks[device.number].copied("spill", task, *during)
            else:
                self._trace.note("spill", task, device.number, during, self._trace.now_s())
