"""The scheduler as a dialogue; every test ends by validating every invariant."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.schedule import (
    Admit,
    Done,
    Drop,
    Enter,
    Failed,
    Interrupted,
    Invalidated,
    Machine,
    PilotDone,
    PilotReady,
    Place,
    PlanReady,
    Promote,
    Promoted,
    Run,
    Standing,
    StartPilot,
    StepDone,
    StepReady,
    TaskReady,
    TrialAdded,
    TrialEnded,
)
from hydra_tune.shard import Direction, Shard, ShardState, Task, TrialPlan


def plan(slots=(30, 30), work=10, held=0, step=10):
    shards = tuple(Shard((i,), size, work, work) for i, size in enumerate(slots))
    return TrialPlan(False, shards, (), held, step)


def task(trial, shard, direction=Direction.FORWARD, step=1):
    return Task(trial, step, shard, direction)


@pytest.fixture
def machine():
    machine = Machine([100])
    yield machine
    machine.validate()


def admitted(machine, *trials, **options):
    for trial in trials:
        machine.handle(TrialAdded(trial))
        assert Admit(trial) in machine.handle(PlanReady(trial, plan(**options)))


def test_one_trial_alone(machine):
    assert machine.handle(TrialAdded(0)) == [Place(0, 0)]
    assert machine.handle(PilotReady(0)) == [StartPilot(0, 100)]
    assert machine.handle(PilotDone(0, 40)) == []
    assert machine.handle(PlanReady(0, plan())) == [Admit(0)]
    assert machine.handle(StepReady(0)) == [Enter(0)]
    first, second = task(0, 0), task(0, 1)
    assert machine.handle(TaskReady(first)) == [Promote(first, 0, 0, 30)]
    assert machine.shard_state(0, 0) is ShardState.IN_FLIGHT
    assert machine.handle(Promoted(first)) == [Run(first)]
    assert machine.shard_state(0, 0) is ShardState.RESIDENT
    assert machine.handle(Done(first)) == []
    assert machine.handle(TaskReady(second)) == [Promote(second, 0, 30, 30)]
    assert machine.handle(Promoted(second)) == [Run(second)]
    assert machine.handle(Done(second)) == []
    back = task(0, 1, Direction.BACKWARD)
    assert machine.handle(TaskReady(back)) == [Run(back)], "it is resident still"
    assert machine.handle(Done(back)) == []
    assert machine.handle(Invalidated(0)) == [Drop(0, 0, 0, 0, 30), Drop(0, 1, 0, 30, 30)]
    assert machine.shard_state(0, 0) is ShardState.SPILLED
    assert machine.handle(StepDone(0)) == []
    assert machine.handle(TrialEnded(0)) == []
    assert machine.devices[0].ledger.used_bytes == 0


def test_one_lease_a_device_first_come_first_served(machine):
    admitted(machine, 0, 1)
    machine.handle(StepReady(0))
    machine.handle(StepReady(1))
    a, b = task(0, 0), task(1, 0)
    machine.handle(TaskReady(a))
    assert machine.handle(TaskReady(b)) == [], "the device is taken"
    assert machine.handle(Promoted(a)) == [Run(a)]
    assert machine.handle(Done(a)) == [Promote(b, 0, 30, 30)]


def test_the_shard_used_least_recently_makes_room(machine):
    admitted(machine, 0, slots=(30, 30, 30))
    machine.handle(StepReady(0))
    for shard in (0, 1):
        machine.handle(TaskReady(task(0, shard)))
        machine.handle(Promoted(task(0, shard)))
        machine.handle(Done(task(0, shard)))
    third = task(0, 2)
    assert machine.handle(TaskReady(third)) == [Promote(third, 0, 60, 30)]
    assert machine.handle(Promoted(third)) == [Drop(0, 0, 0, 0, 30), Run(third)], "its work needs room as well"


def visit(machine, shard, direction=Direction.FORWARD):
    instructions = machine.handle(TaskReady(task(0, shard, direction)))
    if any(isinstance(i, Promote) for i in instructions):
        instructions += machine.handle(Promoted(task(0, shard, direction)))
    machine.handle(Done(task(0, shard, direction)))
    return [i for i in instructions if not isinstance(i, Run)]


def test_the_shard_whose_backward_is_done_makes_room_first(machine):
    """Shard 0 is used least recently, but its backward is yet to come."""
    machine.handle(TrialAdded(0))
    shards = tuple(Shard((i,), size, 10, work) for i, (size, work) in enumerate([(30, 10), (20, 40), (30, 10)]))
    machine.handle(PlanReady(0, TrialPlan(False, shards, (), 0, 10)))
    machine.handle(StepReady(0))
    for shard in range(3):
        visit(machine, shard)
    assert visit(machine, 2, Direction.BACKWARD) == []
    assert visit(machine, 1, Direction.BACKWARD) == [Drop(0, 2, 0, 50, 30)], "its work needs 40"
    assert visit(machine, 0, Direction.BACKWARD) == []


def test_gaps_cost_no_shard_that_bytes_leave_room_for(machine):
    """First fit put shard 1 behind shard 0, so that shard 2 found no gap and shard 1 was promoted twice."""
    admitted(machine, 0, slots=(10, 40, 60), work=0, step=0)
    machine.handle(StepReady(0))
    assert visit(machine, 0) == [Promote(task(0, 0), 0, 0, 10)]
    assert visit(machine, 1) == [Drop(0, 0, 0, 0, 10), Promote(task(0, 1), 0, 0, 40)]
    assert visit(machine, 2) == [Promote(task(0, 2), 0, 40, 60)]
    assert visit(machine, 2, Direction.BACKWARD) == []
    assert visit(machine, 1, Direction.BACKWARD) == []


def test_a_place_that_another_trial_has_is_not_taken_from_it(machine):
    admitted(machine, 0, 1, work=0)
    machine.handle(StepReady(0))
    machine.handle(StepReady(1))
    machine.handle(TaskReady(task(1, 0)))
    machine.handle(Promoted(task(1, 0)))
    machine.handle(Done(task(1, 0)))
    assert visit(machine, 0) == [Promote(task(0, 0), 0, 30, 30)]


def test_a_step_waits_until_its_largest_task_fits_beside_the_others(machine):
    admitted(machine, 0, 1, step=35)  # 35 + 35 + 30 + 10 > 100
    assert machine.handle(StepReady(0)) == [Enter(0)]
    assert machine.handle(StepReady(1)) == []
    assert machine.handle(StepDone(0)) == [Enter(1)]


def test_a_trial_waits_for_admission_until_every_step_would_fit(machine):
    admitted(machine, 0, held=30)
    machine.handle(TrialAdded(1))
    assert machine.handle(PlanReady(1, plan(held=30))) == [], "30 + 30 + 10 + 30 + 10 > 100"
    assert machine.handle(TrialEnded(0)) == [Admit(1)]


def test_two_trials_whose_steps_grow_beyond_the_room_beside_each_other_take_turns(machine):
    admitted(machine, 0, 1, held=20)
    assert machine.handle(PlanReady(0, plan(held=20, step=25))) == [], "20 + 20 + 25 + 30 + 10 > 100"
    assert machine.handle(PlanReady(1, plan(held=20, step=25))) == [Admit(1)]
    assert machine.handle(StepReady(1)) == [Enter(1)]
    assert machine.handle(TrialEnded(1)) == [Admit(0)]


def test_a_pilot_has_the_device_to_itself(machine):
    admitted(machine, 0, held=20)
    machine.handle(StepReady(0))
    machine.handle(TrialAdded(1))
    assert machine.handle(PilotReady(1)) == [], "a step is under way"
    machine.handle(TaskReady(task(0, 0)))
    machine.handle(Promoted(task(0, 0)))
    machine.handle(Done(task(0, 0)))
    assert machine.handle(StepDone(0)) == [Drop(0, 0, 0, 0, 30), StartPilot(1, 80)]
    assert machine.handle(StepReady(0)) == [], "the pilot comes first"
    assert machine.handle(PilotDone(1, 50)) == [Enter(0)]
    assert machine.devices[0].ledger.peak_bytes == 70


def test_a_pilot_that_needs_all_waits_for_what_others_hold(machine):
    admitted(machine, 0, held=20)
    machine.handle(TrialAdded(1))
    assert machine.handle(PilotReady(1, empty=True)) == []
    assert machine.handle(TrialEnded(0)) == [StartPilot(1, 100)]


def test_a_step_that_is_not_measured_yet_runs_alone(machine):
    admitted(machine, 0, 1)
    assert machine.handle(StepReady(0, alone=True)) == [Enter(0)]
    assert machine.handle(StepReady(1)) == []
    assert machine.handle(StepDone(0)) == [Enter(1)]


def test_trials_go_to_the_device_with_fewest():
    machine = Machine([100, 100])
    homes = [machine.handle(TrialAdded(i))[0].device for i in range(3)]
    machine.handle(TrialEnded(1))
    assert [*homes, machine.handle(TrialAdded(3))[0].device] == [0, 1, 0, 1]
    machine.validate()


@pytest.mark.parametrize("moment", ["waiting", "in flight", "running"])
def test_a_failed_task_gives_the_lease_to_the_next(machine, moment):
    admitted(machine, 0, 1)
    machine.handle(StepReady(0))
    machine.handle(StepReady(1))
    a, b = task(0, 0), task(1, 0)
    if moment == "waiting":
        machine.handle(TaskReady(b))
        machine.handle(TaskReady(a))
        assert machine.handle(Failed(a)) == []
        return
    machine.handle(TaskReady(a))
    machine.handle(TaskReady(b))
    if moment == "running":
        machine.handle(Promoted(a))
    assert machine.handle(Failed(a)) == [Drop(0, 0, 0, 0, 30), Promote(b, 0, 0, 30)]


def test_an_interrupted_trial_is_admitted_anew(machine):
    """Ctrl-C after the machine has handled an event, but before the trial's thread has noted what it said."""
    admitted(machine, 0, 1)
    a, b = task(0, 0), task(1, 0)
    for trial in (0, 1):
        machine.handle(StepReady(trial))
        machine.handle(TaskReady(task(trial, 0)))
    assert machine.standing(0) is None, "its shard is on its way"
    assert machine.handle(Promoted(a)) == [Run(a)]
    assert machine.standing(0) == Standing(admitted=True, in_step=True, running=a, slots=frozenset({0}))
    assert machine.handle(Interrupted(0)) == [Drop(0, 0, 0, 0, 30), Promote(b, 0, 0, 30)]
    assert machine.standing(0) == Standing(admitted=False, in_step=False, running=None, slots=frozenset())
    assert machine.handle(PlanReady(0, plan())) == [Admit(0)]
    assert machine.handle(StepReady(0)) == [Enter(0)]


