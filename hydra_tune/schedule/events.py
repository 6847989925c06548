"""The messages between trials and the scheduler: events go in, instructions come out. Plain data.

What stands in brackets happens in some runs only:

    trial  TrialAdded -> Place -> [PilotReady -> StartPilot -> PilotDone] -> PlanReady -> Admit -> steps -> TrialEnded
    step   StepReady -> [Move] -> Enter -> tasks -> StepDone
    task   TaskReady -> [PromoteShard -> Promoted] -> Run, which may ask for a promotion -> Done, which may carry the
           next TaskReady
    slot   PromoteShard, which may come before its task is ready -> Promoted -> Drop

A long lease is one task to the scheduler, though the trial computes many steps in it:

    trial      Run(lasts=True) | step | step | ... | step |      Done -> [StepDone]
    scheduler                    [Worked, Expired ...]    Recall
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hydra_tune.schedule.plan import Task, TrialPlan

# ---- events ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TrialAdded:
    """A trial asks for host memory and a home device.

    `total_steps`  mini-batches to come, None if unknown
    `host_bytes`   host memory that it owns until it ends
    `host_weights` numbers and bytes of frozen weights in host memory, beside these bytes. Trials that have the same
                   weights have them once
    `travels`      its tasks may run on any device, and each of its steps may begin on any
    """

    trial: int
    total_steps: int | None = None
    host_bytes: int = 0
    travels: bool = False
    host_weights: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class PilotReady:
    """The trial asks to measure its blocks while it has its device to itself. With `empty`, no other trial may hold
    bytes for life there either. From now on the trial holds nothing: after the pilot it must be admitted again."""

    trial: int
    empty: bool = False


@dataclass(slots=True)
class PilotDone:
    """`peak_bytes` is the most that the pilot used, or would have needed if it failed. `trained`: it was a mini-batch,
    not an evaluation."""

    trial: int
    peak_bytes: int
    trained: bool = False


@dataclass(slots=True)
class PlanReady:
    """The trial has a plan and asks to be admitted.

    An admitted trial may send another plan between two steps. If that plan holds the same bytes, and every step still
    fits beside them, it is admitted at once. Otherwise `waits` decides: True, and the trial gives back what it holds
    and queues for admission; False, and nothing changes.
    """

    trial: int
    plan: TrialPlan
    waits: bool = True


@dataclass(slots=True)
class Shared:
    """The weights of the trial's shards are also other trials', or may be: for each shard their number, None if they
    are the trial's own. Shards of one number have one slot on a device, and stay there from step to step. It holds
    until the trial's next plan. The trial is between two steps."""

    trial: int
    weights: tuple[int | None, ...]


@dataclass(slots=True)
class StepReady:
    """An admitted trial asks for the bytes of its next step."""

    trial: int


@dataclass(slots=True)
class StepDone:
    """`trained`: it was a mini-batch, not an evaluation. `keeps_bytes`: the user's script still has a tensor of this
    step, so its bytes stay reserved, and the trial's next step uses them without a `StepReady`."""

    trial: int
    trained: bool = True
    keeps_bytes: bool = False


@dataclass(slots=True)
class TaskReady:
    """The trial asks to run this task. With `at_home` the task runs on the home device only, even if the trial travels;
    and the trial's own thread promotes the shard, as a part of the task, without a `PromoteShard`."""

    task: Task
    at_home: bool = False


@dataclass(slots=True)
class Promoted:
    """The task's shard has arrived on the device."""

    task: Task
    device: int


@dataclass(slots=True)
class Done:
    """The task has computed for `seconds`. `then` is the trial's next task, if that is ready already."""

    task: Task
    seconds: float = 0.0
    then: TaskReady | None = None


@dataclass(slots=True)
class Worked:
    """In a long lease: since its last `Worked` the trial has computed for `seconds` and ended `steps` mini-batches."""

    trial: int
    seconds: float
    steps: int = 0


@dataclass(slots=True)
class Expired:
    """The device's long lease has lasted for a quantum (`Policy.quantum_s`), since it began or since the last
    `Expired`."""

    device: int


@dataclass(slots=True)
class OutOfMemory:
    """The trial ran out of memory although its bytes were reserved, for example because memory is fragmented. Every
    slot that can be dropped is dropped, and until the step ends nothing is promoted beside the trial's tasks."""

    trial: int


@dataclass(slots=True)
class Failed:
    """The task ended with an exception, perhaps before its promotion was complete."""

    task: Task


@dataclass(slots=True)
class Invalidated:
    """The trial's weights in host memory have changed, or may have: its device copies are stale, except those of
    weights that it shares."""

    trial: int


@dataclass(slots=True)
class Reported:
    """The trial's objective is `value` now. A larger one is better if its search `maximizes`."""

    trial: int
    value: float
    maximizes: bool = False


@dataclass(slots=True)
class Withdrawn:
    """The trial no longer waits for what it asked for: a pilot, its admission, a step. It keeps what it holds."""

    trial: int


@dataclass(slots=True)
class TrialEnded:
    trial: int


Event: TypeAlias = (
    TrialAdded | PilotReady | PilotDone | PlanReady | Shared | StepReady | StepDone | TaskReady | Promoted | Done
    | Worked | Expired | OutOfMemory | Failed | Invalidated | Reported | Withdrawn | TrialEnded
)  # fmt: skip

# ---- instructions ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Place:
    """The trial has its host memory, and `device` is its home."""

    trial: int
    device: int


@dataclass(slots=True)
class StartPilot:
    """The pilot begins. It may use `free_bytes`, and no other task runs on the device until it ends."""

    trial: int
    free_bytes: int


@dataclass(slots=True)
class Admit:
    """What the plan holds for the trial's life is reserved."""

    trial: int


@dataclass(slots=True)
class Move:
    """Between two steps: from now on `device` is the trial's home. What the trial holds moves there."""

    trial: int
    device: int


@dataclass(slots=True)
class Enter:
    """The step's bytes are reserved: it begins."""

    trial: int


@dataclass(slots=True)
class PromoteShard:
    """Copy the task's shard to its slot. With `ahead` another task computes meanwhile: the device's copy thread makes
    this copy, not the trial's thread."""

    task: Task
    device: int
    offset: int
    num_bytes: int
    ahead: bool = False


@dataclass(slots=True)
class Run:
    """The task has the lease. Unless `num_bytes` is 0, the trial first promotes the task's shard, to `offset`.

    `lasts` makes it a long lease: the trial keeps the device, and the bytes of its step, over many tasks and steps. It
    ends with a `Done` for this task, which the trial sends when it is recalled, or earlier.
    """

    task: Task
    device: int
    lasts: bool = False
    offset: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class Recall:
    """The trial's long lease ends with the task that it computes, or at once if it is between two tasks."""

    trial: int
    device: int


@dataclass(slots=True)
class Drop:
    """Free a slot. Its copy is clean: nothing is copied back. If trials share its weights, `trial` is `SHARED`, and
    `shard` is the number of the weights."""

    trial: int
    shard: int
    device: int
    offset: int
    num_bytes: int


Instruction: TypeAlias = Place | StartPilot | Admit | Move | Enter | PromoteShard | Run | Recall | Drop
