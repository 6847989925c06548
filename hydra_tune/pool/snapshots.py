"""Takes snapshots of a pool, for views and for a study's attributes (`show/snapshot.py`).

A snapshot costs some ten microseconds a live trial, under the pool's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra_tune.devices.device import Device
from hydra_tune.pool.report import Report
from hydra_tune.pool.trial_table import TrialTable
from hydra_tune.pool.waiting_trials import WaitingTrials
from hydra_tune.schedule.machine import Machine
from hydra_tune.show.snapshot import DeviceSnapshot, PoolSnapshot, TrialSnapshot

if TYPE_CHECKING:
    from hydra_tune.schedule.state import DeviceState
    from hydra_tune.trials.trial import Trial


@dataclass
class _FirstSight:
    """When a trial was seen first, with the device seconds that it had then."""

    at_s: float
    device_s: float


class Snapshots:
    """One pool's. Called under the pool's lock, once its report is up to date (`EventLoop.settle`)."""

    def __init__(
        self, devices: Sequence[Device], machine: Machine, table: TrialTable, report: Report, waiting: WaitingTrials
    ) -> None:
        self._devices = devices
        self._machine = machine
        self._table = table
        self._report = report
        self._paces = report.trace.paces
        self._waiting = waiting
        self._first: dict[int, _FirstSight] = {}  # by live trial

    def take(self, host_budget_bytes: int) -> PoolSnapshot:
        live = [number for number in self._table.summaries if number in self._table.leases]
        self._first = {number: first for number, first in self._first.items() if number in self._table.leases}
        devices = zip(self._devices, self._machine.devices, strict=True)
        return PoolSnapshot(
            elapsed_s=self._report.trace.now_s(),
            devices=tuple(self._of_device(device, state) for device, state in devices),
            trials=tuple(self._of_trial(number) for number in live),
            host_used_bytes=self._machine.host_used_bytes,
            host_budget_bytes=host_budget_bytes,
        )

    def figures(self, trial: Trial) -> dict[str, Any]:
        """One trial's, under flat keys that dashboards sort by; None for what is not known yet. Most is known once a
        first step was measured. Ray Tune's table shows the first numbers.

        hydra/peak_mib      device memory that a step takes at most: the least budget that it fits
        hydra/step_ms       of a mini-batch, with waits and the script's own time
        hydra/stalled_pct   the part of its time at tasks that it waited for the device or a shard
        """
        totals, pace = self._report.trace.trials[trial.id], self._paces[trial.id]
        at_tasks_s, is_cut = totals.busy_s + totals.stalled_s, bool(trial.summary["shards"])
        state = "resident" if trial.summary["resident"] else "spilled"
        if trial.id in self._machine.trials:
            state = self._state_of(trial.id)
        measured = {
            "hydra/step_ms": None if pace.step_s is None else round(1e3 * pace.step_s, 2),
            "hydra/peak_mib": _mib(trial.planner.peak_bytes),
            "hydra/steps": pace.steps,
            "hydra/waited_s": round(trial.lease.memory_wait_s, 1),
            "hydra/weights_mib": _mib(trial.summary["weight_bytes"]),
            "hydra/shards": len(trial.summary["shards"]),
            "hydra/promoted_mib": _mib(totals.promoted_bytes),
            "hydra/spilled_mib": _mib(totals.spilled_bytes),
            "hydra/busy_s": round(totals.busy_s, 3),
            "hydra/stalled_pct": round(100 * totals.stalled_s / at_tasks_s, 1) if at_tasks_s else None,
        }
        where = {"hydra/state": state, "hydra/device": trial.device.name}
        return {**where, **(measured if is_cut else dict.fromkeys(measured))}

    def _of_device(self, device: Device, state: DeviceState) -> DeviceSnapshot:
        computes = state.ledger.pilot if state.running is None else state.running.trial
        on_their_way = [task.trial for task in state.in_flight.values()]
        totals = self._report.trace.devices[device.number]
        return DeviceSnapshot(
            name=device.name,
            budget_bytes=device.budget_bytes,
            used_bytes=device.used_bytes,
            peak_bytes=device.peak_bytes,
            computes=self._name(computes),
            promotes=self._name(on_their_way[0] if on_their_way else None),
            busy_s=totals.busy_s,
            stalled_by=dict(self._report.trace.stalls[device.number]),
        )

    def _name(self, number: int | None) -> str:
        return "" if number is None else str(self._table.summaries[number]["name"])

    def _of_trial(self, number: int) -> TrialSnapshot:
        name, state, now_s = self._name(number), self._machine.trials.get(number), self._report.trace.now_s()
        since_s = self._table.leases[number].waits_since_s
        waits_s = None if since_s is None else now_s - since_s
        if state is None:  # it waits for host memory
            return TrialSnapshot(name, self._waiting.state_of(number), waits_s=waits_s)
        progress = state.progress
        first, pace = self._first.setdefault(number, _FirstSight(now_s, progress.device_s)), self._paces[number]
        lived_s = now_s - first.at_s
        return TrialSnapshot(
            name=name,
            state=self._state_of(number),
            steps=pace.steps,
            total_steps=progress.total_steps,
            step_s=pace.step_s,
            value=progress.value,
            device_bytes=self._machine.reserved_bytes(number),
            host_bytes=state.host_bytes,
            waits_s=waits_s,
            shards=len(self._table.summaries[number]["shards"]),
            device_share=min(1.0, (progress.device_s - first.device_s) / lived_s) if lived_s else 0.0,
        )

    def _state_of(self, number: int) -> str:
        """As `WaitingTrials.state_of`, with more words for a trial that does not wait."""
        told, trial = self._waiting.state_of(number), self._machine.trials[number]
        if told != "live":
            return told
        if any(device.ledger.pilot == number for device in self._machine.devices):
            return "measuring"
        if not trial.admitted:
            return "starts"
        return "resident" if trial.plan.resident else "spilled"


def _mib(num_bytes: int) -> float:
    return round(num_bytes / 2**20, 3)
