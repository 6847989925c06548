"""What a trial tells the scheduler, and what the scheduler has it do. Plain data.

trial  TrialAdded -> Place -> [PilotReady -> StartPilot -> PilotDone] -> PlanReady -> Admit -> ... -> TrialEnded
step   StepReady -> [Move] -> Enter -> task -> ... -> StepDone
task   TaskReady -> [PromoteShard -> Promoted] -> Run, perhaps with a promotion -> Done (which may say what comes next)
turn   Run that lasts, for many steps -> [Worked ...] -> [Expired ...] -> [Recall] -> Done -> [StepDone]
slot   PromoteShard, perhaps ahead of its task -> Promoted -> Drop
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hydra_tune.schedule.plan import Task, TrialPlan

# ---- events ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TrialAdded:
    """`total_steps` mini-batches are to come, if that is known. `host_bytes` of host memory are its own until it
    ends. With `travels`, its tasks may run on any device, and its steps begin on any."""

    trial: int
    total_steps: int | None = None
    host_bytes: int = 0
    travels: bool = False


@dataclass(slots=True)
class PilotReady:
    """The trial wants to measure its blocks, with its device to itself; with `empty`, also without what other trials
    hold for life. It holds nothing itself until it is admitted, anew if it was before."""

    trial: int
    empty: bool = False


@dataclass(slots=True)
class PilotDone:
    """`trained`: it was a mini-batch."""

    trial: int
    peak_bytes: int
    trained: bool = False


@dataclass(slots=True)
class PlanReady:
    """The trial knows its plan and wants to be admitted. One that is admitted, and between steps, asks
    again with another plan, and holds nothing until it is admitted anew: at once, if that holds the same
    bytes and every step still fits beside them. If it is not to wait, all is as before where that is not so."""

    trial: int
    plan: TrialPlan
    waits: bool = True


@dataclass(slots=True)
class StepReady:
    trial: int


@dataclass(slots=True)
class StepDone:
    """`trained`: it was a mini-batch, not an evaluation. With `keeps_bytes` the script has an activation of it still:
    another step follows without having to enter, with what this one has."""

    trial: int
    trained: bool = True
    keeps_bytes: bool = False


@dataclass(slots=True)
class TaskReady:
    """With `at_home` the task does not travel, though its trial may; and its shard is promoted as a part of it, by the
    trial's own thread."""

    task: Task
    at_home: bool = False


@dataclass(slots=True)
class Promoted:
    """The task's shard has arrived on the device."""

    task: Task
    device: int


@dataclass(slots=True)
class Done:
    """The task has computed for so many seconds; `then` is ready."""

    task: Task
    seconds: float = 0.0
    then: TaskReady | None = None


@dataclass(slots=True)
class Worked:
    """The trial whose turn lasts has computed for so many seconds since it last said so, and has ended so many
    mini-batches."""

    trial: int
    seconds: float
    steps: int = 0


@dataclass(slots=True)
class Expired:
    """The turn that lasts on this device has taken a quantum, since it began or since this was said last."""

    device: int


@dataclass(slots=True)
class OutOfMemory:
    """The trial found less room where it is than was reserved for it, as where memory is fragmented: what can go is to
    be dropped, and for the rest of the step nothing is promoted while it computes."""

    trial: int


@dataclass(slots=True)
class Failed:
    """The task ended with an exception, perhaps before its promotion was complete."""

    task: Task


@dataclass(slots=True)
class Invalidated:
    """The trial's host copies have changed, or may have: its device copies are stale."""

    trial: int


@dataclass(slots=True)
class Reported:
    """The trial's objective is so far `value`, the larger the better if its search `maximizes`."""

    trial: int
    value: float
    maximizes: bool = False


@dataclass(slots=True)
class Withdrawn:
    """The trial does not wait any more for what it was not yet granted: a pilot, its admission, a step. What it holds
    it keeps."""

    trial: int


@dataclass(slots=True)
class TrialEnded:
    trial: int


Event: TypeAlias = (
    TrialAdded | PilotReady | PilotDone | PlanReady | StepReady | StepDone | TaskReady | Promoted | Done
    | Worked | Expired | OutOfMemory | Failed | Invalidated | Reported | Withdrawn | TrialEnded
)  # fmt: skip

# ---- instructions ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Place:
    trial: int
    device: int


@dataclass(slots=True)
class StartPilot:
    """With these bytes, and the device to itself."""

    trial: int
    free_bytes: int


@dataclass(slots=True)
class Admit:
    trial: int


@dataclass(slots=True)
class Move:
    """`device` is the trial's home from here on, between two steps; what it holds moves along."""

    trial: int
    device: int


@dataclass(slots=True)
class Enter:
    """The step begins."""

    trial: int


@dataclass(slots=True)
class PromoteShard:
    """With `ahead`, while another task computes: whoever copies for the device does it, not the trial's thread."""

    task: Task
    device: int
    offset: int
    num_bytes: int
    ahead: bool = False


@dataclass(slots=True)
class Run:
    """With `lasts`, the trial keeps the device from task to task and from step to step, and what its step reserves,
    until it is recalled or says `Done`, of this task. With bytes, its shard is to be promoted first, to this place."""

    task: Task
    device: int
    lasts: bool = False
    offset: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class Recall:
    """The trial, whose turn lasts, gives the device back at the end of its task; at once, if it is between two."""

    trial: int
    device: int


@dataclass(slots=True)
class Drop:
    """Forget a clean device copy; nothing is copied back."""

    trial: int
    shard: int
    device: int
    offset: int
    num_bytes: int


Instruction: TypeAlias = Place | StartPilot | Admit | Move | Enter | PromoteShard | Run | Recall | Drop
