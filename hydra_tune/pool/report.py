"""What a pool's devices and trials have done, as plain data: bytes moved, seconds busy and stalled, spans of time.

A trial's thread reports the bytes that it moves. The event loop reports tasks and idle devices. Each device has a
clock, which writes its tasks and stalls into the pool's trace (`trace.py`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import Any

from hydra_tune.devices.device import Device
from hydra_tune.pool.trace import TaskClock, Trace
from hydra_tune.pool.trial_table import TrialTable
from hydra_tune.schedule.events import Event, PilotDone, StepDone
from hydra_tune.schedule.ledger import SHARED
from hydra_tune.schedule.machine import Machine

_DEVICE_KEYS = ("name", "budget_bytes", "used_bytes", "peak_bytes", "measured_peak_bytes")


class Report:
    """One pool's report. The pool's lock guards its trace and its clocks."""

    def __init__(self, lock: threading.RLock, devices: Sequence[Device], machine: Machine, table: TrialTable) -> None:
        self.lock = lock
        self.trace = Trace()
        self.clocks = [TaskClock(self.trace, device) for device in devices]
        # Called when a trial has made its first step, with False; and when one ends, which is still there, with True
        self.listeners: list[Callable[[bool], None]] = []
        self._told: tuple[Any, Any] = (None, None)  # the last span and sample of memory that `news` has told
        self._devices = devices
        self._machine = machine
        self._table = table

    # ---- what is reported to it ----

    def note_event(self, event: Event) -> None:
        """Count a training step that has ended now, outside of long leases."""
        if isinstance(event, (StepDone, PilotDone)) and event.trained:
            now_s = self.trace.now_s()
            self.note_steps(event.trial, 1, now_s, now_s)

    def note_steps(self, trial: int, steps: int, since_s: float, until_s: float) -> None:
        """The trial has made so many training steps, from `since_s` to `until_s`."""
        pace = self.trace.paces[trial]
        is_first = not pace.steps
        pace.add(steps, since_s, until_s)
        if is_first:
            self.tell(ends=False)

    def tell(self, *, ends: bool) -> None:
        for listener in list(self.listeners):
            listener(ends)

    def note_moved(self, trial: int, what: str, device: Device, num_bytes: int) -> None:
        """Count bytes that a trial has moved. `what` is an attribute of `Totals`, as ``"promoted_bytes"``."""
        with self.lock:
            self.trace.count(what, device.number, trial, num_bytes)

    def note_spill(self, trial: int, device: Device, num_bytes: int, during: float | tuple[Any, Any]) -> None:
        """Count bytes of gradients that the trial's running task has sent to the host.

        `during` is how many seconds it took until now, or the two marks of the device between which it took place.
        """
        with self.lock:
            self.trace.count("spilled_bytes", device.number, trial, num_bytes)
            task = self._machine.devices[device.number].running
            if task is not None and task.trial == trial:
                self.clocks[device.number].spilled(task, during)

    def note_idle(self, at_s: float | None) -> None:
        """Note for each device how much of it is used, and why it is idle, if it is, from `at_s` or from now on."""
        for device, clock in enumerate(self.clocks):
            self.trace.note_memory(device, self._machine.devices[device].ledger.used_bytes)
            cause = self._machine.idle_cause(device)
            if cause not in ("", clock.cause):
                clock.idles(self.trace.now_s() if at_s is None else at_s, cause)

    # ---- what it says; called under the lock ----

    def of_devices(self) -> list[dict[str, Any]]:
        return [
            {
                **{key: getattr(device, key) for key in _DEVICE_KEYS},
                **asdict(self.trace.devices[device.number]),
                "stalled_by": dict(self.trace.stalls[device.number]),
            }
            for device in self._devices
        ]

    def of_shared(self, base_numbers: Container[int]) -> dict[str, Any]:
        """Bytes of frozen weights that several live trials have, or that come from a base: on the host, and on each
        device. `trials` are the trials that have some of them. All are in the bytes of the host and of devices once."""
        trials = self._machine.trials
        users = Counter(number for trial in trials.values() for number, _ in trial.host_weights)
        shared = {number for number, count in users.items() if count > 1 or number in base_numbers}
        sizes = {number: size for trial in trials.values() for number, size in trial.host_weights}
        ledgers = [device.ledger for device in self._machine.devices]
        return {
            "trials": [n for n, trial in trials.items() if any(number in shared for number, _ in trial.host_weights)],
            "host_bytes": sum(sizes[number] for number in shared),
            "device_bytes": [
                sum(size for number, size in ledger.shared.items() if number in shared)
                + sum(size for (trial, _), (_, size) in ledger.slots.items() if trial == SHARED)
                for ledger in ledgers
            ],
        }

    def of_trials(self, state_of: Callable[[int], str]) -> list[dict[str, Any]]:
        """Data on each trial, ended ones included. `steps` have begun, evaluations too; `trained_steps` have ended, of
        which one takes `step_s`."""
        return [
            {
                "trial": number,
                "shared_weights": (),
                **deepcopy(summary),
                "state": state_of(number),
                "reserved_bytes": self._machine.reserved_bytes(number) if number in self._machine.trials else 0,
                **asdict(self.trace.trials[number]),
                "trained_steps": self.trace.paces[number].steps,
                "step_s": self.trace.paces[number].step_s,
            }
            for number, summary in self._table.summaries.items()
        ]

    def of_time(self) -> list[dict[str, Any]]:
        """The trace's spans, each with the name of its trial."""
        names = {number: summary["name"] for number, summary in self._table.summaries.items()}
        return [{**span._asdict(), "name": names.get(span.trial, "")} for span in self.trace.spans]

    def news(self, state_of: Callable[[int], str]) -> dict[str, Any]:
        """What there is since the last call: spans and samples of memory; and devices and trials as they are now."""
        spans, samples = self.trace.since(*self._told)
        self._told = (spans or [self._told[0]])[-1], (samples or [self._told[1]])[-1]
        return {
            "elapsed_s": self.trace.now_s(),
            "spans": spans,
            "memory": samples,
            "devices": self.of_devices(),
            "trials": self.of_trials(state_of),
        }
