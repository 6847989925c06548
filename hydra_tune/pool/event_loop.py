"""Brings events to the scheduler's machine, and the machine's instructions to devices and trials.

The way of an event, and of the answer to it:

    a trial's thread            EventLoop, under its lock          Machine, which does nothing but decide
    acquire(task) ------------> _handle(TaskReady) --------------> reserves bytes, chooses the next task
                                                   <-------------- instructions, for any of the trials
                                _carry_out: Drop           frees a slot of the device
                                            PromoteShard   to the device's copy thread (`promotions.py`)
                                            Move           the trial has another home device
                                            Run, Enter ..  into the lease of its trial, whose thread wakes
             <----------------- await_answer: takes it there
    copies its shard, computes: without the lock
    release(task) ------------> _handle(Done) -------------------> chooses the next task, perhaps another trial's

A thread gives the machine an event and carries out all instructions that come back, also those for other trials. So no
trial waits for a thread of the pool. Two instructions lead to another event:

    PromoteShard   when the copy thread has made the copy: Promoted
    Recall         ends a long lease, which is the end of its task: Done. It is carried out last, after the other
                   instructions of the same decision

The pool calls the trial to copy a shard: the pool knows when the shard has a slot, but the trial's `residency` owns the
memory. A resident trial with a long lease comes here once a lease, not once a task (`long_leases.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from hydra_tune.devices.device import Device
from hydra_tune.devices.meter import end_trial
from hydra_tune.errors import PoolClosedError, TrialStopped
from hydra_tune.pool.lease import Lease
from hydra_tune.pool.long_leases import LongLeases
from hydra_tune.pool.promotions import Promotions
from hydra_tune.pool.report import Report
from hydra_tune.pool.trial_table import TrialTable
from hydra_tune.pool.waiting_trials import Wait, WaitingTrials
from hydra_tune.process.fork import gate
from hydra_tune.process.interrupts import interrupts
from hydra_tune.schedule import events as e
from hydra_tune.schedule.ledger import SHARED
from hydra_tune.schedule.machine import Machine
from hydra_tune.schedule.plan import Task, TrialPlan
from hydra_tune.schedule.state import PROMOTION
from hydra_tune.sharing.shared_weights import SharedWeights

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

InstructionT = TypeVar("InstructionT", bound=e.Instruction)


class EventLoop:
    """One pool's. Methods without underscores are for trials' threads, which may have the lock already."""

    def __init__(self, devices: tuple[Device, ...], machine: Machine, num_threads: int) -> None:
        self.lock = threading.RLock()
        gate.guard(self.lock)
        self.machine = machine
        self.closed = False
        self.table = TrialTable()
        self.shared_weights = SharedWeights(self.lock)
        self.report = Report(self.lock, devices, machine, self.table)
        self.promotions = Promotions(devices, self.table, self.report.trace, num_threads)
        self.long_leases = LongLeases(devices, machine, self.table, self.report)
        self.waiting = WaitingTrials(devices, machine, self.table, self.long_leases)
        self.devices = devices

    # ---- between tasks ----

    def tell(self, event: e.Event) -> None:
        with self.lock:
            self._handle(event)

    def tell_between_tasks(self, trial: Trial, event: e.Event) -> None:
        """End the trial's long lease, wait for its copies that are under way, then handle the event."""
        with self.lock:
            self.hear(trial, ends=True)
            self.promotions.await_copies(trial)
            self._handle(event)

    def ask(self, trial: Trial, event: e.Event, answer: type[InstructionT]) -> InstructionT:
        """Between two tasks: handle the event, and wait for the scheduler's answer."""
        with self.lock:
            self.check_open(trial)
            self.end_abandoned()
            self.tell_between_tasks(trial, event)
            try:
                return self.await_answer(trial.id, answer, partial(self.check_open, trial))
            except BaseException:  # the script may catch this, and ask again later
                self._handle(e.Withdrawn(trial.id))
                raise

    def readmit(self, trial: Trial, plan: TrialPlan) -> bool:
        """Admit the trial under another plan that holds the same bytes. False, and no change, if that needs a wait."""
        with self.lock:
            self.check_open(trial)
            self.hear(trial, ends=True)
            self._handle(e.PlanReady(trial.id, plan, waits=False))
            granted = trial.lease.granted
            return bool(granted) and isinstance(granted.popleft(), e.Admit)

    def leave_step(self, trial: Trial, *, trained: bool) -> None:
        with self.lock:
            self.hear(trial, ends=True)
            if trial.lease.in_step:  # else the machine was told when the lease ended
                trial.lease.in_step = False
                self.tell_between_tasks(trial, e.StepDone(trial.id, trained))

    def check_open(self, trial: Trial) -> None:
        """Between two tasks: raise if the trial is asked to stop, or if its pool is closed."""
        trial.stop.check()
        if self.closed and trial.of_runner:
            raise TrialStopped("the pool was closed")
        self.check_usable()

    def check_usable(self) -> None:
        if self.closed:
            raise PoolClosedError(
                "a closed pool takes no trials, and a prepared model runs in its pool, but that was closed. Call "
                "hydra_tune.release(model) to go on in plain PyTorch. Make a new ShardPool to go on in that."
            )

    # ---- tasks ----

    def acquire(self, trial: Trial, task: Task, after: Task | None = None) -> None:
        """Wait for the lease, and have the task's shard on the device. The task `after` ends with this call."""
        lease, trace = trial.lease, self.report.trace
        try:
            with self.lock:
                asked_s = promote_s = trace.now_s()
                if lease.device is not None and self.hear(trial, ends=True):
                    after = None
                lease.asks(task, asked_s)
                ready = e.TaskReady(task, True)
                self._handle(ready if after is None else self._end(after, asked_s, ready), asked_s)
                self.check_open(trial)
                waits = not lease.granted
                run = self.await_answer(trial.id, e.Run, partial(self.check_open, trial))
                promote_s = trace.now_s() if waits else promote_s
                clock = self.report.clocks[run.device]
                if run.num_bytes:
                    clock.idles(promote_s, PROMOTION)
            if run.num_bytes:
                copied_bytes = trial.residency.promote_shard(task.shard, run.offset, run.num_bytes)
            with self.lock:
                start_s = trace.now_s()
                if run.num_bytes:
                    trace.note("promote", task, run.device, promote_s, start_s, copied_bytes)
                if waits or run.num_bytes:
                    trace.note("wait", task, run.device, asked_s, start_s)
                mark = clock.begin(start_s)
                if lease.device is not None:
                    lease.start(task, start_s, mark)
        except BaseException:
            with self.lock:
                self._handle_all(self.long_leases.drop(lease))
                self.promotions.await_copies(trial)
                self._handle(e.Failed(task))
                lease.granted.clear()
            raise

    def release(self, task: Task) -> None:
        with self.lock:
            now_s = self.report.trace.now_s()
            self._handle(self._end(task, now_s), now_s)

    def _end(self, task: Task, end_s: float, then: e.TaskReady | None = None) -> e.Done:
        return e.Done(task, self.report.clocks[self.machine.trials[task.trial].home].end(task, end_s), then)

    def hear(self, trial: Trial, *, ends: bool = False) -> bool:
        """In the trial's thread: tell the machine what was done in the trial's long lease, if one lasts. With `ends`,
        or if it was revoked, the lease ends now. Returns whether it ended."""
        lease = trial.lease
        if lease.device is None:  # no long lease: the usual case
            return False
        with self.lock:
            if ends:
                lease.end()
            ends = lease.device is not None and (ends or lease.revoked)
            self._handle_all(self.long_leases.end(lease) if ends else self.long_leases.tasks_done(lease))
            return ends

    def settle(self) -> None:
        """Bring the report up to date: with what was done in long leases, and with what GPUs have finished."""
        with self.lock:
            for lease in self.long_leases.of_devices:
                if lease is not None:
                    self._handle_all(self.long_leases.tasks_done(lease))
            for clock in self.report.clocks:
                clock.settle()

    # ---- to the machine, and back ----

    def _handle_all(self, events: Iterable[e.Event]) -> None:
        for event in events:
            self._handle(event)

    def _handle(self, event: e.Event, at_s: float | None = None) -> None:
        """Give the machine an event that happened at `at_s`, or now, and carry out its instructions."""
        self.report.note_event(event)
        recalled: list[Lease] = []
        for instruction in self.machine.handle(event):
            if isinstance(instruction, e.Recall):
                recalled.append(self.table.leases[instruction.trial])
            else:
                self._carry_out(instruction)
        self.report.note_idle(at_s)
        for lease in recalled:
            self._handle_all(self.long_leases.recall(lease))

    def _carry_out(self, instruction: e.Instruction) -> None:
        if isinstance(instruction, e.Drop):
            device = self.devices[instruction.device]
            if instruction.trial == SHARED:
                device.drop_shared(instruction.shard)
            elif (trial := self.table.live.get(instruction.trial)) is not None:
                trial.residency.drop_shard(instruction.shard)
            device.free_slot(instruction.offset, instruction.num_bytes)
            self.report.trace.count("dropped_bytes", instruction.device, instruction.trial, instruction.num_bytes)
        elif isinstance(instruction, e.PromoteShard):  # ahead of its task
            self.promotions.begin(instruction, self._promoted)
        elif isinstance(instruction, e.Move):
            trial = self.table.live[instruction.trial]
            trial.residency.move_home(self.devices[instruction.device])
            trial.summary["device"] = trial.device.name
        else:
            number = instruction.task.trial if isinstance(instruction, e.Run) else instruction.trial
            lease = self.table.leases[number]
            if isinstance(instruction, e.Run) and instruction.lasts:
                self.long_leases.open(lease, instruction)
            lease.in_step |= isinstance(instruction, e.Enter)
            lease.granted.append(instruction)
            lease.wake.notify_all()

    def _promoted(self, promote: e.PromoteShard, start_s: float, copied_bytes: int) -> None:
        """In a copy thread."""
        with self.lock:
            task, trace = promote.task, self.report.trace
            self.promotions.end(promote)
            trace.note("promote", task, promote.device, start_s, trace.now_s(), copied_bytes)
            self.table.leases[task.trial].wake.notify_all()
            self._handle(e.Promoted(task, promote.device))

    def await_answer(self, number: int, answer: type[InstructionT], check: Callable[[], None]) -> InstructionT:
        """Under the lock: wait for the next instruction to this trial. `check` may raise, which ends the wait."""
        lease, wait = self.table.leases[number], Wait(number)
        lease.waits_since_s = None if answer is e.Run else self.report.trace.now_s()
        while not lease.granted:
            interrupts.check()
            check()
            wait_s, happened = self.long_leases.look_at_holder(wait.trial)
            self._handle_all(happened)
            if not lease.granted:
                lease.wake.wait(wait_s)
            self.end_abandoned()
            self.waiting.goes_on(wait, wait_s)
        lease.ends_wait(self.report.trace.now_s())
        instruction = lease.granted.popleft()
        assert isinstance(instruction, answer), (instruction, answer)
        return instruction

    # ---- ends ----

    def end_trial(self, trial: Trial) -> None:
        """Take back all that the trial holds. Other trials go on."""
        with self.lock:
            self.promotions.await_copies(trial)
            self.forget(trial.id)

    def end_abandoned(self) -> None:
        """Take back what trials hold whose models were garbage collected. So a plain script's trial ends."""
        with self.lock:
            for number in self.table.take_abandoned():
                if number in self.promotions.under_way:
                    self.table.abandoned.append(number)
                else:
                    self.forget(number)

    def forget(self, number: int) -> None:
        """Remove the trial. Does nothing the second time; called again, it completes an end that was interrupted."""
        with self.lock:
            table = self.table
            if number in table.leases:
                table.summaries[number]["state"] = "ended"
                self._handle_all(self.long_leases.drop(table.leases[number]))
                self.report.tell(ends=True)
                end_trial(number, self.devices)  # before its bytes go to others
                self.shared_weights.leave(number)
                self._handle(e.TrialEnded(number))
                del table.leases[number]
            table.live.pop(number, None)

    def close(self) -> None:
        """Trials end at their next task boundary."""
        with self.lock:
            self.closed = True
            for lease in filter(None, self.long_leases.of_devices):
                self._handle_all(self.long_leases.recall(lease))
            for lease in self.table.leases.values():
                lease.wake.notify_all()
