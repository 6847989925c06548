"""Decides which shard of which trial computes next, and where; pure, so that a schedule can be replayed.

Events in, instructions out (`events.py`); no torch, clock, thread or I/O. A device runs one task at a time, of any
trial whose next task is ready: shard parallelism (Hydra, arXiv 2110.08633, section 4). While it does, the shard of the
task that is to come next is promoted (double buffering).

    task on a device     WAITING --> PROMISED --> RUNNING --> done          a promise that proves wrong is taken back:
                             \\_____________________/                        its shard stays, as long as there is room

Where all trials at home on a device are resident and nobody waits for its bytes, nothing is gained by turns of a task:
a turn lasts. To the machine it is one task; what the trial does meanwhile, step after step, it says in sums. There is
no clock here: whoever has one says when a quantum is over, and the policy decides who goes on.

A trial has a home device, whose bytes its step reserves. If it travels, its tasks may run on any device that has room
at the time, and the next step may begin on another one.

No deadlock: a trial is admitted only if, beside everything held for life, each admitted trial's largest
task still fits; a step enters only if, beside all entered steps, the largest task of any of them fits; a pilot waits
until no step has bytes of its device, and has all that is free there until it ends. Every slot can be dropped while its
device is idle, as soon as its copy is made. So whoever holds bytes can always run its next task at home.
No starvation: admissions, steps and pilots are each served in the order in which they asked, an admission that awaits
only that steps end after `STEPS_LET_BY` more of them; a task goes first, whatever the policy, once its home has given
`STARVATION_LIMIT` tasks a trial to others since it was ready.

Known slack: a step's reservation stays at home while its tasks travel; who moves home is decided by how many trials
are at home where, not by seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, get_args

from hydra_tune.schedule.admission import Admission
from hydra_tune.schedule.events import (
    Done,
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
    StepDone,
    StepReady,
    TaskReady,
    TrialAdded,
    TrialEnded,
    Withdrawn,
    Worked,
)
from hydra_tune.schedule.ledger import Ledger
from hydra_tune.schedule.plan import Direction, Shard, Task, TrialPlan
from hydra_tune.schedule.policy import Policy, ShardedLRTF
from hydra_tune.schedule.progress import Neighbours, Progress
from hydra_tune.schedule.ready import ReadyTasks, Waiting
from hydra_tune.schedule.slots import Slots
from hydra_tune.schedule.state import NO_TRIAL, PROMOTION, DeviceState, TaskState, TrialState

STARVATION_LIMIT = 16
_STORY_EVENTS = 200  # short, or the garbage collector would take what it forgets for old


class Machine:
    """All state is plain data; `handle` is the only way in, `validate` checks every invariant.

    `host_bytes` is what all trials together may have of host memory. A promotion of fewer than `least_ahead_bytes` is
    left to the task's own time, none ahead is made where that is None. `links_bytes_per_s` say how fast bytes get to
    each device, infinitely fast, if they say nothing; and `speeds` how fast each computes, beside the others.
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
        of_each = zip(ledgers, links, speeds or [1.0] * len(budgets_bytes), strict=True)
        self.devices = [DeviceState(i, *of) for i, of in enumerate(of_each)]
        self.trials: dict[int, TrialState] = {}
        self.slots = Slots(self.trials, self.devices)
        self.ready = ReadyTasks(len(self.devices))
        self.admission = Admission(self.trials, self.slots, self._take_promise_back)
        self.arrivals: list[TrialAdded] = []
        self.host_bytes = host_bytes
        self.neighbours = Neighbours()
        self._least_ahead_bytes = least_ahead_bytes
        self._story: deque[tuple[Event, list[Instruction]]] = deque(maxlen=_STORY_EVENTS)

    def handle(self, event: Event) -> list[Instruction]:
        """Apply one event; the instructions that follow from it, in the order to carry them out."""
        instructions = _HANDLERS[type(event)](self, event)
        self._story.append((event, instructions))
        return instructions

    # ---- what it knows ----

    @property
    def host_used_bytes(self) -> int:
        return sum(trial.host_bytes for trial in self.trials.values())

    def reserved_bytes(self, trial: int) -> int:
        """What it has on all devices: for life, for its step, and its shards."""
        ledgers = [device.ledger for device in self.devices]
        of_life = sum(ledger.held.get(trial, 0) + ledger.steps.get(trial, 0) for ledger in ledgers)
        return of_life + sum(ledgers[device].slots[trial, shard][1] for device, shard in self.trials[trial].slots)

    def awaits(self, trial: int) -> tuple[int, int | None] | None:
        """The device whose bytes it waits for, and whose pilot or first step must be over before, if that is why."""
        home = self._home(trial)
        for request in (*home.admissions, *home.entries):
            if request.trial == trial:
                return home.index, home.ledger.pilot
        return None

    def task_state(self, trial: int) -> TaskState | None:
        """Of the one task that the trial has in flight; None if it has none."""
        if trial in self.ready.of:
            return TaskState.WAITING
        on = self.trials[trial].on
        if on is None:
            return None
        running = self.devices[on].running
        return TaskState.RUNNING if running is not None and running.trial == trial else TaskState.PROMISED

    def idle_cause(self, device: int) -> str:
        """Why this device runs no task; empty where it does."""
        state = self.devices[device]
        if state.running is not None:
            return "" if state.started else PROMOTION
        if state.ledger.pilot is not None:
            return "pilot"
        if state.entries or state.admissions:
            return "memory"
        return "no ready task" if state.trials else NO_TRIAL

    def story(self, trial: int, shard: int | None = None) -> str:
        """What happened to a trial, or to one shard of it, line by line: events, and what they led to."""
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
        placed: list[Instruction] = []
        while self.arrivals:
            event = self.arrivals[0]
            if self.host_bytes is not None and self.host_used_bytes + event.host_bytes > self.host_bytes:
                break
            home = self._least_loaded()
            home.trials.add(event.trial)
            progress = Progress(event.trial, self.neighbours, event.total_steps)
            self.trials[event.trial] = TrialState(home.index, event.travels, event.host_bytes, progress)
            placed.append(Place(event.trial, home.index))
            del self.arrivals[0]
        return placed

    def _on_PilotReady(self, event: PilotReady) -> list[Instruction]:
        trial, device = self.trials[event.trial], self._home(event.trial)
        assert event.trial not in device.ledger.steps, self._impossible(event)
        freed = {trial.home, *(index for index, _ in trial.slots)}
        dropped = self.slots.drop_all_of(event.trial)
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
        again = trial.admitted and trial.plan.held_bytes == event.plan.held_bytes
        if not (again or event.waits):
            return []
        device.ledger.forget(event.trial)
        at_once = again and self.admission.admissible(device, event.plan)
        if not (at_once or event.waits):
            device.ledger.hold(event.trial, event.plan.held_bytes)
            return []
        trial.admitted = False
        trial.progress.expect(event.plan)
        trial.visits.forget()
        if at_once:
            return [*self.admission.admit_one(device, event), *self._advance(device)]
        device.admissions.append(event)
        return self._advance(device)

    def _on_Reported(self, event: Reported) -> list[Instruction]:
        progress = self.trials[event.trial].progress
        progress.value, progress.maximizes = event.value, event.maximizes
        return []

    def _on_TrialEnded(self, event: TrialEnded) -> list[Instruction]:
        if event.trial not in self.trials:  # it waits for host memory still
            self.arrivals = [e for e in self.arrivals if e.trial != event.trial]
            return []
        device = self._home(event.trial)
        taken_back, freed = self._take_back(event.trial)
        device.trials.discard(event.trial)
        self.trials.pop(event.trial).progress.end()
        return [*taken_back, *self._place_arrivals(), *self._advance_all(freed)]

    def _on_Withdrawn(self, event: Withdrawn) -> list[Instruction]:
        home = self._home(event.trial)
        self._forget_requests(event.trial, home)
        return self._advance(home)

    def _forget_requests(self, number: int, home: DeviceState) -> None:
        home.admissions = [e for e in home.admissions if e.trial != number]
        home.entries = [e for e in home.entries if e.trial != number]

    def _take_back(self, number: int) -> tuple[list[Instruction], set[int]]:
        """All that the trial holds and awaits, whatever was under way; and the devices on which there is more room."""
        trial, home = self.trials[number], self._home(number)
        self._forget_requests(number, home)
        self.ready.remove(number)
        freed = {trial.home, *(index for index, _ in trial.slots), *([] if trial.on is None else [trial.on])}
        self._stop(number)
        home.ledger.forget(number)
        trial.lacks_room = False
        return self.slots.drop_all_of(number), freed

    def _stop(self, number: int) -> DeviceState | None:
        """Take the lease, or the promise of one, from the trial; the device on which it had it."""
        trial = self.trials[number]
        if trial.on is None:
            return None
        device, trial.on = self.devices[trial.on], None
        if device.promised is not None and device.promised.trial == number:
            device.promised = device.waiting = None
        if device.running is not None and device.running.trial == number:
            device.ledger.end_work()
            device.running, device.started, device.lasts = None, False, False
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
        """With one trial more."""
        return min(self.devices, key=lambda device: (device.load(1), len(device.trials), device.index))

    def _choose_home(self, number: int) -> DeviceState:
        """Another one, where that has fewer trials for its speed, with this one, and room for it now."""
        trial, home = self.trials[number], self._home(number)
        plan = trial.plan
        if plan.resident or len(self.devices) == 1:
            return home
        other = self._least_loaded()
        if home is other or home.load() <= other.load(1) or other.ledger.pilot is not None:
            return home
        if other.entries or other.admissions:
            return home
        if not self.admission.admissible(other, plan) or not self.admission.steps_fit(other, plan.held_bytes, plan):
            return home
        if other.ledger.free_bytes < plan.held_bytes + plan.step_bytes + self.admission.yet_to_start(other):
            return home
        home.ledger.forget(number)
        other.ledger.hold(number, plan.held_bytes)
        home.trials.remove(number)
        other.trials.add(number)
        trial.home = other.index
        return other

    def _on_StepDone(self, event: StepDone) -> list[Instruction]:
        trial, device = self.trials[event.trial], self._home(event.trial)
        trial.progress.end_step(trained=event.trained)
        trial.visits.end_step()
        trial.lacks_room = False
        assert self.task_state(event.trial) is not TaskState.RUNNING, self._impossible(event)
        self._stop(event.trial)
        if not event.keeps_bytes:
            device.ledger.leave_step(event.trial)
        return self._advance(device)

    # ---- tasks ----

    def _on_TaskReady(self, event: TaskReady) -> list[Instruction]:
        assert event.task.trial in self._home(event.task.trial).ledger.steps, self._impossible(event)
        self._wait(event)
        return self._grant_anywhere(event.task.trial)

    def _wait(self, event: TaskReady) -> None:
        """The task stands in the queue, or where it is promised."""
        task, trial = event.task, self.trials[event.task.trial]
        rank = self.policy.rank(task, trial.progress)
        trial.at_home = event.at_home
        if trial.on is not None:
            device = self.devices[trial.on]
            assert device.promised is not None and device.promised.trial == task.trial, self._impossible(task)
            if device.promised == task and (device.index == trial.home or not trial.at_home):
                device.waiting = Waiting(task, rank, -1, trial.home, 0)
                return
            device.promised = trial.on = None  # the step has left its usual order
        self.ready.add(task, rank, trial.home)

    def _grant_anywhere(self, number: int) -> list[Instruction]:
        """The trial's task, which has become ready, may go on where nothing runs."""
        trial = self.trials[number]
        device = self.devices[trial.home if trial.on is None else trial.on]
        if device.running is None:
            return self._grant(device)
        if trial.travels:
            for other in self.devices:
                if other.running is None and (granted := self._grant(other)):
                    return granted
        return self._look_ahead(device)

    def _on_Promoted(self, event: Promoted) -> list[Instruction]:
        device, key = self.devices[event.device], (event.task.trial, event.task.shard)
        if key not in device.in_flight:
            return []  # its trial has ended meanwhile
        device.in_flight.remove(key)
        return self._advance(device)

    def _on_Done(self, event: Done) -> list[Instruction]:
        task, trial = event.task, self.trials[event.task.trial]
        device = self._running_on(task, event)
        device.ledger.end_work()
        device.running, device.started, device.lasts, trial.on = None, False, False, None
        trial.progress.spend(event.seconds)
        key = (task.trial, task.shard)
        if task.direction is Direction.BACKWARD and key in device.ledger.slots:
            device.ledger.retire(key)
        if device.promised is not None and device.promised.trial == task.trial:
            trial.on = device.index
        if event.then is None:
            return self._advance(device)
        if self._nobody_waits(device) and trial.home == device.index:
            trial.at_home = event.then.at_home
            return self._start(device, event.then.task)
        self._wait(event.then)
        advanced = self._advance(device)
        elsewhere = self._grant_anywhere(task.trial) if self.task_state(task.trial) is not TaskState.RUNNING else []
        return [*advanced, *elsewhere]

    def _on_Worked(self, event: Worked) -> list[Instruction]:
        progress = self.trials[event.trial].progress
        progress.spend(event.seconds)
        progress.end_steps(event.steps)
        return []

    def _on_Expired(self, event: Expired) -> list[Instruction]:
        """Another one's turn, if it is to go first; else this one's goes on, and counts as two."""
        device = self.devices[event.device]
        running, waiting = device.running, self._choose(device)
        if running is None or not device.lasts or waiting is None:
            return []
        rank = self.policy.rank(running, self.trials[running.trial].progress)
        if waiting.rank <= rank or self._waited_too_long(device) is waiting:
            return self._recall(device)
        self.ready.queues[device.index].given += 1
        return []

    def _recall(self, device: DeviceState) -> list[Instruction]:
        assert device.running is not None and device.lasts, f"no turn lasts on {device}"
        device.lasts = False
        return [Recall(device.running.trial, device.index)]

    def _nobody_waits(self, device: DeviceState) -> bool:
        """And no copy is on its way to where the task's shard may have to go."""
        return not (self.ready.of or device.entries or device.admissions or device.promised or device.in_flight)

    def _on_OutOfMemory(self, event: OutOfMemory) -> list[Instruction]:
        trial = self.trials[event.trial]
        device = self.devices[trial.home if trial.on is None else trial.on]
        trial.lacks_room = True
        return self.slots.drop(device, self.slots.evictable(device))

    def _on_Failed(self, event: Failed) -> list[Instruction]:
        trial, number = self.trials[event.task.trial], event.task.trial
        self.ready.remove(number)
        on = trial.on
        device = self._stop(number)
        if device is None or on is None:
            return []
        key = (number, event.task.shard)
        dropped = self.slots.drop(device, [key] if key in device.ledger.slots else [])
        return dropped + self._advance(device)

    def _on_Invalidated(self, event: Invalidated) -> list[Instruction]:
        trial = self.trials[event.trial]
        assert self.task_state(event.trial) is not TaskState.RUNNING, self._impossible(event)
        if not trial.slots:
            return []
        freed = {index for index, _ in trial.slots}
        self._stop(event.trial)
        return [*self.slots.drop_all_of(event.trial), *self._advance_all(freed)]

    # ---- what can go on now ----

    def _advance_all(self, devices: set[int]) -> list[Instruction]:
        return [instruction for index in sorted(devices) for instruction in self._advance(self.devices[index])]

    def _advance(self, device: DeviceState) -> list[Instruction]:
        going_on = [] if device.running is None or device.started else self._continue(device)
        waiting = self.admission.serve(device) if device.admissions or device.entries else []
        if device.running is None:
            return [*going_on, *waiting, *self._grant(device)]
        if device.lasts and not self._may_last(device):
            return [*going_on, *waiting, *self._recall(device)]
        return [*going_on, *waiting, *([] if going_on else self._look_ahead(device))]

    # ---- who runs, and who is next ----

    def _grant(self, device: DeviceState) -> list[Instruction]:
        """The lease to who waits for it, as far as a copy that is on its way leaves room."""
        promised = device.waiting
        if promised is not None and not self._may_run(device, promised.task):
            self._take_promise_back(device)
            promised = None
        waiting = self._choose(device)
        if promised is not None and (waiting is None or not self._is_ahead(waiting, promised)):
            waiting = promised
        if waiting is None:
            waiting = self._promised_elsewhere(device)
        return [] if waiting is None else self._start(device, waiting.task)

    def _is_ahead(self, waiting: Waiting, of: Waiting) -> bool:
        """By more than what it takes to have promoted another one's shard in vain."""
        return waiting.rank + self.policy.slack(self.trials[waiting.task.trial].progress) < of.rank

    def _promised_elsewhere(self, device: DeviceState) -> Waiting | None:
        """What another device promised to run later, though this one is free now."""
        others = self.devices if len(self.devices) > 1 else ()
        waiting = [d.waiting for d in others if d.waiting is not None and self._may_run(device, d.waiting.task)]
        if not waiting:
            return None
        first = min(waiting, key=lambda w: w.rank)
        self._take_promise_back(next(d for d in others if d.waiting is first))
        return self.ready.of[first.task.trial]

    def _choose(self, device: DeviceState) -> Waiting | None:
        """Whoever waited too long; else the first by rank of those at home here, unless another home's first is
        ahead of it by more than its slack."""
        ready, home = self.ready, device.index
        if not ready.of:
            return None
        oldest = self._waited_too_long(device)
        if oldest is not None:
            return oldest
        best = own = ready.first(home)
        for waiting in ready.firsts(None if own is None else own.rank):
            gains = best is None or (self._is_ahead(waiting, best) if best is own else waiting.rank < best.rank)
            if gains and self._may_run(device, waiting.task):
                best = waiting
        return best

    def _waited_too_long(self, device: DeviceState) -> Waiting | None:
        oldest, given = self.ready.oldest(device.index), self.ready.queues[device.index].given
        too_long = oldest is not None and given - oldest.since > STARVATION_LIMIT * (len(device.trials) + 1)
        return oldest if too_long else None

    def _may_last(self, device: DeviceState) -> bool:
        """Whether nobody needs turns of a task: all trials admitted here are resident, and none waits for bytes."""
        if device.entries or device.admissions:
            return False
        return all(self.trials[trial].plan.resident for trial in device.ledger.held)

    def _may_run(self, device: DeviceState, task: Task) -> bool:
        """At home, always; elsewhere if it may travel, there is room, and to the policy it is worth the bytes."""
        trial = self.trials[task.trial]
        if trial.home == device.index:
            return True
        if not trial.travels or device.ledger.pilot is not None or trial.plan.resident:
            return False
        ledger, shard = device.ledger, self._shard(task)
        if trial.at_home:
            return False
        if self._home(task.trial).load() < 1 / device.speed:
            return False  # its turn at home is sooner over
        there = (task.trial, task.shard) in ledger.slots
        needs = shard.slot_bytes + self.trials[task.trial].work_bytes(task, device.index)
        in_flight = sum(ledger.slots[key][1] for key in device.in_flight if key != (task.trial, task.shard))
        if ledger.held_bytes + ledger.step_bytes + needs + in_flight > ledger.budget_bytes:
            return False
        moved = 2 * shard.boundary_bytes + (0 if there else shard.slot_bytes)
        task_s = trial.plan.task_s(task.shard, task.direction)
        return self.policy.leaves_home(task_s / device.speed, moved, device.link_bytes_per_s)

    def _start(self, device: DeviceState, task: Task) -> list[Instruction]:
        trial, key = self.trials[task.trial], (task.trial, task.shard)
        slot_bytes = trial.plan.shards[task.shard].slot_bytes
        made: list[Instruction] = []
        device.promotes = 0, 0
        if slot_bytes and key not in device.ledger.slots:
            offset, made = self.slots.place(device, task, slot_bytes)
            if offset is None:
                return made  # a copy on its way is where it would go: it waits for that
            if trial.at_home:
                device.promotes = offset, slot_bytes
            else:
                device.in_flight.add(key)
                made.append(PromoteShard(task, device.index, offset, slot_bytes))
        elif slot_bytes:
            device.ledger.touch(key)
        self.ready.of.pop(task.trial, None)
        if device.promised is not None and device.promised.trial != task.trial:
            self._take_promise_back(device)
        device.promised = device.waiting = None
        self.ready.queues[trial.home].given += 1
        device.running, trial.on = task, device.index
        trial.visits.make((task.shard, task.direction))
        made += self._continue(device)
        return made

    def _continue(self, device: DeviceState) -> list[Instruction]:
        """Run the task that has the lease, once its shard is there and its work has room."""
        task = device.running
        if task is None or device.started or (task.trial, task.shard) in device.in_flight:
            return []
        trial, lasts = self.trials[task.trial], False
        work_bytes = trial.work_bytes(task, device.index)
        if trial.plan.resident:  # in a long lease, all its tasks come
            most_bytes = trial.plan.task_bytes
            lasts = self._may_last(device) and self.slots.has_room(device, most_bytes)
            work_bytes = most_bytes if lasts else work_bytes
        dropped: list[Instruction] = []
        if device.ledger.free_bytes < work_bytes:
            if not self.slots.has_room(device, work_bytes):
                return []
            dropped = self.slots.make_room(device, work_bytes)
        device.ledger.start_work(work_bytes)
        device.started, device.lasts = True, lasts
        return [*dropped, Run(task, device.index, lasts, *device.promotes), *self._look_ahead(device)]

    def _look_ahead(self, device: DeviceState) -> list[Instruction]:
        """While a task computes, choose the next one and promote its shard; only if it needs that, and within room
        that nobody will miss."""
        running, least_bytes = device.running, self._least_ahead_bytes
        if running is None or not device.started or device.promised or device.in_flight or least_bytes is None:
            return []
        trial = self.trials[running.trial]
        if device.lasts or trial.lacks_room:
            return []
        place = trial.visits.next  # what its last step did next
        if not self.ready.of and (place is None or trial.plan.shards[place[0]].slot_bytes < least_bytes):
            return []
        after = None if place is None else Task(running.trial, running.step, *place)
        waiting = self._choose(device)
        if after is not None and waiting is not None:
            if self.policy.rank(after, trial.progress) <= waiting.rank:
                waiting = None
            else:
                after = None
        task = after or (waiting.task if waiting is not None else None)
        if task is None or (task.trial, task.shard) in device.ledger.slots:
            return []
        slot_bytes = self._shard(task).slot_bytes
        if slot_bytes < max(least_bytes, 1) or not self._may_run(device, task):
            return []
        offset, dropped = self.slots.place_ahead(device, task, slot_bytes)
        if offset is None:
            return dropped
        device.promised, device.waiting = task, waiting
        if waiting is not None:
            self.ready.remove(task.trial)
            self.trials[task.trial].on = device.index
        device.in_flight.add((task.trial, task.shard))
        return [*dropped, PromoteShard(task, device.index, offset, slot_bytes, ahead=True)]

    def _take_promise_back(self, device: DeviceState) -> None:
        """Its shard stays for as long as there is room."""
        promised, waiting = device.promised, device.waiting
        device.promised = device.waiting = None
        if promised is None:
            return
        trial = self.trials[promised.trial]
        if device.running is None or device.running.trial != promised.trial:
            trial.on = None
        if waiting is not None:
            self.ready.add(waiting.task, waiting.rank, trial.home)

    # ---- shorthand ----

    def _home(self, trial: int) -> DeviceState:
        return self.devices[self.trials[trial].home]

    def _shard(self, task: Task) -> Shard:
        return self.trials[task.trial].plan.shards[task.shard]

    def _running_on(self, task: Task, event: object) -> DeviceState:
        on = self.trials[task.trial].on
        assert on is not None, self._impossible(event)
        device = self.devices[on]
        assert device.running == task and device.started, self._impossible(event)
        return device

    def _impossible(self, event: Any) -> str:
        trial = getattr(getattr(event, "task", event), "trial", -1)
        return f"impossible {event}; {self.trials.get(trial)}\n{self.story(trial)}"

    # ---- invariants ----

    def validate(self) -> None:
        """Every invariant; each test of the machine ends with it."""
        for device in self.devices:
            self._validate_device(device)
        assert self.host_bytes is None or self.host_used_bytes <= self.host_bytes
        for number, trial in self.trials.items():
            slots = {(d.index, shard) for d in self.devices for owner, shard in d.ledger.slots if owner == number}
            assert trial.slots == slots, f"trial {number} thinks that it has {trial.slots}, not {slots}"
            on = None if trial.on is None else self.devices[trial.on]
            tasks = [t for t in (on.running, on.promised) if t is not None] if on is not None else []
            assert on is None or any(t.trial == number for t in tasks), f"trial {number} is not on {on}"
            waits = number in self.ready.of
            assert not (waits and on is not None), f"trial {number} waits and is on a device"

    def _validate_device(self, device: DeviceState) -> None:
        ledger, running = device.ledger, device.running
        ledger.validate()
        assert device.trials == {n for n, trial in self.trials.items() if trial.home == device.index}
        for holder in (*ledger.held, *ledger.steps):
            assert self._home(holder) is device, f"trial {holder} holds bytes away from home"
        for trial, _ in ledger.slots:
            assert self.trials[trial].travels or self._home(trial) is device, f"trial {trial} has a slot away from home"
        assert device.in_flight <= ledger.slots.keys(), "a copy is on its way to no slot"
        assert self.admission.steps_fit(device, 0, None), "an entered step's largest task no longer fits"
        assert ledger.pilot is None or (running is None and ledger.steps.keys() == {ledger.pilot}), "no pilot is alone"
        if running is not None:
            assert running.trial in self._home(running.trial).ledger.steps, f"{running} runs outside a step"
            assert self.trials[running.trial].on == device.index
        if device.lasts:
            assert running is not None and device.started, "a turn lasts of nobody"
            assert self._may_last(device), f"{running} lasts, though others need turns of a task"
        if device.waiting is not None:
            assert device.waiting.task == device.promised, "what waits here was promised another device"
        at_home = self.ready.first(device.index)
        if running is None and not device.in_flight:
            assert at_home is None and device.waiting is None, "the device idles beside a ready task"


def _concerns(what: Any, trial: int, shard: int | None) -> bool:
    task = getattr(what, "task", what)
    return getattr(task, "trial", None) == trial and (shard is None or getattr(task, "shard", shard) == shard)


_HANDLERS: dict[type[Event], Callable[[Machine, Any], list[Instruction]]] = {
    event: getattr(Machine, f"_on_{event.__name__}") for event in get_args(Event)
}
