"""Lets trials that have the same frozen weights visit a shard together. Plain data, as the machine that asks it.

    computes     | A0 | B0 | C0 | A1 | B1 | C1 |        A0: trial A's task of shard 0
    promotes     | shard 1      | shard 2      |        each shard once for all

A task whose shard is on the device goes before others that rank about the same. If no shard is, the trial that is
furthest behind goes on until it has met the others. Trials part where a step ends, since their loops take their own
time between two steps, and meet again there: the first shard is on the device from the end of the backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydra_tune.schedule.ledger import SHARED
from hydra_tune.schedule.plan import Direction, Task
from hydra_tune.schedule.policy import Policy
from hydra_tune.schedule.ready import ReadyTask, ReadyTasks
from hydra_tune.schedule.state import DeviceState, TrialState


class Gathering:
    """Chooses among ready tasks within the policy's slack. If the policy does not gather, ranks alone decide."""

    def __init__(self, trials: Mapping[int, TrialState], ready: ReadyTasks, policy: Policy) -> None:
        self._trials = trials
        self._ready = ready
        self._policy = policy

    def is_clearly_before(self, ready: ReadyTask, other: ReadyTask) -> bool:
        """By more than the policy's slack, so that it is worth a copy that would otherwise not be made."""
        progress = self._trials[ready.task.trial].progress
        share = self._policy.gathers and ready.slot[0] == other.slot[0] == SHARED
        return ready.rank + (self._policy.gather_slack if share else self._policy.slack)(progress) < other.rank

    def is_at_hand(self, device: DeviceState, ready: ReadyTask, other: ReadyTask) -> bool:
        """Whether the shard of the first is on the device and shared, so that it goes before the other one."""
        is_here = self._policy.gathers and ready.slot[0] == SHARED and device.has(ready.slot)
        return is_here and not self.is_clearly_before(other, ready)

    def choose(self, device: DeviceState) -> ReadyTask | None:
        """The first by rank of the home, or a task at shared weights that ranks about the same and goes before it: one
        whose shard is on the device, else any. Of several the one that is furthest behind in its step."""
        first, at_shared = self._ready.first(device.index), self._ready.at_shared
        if first is None or not (at_shared and self._policy.gathers):
            return first
        alike = [
            ready
            for waiting in at_shared.values()
            for ready in waiting.values()
            if ready is first or (ready.home == device.index and not self.is_clearly_before(first, ready))
        ]
        here = [ready for ready in alike if device.has(ready.slot)]
        if first.slot[0] != SHARED:
            return first if device.has(first.slot) or not here else self._furthest_behind(here)
        return self._furthest_behind(here or alike)

    def choose_to_promote(self, device: DeviceState) -> ReadyTask | None:
        """The ready task of this home whose shard is to be promoted next; None if the first ones need no promotion."""
        lacking = [of for slot, of in self._ready.at_shared.items() if slot not in device.ledger.slots]
        at_home = [ready for waiting in lacking for ready in waiting.values() if ready.home == device.index]
        first = self._ready.first(device.index)
        if first is None or device.has(first.slot):
            return self._furthest_behind(at_home) if at_home else None
        alike = [ready for ready in at_home if not self.is_clearly_before(first, ready)]
        return self._furthest_behind([first, *alike]) if first.slot[0] == SHARED else first

    def precedes(self, expected: Task, ready: ReadyTask) -> bool:
        """Whether the running trial's next task is to be promoted before another trial's ready one."""
        trial = self._trials[expected.trial]
        rank = self._policy.rank(expected, trial.progress)
        asked = ready._replace(task=expected, rank=rank, number=-1, slot=trial.slot_key(expected))
        share = self._policy.gathers and asked.slot[0] == ready.slot[0] == SHARED
        if share and not (self.is_clearly_before(asked, ready) or self.is_clearly_before(ready, asked)):
            return self._furthest_behind([asked, ready]) is asked
        return rank <= ready.rank

    def _furthest_behind(self, ready: Sequence[ReadyTask]) -> ReadyTask:
        """The task from which all others are reached by the fewest shards. Steps follow each other, so that places in
        them are on a circle: it is the task after the largest gap."""
        places = sorted({self._place(r.task) for r in ready})
        gaps = [(place - before) % 1.0 or 1.0 for before, place in zip([places[-1], *places], places, strict=False)]
        start = places[gaps.index(max(gaps))]
        return min(ready, key=lambda r: ((self._place(r.task) - start) % 1.0, r.rank, r.number))

    def _place(self, task: Task) -> float:
        """In the order of its step's tasks, from 0 to 1."""
        num_shards = len(self._trials[task.trial].plan.shards)
        is_forward = task.direction is Direction.FORWARD
        return (task.shard if is_forward else 2 * num_shards - 1 - task.shard) / (2 * num_shards)
