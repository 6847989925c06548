"""One pool of devices for all live trials: what it is made of, which trials it has, and what they have done."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hydra_tune.config import ALIGNMENT_BYTES, format_bytes
from hydra_tune.devices.device import Device
from hydra_tune.devices.open_devices import host_bytes_for, open_devices
from hydra_tune.errors import BudgetError, ConfigError
from hydra_tune.planning.step_kind import KnownArchitecture
from hydra_tune.pool.event_loop import EventLoop
from hydra_tune.pool.lease import Lease
from hydra_tune.pool.recording import recorded
from hydra_tune.process.fork import gate, new_in_child
from hydra_tune.process.interrupts import Stop
from hydra_tune.randomness import RandomState
from hydra_tune.schedule import events as e
from hydra_tune.schedule.machine import Machine
from hydra_tune.schedule.plan import TrialPlan
from hydra_tune.schedule.policy import Policy, policy_named
from hydra_tune.show import timeline
from hydra_tune.simulation import workload
from hydra_tune.simulation.workload import TrialWork

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

_SEED_STRIDE = 1_000_003  # seeds of neighbouring trials lie apart
_MOST_KNOWN = 256  # architectures
_DEVICE_KEYS = ("name", "budget_bytes", "used_bytes", "peak_bytes", "measured_peak_bytes")  # in a report


class ShardPool(EventLoop):
    """The devices that all live trials share, and the budget of each.

    Args:
        devices: ``"auto"`` (every GPU, else one virtual device on the CPU), a name, or a list of names.
            ``["cpu", "cpu"]`` makes two virtual devices.
        memory: budget in bytes a device: ``"20GiB"``, an int, a list with one for each device, or
            ``"auto"``: what is free on a GPU, less a margin; a quarter of what the host has left.
        host_memory: bytes for weights, gradients and optimizer states of all trials that live together; those beyond
            wait in `prepare`. ``"auto"``: what the host has left beside its virtual devices.
        policy: the order in which ready tasks get devices, an object of `hydra_tune.schedule.policy` or its name.
        seed: what trials without a seed of their own derive theirs from; `torch.initial_seed()` if None.

    Raises:
        ConfigError: unknown devices or policy, or budgets that are not bytes or exceed what is there.
    """

    def __init__(
        self,
        devices: str | Sequence[str | torch.device] = "auto",
        memory: int | str | Sequence[int | str] = "auto",
        *,
        host_memory: int | str = "auto",
        policy: Policy | str = "sharded-lrtf",
        seed: int | None = None,
    ) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ConfigError(f"seed is an int or None, got {seed!r}.")
        order = policy_named(policy)
        opened = open_devices(devices, memory)
        self.seed = torch.initial_seed() if seed is None else seed
        self.num_threads = torch.get_num_threads()
        self._known: dict[bytes, KnownArchitecture] = {}  # by `fingerprint.plan_key`, the latest last
        self.host_memory_bytes = host_bytes_for(host_memory, opened)  # for all live trials together
        self.budget_bytes = min(device.budget_bytes for device in opened)  # plans are made for any home
        self.spills_behind = any(device.spills_behind for device in opened)
        self._homes_move = len(opened) > 1 and all(device.is_virtual for device in opened)
        self._ids = itertools.count()
        machine = Machine(
            [device.budget_bytes for device in opened],
            order,
            host_bytes=self.host_memory_bytes,
            least_ahead_bytes=opened[0].least_ahead_bytes,
            links_bytes_per_s=[device.link_bytes_per_s for device in opened],
            alignment_bytes=ALIGNMENT_BYTES,
        )
        for device, state in zip(opened, machine.devices, strict=True):
            device.ledger = state.ledger
        super().__init__(opened, machine, self.num_threads)

    @property
    def devices(self) -> tuple[Device, ...]:
        """Each with its name, budget_bytes, used_bytes, peak_bytes and measured_peak_bytes."""
        self.end_abandoned()
        return self._devices

    def random_state(self, number: int) -> RandomState:
        return RandomState((self.seed + _SEED_STRIDE * (number + 1)) % 2**63)

    # ---- what it has done ----

    def report(self) -> dict[str, Any]:
        """Plain data on what each device and each trial, ended ones included, has done so far."""
        with self._lock:
            self.end_abandoned()
            self._settle_clocks()
            devices = [
                {key: getattr(device, key) for key in _DEVICE_KEYS} | asdict(self._trace.devices[device.number])
                for device in self._devices
            ]
            trials = [
                {
                    "trial": i,
                    **deepcopy(summary),
                    "state": self._state(i),
                    "reserved_bytes": self._machine.reserved_bytes(i) if i in self._machine.trials else 0,
                    **asdict(self._trace.trials[i]),
                }
                for i, summary in self._summaries.items()
            ]
            return {"elapsed_s": self._trace.now_s(), "devices": devices, "trials": trials}

    def _settle_clocks(self) -> None:
        for lease in self._long_leases:
            if lease is not None:
                self._note_ran(lease)
        for clock in self._clocks:
            clock.settle()

    def figures(self, trial: Trial) -> dict[str, Any]:
        """Plain data on what one trial has done so far, a few numbers."""
        told = {key: trial.summary[key] for key in ("device", "steps", "resident", "weight_bytes")}
        with self._lock:
            return {**told, "shards": len(trial.summary["shards"]), **asdict(self._trace.trials[trial.id])}

    def timeline(self) -> list[dict[str, Any]]:
        """Spans of time in order of their end: kind (run, promote, spill, wait, stall), device, trial, step, shard,
        direction, seconds, cause."""
        with self._lock:
            self._settle_clocks()
            names = {number: summary["name"] for number, summary in self._summaries.items()}
            return [{**span._asdict(), "name": names.get(span.trial, "")} for span in self._trace.spans]

    def save_timeline(self, path: str | PathLike[str]) -> Path:
        """Write `timeline()` to a .json for ui.perfetto.dev, or a .html that a browser shows (needs plotly).

        Raises:
            ConfigError: another suffix, or plotly is not installed.
        """
        return timeline.save(self.timeline(), [device.name for device in self.devices], path)

    def workload(self) -> list[TrialWork]:
        """What the trials so far have taken, for `hydra_tune.simulate` with other devices or another policy. Those that
        have made a step; they keep as many as they have made."""
        return recorded(self.timeline(), self.report()["trials"])

    def save_workload(self, path: str | PathLike[str]) -> Path:
        """Write `workload()` as JSON, for ``hydra-tune simulate``."""
        return workload.save(self.workload(), path)

    @property
    def host_bytes(self) -> list[int]:
        """Of host memory, what each live trial has."""
        with self._lock:
            return [trial.host_bytes for trial in self._machine.trials.values()]

    # ---- its end ----

    def close(self) -> None:
        """Stop every live trial at its next task boundary and refuse new ones. May be called twice."""
        with self._lock:
            self._closed = True
            for turn in self._long_leases:
                if turn is not None:
                    self._recall(turn)
            for lease in self.leases.values():
                lease.wake.notify_all()

    def __enter__(self) -> ShardPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---- its trials ----

    def add_trial(self, kind: type[Trial], steps: int | None, host_bytes: int, name: str | None, stop: Stop) -> Trial:
        """Place a trial, once host memory has room for it. It has so many mini-batches, if that is known; `stop` ends
        the waiting.

        Raises:
            BudgetError: it needs more than all trials together may have.
        """

        def check() -> None:
            self.check_usable()
            stop.check()

        with self._lock:
            self.check_usable()
            self.end_abandoned()
            number = next(self._ids)
            name = name or f"trial {number}"
            self._check_host_bytes(name, host_bytes)
            self._summaries[number] = {"name": name, "state": f"waits for {format_bytes(host_bytes)} of host memory"}
            self.leases[number] = Lease(number, self._trace.now_s, threading.Condition(self._lock))
            try:
                self._handle(e.TrialAdded(number, steps, host_bytes, self._homes_move))
                home = self._devices[self._await(number, e.Place, check).device]
                trial = self._trials[number] = kind(number, home, pool=self, name=name, stop=stop)
            except BaseException:
                self._forget(number)
                del self._summaries[number]
                raise
            self._summaries[number] = trial.summary
            weakref.finalize(trial, self._abandoned.append, number).atexit = False
            return trial

    def grow_trial(self, trial: Trial, host_bytes: int) -> None:
        """It has another model, of so many bytes of host memory. It does not wait for them: it holds others.

        Raises:
            BudgetError: all trials together may not have so many.
        """
        with self._lock:
            state = self._machine.trials[trial.id]
            self._check_host_bytes(trial.name, state.host_bytes + host_bytes)
            state.host_bytes += host_bytes

    def _check_host_bytes(self, name: str, num_bytes: int) -> None:
        if num_bytes > self.host_memory_bytes:
            raise BudgetError(
                f"{name} needs {format_bytes(num_bytes)} of host memory for its weights, gradients and optimizer "
                f"state, but all trials of this pool may have {format_bytes(self.host_memory_bytes)}. Raise its "
                "host_memory=, or train a smaller model."
            ).lacking(num_bytes, self.host_memory_bytes)

    def readmit(self, trial: Trial, plan: TrialPlan) -> bool:
        """With another plan that holds the same; whether it was done at once. Else nothing has changed."""
        with self._lock:
            self.check_open(trial)
            self.hear(trial, ends=True)
            self._handle(e.PlanReady(trial.id, plan, waits=False))
            granted = self.leases[trial.id].granted
            return bool(granted) and isinstance(granted.popleft(), e.Admit)

    def end_trial(self, trial: Trial) -> None:
        """Take back everything; the others go on."""
        with self._lock:
            self.await_copies(trial)
            self._forget(trial.id)

    def known_of(self, key: bytes) -> KnownArchitecture:
        """What trials of this architecture have shown; the latest architectures are remembered."""
        with self._lock:
            self._known[key] = known = self._known.pop(key, None) or KnownArchitecture()
            if len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            return known

    @property
    def plans(self) -> dict[bytes, TrialPlan]:
        """The latest of each architecture."""
        return {key: known.plan for key, known in self._known.items() if known.plan is not None}

    def note_moved(self, trial: int, what: str, device: Device, num_bytes: int) -> None:
        """Of what a trial has moved (``"promoted_bytes"``)."""
        with self._lock:
            self._trace.count(what, device.number, trial, num_bytes)

    def note_spill(self, trial: int, device: Device, num_bytes: int, during: float | tuple[Any, Any]) -> None:
        """Of the task that it runs: for so many seconds, until now, or between two marks of a device's own."""
        with self._lock:
            self.note_moved(trial, "spilled_bytes", device, num_bytes)
            task = self._machine.devices[device.number].running
            if task is not None and task.trial == trial:
                self._clocks[device.number].spilled(task, during)


_default_pool: ShardPool | None = None
_default_lock = new_in_child(threading.Lock())


def default_pool() -> ShardPool:
    """The process's pool, for scripts that make none: every GPU, else the CPU, with what is free."""
    global _default_pool
    with _default_lock:
        if _default_pool is None or _default_pool._closed or _default_pool.devices[0].process != gate.process:
            _default_pool = ShardPool()
        return _default_pool
