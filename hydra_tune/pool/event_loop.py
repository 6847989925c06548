"""What a pool and its trials' threads tell the scheduler, and how what it says is carried out.

The machine decides under the pool's lock; a trial's own thread does the trial's work outside of it. So it does
promotions, but for those made ahead, which a device's thread copies (`copier`). In a long lease it goes on by
itself, without the lock, and says in sums what it has done (`lease`); whatever else it tells the pool ends the turn.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from hydra_tune.devices.device import Device
from hydra_tune.devices.meter import end_trial
from hydra_tune.errors import PoolClosedError, TrialStopped
from hydra_tune.pool.copier import start_copier
from hydra_tune.pool.lease import Lease
from hydra_tune.pool.trace import BETWEEN, TaskClock, Trace
from hydra_tune.process.fork import gate
from hydra_tune.process.garbage import collect
from hydra_tune.process.interrupts import interrupts
from hydra_tune.schedule import events as e
from hydra_tune.schedule.machine import Machine
from hydra_tune.schedule.plan import Task
from hydra_tune.schedule.state import PROMOTION

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

logger = logging.getLogger("hydra_tune")
InstructionT = TypeVar("InstructionT", bound=e.Instruction)
LOOK_S = 0.05  # how often one that waits looks at who has a long lease, which costs that one a switch or two
_LOOK_AROUND_S = 1.0  # nobody says that a model was collected
_COLLECT_S = 1.0  # and twice, four times ..: autograd's nodes hide what they refer to until they are gone
_WARN_S = 60.0  # in which nobody was seen to compute


class EventLoop:
    """Of one pool. Methods without an underscore are for trials, and take the lock."""

    def __init__(self, devices: Sequence[Device], machine: Machine, num_threads: int) -> None:
        self._devices = tuple(devices)
        self._machine = machine
        self._lock = threading.RLock()
        gate.guard(self._lock)
        self._trials: weakref.WeakValueDictionary[int, Trial] = weakref.WeakValueDictionary()  # a model owns its trial
        self._abandoned: deque[int] = deque()  # collected with their models; only noted there, ended later
        self._summaries: dict[int, dict[str, Any]] = {}  # of all trials, ended ones included
        self.leases: dict[int, Lease] = {}  # of each trial
        self._long_leases: list[Lease | None] = [None] * len(devices)  # those that last
        self._copiers = [start_copier(self, device.name, num_threads) for device in devices]
        self._copying: dict[int, list[e.PromoteShard]] = {}  # ahead of their tasks, by trial
        os.register_at_fork(after_in_child=self._copying.clear)  # the thread stays behind
        self._trace = Trace()
        self._clocks = [TaskClock(self._trace, device) for device in devices]
        self._closed = False

    # ---- between tasks ----

    def tell(self, event: e.Event) -> None:
        with self._lock:
            self._handle(event)

    def tell_between_tasks(self, trial: Trial, event: e.Event) -> None:
        """While no turn of the trial's lasts, and none of its copies is under way."""
        with self._lock:
            self.hear(trial, ends=True)
            self.await_copies(trial)
            self._handle(event)

    def ask(self, trial: Trial, event: e.Event, answer: type[InstructionT]) -> InstructionT:
        """Between tasks; wait until the scheduler grants it."""
        with self._lock:
            self.check_open(trial)
            self.end_abandoned()
            self.tell_between_tasks(trial, event)
            try:
                return self._await(trial.id, answer, partial(self.check_open, trial))
            except BaseException:  # it may go on, and ask anew
                self._handle(e.Withdrawn(trial.id))
                raise

    def leave_step(self, trial: Trial, *, trained: bool) -> None:
        with self._lock:
            self.hear(trial, ends=True)
            if self.leases[trial.id].in_step:  # else who ended its turn has told so
                self.leases[trial.id].in_step = False
                self.tell_between_tasks(trial, e.StepDone(trial.id, trained))

    def check_open(self, trial: Trial) -> None:
        """The task boundary at which a trial stops that is to, or whose pool is closed."""
        trial.stop.check()
        if self._closed and trial.of_runner:
            raise TrialStopped("the pool was closed")
        self.check_usable()

    def check_usable(self) -> None:
        if self._closed:
            raise PoolClosedError(
                "a closed pool takes no trials, and a prepared model runs in its pool, but that was closed. Call "
                "hydra_tune.release(model) to go on in plain PyTorch. Make a new ShardPool to go on in that."
            )

    # ---- tasks ----

    def acquire(self, trial: Trial, task: Task, after: Task | None = None) -> None:
        """Wait for the lease and the shard; `after` is the task that ends with this."""
        lease, trace = trial.lease, self._trace
        try:
            with self._lock:
                asked_s = promote_s = trace.now_s()
                if lease.device is not None and self.hear(trial, ends=True):
                    after = None
                ready = e.TaskReady(task, True)
                self._handle(ready if after is None else self._end(after, asked_s, ready), asked_s)
                self.check_open(trial)
                waits = not lease.granted
                run = self._await(trial.id, e.Run, partial(self.check_open, trial))
                if waits:
                    promote_s = trace.now_s()
                clock = self._clocks[run.device]
                if run.num_bytes:
                    clock.idles(promote_s, PROMOTION)
            if run.num_bytes:
                copied_bytes = trial.residency.promote_shard(task.shard, run.offset, run.num_bytes)
            with self._lock:
                start_s = trace.now_s()
                if run.num_bytes:
                    trace.note("promote", task, run.device, promote_s, start_s, copied_bytes)
                if waits or run.num_bytes:
                    trace.note("wait", task, run.device, asked_s, start_s)
                mark = clock.begin(start_s)
                if lease.device is not None:
                    lease.start(task, start_s, mark)
        except BaseException:
            with self._lock:
                self._drop_long_lease(lease)
                self.await_copies(trial)
                self._handle(e.Failed(task))
                lease.granted.clear()
            raise

    def release(self, task: Task) -> None:
        with self._lock:
            now_s = self._trace.now_s()
            self._handle(self._end(task, now_s), now_s)

    def _end(self, task: Task, end_s: float, then: e.TaskReady | None = None) -> e.Done:
        return e.Done(task, self._clocks[self._machine.trials[task.trial].home].end(task, end_s), then)

    # ---- long leases ----

    def hear(self, trial: Trial, *, ends: bool = False) -> bool:
        """In the trial's thread: what it has done in its turn, if one lasts. That `ends` here, or if it is to; whether
        it did."""
        lease = self.leases[trial.id]
        if lease.device is None:  # mostly
            return False
        with self._lock:
            if ends:
                lease.end()
            ends = lease.device is not None and (ends or lease.revoked)  # still
            if ends:
                self._end_long_lease(lease)
            else:
                self._note_ran(lease)
            return ends

    def _recall(self, lease: Lease) -> None:
        """End its turn, if one lasts: now, if its holder is between two tasks, else at the end of the holder's task."""
        lease.revoked = True  # first
        if not lease.busy and lease.device is not None:
            self._end_long_lease(lease)

    def _end_long_lease(self, lease: Lease) -> None:
        """Its holder is between two tasks, in whatever thread this is."""
        assert lease.device is not None
        task, in_step, clock = lease.task, lease.in_step, self._clocks[lease.device.number]
        self._drop_long_lease(lease)
        if not clock.cause:
            clock.idles(clock.since_s, BETWEEN)
        self._handle(e.Done(task))
        if not in_step:
            self._handle(e.StepDone(lease.trial, trained=False))  # those that trained were told

    def _drop_long_lease(self, lease: Lease) -> None:
        """If one lasts; of its end the machine is told nothing."""
        if lease.device is not None:
            self._long_leases[lease.device.number] = None
            lease.revoked = True  # first
            self._note_ran(lease)
            lease.close()

    def _note_ran(self, lease: Lease) -> None:
        tasks = [lease.ran.popleft() for _ in range(len(lease.ran))]
        steps = lease.num_steps - lease.told_steps
        lease.told_steps += steps
        if lease.device is None or not (tasks or steps):
            return
        seconds = self._clocks[lease.device.number].ran(lease.trial, tasks)
        self._handle(e.Worked(lease.trial, seconds, steps))

    def _look_at_long_lease(self, trial: int) -> float:
        """That of who is in the trial's way, if it waits for one that lasts and is the first to; for how many seconds
        it may wait now."""
        state = self._machine.trials.get(trial)
        lease = None if state is None else self._long_leases[state.home]
        if state is None or lease is None or lease.trial == trial:
            return _LOOK_AROUND_S
        if lease.revoked and not lease.busy:
            self._end_long_lease(lease)
        first = self._machine.ready.oldest(state.home)
        if lease.revoked or first is None or first.task.trial != trial:
            return _LOOK_AROUND_S
        now_s, quantum_s = self._trace.now_s(), self._machine.policy.quantum_s
        if lease.is_idle():
            self._recall(lease)
        elif now_s - lease.since_s >= quantum_s:
            self._note_ran(lease)
            lease.since_s = now_s
            self._handle(e.Expired(state.home))
        return min(LOOK_S, max(quantum_s, 1e-3))

    # ---- instructions ----

    def _handle(self, event: e.Event, at_s: float | None = None) -> None:
        """It has happened then, or now."""
        recalled: list[Lease] = []
        for instruction in self._machine.handle(event):
            if isinstance(instruction, e.Drop):
                if (trial := self._trials.get(instruction.trial)) is not None:
                    trial.residency.drop_shard(instruction.shard)
                self._devices[instruction.device].free_slot(instruction.offset, instruction.num_bytes)
                self._trace.count("dropped_bytes", instruction.device, instruction.trial, instruction.num_bytes)
            elif isinstance(instruction, e.PromoteShard):  # ahead of its task
                self._copying.setdefault(instruction.task.trial, []).append(instruction)
                self._copiers[instruction.device](partial(self._copy_ahead, instruction))
            elif isinstance(instruction, e.Move):
                trial = self._trials[instruction.trial]
                trial.residency.move_home(self._devices[instruction.device])
                trial.summary["device"] = trial.device.name
            elif isinstance(instruction, e.Recall):
                recalled.append(self.leases[instruction.trial])
            else:
                lease = self.leases[instruction.task.trial if isinstance(instruction, e.Run) else instruction.trial]
                if isinstance(instruction, e.Run) and instruction.lasts:
                    self._long_leases[instruction.device] = lease
                    lease.open(instruction.task, self._devices[instruction.device])
                    if (first := self._machine.ready.oldest(instruction.device)) is not None:
                        self.leases[first.task.trial].wake.notify_all()  # it looks at the holder from here on
                lease.in_step |= isinstance(instruction, e.Enter)
                lease.granted.append(instruction)
                lease.wake.notify_all()
        for device, clock in enumerate(self._clocks):
            cause = self._machine.idle_cause(device)
            if cause not in ("", clock.cause):
                clock.idles(self._trace.now_s() if at_s is None else at_s, cause)
        for lease in recalled:
            self._recall(lease)

    def await_copies(self, trial: Trial) -> None:
        """Those of this trial that are under way: host memory may not change, nor the slot go, before they are made.
        Who has the lock keeps others from beginning one meanwhile."""
        if trial.id in self._copying:  # seldom
            with self._lock:
                self.leases[trial.id].wake.wait_for(lambda: trial.id not in self._copying)

    def _copy_ahead(self, promote: e.PromoteShard) -> None:
        """In a device's copy thread. One that failed is made again when the task runs."""
        task, trace = promote.task, self._trace
        start_s, trial, copied_bytes = trace.now_s(), self._trials.get(task.trial), 0
        try:
            if trial is not None and not trial.ended:
                copied_bytes = trial.residency.promote_shard(task.shard, promote.offset, promote.num_bytes, ahead=True)
        finally:
            del trial
            with self._lock:
                self._copying[task.trial].remove(promote)
                if not self._copying[task.trial]:
                    del self._copying[task.trial]
                trace.note("promote", task, promote.device, start_s, trace.now_s(), copied_bytes)
                self.leases[task.trial].wake.notify_all()
                self._handle(e.Promoted(task, promote.device))

    # ---- waiting ----

    def _await(self, number: int, answer: type[InstructionT], check: Callable[[], None]) -> InstructionT:
        """The next instruction to this trial; `check` ends the waiting. A plain script's trial, which nobody ends, ends
        as garbage."""
        lease, collect_s, waited_s, idle_s = self.leases[number], _COLLECT_S, 0.0, 0.0
        while not lease.granted:
            interrupts.check()
            check()
            wait_s = self._look_at_long_lease(number)
            if not lease.granted:
                lease.wake.wait(wait_s)
            waited_s += wait_s  # at most
            if waited_s >= collect_s:
                collect_s *= 2
                if any(not t.of_runner and t.id != number for t in self._trials.values()):
                    # what ends with the garbage may want the locks that this thread holds
                    threading.Thread(target=collect, name="hydra_tune garbage").start()
            self.end_abandoned()
            idle_s = 0.0 if self._is_busy() else idle_s + wait_s
            if idle_s >= _WARN_S and not lease.granted:
                idle_s = -inf  # once, until somebody computes
                self._warn_of_wait(number)
        instruction = lease.granted.popleft()
        assert isinstance(instruction, answer), (instruction, answer)
        return instruction

    def _is_busy(self) -> bool:
        """Whether anybody computes now, or measures a first step."""
        devices = zip(self._machine.devices, self._long_leases, strict=True)
        return any(d.ledger.pilot is not None or (d.running and (turn is None or turn.busy)) for d, turn in devices)

    def _warn_of_wait(self, number: int) -> None:
        logger.warning(
            "%s %s, and no task has begun for a while, beside %s. What is not busy elsewhere (loading, validation, a "
            "pause) is kept for nothing: by its optimizer, a loss, or an exception that came through its frame. Drop "
            "that, or call hydra_tune.release(model).",
            self._summaries[number]["name"],
            self._state(number),
            ", ".join(trial.name for trial in self._trials.values() if trial.id != number),
        )

    def _state(self, number: int) -> str:
        """What the trial says itself; if it is live, what it waits for."""
        trial, state = self._trials.get(number), str(self._summaries[number]["state"])
        if trial is None or state != "live":
            return state
        if trial.stop.is_paused:
            return "paused"
        device, measured = self._machine.awaits(number) or (None, None)
        if measured is not None:
            return f"waits for the pilot or first step of {self._summaries[measured]['name']}"
        return state if device is None else f"waits for memory of {self._devices[device].name}"

    # ---- ends ----

    def end_abandoned(self) -> None:
        """Take back what trials held whose models were collected."""
        with self._lock:
            for _ in range(len(self._abandoned)):
                number = self._abandoned.popleft()
                if number in self._copying:
                    self._abandoned.append(number)
                else:
                    self._forget(number)

    def _forget(self, number: int) -> None:
        """Once; an end that was interrupted is repeated."""
        if number in self.leases:
            self._summaries[number]["state"] = "ended"
            self._drop_long_lease(self.leases[number])
            end_trial(number, self._devices)  # before others may have its bytes
            self._handle(e.TrialEnded(number))
            del self.leases[number]
        self._trials.pop(number, None)
