"""The tasks that wait for a device, by the home of their trials: a choice among thousands takes microseconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from hydra_tune.schedule.plan import Task


class Waiting(NamedTuple):
    """`number` tells in which order tasks became ready, `since` how many tasks its home had been given by then."""

    task: Task
    rank: float
    number: int
    home: int
    since: int


@dataclass
class Queue:
    """Of one home. Entries are forgotten when they come to a front, not when they are taken."""

    by_rank: list[tuple[float, int, Waiting]] = field(default_factory=list)
    by_age: deque[Waiting] = field(default_factory=deque)
    given: int = 0  # tasks that this device was given


class ReadyTasks:
    """At most one a trial."""

    def __init__(self, num_devices: int) -> None:
        self.of: dict[int, Waiting] = {}  # by trial
        self.queues = [Queue() for _ in range(num_devices)]
        self._number = 0

    def add(self, task: Task, rank: float, home: int) -> Waiting:
        queue = self.queues[home]
        waiting = self.of[task.trial] = Waiting(task, rank, self._number, home, queue.given)
        self._number += 1
        heappush(queue.by_rank, (rank, waiting.number, waiting))
        queue.by_age.append(waiting)
        return waiting

    def remove(self, trial: int) -> Waiting | None:
        return self.of.pop(trial, None)

    def first(self, home: int) -> Waiting | None:
        """By rank."""
        heap = self.queues[home].by_rank
        while heap and self.of.get(heap[0][2].task.trial) is not heap[0][2]:
            heappop(heap)
        return heap[0][2] if heap else None

    def firsts(self, before: float | None) -> Iterator[Waiting]:
        """Of each home, where it ranks before that. So may an entry at a front that is to be forgotten: never later."""
        for home, queue in enumerate(self.queues):
            if queue.by_rank and (before is None or queue.by_rank[0][0] < before):
                waiting = self.first(home)
                if waiting is not None:
                    yield waiting

    def oldest(self, home: int) -> Waiting | None:
        ages = self.queues[home].by_age
        while ages and self.of.get(ages[0].task.trial) is not ages[0]:
            ages.popleft()
        return ages[0] if ages else None

    def __len__(self) -> int:
        return len(self.of)
