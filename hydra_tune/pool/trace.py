"""Records what devices did, when and for which trial: spans of time, and totals of them.

The host launches a GPU's work ahead of time. So when a GPU computed a task is known only once the GPU is done with it;
on the CPU it is known at once:

    host    launches A | launches B |                          launches C |
    GPU     .....A....................|.....B.....|   stall    |.....C.....
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap, takewhile
from typing import Any, NamedTuple

from hydra_tune.devices.device import Device
from hydra_tune.pool.lease import Ran
from hydra_tune.schedule.plan import Task
from hydra_tune.schedule.state import NO_TRIAL

MAX_SPANS, MAX_SAMPLES = 200_000, 100_000  # the oldest are forgotten first
LATE_HOST = "launch"  # the cause of a stall that the scheduler did not see: the host was late with a task
BETWEEN = "no ready task"  # the cause of a stall within a long lease
_LEAST_STALL_S = 2e-5
_LEAST_WAKE_S = 1e-3  # of a virtual device's `LATE_HOST`: what the scheduler takes between two tasks is less


class Span(NamedTuple):
    """A span of time. Moments are seconds since the pool began.

    kind       run       a task computed
               promote   its shard was copied to the device
               spill     its gradients were copied to the host; on a virtual device this is a part of its run
               wait      its trial waited
               stall     the device ran no task, for `cause`
    """

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
    """Sums for one device or one trial.

    busy_s      tasks ran
    stalled_s   a device had trials, but ran no task; or a trial had a ready task that waited
    """

    promoted_bytes: int = 0
    spilled_bytes: int = 0
    dropped_bytes: int = 0
    busy_s: float = 0.0
    stalled_s: float = 0.0


@dataclass
class Pace:
    """Of one trial: `steps` mini-batches have ended, each with its backward, the last one at `last_s`."""

    steps: int = 0
    last_s: float = 0.0
    _since: tuple[float, int] = (0.0, 0)  # from when on, and from which step on, it is counted

    def add(self, steps: int, since_s: float, until_s: float) -> None:
        """So many have ended, from `since_s` to `until_s`. A first one alone may be a pilot, and is not counted."""
        if not self.steps:
            self._since = (until_s, 1) if steps == 1 else (since_s, 0)
        self.steps, self.last_s = self.steps + steps, until_s

    @property
    def step_s(self) -> float | None:
        """Seconds from the end of one to the end of the next, on average: with waits, and with whatever the script does
        between them. None before the second."""
        since_s, steps = self._since
        return (self.last_s - since_s) / (self.steps - steps) if self.steps > steps else None


class Trace:
    """One pool's spans and totals. The pool's lock guards it."""

    def __init__(self) -> None:
        # Plain tuples: the garbage collector stops tracking them, so that its full collections stay rare.
        self._spans: deque[tuple[Any, ...]] = deque(maxlen=MAX_SPANS)
        self.memory: deque[tuple[int, float, int]] = deque(maxlen=MAX_SAMPLES)  # device, when, bytes used from then on
        self._used_bytes: dict[int, int] = {}  # by device, the last of these
        self.devices: defaultdict[int, Totals] = defaultdict(Totals)
        self.trials: defaultdict[int, Totals] = defaultdict(Totals)
        self.paces: defaultdict[int, Pace] = defaultdict(Pace)  # by trial
        self.stalls: defaultdict[int, defaultdict[str, float]]  # by device, then by cause: seconds
        self.stalls = defaultdict(lambda: defaultdict(float))
        self._start = time.perf_counter()

    @property
    def spans(self) -> list[Span]:
        return list(starmap(Span, self._spans))

    def since(self, span: Any, sample: Any) -> tuple[list[tuple[Any, ...]], list[tuple[int, float, int]]]:
        """The spans and the samples of memory after these two, the last of an earlier call; None for all."""
        return _after(self._spans, span), _after(self.memory, sample)

    def now_s(self) -> float:
        return time.perf_counter() - self._start

    def note(self, kind: str, task: Task, device: int, start_s: float, end_s: float, num_bytes: int = 0) -> None:
        """Add a span of this task, with the bytes that were promoted in it."""
        direction = task.direction._value_  # reading `value` takes half a microsecond
        self._spans.append((kind, device, task.trial, task.shard, direction, start_s, end_s, "", task.step))
        if kind == "run":
            self.devices[device].busy_s += end_s - start_s
            self.trials[task.trial].busy_s += end_s - start_s
        elif kind == "wait":
            self.trials[task.trial].stalled_s += end_s - start_s
        elif kind == "promote":
            self.count("promoted_bytes", device, task.trial, num_bytes)

    def note_memory(self, device: int, used_bytes: int) -> None:
        """So many bytes of the device are used from now on."""
        if self._used_bytes.get(device) != used_bytes:
            self._used_bytes[device] = used_bytes
            self.memory.append((device, self.now_s(), used_bytes))

    def note_stall(self, device: int, start_s: float, end_s: float, cause: str) -> None:
        self._spans.append(("stall", device, -1, -1, "", start_s, end_s, cause, 0))
        self.devices[device].stalled_s += end_s - start_s
        self.stalls[device][cause] += end_s - start_s

    def note_long_lease(self, device: int, trial: int, tasks: Sequence[Ran], since_s: float) -> tuple[float, float]:
        """Add the tasks of a long lease, and the device's stalls before each of them, the first since `since_s`.
        Returns the seconds that the tasks took, and when the last has ended."""
        busy_s = stalled_s = 0.0
        for step, direction, start_s, end_s in tasks:
            if start_s > since_s:
                self._spans.append(("stall", device, -1, -1, "", since_s, start_s, BETWEEN, 0))
                stalled_s += start_s - since_s
            self._spans.append(("run", device, trial, 0, direction._value_, start_s, end_s, "", step))
            busy_s += end_s - start_s
            since_s = end_s
        if stalled_s:
            self.devices[device].stalled_s += stalled_s
            self.stalls[device][BETWEEN] += stalled_s
        self.devices[device].busy_s += busy_s
        self.trials[trial].busy_s += busy_s
        return busy_s, since_s

    def count(self, what: str, device: int, trial: int, num_bytes: int) -> None:
        of_device, of_trial = self.devices[device].__dict__, self.trials[trial].__dict__
        of_device[what] += num_bytes
        of_trial[what] += num_bytes


def _after(noted: deque[Any], last: Any) -> list[Any]:
    newer = list(takewhile(lambda each: each is not last, reversed(noted)))
    newer.reverse()
    return newer


class TaskClock:
    """One device's clock: adds spans of its tasks, stalls and late copies to `trace`. Called under the pool's lock."""

    def __init__(self, trace: Trace, device: Device) -> None:
        self._trace = trace
        self._device = device
        self.cause = ""  # why the device is idle; "" if it is not
        self._idle_s = 0.0  # since when it is idle for this cause
        # On a GPU: the longest idle time that the host has seen since the last launch, and its cause
        self._why = 0.0, ""
        # When the host began the task under way, or when the last task of a long lease ended
        self.since_s = 0.0
        self._begun: Any = None  # the mark at which the task under way began
        # What a GPU may not have finished: kind, task, marks of start and end, when the host launched it (the GPU may
        # have begun later), and the cause of a stall before it, if there was one
        self._given: deque[tuple[str, Task, Any, Any, float, str]] = deque()
        self._last: tuple[Any, float] | None = None  # the last finished task's end, as a mark and in seconds
        self._untold_s: defaultdict[int, float] = defaultdict(float)  # by trial: computed, and not yet returned

    def idles(self, since_s: float, cause: str) -> None:
        """From `since_s` on the device is idle for `cause`; with "" it is idle no more. The former cause ends then."""
        if self.cause and not self._device.is_virtual:  # a GPU stalls later: note the longest cause for it
            self._why = max(self._why, (since_s - self._idle_s, self.cause))
        elif self.cause:
            self._stalled(self._idle_s, since_s, self.cause)
        self._idle_s, self.cause = since_s, cause

    def _stalled(self, start_s: float, end_s: float, cause: str) -> None:
        least_s = _LEAST_WAKE_S if cause == LATE_HOST and self._device.is_virtual else 0.0
        if end_s > start_s + least_s and cause != NO_TRIAL:
            self._trace.note_stall(self._device.number, start_s, end_s, cause)

    def begin(self, now_s: float) -> Any:
        """A task begins. Returns the mark of its start."""
        self.idles(now_s, "")
        self.since_s, self._begun = now_s, self._device.mark()
        self._last = self._last or (self._begun, now_s)
        return self._begun

    def end(self, task: Task, end_s: float) -> float:
        """The task ends. Returns the seconds that it took. On a GPU: the seconds of all tasks of its trial that have
        become known since the last call."""
        if self._device.is_virtual:
            self._trace.note("run", task, self._device.number, self.since_s, end_s)
            self._idle_s, self.cause = end_s, LATE_HOST  # unless the scheduler knows another, the next thread is late
            return end_s - self.since_s
        self._launch(task, self.since_s, self._begun, self._device.mark(), LATE_HOST)
        return self._told_s(task.trial)

    def ran(self, trial: int, tasks: Sequence[Ran]) -> float:
        """A resident trial has run these tasks in a long lease. Returns seconds, as `end` does."""
        if self._device.is_virtual:
            seconds, self.since_s = self._trace.note_long_lease(self._device.number, trial, tasks, self.since_s)
            return seconds
        for step, direction, (start_s, start), (end_s, end) in tasks:
            self._launch(Task(trial, step, 0, direction), start_s, start, end, BETWEEN)
            self.since_s = end_s
        return self._told_s(trial)

    def _launch(self, task: Task, host_s: float, start: Any, end: Any, otherwise: str) -> None:
        """Note a task that a GPU was given. `otherwise` is the cause of a stall before it if the host saw no cause."""
        cause, self._why = self._why[1] or otherwise, (0.0, "")
        self._given.append(("run", task, start, end, host_s, cause))

    def _told_s(self, trial: int) -> float:
        self.settle()
        return self._untold_s.pop(trial, 0.0)

    def spilled(self, task: Task, during: float | tuple[Any, Any]) -> None:
        """Gradients of the task went to the host: for so many seconds until now, or between two marks of the stream
        that copies them."""
        if isinstance(during, tuple):
            self._given.append(("spill", task, *during, 0.0, ""))
        else:
            now_s = self._trace.now_s()
            self._trace.note("spill", task, self._device.number, now_s - during, now_s)

    def settle(self) -> None:
        """Add spans of what the device has finished."""
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
    """Seconds from one mark to another. The device has reached both."""
    return float(earlier.elapsed_time(later)) / 1e3
