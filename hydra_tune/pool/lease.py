"""A lease is a trial's right to compute on its device.

A small resident trial would spend a good part of each step on the pool's lock and the machine. So it gets a long lease,
which lasts for many steps and needs neither. To the machine a long lease is one task. Its holder goes from task to task
and from step to step by itself, which costs it a few attributes a task. It notes what it has done in `ran`, for
`LongLeases` to read.

Meanwhile another thread may want the device. Two flags decide whether the holder or the waiting thread ends the lease,
without a lock between the two (Dekker's algorithm; the interpreter orders what threads read and write):

    holder   busy = True;    revoked? then it asks the pool      ... computes ...   busy = False;  revoked?
    waiter   revoked = True; busy?    then the holder ends the lease, after its task; else the waiter does

So nobody waits for a holder that loads data, validates on the host or is paused. When it begins its next task, it finds
that its lease has ended.

A holder that pauses between any two steps, since its script loads each batch itself or waits for a GPU, need not be
looked at: while others wait it `yields`, which ends its lease with each step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, TypeAlias

from hydra_tune.devices.device import Device
from hydra_tune.schedule.events import Instruction
from hydra_tune.schedule.plan import Direction, Task

TELL_AFTER = 512  # tasks, after which the holder tells the pool what it has done
LEAST_PAUSE_S = 0.002  # in a shorter pause between two steps another trial would gain less than the change costs
TaskTime: TypeAlias = float | tuple[float, Any]  # in seconds; on a GPU, also the device's mark
# Plain tuples, since two are made in each step: step and direction of a task, when it began, when it ended.
_Running: TypeAlias = tuple[int, Direction, TaskTime]
Ran: TypeAlias = tuple[int, Direction, Any, Any]


class Lease:
    """One trial's lease, long or for one task. `revoked` is False only while a long lease lasts. The pool's lock guards
    what other threads change."""

    def __init__(self, trial: int, now_s: Callable[[], float], wake: threading.Condition) -> None:
        self.trial = trial
        self.granted: deque[Instruction] = deque()  # the scheduler's answers that the trial has not taken yet
        self.memory_wait_s = 0.0  # how long the trial has waited for memory of the host or a device
        self.waits_since_s: float | None = None  # for such memory, now
        self.wake = wake  # wakes the trial's thread, which waits for an answer
        self.task = Task(trial, 0, 0, Direction.FORWARD)  # the one task that a long lease is to the machine
        self.device: Device | None = None  # None unless a long lease lasts
        self.busy = False  # the holder is in a task, or begins or ends one
        self.revoked = True
        self.in_step = False  # False between two steps. In a long lease the step's bytes stay reserved for the next one
        self.begun = 0  # tasks begun
        self.num_steps = 0  # training steps ended in long leases
        self.told_steps = 0  # of these, those that the machine knows of
        self.thread = 0  # the thread that was given the lease
        self.ran: deque[Ran] = deque()  # tasks ended that the pool has not read yet; the holder adds without a lock
        self.since_s = 0.0  # when the quantum began
        self.yields = False  # a long lease ends with the step
        self.pause_s = 0.0  # how long the trial paused between its last steps, the mean of some
        self.ended_s = inf  # when the last task that the pool knows of ended
        self._seen = -1  # `begun` when a waiting thread last looked; -1 if the holder was busy then
        self._now_s = now_s
        self._now: Callable[[], TaskTime] = now_s
        self._running: _Running | None = None

    # ---- in the pool, under its lock ----

    def asks(self, task: Task, now_s: float) -> None:
        """The trial asks for the lease of this task."""
        if task.direction is Direction.FORWARD:
            self.pause_s = now_s - self.ended_s

    def ends_wait(self, now_s: float) -> None:
        """The trial has what it asked for."""
        if self.waits_since_s is not None:
            self.memory_wait_s += now_s - self.waits_since_s
            self.waits_since_s = None

    def open(self, task: Task, device: Device, *, others_wait: bool) -> None:
        """Begin a long lease with this task, which the trial's thread has yet to begin."""
        self.yields = others_wait and self.pauses
        self.task, self.device, self.in_step, self._seen = task, device, True, -1
        self.since_s = self._now_s()
        self._now = self._now_s if device.is_virtual else lambda: (self._now_s(), device.mark())
        self._running = None
        self.busy, self.revoked = True, False  # last: from here on the holder uses the lease without the lock

    def close(self) -> None:
        """End a long lease, which was revoked before."""
        self.device, self.busy, self._running = None, False, None

    @property
    def pauses(self) -> bool:
        return self.pause_s > LEAST_PAUSE_S

    def read(self) -> list[Ran]:
        """What the holder has done since the last call. Learns how long it pauses between its steps."""
        tasks = [self.ran.popleft() for _ in range(len(self.ran))]
        pauses_s = []
        for _, direction, start, end in tasks:
            if direction is Direction.FORWARD:
                pauses_s.append(_host_s(start) - self.ended_s)
            self.ended_s = _host_s(end)
        if pauses_s[1:]:  # before the first it may have waited for the lease
            self.pause_s = sum(pauses_s[1:]) / len(pauses_s[1:])
        return tasks

    def is_idle(self) -> bool:
        """Whether the holder is between two tasks, and has begun none since the last call. If the calling thread is the
        holder's own, one call is enough."""
        seen, self._seen = self._seen, -1 if self.busy else self.begun
        return not self.busy and (seen == self.begun or self.thread == threading.get_ident())

    # ---- in the trial's thread ----

    def start(self, task: Task, start_s: float, mark: Any) -> None:
        """Begin the task that came with the lease."""
        self.begun += 1
        self.thread = threading.get_ident()
        self._running = task.step, task.direction, start_s if self._now is self._now_s else (start_s, mark)

    def begin(self, step: int, direction: Direction) -> bool:
        """Begin a task in a long lease, unless it is under way, and its step, too. Returns False, and does nothing, if
        no long lease lasts or it is to end: then the pool must be asked."""
        self.busy = True
        running = self._running
        if self.revoked:
            self.busy = running is not None
            return False
        if running is not None:
            if running[1] is direction and running[0] == step:
                return True
            self._note_end(running)  # another task begins within it, as a backward within a forward
        self.in_step = True
        self.begun += 1
        self._running = step, direction, self._now()
        return True

    def end(self) -> bool | None:
        """End the task under way. Returns None if there is none in a long lease; False if the pool must be told."""
        running = self._running
        if running is None:
            return None
        self._note_end(running)
        self._running = None
        self.busy = False
        return not self.revoked and len(self.ran) < TELL_AFTER

    def _note_end(self, running: _Running) -> None:
        self.ran.append((*running, self._now()))

    def enter_step(self) -> bool:
        """Enter a step with the bytes that the one before has reserved. Returns False if the pool must be asked."""
        self.busy = True
        goes_on = not self.revoked
        self.in_step |= goes_on
        self.busy = self._running is not None
        return goes_on

    def leave_step(self, *, trained: bool) -> bool:
        """Leave the step, and its last task if that is under way. Returns False, and does nothing, if the pool must be
        told."""
        running = self._running
        self.busy = True
        if self.revoked or self.yields:
            self.busy = running is not None
            return False
        if running is not None:
            self._note_end(running)
            self._running = None
        self.in_step = False
        self.num_steps += trained
        self.busy = False
        return True


def _host_s(when: TaskTime) -> float:
    return when[0] if isinstance(when, tuple) else when
