"""Decides which shard of which trial computes next, and where; pure, so that a schedule can be replayed.

Events in, instructions out (`events.py`); no torch, clock, thread or I/O.

**Shard parallelism** (Hydra, arXiv 2110.08633, section 4). A device runs one task at a time, of any trial whose next
task is ready. Meanwhile the shard of the task that is chosen to come next is promoted (double buffering):

    computes     | task of A      | task of B      | task of A      |
    promotes     | shard of B     | shard of A     | ...

    a task       WAITING --> PROMISED --> RUNNING --> done       PROMISED: chosen to come next. If another task comes
                     \\_____________________/                     instead, the promise is withdrawn. The shard stays in
                                                                 its slot for as long as there is room.

**Shared weights.** Trials may have the same frozen weights (`Shared`). These have one slot a device. Tasks whose shard
is there go before others that rank about the same, so that it is promoted once for all (`gathering.py`).

**Long leases.** Where all trials at home on a device are resident and none waits for bytes there, a change of trial
after each task would gain nothing. There one lease lasts for many steps. To the machine it is one task, and the trial
reports in sums what it has done. The machine has no clock: its caller says when a quantum is over, and the policy
decides which trial goes on.

**Homes.** A trial has a home device, where its steps reserve their bytes. If the trial travels, its tasks may run on
any device that has room at the time, and its next step may begin on another one.

**No deadlock.** A trial that holds bytes can always run its next task at home, because:

- A trial is admitted only if each admitted trial's largest task still fits beside all that is held for life.
- A step enters only if the largest task of any entered step fits beside all that entered steps reserve.
- A pilot waits until no step has bytes of its device. Then it has all that is free there until it ends.
- Every slot can be dropped while its device is idle, once its copy has arrived.

**No starvation.** Admissions, steps and pilots are each served first come, first served. An admission that waits only
for steps to end lets `STEPS_LET_BY` more of them enter first. Whatever the policy, a ready task goes first once its
home has granted other tasks `STARVATION_LIMIT` leases for each trial there.

Known slack: a step's bytes stay reserved at home while its tasks travel. Which trial changes its home is decided by the
number of trials on each device, not by their seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, get_args

from hydra_tune.schedule.admission import Admission
from hydra_tune.schedule.events import (
    Done,
    Drop,
    Event,
    Expired,
    Failed,
    Instruction,
    Invalidated,
    Move,
    OutOfMemory,
    PilotDone,
    PilotReady,
    Place,
    PlanReady,
    Promoted,
    PromoteShard,
    Recall,
    Reported,
    Run,
    Shared,
    StepDone,
    StepReady,
    TaskReady,
    TrialAdded,
    TrialEnded,
    Withdrawn,
    Worked,
)
from hydra_tune.schedule.gathering import Gathering
from hydra_tune.schedule.ledger import SHARED, HeldWeights, Ledger
from hydra_tune.schedule.plan import Direction, Shard, Task, TrialPlan
from hydra_tune.schedule.policy import Policy, ShardedLRTF
from hydra_tune.schedule.progress import EndedTrials, Progress
from hydra_tune.schedule.ready import ReadyTask, ReadyTasks
from hydra_tune.schedule.slots import Slots
from hydra_tune.schedule.state import NO_TRIAL, PROMOTION, DeviceState, TaskState, TrialState

STARVATION_LIMIT = 16
_STORY_EVENTS = 200  # few, so that events are forgotten before the garbage collector moves them to its old generation


class Machine:
    """All state is plain data. `handle` is the only way to change it; `validate` checks every invariant.

    Args:
        budgets_bytes: of each device.
        host_bytes: host memory for all trials together; None for no limit.
        least_ahead_bytes: a promotion is made ahead of its task if it has at least so many bytes; a smaller one is made
            in the task's own time. None: no promotion is made ahead.
        links_bytes_per_s: from the host to each device; infinitely fast unless given.
        speeds: how fast each device computes, relative to the others; equal unless given.
        alignment_bytes: of slots.
    """

    def __init__(
        self,
        budgets_bytes: Sequence[int],
        policy: Policy | None = None,
        *,
        host_bytes: int | None = None,
        least_ahead_bytes: int | None = 0,
        links_bytes_per_s: Sequence[float] = (),
        speeds: Sequence[float] = (),
        alignment_bytes: int = 1,
    ) -> None:
        self.policy = policy or ShardedLRTF()
        links = links_bytes_per_s or [inf] * len(budgets_bytes)
        ledgers = [Ledger(budget, alignment_bytes) for budget in budgets_bytes]
        properties = zip(ledgers, links, speeds or [1.0] * len(budgets_bytes), strict=True)
        self.devices = [DeviceState(i, *of_device) for i, of_device in enumerate(properties)]
        self.trials: dict[int, TrialState] = {}
        self.ready = ReadyTasks(len(self.devices))
        self.slots = Slots(self.trials, self.devices, self.ready)
        self.gathering = Gathering(self.trials, self.ready, self.policy)
        self.admission = Admission(self.trials, self.slots, self._withdraw_promise)
        self.arrivals: list[TrialAdded] = []  # trials that wait for host memory, oldest first
        self.host_bytes = host_bytes
        self.ended_trials = EndedTrials()
        self._least_ahead_bytes = least_ahead_bytes
        self._story: deque[tuple[Event, list[Instruction]]] = deque(maxlen=_STORY_EVENTS)

    def handle(self, event: Event) -> list[Instruction]:
        """Apply one event; returns the instructions that follow from it, in the order in which to carry them out."""
        instructions = _HANDLERS[type(event)](self, event)
        self._story.append((event, instructions))
        return instructions

    # ---- questions ----

    @property
    def host_used_bytes(self) -> int:
        """Weights that several trials have count once."""
        weights = {number: size for trial in self.trials.values() for number, size in trial.host_weights}
        return sum(trial.host_bytes for trial in self.trials.values()) + sum(weights.values())

    def _more_host_bytes(self, num_bytes: int, weights: HeldWeights) -> int:
        """By how much `host_used_bytes` would grow with a trial that has this."""
        known = {number for trial in self.trials.values() for number, _ in trial.host_weights}
        return num_bytes + sum(size for number, size in weights if number not in known)

    def reserved_bytes(self, trial: int) -> int:
        """Bytes that the trial has on all devices, without what it shares: for life, for its step, and for its
        slots."""
        ledgers = [device.ledger for device in self.devices]
        beside_slots = sum(ledger.held.get(trial, 0) + ledger.steps.get(trial, 0) for ledger in ledgers)
        return beside_slots + sum(ledgers[device].slots[trial, shard][1] for device, shard in self.trials[trial].slots)

    def awaits(self, trial: int) -> tuple[int, int | None] | None:
        """What bytes the trial waits for.

        Returns:
            The device, and the trial whose pilot must end first, None if there is no pilot. None if it does not wait.
        """
        home = self._home(trial)
        for request in (*home.admissions, *home.entries):
            if request.trial == trial:
                return home.index, home.ledger.pilot
        return None

    def task_state(self, trial: int) -> TaskState | None:
        """The state of the trial's ready, promised or running task; None if it has none."""
        if trial in self.ready.by_trial:
            return TaskState.WAITING
        device = self.trials[trial].task_device
        if device is None:
            return None
        running = self.devices[device].running
        return TaskState.RUNNING if running is not None and running.trial == trial else TaskState.PROMISED

    def idle_cause(self, device: int) -> str:
        """Why this device computes nothing; empty if it computes."""
        state = self.devices[device]
        if state.running is not None:
            return "" if state.started else PROMOTION
        if state.ledger.pilot is not None:
            return "pilot"
        if state.entries or state.admissions:
            return "memory"
        return "no ready task" if state.trials else NO_TRIAL

    def story(self, trial: int, shard: int | None = None) -> str:
        """The last events of a trial, or of one shard of it, and the instructions that they led to; one a line."""
        lines = []
        for number, (event, instructions) in enumerate(self._story):
            if _concerns(event, trial, shard):
                lines.append(f"{number:6d}  {event}")
            lines += [f"{number:6d}    {i}" for i in instructions if _concerns(i, trial, shard)]
        return "\n".join(lines)

    # ---- trials ----

    def _on_TrialAdded(self, event: TrialAdded) -> list[Instruction]:
        assert event.trial not in self.trials, self._impossible(event)
        self.arrivals.append(event)
        return self._place_arrivals()

    def _place_arrivals(self) -> list[Instruction]:
        """Give homes to trials in the order in which they came, as long as their host memory fits."""
        placed: list[Instruction] = []
        while self.arrivals:
            event = self.arrivals[0]
            more_bytes = self._more_host_bytes(event.host_bytes, event.host_weights)
            if self.host_bytes is not None and self.host_used_bytes + more_bytes > self.host_bytes:
                break
            home = self._least_loaded()
            home.trials.add(event.trial)
            progress = Progress(event.trial, self.ended_trials, event.total_steps)
            self.trials[event.trial] = TrialState(
                home.index, event.travels, event.host_bytes, progress, event.host_weights
            )
            placed.append(Place(event.trial, home.index))
            del self.arrivals[0]
        return placed

    def _on_PilotReady(self, event: PilotReady) -> list[Instruction]:
        trial, device = self.trials[event.trial], self._home(event.trial)
        assert event.trial not in device.ledger.steps, self._impossible(event)
        freed = {trial.home, *(index for index, _ in trial.slots)}
        dropped = [*self.slots.drop_all_of(event.trial), *self.slots.share(event.trial, ())]
        device.ledger.forget(event.trial)
        trial.plan, trial.admitted = TrialPlan(), False
        (device.admissions if event.empty else device.entries).append(event)
        return [*dropped, *self._advance_all(freed)]

    def _on_PilotDone(self, event: PilotDone) -> list[Instruction]:
        device = self._home(event.trial)
        assert device.ledger.pilot == event.trial, self._impossible(event)
        device.ledger.end_pilot(event.peak_bytes)
        self.trials[event.trial].progress.steps_done += event.trained
        return self._advance(device)

    def _on_PlanReady(self, event: PlanReady) -> list[Instruction]:
        trial, device = self.trials[event.trial], self._home(event.trial)
        assert event.trial not in device.ledger.steps, self._impossible(event)
        holds = trial.plan.held_bytes, trial.plan.held_weights
        again = trial.admitted and holds == (event.plan.held_bytes, event.plan.held_weights)
        if not (again or event.waits):
            return []
        device.ledger.forget(event.trial)
        at_once = again and self.admission.admissible(device, event.plan)
        if not (at_once or event.waits):
            device.ledger.hold(event.trial, event.plan.held_bytes, event.plan.held_weights)
            return []
        trial.admitted = False
        trial.progress.estimate_from(event.plan)
        trial.visit_order.forget()
        if at_once:
            return [*self.admission.admit(device, event), *self._advance(device)]
        device.admissions.append(event)
        return self._advance(device)

    def _on_Shared(self, event: Shared) -> list[Instruction]:
        assert len(event.weights) == len(self.trials[event.trial].plan.shards), self._impossible(event)
        assert self.task_state(event.trial) is None, self._impossible(event)
        freed = {device.index for device in self.devices}
        self._revoke(event.trial)
        dropped = [*self.slots.drop_all_of(event.trial), *self.slots.share(event.trial, event.weights)]
        return [*dropped, *self._advance_all(freed)] if dropped else []

    def _on_Reported(self, event: Reported) -> list[Instruction]:
        progress = self.trials[event.trial].progress
        progress.value, progress.maximizes = event.value, event.maximizes
        return []

    def _on_TrialEnded(self, event: TrialEnded) -> list[Instruction]:
        if event.trial not in self.trials:  # it still waits for host memory
            self.arrivals = [e for e in self.arrivals if e.trial != event.trial]
            return []
        device = self._home(event.trial)
        dropped, freed = self._release_all(event.trial)
        device.trials.discard(event.trial)
        self.trials.pop(event.trial).progress.end()
        return [*dropped, *self._place_arrivals(), *self._advance_all(freed)]

    def _on_Withdrawn(self, event: Withdrawn) -> list[Instruction]:
        home = self._home(event.trial)
        self._drop_requests(event.trial, home)
        return self._advance(home)

    def _drop_requests(self, number: int, home: DeviceState) -> None:
        home.admissions = [e for e in home.admissions if e.trial != number]
        home.entries = [e for e in home.entries if e.trial != number]

    def _release_all(self, number: int) -> tuple[list[Instruction], set[int]]:
        """Take from the trial all that it holds and waits for, in whatever state it is.

        Returns:
            The drops, and the devices that have more room now.
        """
        trial, home = self.trials[number], self._home(number)
        self._drop_requests(number, home)
        self.ready.remove(number)
        freed = {
            trial.home,
            *(index for index, _ in trial.slots),
            *([] if trial.task_device is None else [trial.task_device]),
        }
        self._revoke(number)
        home.ledger.forget(number)
        trial.ran_out_of_memory = False
        dropped = [*self.slots.drop_all_of(number), *self.slots.share(number, ())]
        return dropped, freed | {drop.device for drop in dropped if isinstance(drop, Drop)}

    def _revoke(self, number: int) -> DeviceState | None:
        """Take the lease, or the promise of one, from the trial; returns the device on which it had that."""
        trial = self.trials[number]
        if trial.task_device is None:
            return None
        device, trial.task_device = self.devices[trial.task_device], None
        if device.promised is not None and device.promised.trial == number:
            device.promised = device.promised_ready = None
        if device.running is not None and device.running.trial == number:
            device.ledger.end_work()
            device.running, device.started, device.long_lease = None, False, False
        return device

    # ---- steps ----

    def _on_StepReady(self, event: StepReady) -> list[Instruction]:
        trial, device = self.trials[event.trial], self._home(event.trial)
        assert trial.admitted and event.trial not in device.ledger.steps, self._impossible(event)
        homes, moved = {trial.home}, list[Instruction]()
        if trial.travels:
            device = self._choose_home(event.trial)
            if trial.home not in homes:
                homes |= {trial.home, *(index for index, _ in trial.slots)}
                moved = [*self.slots.drop_all_of(event.trial), Move(event.trial, trial.home)]
        device.entries.append(event)
        return [*moved, *self._advance_all(homes)]

    def _least_loaded(self) -> DeviceState:
        """The device with the least load after one more trial."""
        return min(self.devices, key=lambda device: (device.load(1), len(device.trials), device.index))

    def _choose_home(self, number: int) -> DeviceState:
        """Choose the home of the trial's next step, and move what the trial holds there; returns that device.

        A new home must be less loaded than the old one even with this trial, have room for the trial and its step now,
        and have no trial that waits for bytes. A resident trial keeps its home.
        """
        trial, home = self.trials[number], self._home(number)
        plan = trial.plan
        if plan.resident or len(self.devices) == 1:
            return home
        other = self._least_loaded()
        if home is other or home.load() <= other.load(1) or other.ledger.pilot is not None:
            return home
        if other.entries or other.admissions:
            return home
        held_bytes = other.ledger.more_bytes(plan.held_bytes, plan.held_weights)
        if not self.admission.admissible(other, plan) or not self.admission.steps_fit(other, held_bytes, plan):
            return home
        if other.ledger.free_bytes < held_bytes + plan.step_bytes + self.admission.unstarted_work_bytes(other):
            return home
        home.ledger.forget(number)
        other.ledger.hold(number, plan.held_bytes, plan.held_weights)
        home.trials.remove(number)
        other.trials.add(number)
        trial.home = other.index
        return other

    def _on_StepDone(self, event: StepDone) -> list[Instruction]:
        trial, device = self.trials[event.trial], self._home(event.trial)
        trial.progress.end_step(trained=event.trained)
        trial.visit_order.end_step()
        trial.ran_out_of_memory = False
        assert self.task_state(event.trial) is not TaskState.RUNNING, self._impossible(event)
        self._revoke(event.trial)
        if not event.keeps_bytes:
            device.ledger.leave_step(event.trial)
        return self._advance(device)

    # ---- tasks ----

    def _on_TaskReady(self, event: TaskReady) -> list[Instruction]:
        assert event.task.trial in self._home(event.task.trial).ledger.steps, self._impossible(event)
        self._enqueue(event)
        return self._grant_on_any(event.task.trial)

    def _enqueue(self, event: TaskReady) -> None:
        """Put the task into its home's queue; or, if it is promised to a device, note there that it is ready."""
        task, trial = event.task, self.trials[event.task.trial]
        rank = self.policy.rank(task, trial.progress)
        trial.task_stays_home = event.at_home
        if trial.task_device is not None:
            device = self.devices[trial.task_device]
            assert device.promised is not None and device.promised.trial == task.trial, self._impossible(task)
            if device.promised == task and (device.index == trial.home or not trial.task_stays_home):
                device.promised_ready = ReadyTask(task, rank, -1, trial.home, 0, trial.slot_key(task))
                return
            device.promised = trial.task_device = None  # another task was expected to come next
        self.ready.add(task, rank, trial.home, trial.slot_key(task))

    def _grant_on_any(self, number: int) -> list[Instruction]:
        """The trial's task has become ready: run it on a device that is free, or promote it ahead at home."""
        trial = self.trials[number]
        device = self.devices[trial.home if trial.task_device is None else trial.task_device]
        if device.running is None:
            return self._grant_lease(device)
        if trial.travels:
            for other in self.devices:
                if other.running is None and (granted := self._grant_lease(other)):
                    return granted
        return self._promote_ahead(device)

    def _on_Promoted(self, event: Promoted) -> list[Instruction]:
        device = self.devices[event.device]
        arrived = [key for key, task in device.in_flight.items() if task == event.task]
        if not arrived:
            return []  # the slot was dropped meanwhile, for example because its trial ended
        del device.in_flight[arrived[0]]
        return self._advance(device)

    def _on_Done(self, event: Done) -> list[Instruction]:
        task, trial = event.task, self.trials[event.task.trial]
        device = self._device_running(task, event)
        device.ledger.end_work()
        device.running, device.started, device.long_lease, trial.task_device = None, False, False, None
        trial.progress.spend(event.seconds)
        key = trial.slot_key(task)
        if task.direction is Direction.BACKWARD and key in device.ledger.slots and key not in self.ready.at_shared:
            device.ledger.retire(key)
        if device.promised is not None and device.promised.trial == task.trial:
            trial.task_device = device.index  # its next task is promised to this device
        if event.then is None:
            return self._advance(device)
        if self._nobody_waits(device) and trial.home == device.index:
            trial.task_stays_home = event.then.at_home
            return self._give_lease(device, event.then.task)
        self._enqueue(event.then)
        advanced = self._advance(device)
        elsewhere = self._grant_on_any(task.trial) if self.task_state(task.trial) is not TaskState.RUNNING else []
        return [*advanced, *elsewhere]

    def _on_Worked(self, event: Worked) -> list[Instruction]:
        progress = self.trials[event.trial].progress
        progress.spend(event.seconds)
        progress.end_steps(event.steps)
        return []

    def _on_Expired(self, event: Expired) -> list[Instruction]:
        """Recall the long lease if a ready task is to go first. Otherwise it goes on, and counts as one more lease."""
        device = self.devices[event.device]
        running, ready = device.running, self._choose_next(device)
        if running is None or not device.long_lease or ready is None:
            return []
        rank = self.policy.rank(running, self.trials[running.trial].progress)
        if ready.rank <= rank or self._waited_too_long(device) is ready:
            return self._recall(device)
        self.ready.queues[device.index].granted += 1
        return []

    def _recall(self, device: DeviceState) -> list[Instruction]:
        assert device.running is not None and device.long_lease, f"no long lease on {device}"
        device.long_lease = False
        return [Recall(device.running.trial, device.index)]

    def _nobody_waits(self, device: DeviceState) -> bool:
        """Whether no trial waits for anything here, and no copy is on its way to where a shard may have to go."""
        return not (self.ready.by_trial or device.entries or device.admissions or device.promised or device.in_flight)

    def _on_OutOfMemory(self, event: OutOfMemory) -> list[Instruction]:
        trial = self.trials[event.trial]
        device = self.devices[trial.home if trial.task_device is None else trial.task_device]
        trial.ran_out_of_memory = True
        return self.slots.drop(device, self.slots.evictable(device))

    def _on_Failed(self, event: Failed) -> list[Instruction]:
        trial, number = self.trials[event.task.trial], event.task.trial
        self.ready.remove(number)
        task_device = trial.task_device
        device = self._revoke(number)
        if device is None or task_device is None:
            return []
        key = trial.slot_key(event.task)
        dropped = self.slots.drop(device, [key] if key in device.ledger.slots else [])
        return dropped + self._advance(device)

    def _on_Invalidated(self, event: Invalidated) -> list[Instruction]:
        trial = self.trials[event.trial]
        assert self.task_state(event.trial) is not TaskState.RUNNING, self._impossible(event)
        if not trial.slots:
            return []
        freed = {index for index, _ in trial.slots}
        self._revoke(event.trial)
        return [*self.slots.drop_all_of(event.trial), *self._advance_all(freed)]

    # ---- what can happen now ----

    def _advance_all(self, devices: set[int]) -> list[Instruction]:
        return [instruction for index in sorted(devices) for instruction in self._advance(self.devices[index])]

    def _advance(self, device: DeviceState) -> list[Instruction]:
        """Start all that can start on this device, after bytes or its lease became free there."""
        started = [] if device.running is None or device.started else self._run_if_ready(device)
        served = self.admission.serve(device) if device.admissions or device.entries else []
        if device.running is None:
            return [*started, *served, *self._grant_lease(device)]
        if device.long_lease and not self._allows_long_lease(device):
            return [*started, *served, *self._recall(device)]
        return [*started, *served, *([] if started else self._promote_ahead(device))]

    # ---- which task runs, and which is next ----

    def _grant_lease(self, device: DeviceState) -> list[Instruction]:
        """Give the free lease to a ready task, unless a copy on its way leaves no room for the task's shard.

        The promised task comes first, unless another one ranks clearly before it. If the device has neither, it takes
        over a task that is promised to a busy device.
        """
        promised = device.promised_ready
        if promised is not None and not self._may_run(device, promised.task):
            self._withdraw_promise(device)
            promised = None
        ready = self._choose_next(device)
        first = self.gathering
        if promised is not None and (
            ready is None or not (first.is_clearly_before(ready, promised) or first.is_at_hand(device, ready, promised))
        ):
            ready = promised
        if ready is None:
            ready = self._take_over_promised(device)
        return [] if ready is None else self._give_lease(device, ready.task)

    def _take_over_promised(self, device: DeviceState) -> ReadyTask | None:
        """Take a ready task from the device that has promised to run it later, since this one is free now."""
        others = self.devices if len(self.devices) > 1 else ()
        ready = [
            d.promised_ready
            for d in others
            if d.promised_ready is not None and self._may_run(device, d.promised_ready.task)
        ]
        if not ready:
            return None
        first = min(ready, key=lambda r: r.rank)
        self._withdraw_promise(next(d for d in others if d.promised_ready is first))
        return self.ready.by_trial[first.task.trial]

    def _choose_next(self, device: DeviceState) -> ReadyTask | None:
        """The ready task that goes next on this device; it stays in its queue.

        First a task of this home that has waited too long. Else the first by rank of this home, or one whose shared
        shard is here already, or one of another home that is clearly before it and may run here.
        """
        ready = self.ready
        if not ready.by_trial:
            return None
        oldest = self._waited_too_long(device)
        if oldest is not None:
            return oldest
        best = own = self.gathering.choose(device)
        for other in ready.first_of_each_home(None if own is None else own.rank):
            is_better = best is None or (
                self.gathering.is_clearly_before(other, best) if best is own else other.rank < best.rank
            )
            if is_better and self._may_run(device, other.task):
                best = other
        return best

    def _waited_too_long(self, device: DeviceState) -> ReadyTask | None:
        """The oldest ready task of this home, if `STARVATION_LIMIT` leases a trial have gone to others since."""
        oldest, granted = self.ready.oldest(device.index), self.ready.queues[device.index].granted
        too_long = oldest is not None and granted - oldest.granted_before > STARVATION_LIMIT * (len(device.trials) + 1)
        return oldest if too_long else None

    def _allows_long_lease(self, device: DeviceState) -> bool:
        """Whether all trials admitted here are resident, and none waits for bytes."""
        if device.entries or device.admissions:
            return False
        return all(self.trials[trial].plan.resident for trial in device.ledger.held)

    def _may_run(self, device: DeviceState, task: Task) -> bool:
        """Whether the task may run on this device. At home, always; elsewhere if it travels, there is room for it, and
        the policy finds that worth the bytes that have to move."""
        trial = self.trials[task.trial]
        if trial.home == device.index:
            return True
        if not trial.travels or device.ledger.pilot is not None or trial.plan.resident:
            return False
        ledger, shard = device.ledger, self._shard(task)
        if trial.task_stays_home:
            return False
        if self._home(task.trial).load() < 1 / device.speed:
            return False  # even shared with other trials, its home is faster
        slot = trial.slot_key(task)
        has_slot = slot in ledger.slots
        needed_bytes = shard.slot_bytes + self.trials[task.trial].work_bytes(task, device.index)
        in_flight_bytes = sum(ledger.slots[key][1] for key in device.in_flight if key != slot)
        if ledger.held_bytes + ledger.step_bytes + needed_bytes + in_flight_bytes > ledger.budget_bytes:
            return False
        moved_bytes = 2 * shard.boundary_bytes + (0 if has_slot else shard.slot_bytes)
        task_s = trial.plan.task_s(task.shard, task.direction)
        return self.policy.leaves_home(task_s / device.speed, moved_bytes, device.link_bytes_per_s)

    def _give_lease(self, device: DeviceState, task: Task) -> list[Instruction]:
        """Give the task the lease, and a slot for its shard. The task runs once the shard has arrived."""
        trial = self.trials[task.trial]
        key = trial.slot_key(task)
        slot_bytes = trial.plan.shards[task.shard].slot_bytes
        instructions: list[Instruction] = []
        device.own_promotion = 0, 0
        if slot_bytes and key not in device.ledger.slots:
            offset, instructions = self.slots.place(device, task, slot_bytes)
            if offset is None:
                return instructions  # a copy on its way is in the shard's place: the task waits until that has arrived
            if trial.task_stays_home:
                device.own_promotion = offset, slot_bytes
            else:
                device.in_flight[key] = task
                instructions.append(PromoteShard(task, device.index, offset, slot_bytes))
        elif slot_bytes:
            device.ledger.touch(key)
        self.ready.remove(task.trial)
        if device.promised is not None and device.promised.trial != task.trial:
            self._withdraw_promise(device)
        device.promised = device.promised_ready = None
        self.ready.queues[trial.home].granted += 1
        device.running, trial.task_device = task, device.index
        trial.visit_order.note((task.shard, task.direction))
        instructions += self._run_if_ready(device)
        return instructions

    def _run_if_ready(self, device: DeviceState) -> list[Instruction]:
        """Run the task that has the lease, if its shard has arrived and its work has room."""
        task = device.running
        if task is None or device.started or self.slots.key(task) in device.in_flight:
            return []
        trial, long_lease = self.trials[task.trial], False
        work_bytes = trial.work_bytes(task, device.index)
        if trial.plan.resident:
            largest_bytes = trial.plan.task_bytes  # a long lease covers all tasks of a step
            long_lease = self._allows_long_lease(device) and self.slots.has_room(device, largest_bytes)
            work_bytes = largest_bytes if long_lease else work_bytes
        dropped: list[Instruction] = []
        if device.ledger.free_bytes < work_bytes:
            if not self.slots.has_room(device, work_bytes):
                return []
            dropped = self.slots.make_room(device, work_bytes)
        device.ledger.start_work(work_bytes)
        device.started, device.long_lease = True, long_lease
        return [*dropped, Run(task, device.index, long_lease, *device.own_promotion), *self._promote_ahead(device)]

    def _promote_ahead(self, device: DeviceState) -> list[Instruction]:
        """While a task computes, choose the next one, and promote its shard into room that no other shard needs.

        The next one is the running trial's expected next task, or the ready task that ranks before it. Tasks whose
        shared shard is on the device need no promotion, and run meanwhile.
        """
        running, least_bytes = device.running, self._least_ahead_bytes
        if running is None or not device.started or device.promised or device.in_flight or least_bytes is None:
            return []
        trial = self.trials[running.trial]
        if device.long_lease or trial.ran_out_of_memory:
            return []
        visit = trial.visit_order.next
        if not self.ready.by_trial and (visit is None or trial.plan.shards[visit[0]].slot_bytes < least_bytes):
            return []
        expected = None if visit is None else Task(running.trial, running.step, *visit)
        ready = self._choose_next(device)
        if ready is not None and ready.slot[0] == SHARED and device.has(ready.slot):
            ready = self.gathering.choose_to_promote(device)
        if expected is not None and ready is not None:
            if self.gathering.precedes(expected, ready):
                ready = None
            else:
                expected = None
        task = expected or (ready.task if ready is not None else None)
        if task is None or self.slots.key(task) in device.ledger.slots:
            return []
        slot_bytes = self._shard(task).slot_bytes
        if slot_bytes < max(least_bytes, 1) or not self._may_run(device, task):
            return []
        offset, dropped = self.slots.place_ahead(device, task, slot_bytes)
        if offset is None:
            return dropped
        device.promised, device.promised_ready = task, ready
        if ready is not None:
            self.ready.remove(task.trial)
            self.trials[task.trial].task_device = device.index
        device.in_flight[self.slots.key(task)] = task
        return [*dropped, PromoteShard(task, device.index, offset, slot_bytes, ahead=True)]

    def _withdraw_promise(self, device: DeviceState) -> None:
        """The promised task, if it is ready, goes back to its queue. Its shard stays for as long as there is room."""
        promised, ready = device.promised, device.promised_ready
        device.promised = device.promised_ready = None
        if promised is None:
            return
        trial = self.trials[promised.trial]
        if device.running is None or device.running.trial != promised.trial:
            trial.task_device = None
        if ready is not None:
            self.ready.add(ready.task, ready.rank, trial.home, ready.slot)

    # ---- helpers ----

    def _home(self, trial: int) -> DeviceState:
        return self.devices[self.trials[trial].home]

    def _shard(self, task: Task) -> Shard:
        return self.trials[task.trial].plan.shards[task.shard]

    def _device_running(self, task: Task, event: object) -> DeviceState:
        """The device on which the task computes. It must compute on one."""
        index = self.trials[task.trial].task_device
        assert index is not None, self._impossible(event)
        device = self.devices[index]
        assert device.running == task and device.started, self._impossible(event)
        return device

    def _impossible(self, event: Any) -> str:
        """The message for an event that must not happen now: the trial's state, and its story."""
        trial = getattr(getattr(event, "task", event), "trial", -1)
        return f"impossible {event}; {self.trials.get(trial)}\n{self.story(trial)}"

    # ---- invariants ----

    def validate(self) -> None:
        """Check every invariant. Each test of the machine ends with it."""
        for device in self.devices:
            self._validate_device(device)
        assert self.host_bytes is None or self.host_used_bytes <= self.host_bytes
        for number, trial in self.trials.items():
            slots = {(d.index, shard) for d in self.devices for owner, shard in d.ledger.slots if owner == number}
            assert trial.slots == slots, f"trial {number} thinks that it has {trial.slots}, not {slots}"
            on = None if trial.task_device is None else self.devices[trial.task_device]
            tasks = [t for t in (on.running, on.promised) if t is not None] if on is not None else []
            assert on is None or any(t.trial == number for t in tasks), f"trial {number} is not on {on}"
            waits = number in self.ready.by_trial
            assert not (waits and on is not None), f"trial {number} waits and is on a device"

    def _validate_device(self, device: DeviceState) -> None:
        ledger, running = device.ledger, device.running
        ledger.validate()
        assert device.trials == {n for n, trial in self.trials.items() if trial.home == device.index}
        for holder in (*ledger.held, *ledger.steps):
            assert self._home(holder) is device, f"trial {holder} holds bytes away from home"
        shared = {number for trial, number in ledger.slots if trial == SHARED}
        assert shared <= self.slots.users.keys(), f"shared slots {shared} that no trial uses"
        for trial in {trial for trial, _ in ledger.slots if trial != SHARED}:
            assert self.trials[trial].travels or self._home(trial) is device, f"trial {trial} has a slot away from home"
        assert device.in_flight.keys() <= ledger.slots.keys(), "a copy is on its way to no slot"
        assert self.admission.steps_fit(device, 0, None), "an entered step's largest task no longer fits"
        assert ledger.pilot is None or (running is None and ledger.steps.keys() == {ledger.pilot}), "no pilot is alone"
        if running is not None:
            assert running.trial in self._home(running.trial).ledger.steps, f"{running} runs outside a step"
            assert self.trials[running.trial].task_device == device.index
        if device.long_lease:
            assert running is not None and device.started, "a long lease of nobody"
            assert self._allows_long_lease(device), f"{running} has a long lease, though others need leases of one task"
        if device.promised_ready is not None:
            assert device.promised_ready.task == device.promised, "what waits here was promised another device"
        at_home = self.ready.first(device.index)
        if running is None and not device.in_flight:
            assert at_home is None and device.promised_ready is None, "the device idles beside a ready task"


def _concerns(message: Any, trial: int, shard: int | None) -> bool:
    """Whether the event or instruction is about this trial, and about this shard if one is given."""
    task = getattr(message, "task", message)
    return getattr(task, "trial", None) == trial and (shard is None or getattr(task, "shard", shard) == shard)


_HANDLERS: dict[type[Event], Callable[[Machine, Any], list[Instruction]]] = {
    event: getattr(Machine, f"_on_{event.__name__}") for event in get_args(Event)
}
