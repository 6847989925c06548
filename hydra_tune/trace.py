"""What happened, when, where and for whom: spans of time, and the totals drawn from them."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import starmap
from typing import Any, NamedTuple

from hydra_tune.lease import Ran
from hydra_tune.shard import Task

During = float | tuple[Any, Any]  # for so many seconds, until now, or between two marks of a device's own
MAX_SPANS = 200_000  # the oldest are forgotten first


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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


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
        self._spans.append(("stall", device, -1, -1, "", start_s, end_s, cause, 0))
        self.devices[device].stalled_s += end_s - start_s

    def note_turn(self, device: int, trial: int, tasks: Iterable[Ran], since_s: float, cause: str) -> float:
        """A resident trial's tasks, one after another, and why the device waited before each. Seconds they took."""
        busy_s = stalled_s = 0.0
        for step, direction, start_s, _, end_s, _ in tasks:
            if start_s > since_s:
                self._spans.append(("stall", device, -1, -1, "", since_s, start_s, cause, 0))
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
