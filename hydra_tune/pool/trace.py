"""What happened, when, where and for whom: spans of time, and the totals drawn from them.

When a device computed a task is known at once on the CPU; of a GPU, which the host is ahead of, once it is done:

    host    launches A | launches B |                          launches C |
    GPU     .....A....................|.....B.....|   stall    |.....C.....
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, NamedTuple

from hydra_tune.devices.device import Device
from hydra_tune.pool.lease import Ran
from hydra_tune.schedule.plan import Task
from hydra_tune.schedule.state import NO_TRIAL

MAX_SPANS = 200_000  # the oldest are forgotten first
LATE_HOST = "launch"  # the cause of a stall that the scheduler has not seen: nothing was launched yet
BETWEEN = "no ready task"  # the cause of one within a long lease
_LEAST_STALL_S = 2e-5


class Span(NamedTuple):
    """`kind` is run, promote, spill (during the task's run, where its device is a virtual one), wait (of a trial) or
    stall (of a device, which ran no task, for `cause`); seconds since the pool began."""

    kind: str
    device: int
    trial: int
    shard: int
    direction: str
    start_s: float
    end_s: float
    cause: str = ""
    step: int = 0


@dataclass
class Totals:
    """busy: tasks ran. stalled: a device had trials, but ran no task; a trial had a task, but it waited."""

    promoted_bytes: int = 0
    spilled_bytes: int = 0
    dropped_bytes: int = 0
    busy_s: float = 0.0
    stalled_s: float = 0.0


class Trace:
    def __init__(self) -> None:
        # plain tuples: those the garbage collector stops to track, so that its full collections stay rare
        self._spans: deque[tuple[Any, ...]] = deque(maxlen=MAX_SPANS)
        self.devices: defaultdict[int, Totals] = defaultdict(Totals)
        self.trials: defaultdict[int, Totals] = defaultdict(Totals)
        self._start = time.perf_counter()

    @property
    def spans(self) -> list[Span]:
        return list(starmap(Span, self._spans))

    def now_s(self) -> float:
        return time.perf_counter() - self._start

    def note(self, kind: str, task: Task, device: int, start_s: float, end_s: float, num_bytes: int = 0) -> None:
        """A span of this task's, with the bytes that it has promoted."""
        direction = task.direction._value_  # `value` takes half a microsecond
        self._spans.append((kind, device, task.trial, task.shard, direction, start_s, end_s, "", task.step))
        if kind == "run":
            self.devices[device].busy_s += end_s - start_s
            self.trials[task.trial].busy_s += end_s - start_s
        elif kind == "wait":
            self.trials[task.trial].stalled_s += end_s - start_s
        elif kind == "promote":
            self.count("promoted_bytes", device, task.trial, num_bytes)

    def note_stall(self, device: int, start_s: float, end_s: float, cause: str) -> None:
        self._spans.append(("stall", device, -1, -1, "", start_s, end_s, cause, 0))
        self.devices[device].stalled_s += end_s - start_s

    def note_long_lease(self, device: int, trial: int, tasks: Sequence[Ran], since_s: float) -> tuple[float, float]:
        """A resident trial's tasks, one after another, and that the device waited before each. Seconds they took, and
        when the last has ended."""
        busy_s = stalled_s = 0.0
        for step, direction, start_s, end_s in tasks:
            if start_s > since_s:
                self._spans.append(("stall", device, -1, -1, "", since_s, start_s, BETWEEN, 0))
                stalled_s += start_s - since_s
            self._spans.append(("run", device, trial, 0, direction._value_, start_s, end_s, "", step))
            busy_s += end_s - start_s
            since_s = end_s
        self.devices[device].stalled_s += stalled_s
        self.devices[device].busy_s += busy_s
        self.trials[trial].busy_s += busy_s
        return busy_s, since_s

    def count(self, what: str, device: int, trial: int, num_bytes: int) -> None:
        of_device, of_trial = self.devices[device].__dict__, self.trials[trial].__dict__
        of_device[what] += num_bytes
        of_trial[what] += num_bytes


class TaskClock:
    """One device's: writes spans of its tasks, stalls and late copies into `trace`. Called under the pool's lock."""

    def __init__(self, trace: Trace, device: Device) -> None:
        self._trace = trace
        self._device = device
        self.cause = ""  # why it idles; empty where it does not
        self._idle_s = 0.0  # since when
        self._why = 0.0, ""  # a GPU had nothing to do: the longest of what the host has seen
        self.since_s = 0.0  # when its task began, or the last one of a long lease ended; on a GPU, for the host
        self._begun: Any = None  # a mark
        # what a GPU may not be done with: kind, task, marks of its start and end, when the host has launched it (it may
        # have begun later), and why the GPU would have computed nothing before
        self._given: deque[tuple[str, Task, Any, Any, float, str]] = deque()
        self._last: tuple[Any, float] | None = None  # the last task's end, as a mark and in seconds
        self._untold_s: defaultdict[int, float] = defaultdict(float)  # by trial

    def idles(self, since_s: float, cause: str) -> None:
        """One cause may give way to another."""
        if self.cause and not self._device.is_virtual:  # its own stall is another one, for most of the same reason
            self._why = max(self._why, (since_s - self._idle_s, self.cause))
        elif self.cause:
            self._stalled(self._idle_s, since_s, self.cause)
        self._idle_s, self.cause = since_s, cause

    def _stalled(self, start_s: float, end_s: float, cause: str) -> None:
        if end_s > start_s and cause != NO_TRIAL:
            self._trace.note_stall(self._device.number, start_s, end_s, cause)

    def begin(self, now_s: float) -> Any:
        """The mark of its task's start."""
        self.idles(now_s, "")
        self.since_s, self._begun = now_s, self._device.mark()
        self._last = self._last or (self._begun, now_s)
        return self._begun

    def end(self, task: Task, end_s: float) -> float:
        """Seconds that the task took; on a GPU, what has become known of its trial's tasks since it was last told."""
        if self._device.is_virtual:
            self._trace.note("run", task, self._device.number, self.since_s, end_s)
            return end_s - self.since_s
        self._launch(task, self.since_s, self._begun, self._device.mark(), LATE_HOST)
        return self._told_s(task.trial)

    def ran(self, trial: int, tasks: Sequence[Ran]) -> float:
        """Those of a resident trial, one after another, in a long lease. As `end`."""
        if self._device.is_virtual:
            seconds, self.since_s = self._trace.note_long_lease(self._device.number, trial, tasks, self.since_s)
            return seconds
        for step, direction, (start_s, start), (end_s, end) in tasks:
            self._launch(Task(trial, step, 0, direction), start_s, start, end, BETWEEN)
            self.since_s = end_s
        return self._told_s(trial)

    def _launch(self, task: Task, host_s: float, start: Any, end: Any, otherwise: str) -> None:
        """`otherwise` is why the GPU had nothing to do, where the host has seen no cause."""
        cause, self._why = self._why[1] or otherwise, (0.0, "")
        self._given.append(("run", task, start, end, host_s, cause))

    def _told_s(self, trial: int) -> float:
        self.settle()
        return self._untold_s.pop(trial, 0.0)

    def spilled(self, task: Task, during: float | tuple[Any, Any]) -> None:
        """For so many seconds, until now; or between two marks, in a stream of its own."""
        if isinstance(during, tuple):
            self._given.append(("spill", task, *during, 0.0, ""))
        else:
            now_s = self._trace.now_s()
            self._trace.note("spill", task, self._device.number, now_s - during, now_s)

    def settle(self) -> None:
        """Note what the device is done with."""
        while self._last is not None and self._given and self._given[0][3].query():
            kind, task, start, end, host_s, cause = self._given.popleft()
            last, last_s = self._last
            start_s, seconds = max(host_s, last_s + _seconds(last, start)), _seconds(start, end)
            if kind == "run":
                if start_s > last_s + _LEAST_STALL_S:
                    self._stalled(last_s, start_s, cause)
                self._untold_s[task.trial] += seconds
                self._last = end, start_s + seconds
            self._trace.note(kind, task, self._device.number, start_s, start_s + seconds)


def _seconds(earlier: Any, later: Any) -> float:
    """From one mark to another, both reached."""
    return float(earlier.elapsed_time(later)) / 1e3
