"""A trial's turn that lasts for many steps: what its thread pays for a task of it is a few attributes.

The pool's lock and its machine know of such a turn as one task. Meanwhile the trial's thread goes from task to task and
from step to step by itself, and only leaves word of what it has done. Two flags decide who ends the turn, the holder or
one that waits, without a lock between them (Dekker's; the interpreter orders what threads read and write):

    holder   busy = True;    revoked? then by the way that has the lock      ... computes ...   busy = False;  revoked?
    waiter   revoked = True; busy?    then the holder ends the turn, at the end of its task; else the waiter does

So a holder that loads data, validates on the host or is paused keeps nobody waiting, and never learns of it before it
wants to go on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from hydra_tune.device import Device
from hydra_tune.events import Instruction
from hydra_tune.shard import Direction, Task

LOOK_S = 0.02  # how often one that waits looks at the holder; idle for so long, it computes on the host
_TELL_AFTER = 512  # tasks


# plain tuples: made twice a step
_Running: TypeAlias = tuple[int, Direction, float, Any]  # a task's step and direction, when it began, and a mark
Ran: TypeAlias = tuple[int, Direction, float, Any, float, Any]  # and when it ended, with the device's mark, if it has


class Lease:
    """One trial's. `revoked` is also what it is while it has none; the pool's lock guards all that others change."""

    def __init__(self, trial: int, now_s: Callable[[], float], wake: threading.Condition) -> None:
        self.trial = trial
        self.granted: deque[Instruction] = deque()  # what the scheduler has said to it
        self.wake = wake  # of its thread, where that waits for such
        self.task = Task(trial, 0, 0, Direction.FORWARD)  # that the machine believes to run
        self.device: Device | None = None  # where, while the turn lasts
        self.busy = False  # in a task, or at its edges
        self.revoked = True
        self.in_step = False  # else, what the last step had reserved is kept for the next one, while the turn lasts
        self.begun = 0  # tasks
        self.num_steps = 0  # trained
        self.told_steps = 0  # of these
        self.thread = 0  # that was given the turn
        self._ran: deque[Ran] = deque()
        self.since_s = 0.0  # of the quantum
        self.told_s = 0.0  # until when what it did was told
        self.seen = 0, 0.0  # by who looks at the holder: tasks begun, and when it last was busy
        self._now_s = now_s
        self._mark: Callable[[], Any] | None = None
        self._running: _Running | None = None

    @property
    def is_open(self) -> bool:
        """The turn lasts."""
        return self.device is not None

    # ---- in the pool, under its lock ----

    def open(self, task: Task, device: Device) -> None:
        """The trial has been given a turn that lasts; with this task, which it has yet to begin."""
        now_s = self._now_s()
        self.task, self.device, self.in_step = task, device, True
        self.since_s = self.told_s = now_s
        self.seen = self.begun, now_s
        self._mark = None if device.mark() is None else device.mark
        self._running = None
        self.busy, self.revoked = True, False  # last

    def close(self) -> None:
        """It has no turn any more."""
        self.revoked = True  # first
        self.device, self.busy, self._running = None, False, None

    def revoke(self) -> bool:
        """Let the turn end; whether the holder is between two tasks, and who asks is to end it now."""
        self.revoked = True
        return not self.busy

    def is_idle(self, now_s: float) -> bool:
        """For a while, as far as who asks has looked; or as it is the holder's own thread."""
        if not self.busy and self.thread == threading.get_ident():
            return True
        if self.busy or self.begun != self.seen[0]:
            self.seen = self.begun, now_s
            return False
        return now_s - self.seen[1] >= LOOK_S

    def take_ran(self) -> list[Ran]:
        """What the holder, which goes on meanwhile, has left word of."""
        return [self._ran.popleft() for _ in range(len(self._ran))]

    # ---- in the trial's thread ----

    def start(self, task: Task, start_s: float) -> None:
        """Begin the task that came with the turn."""
        self.begun += 1
        self.thread = threading.get_ident()
        self.told_s = start_s
        self._running = task.step, task.direction, start_s, None

    def begin(self, step: int, direction: Direction) -> bool:
        """A task, unless it is under way; False if the pool is to be asked, for no turn lasts, or it is to end."""
        self.busy = True
        running = self._running
        if self.revoked:
            self.busy = running is not None
            return False
        if running is not None:
            if running[1] is direction and running[0] == step:
                return True
            self._note_end(running)  # a backward within a forward
        self.begun += 1
        self._running = step, direction, self._now_s(), None if self._mark is None else self._mark()
        return True

    def end(self) -> bool | None:
        """The task, if one is under way in a turn that lasts; whether nobody need be told."""
        running = self._running
        if running is None:
            return None
        self._note_end(running)
        self._running = None
        self.busy = False
        return not self.revoked and len(self._ran) < _TELL_AFTER

    def begin_step(self, step: int) -> bool:
        """`enter_step` and `begin` its forward at once, where nothing is under way; False if the pool is to be asked:
        nothing has happened then."""
        if self._running is not None or len(self._ran) >= _TELL_AFTER:
            return False
        self.busy = True
        if self.revoked:
            self.busy = False
            return False
        self.in_step = True
        self.begun += 1
        self._running = step, Direction.FORWARD, self._now_s(), None if self._mark is None else self._mark()
        return True

    def end_step(self, *, trained: bool) -> bool:
        """`end` its backward and `leave_step` at once; False if the pool is to be told: nothing has happened then."""
        running = self._running
        if running is None or self.revoked:
            return False
        self._note_end(running)
        self._running = None
        self.in_step = False
        self.num_steps += trained
        self.busy = False
        return True

    def _note_end(self, running: _Running) -> None:
        self._ran.append((*running, self._now_s(), None if self._mark is None else self._mark()))

    def enter_step(self) -> bool:
        """With what the one before has reserved; False if the pool is to be asked."""
        self.busy = True
        goes_on = not self.revoked
        if goes_on:
            self.in_step = True
        self.busy = self._running is not None
        return goes_on

    def leave_step(self, *, trained: bool) -> bool:
        """Between two tasks; False if the pool is to be told."""
        self.busy = True
        goes_on = not self.revoked
        if goes_on:
            self.in_step = False
            self.num_steps += trained
        self.busy = False
        return goes_on and not self.revoked
