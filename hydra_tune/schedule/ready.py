"""The tasks that wait for a device, in one queue for each home. A choice among thousands takes microseconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from hydra_tune.schedule.ledger import SHARED, SlotKey
from hydra_tune.schedule.plan import Task


class ReadyTask(NamedTuple):
    """`number` counts ready tasks in the order in which they came.

    `granted_before` is how many leases tasks of this home had been granted by then. How many have been granted since
    tells the machine whether the task has waited for too long (`STARVATION_LIMIT` in `machine.py`).

    `slot` is that of the task's shard."""

    task: Task
    rank: float
    number: int
    home: int
    granted_before: int
    slot: SlotKey


@dataclass
class Queue:
    """The ready tasks of one home. A task that is removed stays in both orders until it comes to the front."""

    by_rank: list[tuple[float, int, ReadyTask]] = field(default_factory=list)
    by_age: deque[ReadyTask] = field(default_factory=deque)
    granted: int = 0  # leases that tasks of this home have been granted


class ReadyTasks:
    """At most one for each trial."""

    def __init__(self, num_devices: int) -> None:
        self.by_trial: dict[int, ReadyTask] = {}
        self.at_shared: dict[SlotKey, dict[int, ReadyTask]] = {}  # by the slot of shared weights, then by trial
        self.queues = [Queue() for _ in range(num_devices)]  # by home
        self._number = 0

    def add(self, task: Task, rank: float, home: int, slot: SlotKey) -> ReadyTask:
        queue = self.queues[home]
        ready = self.by_trial[task.trial] = ReadyTask(task, rank, self._number, home, queue.granted, slot)
        if slot[0] == SHARED:
            self.at_shared.setdefault(slot, {})[task.trial] = ready
        self._number += 1
        heappush(queue.by_rank, (rank, ready.number, ready))
        queue.by_age.append(ready)
        return ready

    def remove(self, trial: int) -> ReadyTask | None:
        ready = self.by_trial.pop(trial, None)
        if ready is not None and ready.slot[0] == SHARED:
            waiting = self.at_shared[ready.slot]
            del waiting[trial]
            if not waiting:
                del self.at_shared[ready.slot]
        return ready

    def first(self, home: int) -> ReadyTask | None:
        """The one with the smallest rank; of equal ranks the one that came first."""
        heap = self.queues[home].by_rank
        while heap and self.by_trial.get(heap[0][2].task.trial) is not heap[0][2]:
            heappop(heap)
        return heap[0][2] if heap else None

    def first_of_each_home(self, rank_below: float | None) -> Iterator[ReadyTask]:
        """Each home's first task. Homes whose first task does not rank below the limit may be left out.

        A removed task that is still at a front never ranks after the home's first task, so that no home that is
        wanted is left out.
        """
        for home, queue in enumerate(self.queues):
            if queue.by_rank and (rank_below is None or queue.by_rank[0][0] < rank_below):
                ready = self.first(home)
                if ready is not None:
                    yield ready

    def oldest(self, home: int) -> ReadyTask | None:
        by_age = self.queues[home].by_age
        while by_age and self.by_trial.get(by_age[0].task.trial) is not by_age[0]:
            by_age.popleft()
        return by_age[0] if by_age else None

    def __len__(self) -> int:
        return len(self.by_trial)
