"""What the scheduler knows of each trial and each device. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import inf

from hydra_tune.schedule.events import PilotReady, PlanReady, StepReady
from hydra_tune.schedule.ledger import SHARED, HeldWeights, Ledger, SlotKey
from hydra_tune.schedule.plan import Task, TrialPlan
from hydra_tune.schedule.progress import Progress, VisitOrder
from hydra_tune.schedule.ready import ReadyTask

# Why a device idles. With no trial at home its idle time does not count as a stall.
NO_TRIAL = "no trial"
PROMOTION = "promotion"


class TaskState(Enum):
    """WAITING   ready to run; reserves nothing beyond what its trial and its step do.
    PROMISED  chosen to run next on a device; also has a slot there, with its shard in it or on its way.
    RUNNING   has the device's lease and a slot; once its shard has arrived, also the bytes of its work."""

    WAITING = "waiting"
    PROMISED = "promised"
    RUNNING = "running"


@dataclass
class TrialState:
    home: int
    travels: bool
    host_bytes: int
    progress: Progress
    host_weights: HeldWeights = ()
    plan: TrialPlan = field(default_factory=TrialPlan)
    admitted: bool = False
    task_device: int | None = None  # on which its task runs, or is promised to run
    task_stays_home: bool = False  # its task does not travel, and its own thread promotes the shard
    ran_out_of_memory: bool = False  # in this step
    slots: set[tuple[int, int]] = field(default_factory=set)  # (device, shard) of its own, not those that it shares
    visit_order: VisitOrder = field(default_factory=VisitOrder)
    weights: tuple[int | None, ...] = ()  # by shard: their number if trials share them; empty if none are shared

    def slot_key(self, task: Task) -> SlotKey:
        """Of the slot with the task's shard."""
        number = self.weights[task.shard] if self.weights else None
        return (task.trial, task.shard) if number is None else (SHARED, number)

    def work_bytes(self, task: Task, device: int) -> int:
        """Scratch of the task on this device. Away from home its inputs and outputs take room, too."""
        shard = self.plan.shards[task.shard]
        return shard.work_bytes(task.direction) + (2 * shard.boundary_bytes if self.home != device else 0)


@dataclass
class DeviceState:
    index: int
    ledger: Ledger
    link_bytes_per_s: float = inf
    speed: float = 1.0  # relative to other devices
    admissions: list[PilotReady | PlanReady] = field(default_factory=list)  # requests for bytes for life, oldest first
    entries: list[PilotReady | StepReady] = field(default_factory=list)  # requests for bytes of a step, oldest first
    running: Task | None = None  # has the lease
    started: bool = False  # the running task computes; False while it waits for its shard or for room
    long_lease: bool = False  # the running task has one, and it was not recalled
    own_promotion: tuple[int, int] = (0, 0)  # offset and bytes that the running task promotes itself
    promised: Task | None = None  # chosen to run next
    promised_ready: ReadyTask | None = None  # the same task, once its trial has reported it ready
    in_flight: dict[SlotKey, Task] = field(default_factory=dict)  # slots whose copy is on its way, and for which task
    steps_let_by: int = 0  # steps that entered while the first admission waited only for steps to end
    trials: set[int] = field(default_factory=set)  # at home here

    def load(self, more_trials: int = 0) -> float:
        """Trials at home here, and `more_trials`, relative to the device's speed."""
        return (len(self.trials) + more_trials) / self.speed

    def has(self, key: SlotKey) -> bool:
        """Whether the slot is here, and its copy has arrived."""
        return key in self.ledger.slots and key not in self.in_flight
