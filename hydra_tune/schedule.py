"""Decides which shard of which trial computes next; pure, so that a schedule can be replayed.

Events in, instructions out; no torch, clock, thread or I/O. One device runs one task at a time, of any
trial whose next task is ready: shard parallelism (Hydra, arXiv 2110.08633, section 4).

    trial  added -> [pilot] -> admitted -> step -> step -> ... -> ended      (home device: for life)
    step   ready -> entered -> task -> task -> ... -> done                   (whole-step reservation)
    task   ready -> [promote] -> run -> done                                 (one lease a device)

No deadlock: a trial is admitted only if, beside everything held for life, each admitted trial's largest
task still fits; a step enters only if, beside all entered steps, the largest task of any of them fits;
every slot can be evicted while its device is idle. So whoever holds bytes can always run its next task.
No starvation: admissions, steps and pilots are each served in the order in which they asked.

Known slack: a trial's shards run on its home device alone, and nothing is promoted ahead of its task.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import neg
from typing import Any, TypeAlias, get_args

from hydra_tune.ledger import Ledger
from hydra_tune.policy import Fifo, Policy
from hydra_tune.shard import Direction, Shard, ShardState, Task, TrialPlan

# ---- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrialAdded:
    trial: int


@dataclass(frozen=True)
class PilotReady:
    """The trial wants its device to itself; with `empty`, also without what other trials hold for life. It
    holds nothing itself until it is admitted, anew if it was before."""

    trial: int
    empty: bool = False


@dataclass(frozen=True)
class PilotDone:
    trial: int
    peak_bytes: int


@dataclass(frozen=True)
class PlanReady:
    """The trial knows its plan and wants to be admitted. One that is admitted, and between steps, asks
    again with another plan, and holds nothing until it is admitted anew: at once, if that holds the same
    bytes and every step still fits beside them."""

    trial: int
    plan: TrialPlan


@dataclass(frozen=True)
class StepReady:
    """With `alone`, the step shares its device with no other: its bytes are still an estimate."""

    trial: int
    alone: bool = False


@dataclass(frozen=True)
class StepDone:
    trial: int


@dataclass(frozen=True)
class TaskReady:
    task: Task


@dataclass(frozen=True)
class Promoted:
    task: Task


@dataclass(frozen=True)
class Done:
    task: Task


@dataclass(frozen=True)
class Failed:
    """The task ended with an exception, perhaps before its promotion was complete."""

    task: Task


@dataclass(frozen=True)
class Invalidated:
    """The trial's host copies have changed, or may have: its device copies are stale."""

    trial: int


@dataclass(frozen=True)
class Interrupted:
    """The trial's thread was interrupted, perhaps within an event. It keeps its home, and holds and awaits nothing
    until it is admitted anew."""

    trial: int


@dataclass(frozen=True)
class TrialEnded:
    trial: int


Event: TypeAlias = (
    TrialAdded | PilotReady | PilotDone | PlanReady | StepReady | StepDone | TaskReady | Promoted | Done
    | Failed | Invalidated | Interrupted | TrialEnded
)  # fmt: skip

# ---- instructions ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    trial: int
    device: int


@dataclass(frozen=True)
class StartPilot:
    trial: int
    free_bytes: int


@dataclass(frozen=True)
class Admit:
    trial: int


@dataclass(frozen=True)
class Enter:
    trial: int


@dataclass(frozen=True)
class Promote:
    task: Task
    device: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Run:
    task: Task


@dataclass(frozen=True)
class Drop:
    """Forget a clean device copy; nothing is copied back."""

    trial: int
    shard: int
    device: int
    offset: int
    num_bytes: int


Instruction: TypeAlias = Place | StartPilot | Admit | Enter | Promote | Run | Drop


# ---- state -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """What a trial has now; its thread knows the same, unless it was interrupted."""

    admitted: bool
    in_step: bool
    running: Task | None
    slots: frozenset[int]  # shards


@dataclass
class TrialState:
    device: int
    plan: TrialPlan | None = None
    admitted: bool = False


@dataclass
class DeviceState:
    ledger: Ledger
    admissions: list[PilotReady | PlanReady] = field(default_factory=list)
    entries: list[PilotReady | StepReady] = field(default_factory=list)
    ready: list[Task] = field(default_factory=list)
    running: Task | None = None
    in_flight: bool = False  # the running task's shard is being promoted
    exclusive: int | None = None  # the trial whose pilot or unmeasured step has the device to itself


