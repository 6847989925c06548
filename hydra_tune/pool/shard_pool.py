"""A pool as its user sees it: devices and their budgets, what trials have done there, and how it is closed.

Trials use its `events` (`event_loop.py`), and share what they have measured in `known`.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hydra_tune.config import ALIGNMENT_BYTES
from hydra_tune.devices.device import Device
from hydra_tune.devices.open_devices import host_bytes_for, open_devices
from hydra_tune.errors import ConfigError
from hydra_tune.planning.known_steps import KnownArchitectures
from hydra_tune.pool.event_loop import EventLoop
from hydra_tune.pool.recording import recorded
from hydra_tune.pool.snapshots import Snapshots
from hydra_tune.process.fork import gate, new_in_child
from hydra_tune.randomness import RandomState
from hydra_tune.schedule.machine import Machine
from hydra_tune.schedule.plan import TrialPlan
from hydra_tune.schedule.policy import Policy, policy_named
from hydra_tune.show import timeline
from hydra_tune.show.environment import environment
from hydra_tune.show.report_page import RunRecord, save_page
from hydra_tune.show.run_file import RunRecorder
from hydra_tune.show.snapshot import PoolSnapshot
from hydra_tune.simulation import workload
from hydra_tune.simulation.workload import TrialWork

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from hydra_tune.trials.trial import Trial

_SEED_STRIDE = 1_000_003  # seeds of neighbouring trials lie apart


class ShardPool:
    """The devices that all live trials share, and the budget of each.

    Args:
        devices: ``"auto"`` (every GPU, else one virtual device on the CPU), a name, or a list of names.
            ``["cpu", "cpu"]`` makes two virtual devices.
        memory: budget in bytes of each device: ``"20GiB"``, an int, a list with one for each device, or
            ``"auto"``: on a GPU, what is free less a margin; virtual devices share a quarter of the host's free memory.
        host_memory: bytes for weights, gradients and optimizer states of all live trials together; trials beyond that
            wait in `prepare`. ``"auto"``: the host's free memory without the budgets of virtual devices.
        policy: the order in which ready tasks get devices, an object of `hydra_tune.schedule.policy` or its name.
        seed: trials without a seed of their own derive theirs from it; `torch.initial_seed()` if None.
        record: a file to which the run is written as it happens. ``hydra-tune report FILE`` makes a page of it, also
            after a crash. A file that there is is continued.

    Raises:
        ConfigError: unknown devices or policy, or budgets that are not bytes or exceed the memory that there is.
    """

    def __init__(
        self,
        devices: str | Sequence[str | torch.device] = "auto",
        memory: int | str | Sequence[int | str] = "auto",
        *,
        host_memory: int | str = "auto",
        policy: Policy | str = "sharded-lrtf",
        seed: int | None = None,
        record: str | PathLike[str] | None = None,
    ) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ConfigError(f"seed is an int or None, got {seed!r}.")
        order = policy_named(policy)
        opened = open_devices(devices, memory)
        self.seed = torch.initial_seed() if seed is None else seed
        self.num_threads = torch.get_num_threads()
        self.host_memory_bytes = host_bytes_for(host_memory, opened)  # for all live trials together
        self.budget_bytes = min(device.budget_bytes for device in opened)  # the least: a plan must fit any device
        self.spills_behind = any(device.spills_behind for device in opened)
        self.logs_plans = True
        self.homes_move = len(opened) > 1 and all(device.is_virtual for device in opened)
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
        self.events = EventLoop(tuple(opened), machine, self.num_threads)
        self._snapshots = Snapshots(opened, machine, self.events.table, self.events.report, self.events.waiting)
        self.known = KnownArchitectures(self.events.lock)
        self.shared_weights = self.events.shared_weights
        self.record = record
        self._recorder = None if record is None else RunRecorder(record, partial(_news, self.events))
        if self._recorder is not None:
            weakref.finalize(self, self._recorder.end).atexit = False

    @property
    def devices(self) -> tuple[Device, ...]:
        """Each with its name, budget_bytes, used_bytes, peak_bytes and measured_peak_bytes."""
        self.events.end_abandoned()
        return self.events.devices

    def random_state(self, number: int) -> RandomState:
        """The random state that the trial with this number starts from, if it has no seed of its own."""
        return RandomState((self.seed + _SEED_STRIDE * (number + 1)) % 2**63)

    # ---- what it has done ----

    def report(self) -> dict[str, Any]:
        """Plain data on what each device and each trial, ended ones included, has done so far, and on the frozen
        weights that live trials share."""
        events, report = self.events, self.events.report
        with events.lock:
            events.end_abandoned()
            events.settle()
            devices, trials = report.of_devices(), report.of_trials(events.waiting.state_of)
            shared = report.of_shared(self.shared_weights.base_numbers)
            return {"elapsed_s": report.trace.now_s(), "devices": devices, "trials": trials, "shared": shared}

    def snapshot(self) -> PoolSnapshot:
        """What devices and live trials do now, for a view."""
        with self.events.lock:
            self.events.end_abandoned()
            self.events.settle()
            return self._snapshots.take(self.host_memory_bytes)

    def command(self, command: str, trial: str) -> str:
        """Pause or resume the live trial of this name, for `hydra-tune top`. Returns what was done.

        Raises:
            ConfigError: there is no such trial, or another command, which needs the trial's search.
        """
        live = {each.name: each for each in self.events.table.live.values()}
        if trial not in live:
            raise ConfigError(f"a trial is commanded while it lives, but {trial!r} is not among {list(live)}.")
        if command not in ("pause", "resume"):
            raise ConfigError(f"a trial of a plain script or of Ray Tune is paused or resumed; got {command!r}.")
        goes_on = live[trial].stop.goes_on
        (goes_on.set if command == "resume" else goes_on.clear)()
        return f"{trial}: {command}d"

    def figures(self, trial: Trial) -> dict[str, Any]:
        """A few figures on what one trial has done so far, under flat keys such as ``hydra/state``."""
        with self.events.lock:
            self.events.settle()
            return self._snapshots.figures(trial)

    def timeline(self) -> list[dict[str, Any]]:
        """Spans of time in order of their end: kind (run, promote, spill, wait, stall), device, trial, step, shard,
        direction, seconds, cause."""
        with self.events.lock:
            self.events.settle()
            return self.events.report.of_time()

    def save_timeline(self, path: str | PathLike[str]) -> Path:
        """Write `timeline()` to a .json for ui.perfetto.dev, or a .html that a browser shows (needs plotly).

        Raises:
            ConfigError: another suffix, or plotly is not installed.
        """
        return timeline.save(self.timeline(), [device.name for device in self.devices], path)

    def save_report(
        self,
        path: str | PathLike[str],
        *,
        results: Mapping[str, Mapping[str, Any]] | None = None,
        figures: Sequence[tuple[str, str]] = (),
        title: str = "hydra_tune report",
    ) -> Path:
        """Write a page on what devices and trials have done, which opens in a browser without a network: the trials,
        where the time went, a timeline to zoom into, memory against the budgets. `hydra_tune.save_report` adds what a
        study knows.

        Args:
            path: of a .html.
            results: columns of the table, by a trial's name: ``{"trial 0": {"value": 0.3}}``.
            figures: more to show, each a title and a plotly figure as JSON.

        Raises:
            ConfigError: another suffix, or there is no such folder.
        """
        with self.events.lock:
            report, spans = self.report(), self.timeline()
            memory = list(self.events.report.trace.memory)
        run = RunRecord(report, spans, memory, environment(), results or {}, figures, title)
        return save_page(run, path)

    def plot_timeline(self) -> Figure:
        """A plotly figure of `timeline()`, with the memory of each device below, for a notebook.

        Raises:
            ConfigError: plotly is not installed.
        """
        names = [device.name for device in self.devices]
        return timeline.figure(self.timeline(), names, list(self.events.report.trace.memory))

    def workload(self) -> list[TrialWork]:
        """What the trials so far have taken, for `hydra_tune.simulate` with other devices or another policy. It has the
        trials that have made a training step, each with as many steps as it has made."""
        return recorded(self.timeline(), self.report()["trials"])

    def save_workload(self, path: str | PathLike[str]) -> Path:
        """Write `workload()` as JSON, for ``hydra-tune simulate``."""
        return workload.save(self.workload(), path)

    @property
    def host_bytes(self) -> list[int]:
        """Bytes of host memory that each live trial has for itself."""
        with self.events.lock:
            trials, bases = self.events.machine.trials.values(), self.shared_weights.base_numbers
            having = Counter(number for trial in trials for number, _ in trial.host_weights)
            return [
                t.host_bytes + sum(size for n, size in t.host_weights if having[n] == 1 and n not in bases)
                for t in trials
            ]

    @property
    def host_used_bytes(self) -> int:
        """Bytes of host memory that live trials have together. What they share counts once."""
        with self.events.lock:
            return self.events.machine.host_used_bytes

    @property
    def plans(self) -> dict[bytes, TrialPlan]:
        """The latest plan of each architecture, by `fingerprint.plan_key`."""
        return {key: known.plan for key, known in self.known.by_key.items() if known.plan is not None}

    # ---- its end ----

    def close(self) -> None:
        """Stop every live trial at its next task boundary and refuse new ones. May be called twice."""
        self.events.close()
        self.shared_weights.kept_bases.clear()
        if self._recorder is not None:
            self._recorder.close()

    def __enter__(self) -> ShardPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _news(events: EventLoop) -> dict[str, Any]:
    """For a recording. It holds no pool, which may be garbage collected meanwhile."""
    with events.lock:
        events.end_abandoned()
        events.settle()
        return events.report.news(events.waiting.state_of)


_default_pool: ShardPool | None = None
_default_lock = new_in_child(threading.Lock())


def default_pool() -> ShardPool:
    """The process's pool, for scripts that make none: every GPU, else the CPU, with ``memory="auto"``."""
    global _default_pool
    with _default_lock:
        if _default_pool is None or _default_pool.events.closed or _default_pool.devices[0].process != gate.process:
            _default_pool = ShardPool()
        return _default_pool
