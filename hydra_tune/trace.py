"""What happened, when, where and for whom: spans of time, and the totals drawn from them."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hydra_tune.shard import Task

During = float | tuple[Any, Any]  # since so many seconds, or between two marks of a device's own
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
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self.devices: defaultdict[int, Totals] = defaultdict(Totals)
        self.trials: defaultdict[int, Totals] = defaultdict(Totals)
        self._start = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._start

    def note(self, kind: str, task: Task, device: int, start_s: float, end_s: float) -> None:
        """A span of this task's."""
        self.add(Span(kind, device, task.trial, task.shard, task.direction.value, start_s, end_s, step=task.step))

    def add(self, span: Span) -> None:
        self.spans.append(span)
        seconds = span.end_s - span.start_s
        if span.kind == "run":
            self.devices[span.device].busy_s += seconds
            self.trials[span.trial].busy_s += seconds
        elif span.kind == "wait":
            self.trials[span.trial].stalled_s += seconds
        elif span.kind == "stall":
            self.devices[span.device].stalled_s += seconds

    def count(self, what: str, device: int, trial: int, num_bytes: int) -> None:
        for totals in (self.devices[device], self.trials[trial]):
            setattr(totals, what, getattr(totals, what) + num_bytes)