class Machine:
    """All state is plain data; `handle` is the only way in, `validate` checks every invariant."""

    def __init__(self, budgets_bytes: Sequence[int], policy: Policy | None = None) -> None:
        self.policy = policy or Fifo()
        self.devices = [DeviceState(Ledger(budget)) for budget in budgets_bytes]
        self.trials: dict[int, TrialState] = {}

    def handle(self, event: Event) -> list[Instruction]:
        """Apply one event; the instructions that follow from it, in the order to carry them out."""
        return _HANDLERS[type(event)](self, event)

    def shard_state(self, trial: int, shard: int) -> ShardState:
        device = self.devices[self.trials[trial].device]
        if (trial, shard) not in device.ledger.slots:
            return ShardState.SPILLED
        task = device.running
        in_flight = device.in_flight and task is not None and (task.trial, task.shard) == (trial, shard)
        return ShardState.IN_FLIGHT if in_flight else ShardState.RESIDENT

    def standing(self, trial: int) -> Standing | None:
        """None while it awaits something, or where an event was handled only in part."""
        device = self._device(trial)
        awaits = any(e.trial == trial for e in (*device.admissions, *device.entries, *device.ready))
        running = device.running if device.running is not None and device.running.trial == trial else None
        if awaits or not device.ledger.is_sound or (running is not None and device.in_flight):
            return None
        slots = frozenset(shard for owner, shard in device.ledger.slots if owner == trial)
        return Standing(self.trials[trial].admitted, trial in device.ledger.steps, running, slots)

    # ---- one handler an event ----

    def _on_TrialAdded(self, event: TrialAdded) -> list[Instruction]:
        assert event.trial not in self.trials, self._story(event)
        live = [sum(t.device == i for t in self.trials.values()) for i in range(len(self.devices))]
        home = min(range(len(self.devices)), key=lambda i: (live[i], i))
        self.trials[event.trial] = TrialState(device=home)
        return [Place(event.trial, home)]

    def _on_PilotReady(self, event: PilotReady) -> list[Instruction]:
        device = self._device(event.trial)
        assert event.trial not in device.ledger.steps, self._story(event)
        dropped = self._drop(device, [key for key in device.ledger.slots if key[0] == event.trial])
        device.ledger.forget(event.trial)
        trial = self.trials[event.trial]
        trial.plan, trial.admitted = None, False
        (device.admissions if event.empty else device.entries).append(event)
        return [*dropped, *self._advance(device)]

    def _on_PilotDone(self, event: PilotDone) -> list[Instruction]:
        device = self._device(event.trial)
        assert device.exclusive == event.trial, self._story(event)
        device.exclusive = None
        device.ledger.leave_step(event.trial)
        device.ledger.note_peak(event.peak_bytes)
        return self._advance(device)

    def _on_PlanReady(self, event: PlanReady) -> list[Instruction]:
        trial, device = self.trials[event.trial], self._device(event.trial)
        assert event.trial not in device.ledger.steps, self._story(event)
        again = trial.admitted and trial.plan is not None and trial.plan.held_bytes == event.plan.held_bytes
        trial.admitted = False
        device.ledger.forget(event.trial)
        if again and self._admissible(device, event):
            return [*self._admit_one(device, event), *self._advance(device)]
        device.admissions.append(event)
        return self._advance(device)

    def _on_StepReady(self, event: StepReady) -> list[Instruction]:
        device = self._device(event.trial)
        assert self.trials[event.trial].admitted and event.trial not in device.ledger.steps, self._story(event)
        device.entries.append(event)
        return self._advance(device)

    def _on_StepDone(self, event: StepDone) -> list[Instruction]:
        device = self._device(event.trial)
        device.ledger.leave_step(event.trial)
        if device.exclusive == event.trial:
            device.exclusive = None
        return self._advance(device)

    def _on_TaskReady(self, event: TaskReady) -> list[Instruction]:
        device = self._device(event.task.trial)
        assert event.task.trial in device.ledger.steps, self._story(event)
        device.ready.append(event.task)
        return self._advance(device)

    def _on_Promoted(self, event: Promoted) -> list[Instruction]:
        device = self._device(event.task.trial)
        assert device.running == event.task and device.in_flight, self._story(event)
        device.in_flight = False
        return self._run(device, event.task)

    def _on_Done(self, event: Done) -> list[Instruction]:
        device = self._device(event.task.trial)
        assert device.running == event.task and not device.in_flight, self._story(event)
        device.ledger.end_work()
        device.running = None
        key = (event.task.trial, event.task.shard)
        if event.task.direction is Direction.BACKWARD and key in device.ledger.slots:
            device.ledger.retire(key)
        return self._advance(device)

    def _on_Failed(self, event: Failed) -> list[Instruction]:
        device, key = self._device(event.task.trial), (event.task.trial, event.task.shard)
        device.ready = [task for task in device.ready if task != event.task]
        if device.running != event.task:
            return []
        device.ledger.end_work()
        device.running, device.in_flight = None, False
        dropped = self._drop(device, [key] if key in device.ledger.slots else [])
        return dropped + self._advance(device)

    def _on_Invalidated(self, event: Invalidated) -> list[Instruction]:
        device = self._device(event.trial)
        assert device.running is None or device.running.trial != event.trial, self._story(event)
        return self._drop(device, sorted(key for key in device.ledger.slots if key[0] == event.trial))

    def _on_TrialEnded(self, event: TrialEnded) -> list[Instruction]:
        device = self._device(event.trial)
        dropped = self._take_back(device, event.trial)
        del self.trials[event.trial]
        return dropped + self._advance(device)

    def _on_Interrupted(self, event: Interrupted) -> list[Instruction]:
        device, trial = self._device(event.trial), self.trials[event.trial]
        trial.plan, trial.admitted = None, False
        return self._take_back(device, event.trial) + self._advance(device)

    def _take_back(self, device: DeviceState, trial: int) -> list[Instruction]:
        """All that the trial holds and awaits, whatever was under way."""
        device.admissions = [e for e in device.admissions if e.trial != trial]
        device.entries = [e for e in device.entries if e.trial != trial]
        device.ready = [task for task in device.ready if task.trial != trial]
        if device.running is not None and device.running.trial == trial:
            device.ledger.end_work()
            device.running, device.in_flight = None, False
        if device.exclusive == trial:
            device.exclusive = None
        device.ledger.recount()
        device.ledger.forget(trial)
        return self._drop(device, [key for key in device.ledger.slots if key[0] == trial])

    # ---- what can go on now ----

    def _advance(self, device: DeviceState) -> list[Instruction]:
        waiting = self._admit(device) + self._enter(device) if device.admissions or device.entries else []
        return waiting + self._grant(device)

    def _admit(self, device: DeviceState) -> list[Instruction]:
        admitted: list[Instruction] = []
        while device.admissions and device.exclusive is None:
            request = device.admissions[0]
            if isinstance(request, PilotReady):
                if device.ledger.held_bytes:
                    break
                device.entries.append(PilotReady(request.trial))
            else:
                if not self._admissible(device, request):
                    break
                admitted += self._admit_one(device, request)
            device.admissions.pop(0)
        return admitted

    def _admit_one(self, device: DeviceState, request: PlanReady) -> list[Instruction]:
        self.trials[request.trial].plan = request.plan
        self.trials[request.trial].admitted = True
        dropped = self._make_room(device, request.plan.held_bytes)
        device.ledger.hold(request.trial, request.plan.held_bytes)
        return [*dropped, Admit(request.trial)]

    def _admissible(self, device: DeviceState, request: PlanReady) -> bool:
        """Would every admitted trial's step still fit alone, and those under way go on?"""
        plans = [t.plan for t in self.trials.values() if t.admitted and t.plan and self.devices[t.device] is device]
        held = device.ledger.held_bytes + request.plan.held_bytes
        most = max(plan.step_bytes + plan.task_bytes for plan in [*plans, request.plan])
        return held + most <= device.ledger.budget_bytes and self._steps_fit(device, request.plan.held_bytes, None)

    def _steps_fit(self, device: DeviceState, more_held: int, entering: int | None) -> bool:
        trials = [*device.ledger.steps, *([] if entering is None else [entering])]
        plans = [plan for plan in (self.trials[trial].plan for trial in trials) if plan is not None]
        reserved = device.ledger.held_bytes + more_held + sum(plan.step_bytes for plan in plans)
        return reserved + max((plan.task_bytes for plan in plans), default=0) <= device.ledger.budget_bytes

    def _enter(self, device: DeviceState) -> list[Instruction]:
        entered: list[Instruction] = []
        while device.entries and device.exclusive is None:
            request = device.entries[0]
            alone = isinstance(request, PilotReady) or request.alone
            if alone and device.ledger.steps:
                break
            if isinstance(request, PilotReady):
                entered += self._drop(device, list(device.ledger.slots))
                entered.append(StartPilot(request.trial, device.ledger.reserve_rest(request.trial)))
            else:
                if not self._steps_fit(device, 0, request.trial):
                    break
                plan = self.trials[request.trial].plan
                assert plan is not None, self._story(request)
                entered += self._make_room(device, plan.step_bytes)
                device.ledger.enter_step(request.trial, plan.step_bytes)
                entered.append(Enter(request.trial))
            if alone:
                device.exclusive = request.trial
            device.entries.pop(0)
        return entered

    def _grant(self, device: DeviceState) -> list[Instruction]:
        if device.running is not None or not device.ready:
            return []
        task = self.policy.choose(device.ready)
        device.ready.remove(task)
        device.running = task
        shard, key = self._shard(task), (task.trial, task.shard)
        if key in device.ledger.slots:
            device.ledger.touch(key)
            return self._run(device, task)
        if shard.slot_bytes == 0:
            return self._run(device, task)
        at, dropped = self._place(device, task)
        dropped += self._make_room(device, shard.slot_bytes)
        while (offset := device.ledger.place(key, shard.slot_bytes, at)) is None:
            dropped += self._drop(device, [next(iter(device.ledger.slots))])
        device.in_flight = True
        return [*dropped, Promote(task, self.trials[task.trial].device, offset, shard.slot_bytes)]

    def _run(self, device: DeviceState, task: Task) -> list[Instruction]:
        work_bytes = self._shard(task).work_bytes(task.direction)
        dropped = self._make_room(device, work_bytes)
        device.ledger.start_work(work_bytes)
        return [*dropped, Run(task)]

    # ---- slots ----

    def _place(self, device: DeviceState, task: Task) -> tuple[int | None, list[Instruction]]:
        """Where the slot goes, after its trial's own slots have made way; None if no place is reserved for it,
        or another trial's slot is there.

        The last shards, as many as the arena holds, have places side by side, so that the bytes that are
        free alone decide which of them stay until their backward, never the gaps between them.
        """
        plan = self.trials[task.trial].plan
        assert plan is not None
        size, arena_bytes = plan.shards[task.shard].slot_bytes, device.ledger.budget_bytes
        to_end = plan.bytes_to_end
        if to_end[task.shard] > arena_bytes:
            return None, []
        first = bisect_left(to_end, -arena_bytes, key=neg)
        at = to_end[first] - to_end[task.shard]
        there = device.ledger.slots_at(at, size)
        if any(trial != task.trial or to_end[shard] <= arena_bytes for trial, shard in there):
            return None, []
        dropped: list[Instruction] = []
        own = [key for key in device.ledger.slots if key[0] == task.trial]
        while device.ledger.slots_at(at, size):
            dropped += self._drop(device, [own.pop(0)])
        return at, dropped

    def _make_room(self, device: DeviceState, num_bytes: int) -> list[Instruction]:
        """Drop the least recently used idle slots until `num_bytes` are free.

        Within one step a trial visits its shards forwards, then backwards, so the slot used last is
        the one needed first, and after its backward it is not needed: in this order, with those retired
        first, goes what is needed last (Belady).
        """
        dropped: list[Instruction] = []
        if device.ledger.free_bytes >= num_bytes:
            return dropped
        busy = (device.running.trial, device.running.shard) if device.running else None
        for key in list(device.ledger.slots):
            if device.ledger.free_bytes >= num_bytes:
                break
            if key != busy:
                dropped += self._drop(device, [key])
        return dropped

    def _drop(self, device: DeviceState, keys: Sequence[tuple[int, int]]) -> list[Instruction]:
        index = self.devices.index(device)
        return [Drop(*key, index, *device.ledger.remove(key)) for key in keys]

    def _device(self, trial: int) -> DeviceState:
        return self.devices[self.trials[trial].device]

    def _shard(self, task: Task) -> Shard:
        plan = self.trials[task.trial].plan
        assert plan is not None
        return plan.shards[task.shard]

    def _story(self, event: object) -> str:
        trial = getattr(event, "trial", None)
        return f"impossible {event}; trial {self.trials.get(trial) if trial is not None else ''}; {self.devices}"

    def validate(self) -> None:
        """Every invariant; each test of the machine ends with it."""
        for device in self.devices:
            device.ledger.validate()
            for holder in (*device.ledger.held, *device.ledger.steps, *(t for t, _ in device.ledger.slots)):
                assert self._device(holder) is device, f"trial {holder} holds bytes away from home"
            if device.running is not None:
                assert device.running.trial in device.ledger.steps, f"{device.running} runs outside a step"
                assert device.running not in device.ready, f"{device.running} runs and waits"
            assert device.in_flight <= (device.running is not None)
            assert self._steps_fit(device, 0, None), "an entered step's largest task no longer fits"
            waiting = {task.trial for task in device.ready}
            assert len(waiting) == len(device.ready), "a trial has two tasks in flight"
            assert device.running is not None or not device.ready, "the device idles beside a ready task"


_HANDLERS: dict[type[Event], Callable[[Machine, Any], list[Instruction]]] = {
    event: getattr(Machine, f"_on_{event.__name__}") for event in get_args(Event)
}
