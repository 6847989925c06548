"""A trial's right to its device. A lease that lasts for many steps costs its holder a few attributes a task.

A small resident trial would spend a good part of each step on the pool's lock and the machine. While its lease lasts it
uses neither: the machine knows of the lease as of one task, and the holder goes from task to task and from step to step
by itself. It only notes what it has done (`ran`), for `LongLeases` to read.

Another thread may want the device meanwhile. Two flags decide who ends the lease, the holder or the thread that waits,
without a lock between them (Dekker's algorithm; the interpreter orders what threads read and write):

    holder   busy = True;    revoked? then it asks the pool      ... computes ...   busy = False;  revoked?
    waiter   revoked = True; busy?    then the holder ends the lease, after its task; else the waiter does

So a holder that loads data, validates on the host or is paused keeps nobody waiting. It learns that its lease has ended
when it begins its next task.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from hydra_tune.devices.device import Device
from hydra_tune.schedule.events import Instruction
from hydra_tune.schedule.plan import Direction, Task

TELL_AFTER = 512  # tasks
TaskTime: TypeAlias = float | tuple[float, Any]  # in seconds; of a GPU's task, with the device's mark
# plain tuples, made twice a step: a task's step and direction, when it began, and when it ended
_Running: TypeAlias = tuple[int, Direction, TaskTime]
Ran: TypeAlias = tuple[int, Direction, Any, Any]  # moments


class Lease:
    """One trial's. While it does not last it is `revoked`; the pool's lock guards all that others change."""

    def __init__(self, trial: int, now_s: Callable[[], float], wake: threading.Condition) -> None:
        self.trial = trial
        self.granted: deque[Instruction] = deque()  # what the scheduler has said to it
        self.wake = wake  # of its thread, where that waits for such
        self.task = Task(trial, 0, 0, Direction.FORWARD)  # that the machine believes to run
        self.device: Device | None = None  # where, while the lease lasts
        self.busy = False  # in a task, or at its edges
        self.revoked = True
        self.in_step = False  # else, while the lease lasts, what the last step had reserved is kept for the next one
        self.begun = 0  # tasks
        self.num_steps = 0  # trained
        self.told_steps = 0  # of these
        self.thread = 0  # that was given the lease
        self.ran: deque[Ran] = deque()  # what the holder, which goes on meanwhile, has left word of
        self.since_s = 0.0  # of the quantum
        self._seen = -1  # tasks begun, by who has looked at the holder; -1 if it was in one
        self._now_s = now_s
        self._now: Callable[[], TaskTime] = now_s
        self._running: _Running | None = None

    # ---- in the pool, under its lock ----

    def open(self, task: Task, device: Device) -> None:
        """The trial has been given a long lease; with this task, which it has yet to begin."""
        self.task, self.device, self.in_step, self._seen = task, device, True, -1
        self.since_s = self._now_s()
        self._now = self._now_s if device.is_virtual else lambda: (self._now_s(), device.mark())
        self._running = None
        self.busy, self.revoked = True, False  # last

    def close(self) -> None:
        """It lasts no more, having been revoked before."""
        self.device, self.busy, self._running = None, False, None

    def is_idle(self) -> bool:
        """It has been between the same two tasks when this was asked last; or it is the asking thread's own."""
        seen, self._seen = self._seen, -1 if self.busy else self.begun
        return not self.busy and (seen == self.begun or self.thread == threading.get_ident())

    # ---- in the trial's thread ----

    def start(self, task: Task, start_s: float, mark: Any) -> None:
        """Begin the task that came with the lease."""
        self.begun += 1
        self.thread = threading.get_ident()
        self._running = task.step, task.direction, start_s if self._now is self._now_s else (start_s, mark)

    def begin(self, step: int, direction: Direction) -> bool:
        """A task, unless it is under way, and its step with it; False if the pool is to be asked, for the lease does
        not last, or is to end: nothing has happened then."""
        self.busy = True
        running = self._running
        if self.revoked:
            self.busy = running is not None
            return False
        if running is not None:
            if running[1] is direction and running[0] == step:
                return True
            self._note_end(running)  # a backward within a forward
        self.in_step = True
        self.begun += 1
        self._running = step, direction, self._now()
        return True

    def end(self) -> bool | None:
        """The task, if one is under way in a long lease; whether nobody need be told."""
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
        """With what the one before has reserved; False if the pool is to be asked."""
        self.busy = True
        goes_on = not self.revoked
        self.in_step |= goes_on
        self.busy = self._running is not None
        return goes_on

    def leave_step(self, *, trained: bool) -> bool:
        """At its end, or that of its last task; False if the pool is to be told: nothing has happened then."""
        running = self._running
        self.busy = True
        if self.revoked:
            self.busy = running is not None
            return False
        if running is not None:
            self._note_end(running)
            self._running = None
        self.in_step = False
        self.num_steps += trained
        self.busy = False
        return True
