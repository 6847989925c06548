"""What the scheduler knows of each trial and each device. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import inf

from hydra_tune.schedule.events import PilotReady, PlanReady, StepReady
from hydra_tune.schedule.ledger import Ledger, SlotKey
from hydra_tune.schedule.plan import Task, TrialPlan
from hydra_tune.schedule.progress import Progress, VisitOrder
from hydra_tune.schedule.ready import Waiting

NO_TRIAL = "no trial"  # why a device idles: then it does not stall
PROMOTION = "promotion"


class TaskState(Enum):
    """WAITING   ready; holds nothing but what its trial and step do.
    PROMISED  next on a device: its shard is there or on its way.
    RUNNING   has the device's lease, its shard and room for its work."""

    WAITING = "waiting"
    PROMISED = "promised"
    RUNNING = "running"


@dataclass
class TrialState:
    home: int
    travels: bool
    host_bytes: int
    progress: Progress
    plan: TrialPlan = field(default_factory=TrialPlan)
    admitted: bool = False
    on: int | None = None  # the device that its task is running on, or promised to
    at_home: bool = False  # the task that it has in flight does not travel, and promotes its shard itself
    lacks_room: bool = False  # it has run out of memory in this step
    slots: set[tuple[int, int]] = field(default_factory=set)  # (device, shard)
    visits: VisitOrder = field(default_factory=VisitOrder)

    def work_bytes(self, task: Task, device: int) -> int:
        """Away from home its inputs and outputs take room, too."""
        shard = self.plan.shards[task.shard]
        return shard.work_bytes(task.direction) + (2 * shard.boundary_bytes if self.home != device else 0)


@dataclass
class DeviceState:
    index: int
    ledger: Ledger
    link_bytes_per_s: float = inf
    speed: float = 1.0
    admissions: list[PilotReady | PlanReady] = field(default_factory=list)
    entries: list[PilotReady | StepReady] = field(default_factory=list)
    running: Task | None = None
    started: bool = False  # else the running task awaits its shard, or room for its work
    lasts: bool = False  # the turn of the running task, for many steps; until it is recalled
    promotes: tuple[int, int] = (0, 0)  # offset and bytes of what the running task promotes itself
    promised: Task | None = None
    waiting: Waiting | None = None  # the promised task, once it is ready
    in_flight: set[SlotKey] = field(default_factory=set)
    steps_let_by: int = 0  # since the first of the admissions awaits nothing but that steps end
    trials: set[int] = field(default_factory=set)  # at home here

    def load(self, more_trials: int = 0) -> float:
        """Trials at home here, and so many more, over its speed."""
        return (len(self.trials) + more_trials) / self.speed

    @property
    def busy(self) -> SlotKey | None:
        """The slot that the running task uses."""
        return None if self.running is None else (self.running.trial, self.running.shard)
