"""One pool of devices for all live trials: carries out what the scheduler decides.

The machine decides under the pool's lock; a trial's own thread does the trial's work outside of it. So it does
promotions, but for those made ahead, which a device's thread copies (`copier`). In a turn that lasts it goes on by
itself, without the lock, and says in sums what it has done (`lease`); whatever else it tells the pool ends the turn.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hydra_tune import events as e
from hydra_tune import timeline, workload
from hydra_tune.config import ALIGNMENT_BYTES, format_bytes
from hydra_tune.copier import Copier
from hydra_tune.device import Device
from hydra_tune.devices import host_bytes_for, open_devices
from hydra_tune.errors import BudgetError, ConfigError, PoolClosedError, TrialStopped
from hydra_tune.fingerprint import PlanKey
from hydra_tune.fork import gate, new_in_child
from hydra_tune.garbage import Wait, collect_beside
from hydra_tune.interrupts import Stop, interrupts
from hydra_tune.lease import LOOK_S, Lease
from hydra_tune.planning.kind import Kind, StepMeasure
from hydra_tune.policy import Policy, policy_named
from hydra_tune.randomness import RandomState
from hydra_tune.recording import recorded
from hydra_tune.schedule import Machine
from hydra_tune.shard import Task, TrialPlan
from hydra_tune.trace import BETWEEN, During, TaskClock, Trace
from hydra_tune.workload import TrialWork

if TYPE_CHECKING:
    from hydra_tune.trial import Trial

logger = logging.getLogger("hydra_tune")
InstructionT = TypeVar("InstructionT", bound=e.Instruction)
_LOOK_AROUND_S = 1.0  # nobody says that a model was collected
_SEED_STRIDE = 1_000_003  # seeds of neighbouring trials lie apart
_DEVICE_KEYS = ("name", "budget_bytes", "used_bytes", "peak_bytes", "measured_peak_bytes")  # in a report


class Copy:
    """Of a shard, ahead of its task."""

    def __init__(self, promote: e.Promote) -> None:
        self.promote = promote


class ShardPool:
    """The devices that all live trials share, and the budget of each.

    Args:
        devices: ``"auto"`` (every GPU, else one virtual device on the CPU), a name, or a list of names.
            ``["cpu", "cpu"]`` makes two virtual devices.
        memory: budget in bytes a device: ``"20GiB"``, an int, a list with one for each device, or
            ``"auto"``: what is free on a GPU, less a margin; a quarter of what the host has left.
        host_memory: bytes for weights, gradients and optimizer states of all trials that live together; those beyond
            wait in `prepare`. ``"auto"``: what the host has left beside its virtual devices.
        policy: the order in which ready tasks get devices, an object of `hydra_tune.policy` or its name.
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
        self._devices = tuple(open_devices(devices, memory))
        self.seed = torch.initial_seed() if seed is None else seed
        self.num_threads = torch.get_num_threads()
        self.plans: dict[PlanKey, TrialPlan] = {}  # the latest of each architecture
        self.measures: dict[PlanKey, list[StepMeasure]] = {}  # by `partition.plan_key`
        self.refusals: dict[tuple[PlanKey, Kind], BudgetError] = {}  # of first steps that had the whole device
        self.too_large: set[PlanKey] = set()  # keys of resident plans under which a trial ran out of memory
        self.host_memory_bytes = host_bytes_for(host_memory, self._devices)  # for all live trials together
        self._machine = Machine(
            [device.budget_bytes for device in self._devices],
            order,
            host_bytes=self.host_memory_bytes,
            least_ahead_bytes=self._devices[0].least_ahead_bytes,
            links_bytes_per_s=[device.link_bytes_per_s for device in self._devices],
            alignment_bytes=ALIGNMENT_BYTES,
        )
        for device, state in zip(self._devices, self._machine.devices, strict=True):
            device.ledger = state.ledger
        self._homes_move = len(self._devices) > 1 and all(device.is_virtual for device in self._devices)
        self.spills_behind = any(device.spills_behind for device in self._devices)  # plans are made for any of them
        self._lock = threading.RLock()
        gate.guard(self._lock)
        self._trials: weakref.WeakValueDictionary[int, Trial] = weakref.WeakValueDictionary()  # a model owns its trial
        self._granted: dict[int, deque[e.Instruction]] = {}
        self._wake: dict[int, threading.Condition] = {}
        self._leases: dict[int, Lease] = {}  # of each trial
        self._turns: list[Lease | None] = [None] * len(self._devices)  # those that last
        self._quantum_s = order.quantum_s
        self._copiers = [Copier(device.name, self.num_threads) for device in self._devices]
        self._copying: dict[int, list[Copy]] = {}  # ahead of their tasks, by trial
        self._ids = itertools.count()
        self._summaries: dict[int, dict[str, Any]] = {}
        self._abandoned: deque[int] = deque()  # collected with their models; only noted there, ended later
        self._trace = Trace()
        self._clocks = [TaskClock(self._trace, device) for device in self._devices]
        self._closed = False

    @property
    def devices(self) -> tuple[Device, ...]:
        """Each with its name, budget_bytes, used_bytes, peak_bytes and measured_peak_bytes."""
        self.end_abandoned()
        return self._devices

    @property
    def budget_bytes(self) -> int:
        """What every device has: plans are made for it, so that any device may be a trial's home."""
        return min(device.budget_bytes for device in self._devices)

    def random_state(self, number: int) -> RandomState:
        """The random state of the trial with this number."""
        return RandomState((self.seed + _SEED_STRIDE * (number + 1)) % 2**63)

    def report(self) -> dict[str, Any]:
        """Plain data on what each device and each trial, ended ones included, has done so far."""
        with self._lock:
            self._end_abandoned()
            self._settle_clocks()
            for trial in self._trials.values():
                self.note_summary(trial)
            devices = [
                {key: getattr(device, key) for key in _DEVICE_KEYS} | asdict(self._trace.devices[device.number])
                for device in self._devices
            ]
            trials = [
                {
                    "trial": i,
                    **deepcopy(summary),
                    "state": self._state(i, summary["state"]),
                    "reserved_bytes": self._machine.reserved_bytes(i) if i in self._machine.trials else 0,
                    **asdict(self._trace.trials[i]),
                }
                for i, summary in self._summaries.items()
            ]
            return {"elapsed_s": self._trace.now_s(), "devices": devices, "trials": trials}

    def _settle_clocks(self) -> None:
        for lease in self._turns:
            if lease is not None:
                self._note_ran(lease)
        for clock in self._clocks:
            clock.settle()

    def _state(self, trial: int, state: str) -> str:
        """What it says itself; if it is live, what it waits for."""
        awaited = self._machine.awaits(trial) if state == "live" and trial in self._machine.trials else None
        if awaited is None:
            return state
        device, measured = awaited
        if measured is not None:
            return f"waits for the pilot or first step of {self._summaries[measured]['name']}"
        return f"waits for memory of {self._devices[device].name}"

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
        trials = self.report()["trials"]
        return recorded(self.timeline(), trials)

    def save_workload(self, path: str | PathLike[str]) -> Path:
        """Write `workload()` as JSON, for ``hydra-tune simulate``."""
        return workload.save(self.workload(), path)

    def close(self) -> None:
        """Stop every live trial at its next task boundary and refuse new ones. May be called twice."""
        with self._lock:
            self._closed = True
            for lease in self._turns:
                if lease is not None and lease.revoke():
                    self._end_turn(lease)
            self.wake_all()

    def wake_all(self) -> None:
        """Who waits looks again."""
        with self._lock:
            for wake in self._wake.values():
                wake.notify_all()

    @property
    def host_free_bytes(self) -> int:
        """What of its host memory no live trial has."""
        with self._lock:
            return self.host_memory_bytes - self._machine.host_used_bytes

    @property
    def host_bytes_a_trial(self) -> int:
        """Of the one of the live trials that takes the most; 0 while there is none."""
        with self._lock:
            return max((trial.host_bytes for trial in self._machine.trials.values()), default=0)

    def __enter__(self) -> ShardPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---- for trials ----

    def add_trial(
        self,
        make: Callable[[int, Device], Trial],
        total_steps: int | None,
        host_bytes: int,
        name: str | None,
        stop: Stop,
    ) -> Trial:
        """Place a trial, once host memory has room for it. It has so many mini-batches, if that is known; `stop` ends
        the waiting.

        Raises:
            BudgetError: it needs more than all trials together may have.
        """
        with self._lock:
            self.check_usable()
            self._end_abandoned()
            number = next(self._ids)
            name = name or f"trial {number}"
            self._check_host_bytes(name, host_bytes)
            self._granted[number] = deque()
            self._leases[number] = Lease(number, self._trace.now_s)
            self._wake[number] = threading.Condition(self._lock)
            try:
                home = self._await_place(e.TrialAdded(number, total_steps, host_bytes, self._homes_move), name, stop)
                trial = self._trials[number] = make(number, self._devices[home])
            except BaseException:
                self._summaries.pop(number, None)
                self._handle(e.TrialEnded(number))
                self._leave(number)
                raise
            self.note_summary(trial)
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

    def _await_place(self, event: e.TrialAdded, name: str, stop: Stop) -> int:
        self._handle(event)
        wait, awaited = Wait(), f"waits for {format_bytes(event.host_bytes)} of host memory"
        self._summaries[event.trial] = {"name": name, "state": awaited}
        while not self._granted[event.trial]:
            interrupts.check()
            self.check_usable()
            stop.check()
            self._wait(event.trial, wait)
        place = self._granted[event.trial].popleft()
        assert isinstance(place, e.Place), place
        return place.device

    def tell(self, event: e.Event) -> None:
        with self._lock:
            self._handle(event)

    def tell_between_tasks(self, trial: Trial, event: e.Event) -> None:
        """While no turn of the trial's lasts, and none of its copies is under way."""
        with self._lock:
            self.give_back(trial)
            self.await_copies(trial)
            self._handle(event)

    def ask(
        self, trial: Trial, event: e.PilotReady | e.PlanReady | e.StepReady | e.Outgrown, answer: type[InstructionT]
    ) -> InstructionT:
        """Between tasks; wait until the scheduler grants it."""
        with self._lock:
            self.give_back(trial)
            self.await_copies(trial)
            self.check_open(trial)
            self._end_abandoned()
            self._handle(event)
            try:
                instruction: InstructionT = self._await(trial.id, (answer,))
            except BaseException:  # it may go on, and ask anew
                self._handle(e.Withdrawn(trial.id))
                raise
            return instruction

    def share(self, key: PlanKey, measure: StepMeasure) -> None:
        """Keep what a first step has shown for the trials to come; let go of what none can need, for a class of its
        model is gone."""
        with self._lock:
            for gone in [other for other in self.measures if not other.can_be_met]:
                del self.measures[gone]
                self.plans.pop(gone, None)
                self.too_large.discard(gone)
            for refused in [each for each in self.refusals if not each[0].can_be_met]:
                del self.refusals[refused]
            known = self.measures.get(key, [])
            self.measures[key] = [*(m for m in known if m.cut == measure.cut and not measure.replaces(m)), measure]

    def free_bytes_of(self, trial: Trial) -> int:
        """Of its home, where it has that to itself: all that no other trial holds for life."""
        with self._lock:
            ledger = self._machine.devices[self._machine.trials[trial.id].home].ledger
            return ledger.budget_bytes - ledger.held_bytes

    def readmit(self, trial: Trial, plan: TrialPlan) -> bool:
        """With another plan that holds the same; whether it was done at once. Else nothing has changed."""
        with self._lock:
            self.check_open(trial)
            self.give_back(trial)
            self._handle(e.PlanReady(trial.id, plan, waits=False))
            at_once = bool(self._granted[trial.id])
            if at_once:
                self._await(trial.id, (e.Admit,))
            return at_once

    def enter_step(self, trial: Trial) -> None:
        self.ask(trial, e.StepReady(trial.id), e.Enter)
        self._leases[trial.id].in_step = True

    def leave_step(self, trial: Trial, *, trained: bool) -> None:
        with self._lock:
            self.give_back(trial)
            self.await_copies(trial)
            lease = self._leases[trial.id]
            if lease.in_step:  # else who ended its turn has told so
                lease.in_step = False
                self._handle(e.StepDone(trial.id, trained))

    def note_summary(self, trial: Trial) -> None:
        """Kept for the report, should the trial be collected with its model."""
        self._summaries[trial.id] = trial.summary()

    def figures(self, trial: Trial) -> dict[str, Any]:
        """Plain data on what one trial has done so far, a few numbers."""
        with self._lock:
            if not trial.ended:  # then it was noted
                self.note_summary(trial)
            summary, totals = self._summaries[trial.id], asdict(self._trace.trials[trial.id])
        keys = ("device", "steps", "resident", "weight_bytes")
        return {**{key: summary[key] for key in keys}, "shards": len(summary["shards"]), **totals}

    def acquire(self, task: Task, after: tuple[Task, float] | None = None) -> float:
        """Wait for the lease and the shard; when the task began, in seconds. `after` is the task that ends with this,
        and when it began."""
        trial, lease, ready = self._trials[task.trial], self._leases[task.trial], e.TaskReady(task, at_home=True)
        try:
            with self._lock:
                asked_s = self._trace.now_s()
                if self.give_back(trial):
                    after = None
                if after is None:
                    self.check_open(trial)
                    self._handle(ready)
                else:
                    self._end_task(after[0], after[1], asked_s, ready)
                    self.check_open(trial)
                waited = not self._granted[task.trial]
                granted = self._await(task.trial, (e.Promote, e.Run))
                device = self._devices[granted.device]
                if isinstance(granted, e.Run):
                    return self._note_start(task, device, asked_s, waited=waited)
                self._handle(e.Promoted(task, device.number))  # by this thread: as a part of the task
                self._await(task.trial, (e.Run,))
                promote_s = self._trace.now_s()
            trial.promote_shard(device, task.shard, granted.offset, granted.num_bytes)
            with self._lock:
                self._trace.note("promote", task, device.number, promote_s, self._trace.now_s())
                return self._note_start(task, device, asked_s, waited=True)
        except BaseException:
            with self._lock:
                self._drop_turn(lease)
                self.await_copies(trial)
                self._handle(e.Failed(task))
                self._granted[task.trial].clear()
            raise

    def release(self, task: Task, start_s: float) -> None:
        with self._lock:
            self._end_task(task, start_s, self._trace.now_s(), None)

    def _end_task(self, task: Task, start_s: float, end_s: float, then: e.TaskReady | None) -> None:
        device = self._device_of(task)
        clock = self._clocks[device]
        self._handle(e.Done(task, clock.end(task, start_s, end_s), then), end_s)

    def _device_of(self, task: Task) -> int:
        """That it runs on."""
        device = self._machine.trials[task.trial].on
        assert device is not None, f"{task} does not run"
        return device

    def _note_start(self, task: Task, device: Device, asked_s: float, *, waited: bool) -> float:
        """Of a task, in seconds; and what it and its device have waited for until now."""
        start_s = self._trace.now_s()
        if waited:
            self._trace.note("wait", task, device.number, asked_s, start_s)
        self._clocks[device.number].begin(start_s)
        if self._leases[task.trial].is_open:
            self._leases[task.trial].start(task, start_s)
        return start_s

    def slot_of(self, task: Task) -> tuple[int, int]:
        """Offset and bytes of its shard's slot; none for a shard whose weights are all held."""
        with self._lock:
            ledger = self._machine.devices[self._device_of(task)].ledger
            return ledger.slots.get((task.trial, task.shard), (0, 0))

    def end_trial(self, trial: Trial) -> None:
        """Take back everything; the others go on."""
        with self._lock:
            self._drop_turn(self._leases.get(trial.id))
            self.await_copies(trial)
            self._end_counting(trial.id)
            self.note_summary(trial)
            self._forget(trial.id)
            self._trials.pop(trial.id, None)

    @property
    def is_shared(self) -> bool:
        """By several trials, now."""
        return len(self._trials) > 1

    def now_s(self) -> float:
        """Since the pool began."""
        return self._trace.now_s()

    def note_moved(self, trial: int, what: str, device: Device, num_bytes: int, during: During | None = None) -> None:
        """Of what a trial has moved (``"promoted_bytes"``); `during`, for a span of the task that it runs."""
        with self._lock:
            self._trace.count(what, device.number, trial, num_bytes)
            task = self._machine.devices[device.number].running
            if during is None or task is None or task.trial != trial:
                return
            if isinstance(during, tuple):
                self._clocks[device.number].spilled(task, *during)
            else:
                self._trace.note("spill", task, device.number, during, self._trace.now_s())

    def check_usable(self) -> None:
        if self._closed:
            raise PoolClosedError("a closed pool takes no trials. Make a new ShardPool.")

    def check_open(self, trial: Trial) -> None:
        """The task boundary at which a trial stops that is to, or whose pool is closed."""
        trial.stop.check()
        if self._closed and trial.of_runner:
            raise TrialStopped("the pool was closed")
        if self._closed:
            raise PoolClosedError(
                "a prepared model runs in its pool, but that was closed. Call hydra_tune.release(model) to go on in "
                "plain PyTorch; then it may be prepared in a new ShardPool, too."
            )

    # ---- turns that last ----

    def lease_of(self, trial: int) -> Lease:
        return self._leases[trial]

    def give_back(self, trial: Trial) -> bool:
        """In the trial's thread: its turn, if one lasts, ends here. Whether one did."""
        lease = self._leases[trial.id]
        if not lease.is_open:  # seldom true
            return False
        with self._lock:
            lease.end()
            if lasted := lease.is_open:  # still
                self._end_turn(lease)
            return lasted

    def hear(self, trial: Trial) -> None:
        """What the trial has done in its turn, which ends if it is to."""
        lease = self._leases[trial.id]
        with self._lock:
            if lease.is_open and lease.revoked:
                self._end_turn(lease)
            elif lease.is_open:
                self._note_ran(lease)

    def _end_turn(self, lease: Lease) -> None:
        """Its holder is between two tasks, in whatever thread this is."""
        task, in_step = lease.task, lease.in_step
        device = self._drop_turn(lease)
        if self._clocks[device].cause == "":
            self._clocks[device].idles(lease.told_s, BETWEEN)
        self._handle(e.Done(task))
        if not in_step:
            self._handle(e.StepDone(lease.trial, trained=False))  # those that trained were told

    def _drop_turn(self, lease: Lease | None) -> int:
        """The device that it was on; of the turn the machine is told nothing."""
        if lease is None or lease.device is None:
            return -1
        device = lease.device.number
        lease.revoke()  # first
        self._note_ran(lease)
        lease.close()
        self._turns[device] = None
        return device

    def _note_ran(self, lease: Lease) -> None:
        tasks = lease.take_ran()
        steps = lease.num_steps - lease.told_steps
        lease.told_steps += steps
        if lease.device is None or not (tasks or steps):
            return
        seconds = self._clocks[lease.device.number].ran(lease.trial, tasks, lease.told_s)
        if tasks:
            step, *_, lease.told_s, _ = tasks[-1]
            self._summaries[lease.trial]["steps"] = step
        self._handle(e.Worked(lease.trial, seconds, steps))

    def _look_at_turn(self, trial: int) -> float:
        """That of who is in the trial's way, if it waits for one that lasts, and nobody else looks; for how many
        seconds it may wait now."""
        state = self._machine.trials.get(trial)
        lease = None if state is None else self._turns[state.home]
        if lease is None or lease.device is None or lease.trial == trial:
            return _LOOK_AROUND_S
        if lease.revoked:
            if not lease.busy:
                self._end_turn(lease)
            return _LOOK_AROUND_S
        if lease.watcher is None and trial in self._machine.ready.of:
            lease.watcher = trial
        if lease.watcher != trial:
            return _LOOK_AROUND_S
        now_s = self._trace.now_s()
        if lease.is_idle(now_s):
            if lease.revoke():
                self._end_turn(lease)
            return LOOK_S
        if now_s - lease.since_s >= self._quantum_s:
            self._note_ran(lease)
            lease.since_s = now_s
            self._handle(e.Expired(lease.device.number))
        return min(LOOK_S, max(self._quantum_s, 1e-3))

    def _look_no_more(self, trial: int) -> None:
        """Another one of those that wait does."""
        for device, lease in enumerate(self._turns):
            if lease is not None and lease.watcher == trial:
                lease.watcher = None
                self._wake_one(device)

    def _wake_one(self, device: int) -> None:
        """Of those that wait for a turn there."""
        for waiting in self._machine.ready.of.values():
            if waiting.home == device:
                self._wake[waiting.task.trial].notify_all()
                break

    # ---- events and instructions ----

    def _handle(self, event: e.Event, at_s: float | None = None) -> None:
        """It has happened then, or now."""
        recalled: list[Lease] = []
        for instruction in self._machine.handle(event):
            if isinstance(instruction, e.Drop):
                self._drop(instruction)
                continue
            if isinstance(instruction, e.Promote) and instruction.ahead:
                self._promote_ahead(instruction)
                continue
            if isinstance(instruction, e.Move):
                self._trials[instruction.trial].move_home(self._devices[instruction.device])
                continue
            if isinstance(instruction, e.Recall):
                recalled.append(self._leases[instruction.trial])
                continue
            if isinstance(instruction, e.Run) and instruction.lasts:
                self._begin_turn(instruction)
            trial = instruction.task.trial if isinstance(instruction, (e.Promote, e.Run)) else instruction.trial
            self._granted[trial].append(instruction)
            self._wake[trial].notify_all()
        for device, clock in enumerate(self._clocks):
            cause = self._machine.idle_cause(device)
            if cause not in ("", clock.cause):
                clock.idles(self._trace.now_s() if at_s is None else at_s, cause)
        for lease in recalled:
            if lease.revoke() and lease.is_open:
                self._end_turn(lease)

    def _begin_turn(self, run: e.Run) -> None:
        lease = self._turns[run.device] = self._leases[run.task.trial]
        lease.open(run.task, self._devices[run.device])
        self._wake_one(run.device)

    def _drop(self, drop: e.Drop) -> None:
        trial = self._trials.get(drop.trial)
        if trial is not None:
            trial.drop_shard(self._devices[drop.device], drop.shard)
        self._devices[drop.device].free_slot(drop.offset, drop.num_bytes)
        self._trace.count("dropped_bytes", drop.device, drop.trial, drop.num_bytes)

    def _promote_ahead(self, promote: e.Promote) -> None:
        copy = Copy(promote)
        self._copying.setdefault(promote.task.trial, []).append(copy)
        self._copiers[copy.promote.device].submit(partial(_promote_ahead, weakref.ref(self), copy))

    def _has_arrived(self, copy: Copy, start_s: float) -> None:
        """One that failed is made again when the task runs."""
        promote = copy.promote
        with self._lock:
            left = self._copying[promote.task.trial]
            left.remove(copy)
            if not left:
                del self._copying[promote.task.trial]
            self._trace.note("promote", promote.task, promote.device, start_s, self._trace.now_s())
            self._wake[promote.task.trial].notify_all()
            self._handle(e.Promoted(promote.task, promote.device))

    def await_copies(self, trial: Trial) -> None:
        """Those of this trial that are under way: host memory may not change, nor the slot go, before they are made.
        Who has the lock keeps others from beginning one meanwhile."""
        if trial.id in self._copying:  # seldom
            with self._lock:
                while self._copying.get(trial.id):
                    self._keep_copying()
                    self._wake[trial.id].wait(_LOOK_AROUND_S)

    def _keep_copying(self) -> None:
        for copier in self._copiers:
            copier.keep_going()

    def _await(self, trial: int, answers: tuple[type, ...]) -> Any:
        if not self._granted[trial]:
            wait = Wait()
            try:
                while not self._granted[trial]:
                    interrupts.check()
                    self.check_open(self._trials[trial])
                    self._wait(trial, wait)
            finally:
                self._look_no_more(trial)
        instruction = self._granted[trial].popleft()
        assert isinstance(instruction, answers), (instruction, answers)
        return instruction

    def _wait(self, trial: int, wait: Wait) -> None:
        """Until it is told something, for a while. A plain script's trial, which nobody ends, ends as garbage."""
        self._keep_copying()
        seconds = self._look_at_turn(trial)
        if not self._granted[trial]:
            self._wake[trial].wait(seconds)
        if wait.shall_collect() and any(not t.of_runner and t.id != trial for t in self._trials.values()):
            collect_beside()
        self._end_abandoned()
        begun = self._machine.tasks_begun + sum(lease.begun for lease in self._turns if lease is not None)
        if wait.shall_warn(begun) and not self._granted[trial]:
            self._warn_of_wait(trial)

    def _warn_of_wait(self, trial: int) -> None:
        machine, summary = self._machine, self._summaries[trial]
        turns = zip(machine.devices, self._turns, strict=True)
        if any(d.ledger.pilot is not None or (d.running and (turn is None or turn.busy)) for d, turn in turns):
            return
        bytes_of = machine.reserved_bytes if trial in machine.trials else lambda i: machine.trials[i].host_bytes
        others = [i for i in machine.trials if i != trial and bytes_of(i)]
        if others:
            logger.warning(
                "%s %s, and no task has begun for a while: %s. What is not busy elsewhere (loading, validation, a "
                "pause) is kept for nothing: by its optimizer, a loss, or an exception that came through its frame. "
                "Drop that, or call hydra_tune.release(model).",
                summary["name"],
                self._state(trial, summary["state"]),
                ", ".join(f"{self._summaries[i]['name']} has {format_bytes(bytes_of(i))}" for i in others),
            )

    def end_abandoned(self) -> None:
        """Take back what trials held whose models were collected."""
        with self._lock:
            self._end_abandoned()

    def _end_abandoned(self) -> None:
        for _ in range(len(self._abandoned)):
            number = self._abandoned.popleft()
            if self._copying.get(number):
                self._abandoned.append(number)
            elif number in self._granted:
                self._summaries[number]["state"] = "ended"
                self._end_counting(number)
                self._forget(number)

    def _end_counting(self, number: int) -> None:
        """Before others may have its bytes."""
        for device in self._devices:
            device.meter.end_trial(number)

    def _forget(self, number: int) -> None:
        self._drop_turn(self._leases.get(number))
        if number in self._machine.trials:
            self._handle(e.TrialEnded(number))
        self._leave(number)

    def _leave(self, number: int) -> None:
        for of_trials in (self._granted, self._wake, self._leases):
            of_trials.pop(number, None)


def _promote_ahead(reference: weakref.ref[ShardPool], copy: Copy) -> None:
    """In a device's copy thread, until it has arrived: it may have been submitted twice."""
    pool, promote = reference(), copy.promote
    if pool is None or copy not in pool._copying.get(promote.task.trial, ()):
        return
    start_s, trial = pool._trace.now_s(), pool._trials.get(promote.task.trial)
    try:
        if trial is not None and not trial.ended:
            device = pool._devices[promote.device]
            trial.promote_shard(device, promote.task.shard, promote.offset, promote.num_bytes, ahead=True)
    except Exception as error:  # the trial's thread will meet it, too
        logger.debug("%s could not be promoted ahead: %s", promote.task, error)
    finally:
        del trial
        pool._has_arrived(copy, start_s)


_default_pool: ShardPool | None = None
_default_lock = new_in_child(threading.Lock())


def default_pool() -> ShardPool:
    """The pool of scripts that make none: every GPU, else the CPU, with what is free."""
    global _default_pool
    with _default_lock:
        if _default_pool is None or _default_pool._closed:
            _default_pool = ShardPool()
        return _default_pool
