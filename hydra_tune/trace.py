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
from itertools import pairwise, starmap
from typing import Any, NamedTuple

from hydra_tune.device import Device
from hydra_tune.lease import Ran
from hydra_tune.shard import Task
from hydra_tune.state import NO_TRIAL

During = float | tuple[Any, Any]  # for so many seconds, until now, or between two marks of a device's own
MAX_SPANS = 200_000  # the oldest are forgotten first
LATE_HOST = "launch"  # the cause of a stall that the scheduler has not seen: nothing was launched yet
BETWEEN = "no ready task"  # the cause of one within a turn that lasts
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

    def note(self, kind: str, task: Task, device: int, start_s: float, end_s: float) -> None:
        """A span of this task's."""
        direction = task.direction._value_  # `value` takes half a microsecond
        self._spans.append((kind, device, task.trial, task.shard, direction, start_s, end_s, "", task.step))
        if kind == "run":
            self.devices[device].busy_s += end_s - start_s
            self.trials[task.trial].busy_s += end_s - start_s
        elif kind == "wait":
            self.trials[task.trial].stalled_s += end_s - start_s

    def note_stall(self, device: int, start_s: float, end_s: float, cause: str) -> None:
        if end_s > start_s and cause != NO_TRIAL:
            self._spans.append(("stall", device, -1, -1, "", start_s, end_s, cause, 0))
            self.devices[device].stalled_s += end_s - start_s

    def note_turn(self, device: int, trial: int, tasks: Sequence[Ran], since_s: float) -> float:
        """A resident trial's tasks, one after another, and that the device waited before each. Seconds they took."""
        busy_s = stalled_s = 0.0
        for step, direction, start_s, _, end_s, _ in tasks:
            if start_s > since_s:
                self._spans.append(("stall", device, -1, -1, "", since_s, start_s, BETWEEN, 0))
                stalled_s += start_s - since_s
            self._spans.append(("run", device, trial, 0, direction._value_, start_s, end_s, "", step))
            busy_s += end_s - start_s
            since_s = end_s
        self.devices[device].stalled_s += stalled_s
        self.devices[device].busy_s += busy_s
        self.trials[trial].busy_s += busy_s
        return busy_s

    def count(self, what: str, device: int, trial: int, num_bytes: int) -> None:
        for totals in (self.devices[device], self.trials[trial]):
            vars(totals)[what] += num_bytes


class _Launched(NamedTuple):
    task: Task
    host_s: float  # when it was launched; the device may have begun later
    start: Any  # marks
    end: Any
    cause: str  # why the device would have computed nothing before


class TaskClock:
    """One device's: writes spans of its tasks, stalls and late copies into `trace`. Called under the pool's lock."""

    def __init__(self, trace: Trace, device: Device) -> None:
        self._trace = trace
        self._device = device
        self._idle: list[tuple[float, str]] = []  # since when, and why: a cause may give way to another
        self._begun: tuple[Any, str] | None = None
        self._launched: deque[_Launched] = deque()
        self._spills: deque[tuple[Task, Any, Any]] = deque()
        self._last: tuple[Any, float] | None = None  # the last task's end, as a mark and in seconds
        self._untold_s: defaultdict[int, float] = defaultdict(float)  # by trial

    @property
    def cause(self) -> str:
        """Why it idles; empty where it does not."""
        return self._idle[-1][1] if self._idle else ""

    def idles(self, since_s: float, cause: str) -> None:
        self._idle.append((since_s, cause))

    def begin(self, now_s: float) -> None:
        stalls = [(start_s, end_s, cause) for (start_s, cause), (end_s, _) in pairwise([*self._idle, (now_s, "")])]
        self._idle, mark = [], self._device.mark()
        if mark is not None:  # its own stall is another one, for most of the same reason
            self._begun = mark, max(stalls, key=lambda stall: stall[1] - stall[0])[2] if stalls else ""
            return
        for stall in stalls:
            self._trace.note_stall(self._device.number, *stall)

    def end(self, task: Task, start_s: float, end_s: float) -> float:
        """Seconds that the task took; on a GPU, what has become known of its trial's tasks since it was last told."""
        if self._begun is None:
            self._trace.note("run", task, self._device.number, start_s, end_s)
            return end_s - start_s
        (start, cause), self._begun = self._begun, None
        self._launched.append(_Launched(task, start_s, start, self._device.mark(), cause))
        self.settle()
        return self._untold_s.pop(task.trial, 0.0)

    def ran(self, trial: int, tasks: Sequence[Ran], since_s: float) -> float:
        """Those of a resident trial, one after another, in a turn that lasts; since then the device has run none. As
        `end`."""
        if tasks and tasks[0][-1] is None:
            return self._trace.note_turn(self._device.number, trial, tasks, since_s)
        for step, direction, start_s, start, _, end in tasks:
            begun, cause = self._begun or (start, BETWEEN)
            self._begun = None
            self._launched.append(_Launched(Task(trial, step, 0, direction), start_s, begun, end, cause))
        if not self._launched:
            return 0.0
        self.settle()
        return self._untold_s.pop(trial, 0.0)

    def spilled(self, task: Task, start: Any, end: Any) -> None:
        """From one mark to another, in a stream of its own."""
        self._spills.append((task, start, end))

    def settle(self) -> None:
        """Note what the device is done with."""
        while self._launched and self._launched[0].end.query():
            self._settle(self._launched.popleft())
        while self._spills and self._last is not None and self._spills[0][-1].query():
            task, start, end = self._spills.popleft()
            mark, mark_s = self._last
            start_s = max(0.0, mark_s + _seconds(mark, start))
            self._trace.note("spill", task, self._device.number, start_s, start_s + _seconds(start, end))

    def _settle(self, launched: _Launched) -> None:
        start_s = launched.host_s
        if self._last is not None:
            last, last_s = self._last
            start_s = max(start_s, last_s + _seconds(last, launched.start))
            if start_s > last_s + _LEAST_STALL_S:
                self._trace.note_stall(self._device.number, last_s, start_s, launched.cause or LATE_HOST)
        seconds = _seconds(launched.start, launched.end)
        self._trace.note("run", launched.task, self._device.number, start_s, start_s + seconds)
        self._untold_s[launched.task.trial] += seconds
        self._last = launched.end, start_s + seconds


def _seconds(earlier: Any, later: Any) -> float:
    """From one mark to another, both reached."""
    return float(earlier.elapsed_time(later)) / 1e3