def test_an_interruption_within_an_event_leaves_sums_that_are_counted_anew(machine):
    admitted(machine, 0, held=20)
    machine.handle(StepReady(0))
    machine.devices[0].ledger.held_bytes = 40  # halfway through a change
    assert machine.standing(0) is None
    machine.handle(Interrupted(0))
    assert machine.devices[0].ledger.used_bytes == 0


def test_an_impossible_event_tells_its_story(machine):
    admitted(machine, 0)
    with pytest.raises(AssertionError, match="impossible TaskReady"):
        machine.handle(TaskReady(task(0, 0)))


class Player:
    """Plays trials against the machine with random timing, and keeps the story."""

    def __init__(self, rng, budgets, plans, steps, fail_rate, interrupt_rate):
        self.rng, self.machine = rng, Machine(budgets)
        self.plans, self.steps = plans, steps
        self.fail_rate, self.interrupt_rate = fail_rate, interrupt_rate
        self.granted = {t: [] for t in range(len(plans))}
        self.story = []

    def script(self, trial, anew=False):
        """What a trial asks and which answer it waits for, as a generator of (event, answer). Even trials
        measure their first step, which proves larger than estimated."""
        final, measures = self.plans[trial], trial % 2 == 0
        if not anew:
            yield TrialAdded(trial), Place
        yield PilotReady(trial), StartPilot
        yield PilotDone(trial, 0), None
        yield PlanReady(trial, replace(final, step_bytes=final.step_bytes // 2) if measures else final), Admit
        for step in range(1, self.steps + 1):
            if step == 2 and measures:
                yield PlanReady(trial, final), Admit
            yield StepReady(trial, alone=step == 1 and measures), Enter
            yield Invalidated(trial), None
            shards = range(len(self.plans[trial].shards))
            visits = [task(trial, s, step=step) for s in shards]
            visits += [task(trial, s, Direction.BACKWARD, step) for s in reversed(shards)]
            for visit in visits:
                yield TaskReady(visit), Run
                yield Done(visit), None
            yield StepDone(trial), None
        yield TrialEnded(trial), None

    def send(self, event):
        for instruction in self.machine.handle(event):
            self.story.append(instruction)
            if isinstance(instruction, (Promote, Run)):
                self.granted[instruction.task.trial].append(instruction)
            elif not isinstance(instruction, Drop):
                self.granted[instruction.trial].append(instruction)
        self.machine.validate()

    def interrupt(self, trial):
        """Wherever it is; its last event may have been handled only in part."""
        ledger = self.machine._device(trial).ledger
        ledger.held_bytes += self.rng.choice((0, 1))
        ledger.slot_bytes -= self.rng.choice((0, 1))
        self.send(Interrupted(trial))
        self.granted[trial].clear()

    def play(self):
        live = {t: self.script(t) for t in self.granted}
        waiting = {}
        while live:
            known = [t for t in live if t in self.machine.trials]
            if known and self.rng.random() < self.interrupt_rate:
                trial = self.rng.choice(known)
                self.interrupt(trial)
                waiting.pop(trial, None)
                live[trial] = self.script(trial, anew=True)
            movable = [t for t in live if t not in waiting or self.granted[t]]
            assert movable, f"deadlock: {waiting}"
            trial = self.rng.choice(movable)
            if trial in waiting:
                instruction = self.granted[trial].pop(0)
                if isinstance(instruction, Promote):
                    self.send(Promoted(instruction.task))
                else:
                    assert isinstance(instruction, waiting.pop(trial))
                continue
            if trial in self.machine.trials and self.rng.random() < self.fail_rate:
                self.send(TrialEnded(trial))
                del live[trial]
                continue
            event, answer = next(live[trial])
            if answer is not None:
                waiting[trial] = answer
            if isinstance(event, TrialEnded):
                del live[trial]
            self.send(event)
        return self.story


@st.composite
def workloads(draw):
    budgets = draw(st.lists(st.integers(100, 200), min_size=1, max_size=3))
    budgets = [min(budgets)] * len(budgets)
    plans = []
    for _ in range(draw(st.integers(1, 6))):
        held, step, work = draw(st.integers(0, 20)), draw(st.integers(0, 30)), draw(st.integers(0, 20))
        rest = min(budgets) - held - step - work
        plans.append(
            plan(draw(st.lists(st.integers(0, rest), min_size=1, max_size=5)), work=work, held=held, step=step)
        )
    rates = [draw(st.sampled_from([0.0, 0.02])) for _ in range(2)]
    return budgets, plans, draw(st.integers(0, 2**16)), *rates


def play(budgets, plans, seed, *rates):
    return Player(random.Random(seed), budgets, plans, 2, *rates).play()


def check_any_mix(workload):
    _, plans, _, *rates = workload
    story = play(*workload)
    assert story == play(*workload), "same seed, same story"
    if not any(rates):
        runs = [i.task for i in story if isinstance(i, Run)]
        for trial, its_plan in enumerate(plans):
            shards = range(len(its_plan.shards))
            once = [(s, Direction.FORWARD) for s in shards] + [(s, Direction.BACKWARD) for s in reversed(shards)]
            assert [(t.shard, t.direction) for t in runs if t.trial == trial] == once * 2


@settings(max_examples=300, deadline=None, derandomize=True)
@given(workloads())
def test_any_mix_of_trials_that_fit_alone_finishes_within_budget(workload):
    check_any_mix(workload)


@pytest.mark.proof
@settings(max_examples=10_000, deadline=None, derandomize=True)
@given(workloads())
def test_any_mix_of_trials_that_fit_alone_finishes_within_budget_at_length(workload):
    check_any_mix(workload)
