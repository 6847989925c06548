"""The scheduler as a dialogue; every test ends by validating every invariant."""

import random
from dataclasses import replace
from math import inf
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.errors import ConfigError
from hydra_tune.schedule.admission import STEPS_LET_BY
from hydra_tune.schedule.events import (
    Admit,
    Done,
    Drop,
    Enter,
    Expired,
    Failed,
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
    StartPilot,
    StepDone,
    StepReady,
    TaskReady,
    TrialAdded,
    TrialEnded,
    Withdrawn,
    Worked,
)
from hydra_tune.schedule.ledger import Ledger
from hydra_tune.schedule.machine import STARVATION_LIMIT, Machine
from hydra_tune.schedule.plan import BlockProfile, Direction, Shard, Task, TrialPlan
from hydra_tune.schedule.policy import (
    BestFirst,
    FairShare,
    Fifo,
    OldestFirst,
    RungSynchronous,
    ShardedLRTF,
    Shuffled,
    policy_named,
)
from hydra_tune.schedule.progress import EndedTrials, Progress
from hydra_tune.schedule.state import TaskState


def plan(slots=(30, 30), work=10, held=0, step=10, boundary=0):
    works = work if isinstance(work, tuple) else (work,) * len(slots)
    shards = tuple(
        Shard((i,), size, work, work, boundary) for i, (size, work) in enumerate(zip(slots, works, strict=True))
    )
    blocks = tuple(BlockProfile(f"{i}", size, forward_s=1.0, backward_s=2.0) for i, size in enumerate(slots))
    return TrialPlan(False, shards, blocks, held, step)


def task(trial, shard, direction=Direction.FORWARD, step=1):
    return Task(trial, step, shard, direction)


@pytest.fixture
def machine():
    machine = Machine([100], Fifo(), least_ahead_bytes=None)
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
    assert machine.handle(TaskReady(first)) == [PromoteShard(first, 0, 0, 30)]
    assert machine.devices[0].in_flight == {(0, 0): first}
    assert machine.handle(Promoted(first, 0)) == [Run(first, 0)]
    assert machine.devices[0].in_flight == {}
    assert machine.handle(Done(first)) == []
    assert machine.handle(TaskReady(second)) == [PromoteShard(second, 0, 30, 30)]
    assert machine.handle(Promoted(second, 0)) == [Run(second, 0)]
    assert machine.handle(Done(second)) == []
    back = task(0, 1, Direction.BACKWARD)
    assert machine.handle(TaskReady(back)) == [Run(back, 0)], "it is resident still"
    assert machine.handle(Done(back)) == []
    assert machine.handle(Invalidated(0)) == [Drop(0, 0, 0, 0, 30), Drop(0, 1, 0, 30, 30)]
    assert machine.trials[0].slots == set()
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
    assert machine.handle(Promoted(a, 0)) == [Run(a, 0)]
    assert machine.handle(Done(a)) == [PromoteShard(b, 0, 70, 30)]


def test_the_shard_used_least_recently_makes_room(machine):
    admitted(machine, 0, slots=(30, 30, 30))
    machine.handle(StepReady(0))
    for shard in (0, 1):
        machine.handle(TaskReady(task(0, shard)))
        machine.handle(Promoted(task(0, shard), 0))
        machine.handle(Done(task(0, shard)))
    third = task(0, 2)
    assert machine.handle(TaskReady(third)) == [PromoteShard(third, 0, 60, 30)]
    assert machine.handle(Promoted(third, 0)) == [Drop(0, 0, 0, 0, 30), Run(third, 0)], "its work needs room as well"


def visit(machine, shard, direction=Direction.FORWARD):
    instructions = machine.handle(TaskReady(task(0, shard, direction)))
    if any(isinstance(i, PromoteShard) for i in instructions):
        instructions += machine.handle(Promoted(task(0, shard, direction), 0))
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
    """Shard 1 was once put behind shard 0, so that shard 2 found no gap and shard 1 was promoted twice."""
    admitted(machine, 0, slots=(10, 40, 60), work=0, step=0)
    machine.handle(StepReady(0))
    assert visit(machine, 0) == [PromoteShard(task(0, 0), 0, 90, 10)]
    assert visit(machine, 1) == [PromoteShard(task(0, 1), 0, 0, 40)]
    assert visit(machine, 2) == [Drop(0, 0, 0, 90, 10), PromoteShard(task(0, 2), 0, 40, 60)]
    assert visit(machine, 2, Direction.BACKWARD) == []
    assert visit(machine, 1, Direction.BACKWARD) == []


def test_a_place_that_another_trial_has_is_not_taken_from_it(machine):
    admitted(machine, 0, 1, work=0)
    machine.handle(StepReady(0))
    machine.handle(StepReady(1))
    machine.handle(TaskReady(task(1, 0)))
    machine.handle(Promoted(task(1, 0), 0))
    machine.handle(Done(task(1, 0)))
    assert visit(machine, 0) == [PromoteShard(task(0, 0), 0, 70, 30)]


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


def test_a_plan_that_is_not_to_wait_is_taken_at_once_or_changes_nothing(machine):
    admitted(machine, 0, 1, held=20)
    before = dict(machine.devices[0].ledger.held)
    assert machine.handle(PlanReady(0, plan(held=20, step=25), waits=False)) == [], "20 + 20 + 25 + 30 + 10 > 100"
    assert machine.handle(PlanReady(0, plan(held=21), waits=False)) == [], "what it holds would change"
    assert machine.devices[0].ledger.held == before and machine.trials[0].plan == plan(held=20)
    machine.validate()
    assert machine.handle(StepReady(0)) == [Enter(0)]
    machine.handle(StepDone(0))
    assert machine.handle(PlanReady(0, plan(held=20, step=9), waits=False)) == [Admit(0)]
    assert machine.trials[0].plan == plan(held=20, step=9)
    machine.validate()


def test_a_pilot_has_the_device_to_itself(machine):
    admitted(machine, 0, held=20)
    machine.handle(StepReady(0))
    machine.handle(TrialAdded(1))
    assert machine.handle(PilotReady(1)) == [], "a step is under way"
    machine.handle(TaskReady(task(0, 0)))
    machine.handle(Promoted(task(0, 0), 0))
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


def test_who_comes_after_a_pilot_that_needs_all_is_not_admitted_before_it(machine):
    """What fits would then depend on the neighbours."""
    admitted(machine, 0, held=20)
    for trial in (1, 2, 3):
        machine.handle(TrialAdded(trial))
    assert machine.handle(PilotReady(3)) == [StartPilot(3, 80)]
    assert machine.handle(PilotReady(1, empty=True)) == []
    assert machine.handle(PlanReady(2, plan(held=20))) == []
    assert machine.handle(TrialEnded(0)) == [], "another pilot is under way"
    assert machine.handle(PilotDone(3, 5)) == [StartPilot(1, 100)]
    assert machine.handle(PilotDone(1, 5)) == [Admit(2)]
    machine.validate()


def test_a_pilot_has_the_device_to_itself_and_who_is_behind_it_waits(machine):
    admitted(machine, 0, 1, held=5)
    assert machine.handle(StepReady(0)) == [Enter(0)]
    for trial in (2, 3):
        machine.handle(TrialAdded(trial))
    assert machine.handle(PilotReady(2)) == []
    assert machine.handle(PilotReady(3)) == []
    assert machine.handle(StepReady(1)) == [], "else a pilot might wait for ever"
    assert machine.handle(StepDone(0)) == [StartPilot(2, 90)]
    assert machine.devices[0].ledger.steps == {2: 90}
    assert machine.handle(StepReady(0)) == []
    assert [machine.awaits(trial) for trial in (0, 1, 3)] == [(0, 2)] * 3
    machine.validate()
    assert machine.handle(PilotDone(2, 60)) == [StartPilot(3, 90)]
    assert machine.devices[0].ledger.peak_bytes == 10 + 60
    assert machine.handle(PilotDone(3, 40)) == [Enter(1), Enter(0)]
    machine.validate()


def test_nobody_travels_to_where_a_pilot_is_under_way():
    machine = Machine([100, 100], Fifo(), least_ahead_bytes=None)
    for trial in (0, 1):
        machine.handle(TrialAdded(trial, travels=True))
        machine.handle(PlanReady(trial, plan((10,), work=5, step=5)))
    assert machine.handle(TrialAdded(2)) == [Place(2, 0)]
    assert machine.handle(TrialAdded(3)) == [Place(3, 1)]
    machine.handle(PlanReady(2, plan((10,), work=5, step=5)))
    assert machine.handle(PilotReady(3)) == [StartPilot(3, 100)]
    for trial in (0, 2):
        assert machine.handle(StepReady(trial)) == [Enter(trial)]
        machine.handle(TaskReady(task(trial, 0)))
    assert machine.task_state(2) is TaskState.WAITING
    machine.validate()


def test_a_step_of_which_the_script_keeps_activations_goes_on_as_the_next(machine):
    admitted(machine, 0, held=0)
    assert machine.handle(StepReady(0)) == [Enter(0)]
    assert machine.handle(StepDone(0, keeps_bytes=True)) == []
    assert machine.devices[0].ledger.steps == {0: 10}
    assert machine.handle(StepDone(0)) == []
    assert machine.devices[0].ledger.steps == {}


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
        machine.handle(Promoted(a, 0))
    assert machine.handle(Failed(a)) == [Drop(0, 0, 0, 0, 30), PromoteShard(b, 0, 0, 30)]


def test_who_does_not_wait_any_more_keeps_what_it_has_and_may_ask_anew(machine):
    """Ctrl-C, while it waits."""
    admitted(machine, 0, held=30)
    assert machine.handle(TrialAdded(1)) == [Place(1, 0)]
    assert machine.handle(PlanReady(1, plan(held=30))) == [], "30 + 30 + 10 + 40 > 100"
    assert machine.handle(Withdrawn(1)) == []
    assert machine.handle(StepReady(0)) == [Enter(0)]
    assert machine.handle(Withdrawn(0)) == [], "it waits for nothing"
    assert machine.handle(StepDone(0)) == []
    assert machine.handle(TrialEnded(0)) == [], "nobody waits"
    assert machine.handle(PlanReady(1, plan(held=30))) == [Admit(1)]


def test_who_waited_behind_one_that_does_not_any_more_goes_on(machine):
    admitted(machine, 0, 1, held=5, step=50)
    assert machine.handle(StepReady(0)) == [Enter(0)]
    assert machine.handle(PilotReady(1)) == [], "it wants the device to itself"
    assert machine.handle(StepDone(0)) == [StartPilot(1, 95)]
    assert machine.handle(StepReady(0)) == []
    assert machine.handle(Withdrawn(0)) == []
    assert machine.handle(PilotDone(1, 10)) == []


def test_an_impossible_event_tells_its_story(machine):
    admitted(machine, 0)
    with pytest.raises(AssertionError, match="impossible TaskReady"):
        machine.handle(TaskReady(task(0, 0)))


def looking_ahead(*trials, budget=100, devices=1, policy=None, **options):
    """A machine that has seen a step of each of these trials, and the second entered."""
    machine = Machine([budget] * devices, policy or Fifo())
    for trial in trials:
        machine.handle(TrialAdded(trial, total_steps=3))
        machine.handle(PlanReady(trial, plan(**options)))
    shards = range(len(machine.trials[trials[0]].plan.shards))
    places = [(s, Direction.FORWARD) for s in shards] + [(s, Direction.BACKWARD) for s in reversed(shards)]
    for trial in trials:
        machine.handle(StepReady(trial))
        for shard, direction in places:
            now = task(trial, shard, direction)
            for instruction in machine.handle(TaskReady(now)):
                if isinstance(instruction, PromoteShard):
                    machine.handle(Promoted(now, instruction.device))
            machine.handle(Done(now, 1.0))
        machine.handle(StepDone(trial))
        machine.handle(Invalidated(trial))
    for trial in trials:
        assert Enter(trial) in machine.handle(StepReady(trial))
    return machine


def test_while_a_task_computes_the_shard_of_the_next_is_promoted():
    machine = looking_ahead(0, slots=(40, 40), work=5)
    first, second = task(0, 0, step=2), task(0, 1, step=2)
    assert machine.handle(TaskReady(first)) == [PromoteShard(first, 0, 0, 40)]
    assert machine.handle(Promoted(first, 0)) == [Run(first, 0), PromoteShard(second, 0, 40, 40, ahead=True)]
    assert machine.devices[0].in_flight == {(0, 1): second}
    assert machine.handle(Promoted(second, 0)) == []
    assert machine.handle(Done(first, 1.0, TaskReady(second))) == [Run(second, 0)]
    machine.validate()


def test_a_task_whose_shard_is_on_its_way_runs_when_it_has_arrived():
    machine = looking_ahead(0, slots=(40, 40), work=5)
    first, second = task(0, 0, step=2), task(0, 1, step=2)
    machine.handle(TaskReady(first))
    machine.handle(Promoted(first, 0))
    assert machine.handle(Done(first, 1.0, TaskReady(second))) == []
    assert machine.task_state(0) is TaskState.RUNNING and machine.idle_cause(0) == "promotion"
    assert machine.handle(Promoted(second, 0)) == [Run(second, 0)]
    machine.validate()


def test_the_next_may_be_another_trials():
    machine = looking_ahead(0, 1, slots=(25, 25), work=5)
    a, b = task(0, 0, step=2), task(1, 0, step=2)
    machine.handle(TaskReady(a))
    machine.handle(Promoted(a, 0))
    machine.handle(Promoted(task(0, 1, step=2), 0))
    assert machine.task_state(1) is None
    assert machine.handle(TaskReady(b)) == [], "the promise is made"
    assert machine.task_state(1) is TaskState.WAITING
    assert machine.handle(Done(a, 1.0)) == [PromoteShard(b, 0, 75, 25)], "the promised one is not ready yet"
    machine.validate()


def test_a_promise_that_proves_wrong_does_no_harm():
    machine = looking_ahead(0, slots=(25, 25, 25), work=5)
    first, second, other = (task(0, shard, step=2) for shard in (0, 1, 2))
    machine.handle(TaskReady(first))
    assert machine.handle(Promoted(first, 0)) == [Run(first, 0), PromoteShard(second, 0, 25, 25, ahead=True)]
    assert machine.handle(Done(first, 1.0, TaskReady(other))) == [PromoteShard(other, 0, 50, 25)]
    assert machine.handle(Promoted(second, 0)) == [], "it stays, as long as there is room"
    assert machine.handle(Promoted(other, 0)) == [Run(other, 0)], "what comes next is not known now"
    machine.validate()


def test_a_pruned_trials_promise_is_given_to_the_next():
    machine = looking_ahead(0, 1, slots=(25, 25), work=5)
    a, b = task(0, 0, step=2), task(1, 0, step=2)
    machine.handle(TaskReady(a))
    assert machine.handle(Promoted(a, 0))[1:] == [PromoteShard(task(0, 1, step=2), 0, 25, 25, ahead=True)]
    machine.handle(TaskReady(b))
    instructions = machine.handle(TrialEnded(0))
    assert instructions[:2] == [Drop(0, 0, 0, 0, 25), Drop(0, 1, 0, 25, 25)]
    assert instructions[2:] == [PromoteShard(b, 0, 0, 25)]
    assert machine.handle(Promoted(task(0, 1, step=2), 0)) == [], "what was on its way counts no more"
    machine.validate()


def test_nothing_that_is_to_stay_makes_way_for_a_promise():
    """Shards 1 and 2 stay from their forward to their backward; beside the work of shard 1 there is no room for 2."""
    machine = looking_ahead(0, slots=(40, 30, 35), work=(5, 40, 5), step=0)
    machine.handle(TaskReady(task(0, 0, step=2)))
    ahead = PromoteShard(task(0, 1, step=2), 0, 0, 30, ahead=True)
    assert machine.handle(Promoted(task(0, 0, step=2), 0))[1:] == [ahead]
    machine.handle(Promoted(task(0, 1, step=2), 0))
    running = machine.handle(Done(task(0, 0, step=2), 1.0, TaskReady(task(0, 1, step=2))))
    assert running == [Drop(0, 0, 0, 60, 40), Run(task(0, 1, step=2), 0)]
    assert machine.handle(Done(task(0, 1, step=2), 1.0, TaskReady(task(0, 2, step=2)))) == [
        PromoteShard(task(0, 2, step=2), 0, 30, 35)
    ]
    machine.validate()


def test_longest_remaining_time_goes_first():
    machine = Machine([100], ShardedLRTF(), least_ahead_bytes=None)
    for trial, steps in enumerate((2, 9, 5)):
        machine.handle(TrialAdded(trial, total_steps=steps))
        machine.handle(PlanReady(trial, plan((10,), step=10, work=0)))
        machine.trials[trial].progress.step_s = 1.0
        machine.handle(StepReady(trial))
    machine.handle(TaskReady(task(0, 0)))
    machine.handle(TaskReady(task(2, 0)))
    machine.handle(TaskReady(task(1, 0)))
    machine.handle(Promoted(task(0, 0), 0))
    assert machine.handle(Done(task(0, 0), 1.0))[0].task.trial == 1
    machine.validate()


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fifo", [0, 1, 2]),
        ("fair-share", [2, 0, 1]),
        ("best-first", [1, 2, 0]),
        (BestFirst("maximize"), [1, 0, 2]),
        ("rung-synchronous", [1, 2, 0]),
        ("oldest-first", [0, 1, 2]),
        (ShardedLRTF(), [2, 1, 0]),
    ],
)
def test_each_policy_has_its_order(policy, order):
    """Trial 1 has reported no objective; of equals the first comes first."""
    ranks = []
    for trial, device_s, steps, value, total in ((0, 5.0, 3, 0.9, 4), (1, 7.0, 1, None, 5), (2, 2.0, 2, 0.2, 9)):
        progress = Progress(trial, EndedTrials(), total, steps_done=steps, step_s=1.0, device_s=device_s, value=value)
        ranks.append((policy_named(policy).rank(task(trial, 0), progress), trial))
    assert [trial for _, trial in sorted(ranks)] == order


def test_a_random_order_is_its_seeds():
    tasks = [task(trial, shard) for trial in range(5) for shard in range(3)]
    progress = Progress(0, EndedTrials())

    def order(seed):
        return sorted(tasks, key=lambda task: Shuffled(seed).rank(task, progress))

    assert order(1) == order(1) != order(2) != tasks


def test_a_policy_is_an_object_or_its_name():
    assert policy_named("best-first") == BestFirst()
    with pytest.raises(ConfigError, match=r"one of sharded-lrtf, fifo, .*; got 'lifo'"):
        policy_named("lifo")
    nothing = type("RanksNothing", (Fifo,), {"rank": lambda self, task, progress: progress.value})
    with pytest.raises(
        ConfigError, match=r"a rank is a number, .*RanksNothing\(.*\) gave None for a trial's first task"
    ):
        policy_named(nothing())
    with pytest.raises(ConfigError, match="None for that of its search; got 'up'"):
        BestFirst("up")
    with pytest.raises(ConfigError, match=r"the class of one. Write Fifo\(\)"):
        policy_named(Fifo)
    with pytest.raises(ConfigError, match="a seed is an int"):
        Shuffled("a")


def test_a_trial_without_a_known_length_takes_what_its_neighbours_took():
    ended_trials = EndedTrials()
    known, unknown = Progress(0, ended_trials, total_steps=10), Progress(1, ended_trials)
    for progress in (known, unknown):
        progress.spend(2.0)
        progress.end_step(trained=True)
    assert known.remaining_s == 18.0
    assert unknown.remaining_s == inf, "nobody knows yet"
    known.spend(18.0)
    known.end()
    assert unknown.remaining_s == 20.0 - 2.0


def test_remaining_time_does_not_drift_with_epochs_or_evaluations():
    progress = Progress(0, EndedTrials(), total_steps=1000)
    for step in range(999):
        progress.spend(3.0 if step % 2 else 1.0)
        progress.end_step(trained=True)
        progress.spend(50.0)
        progress.end_step(trained=False)
    assert progress.remaining_s == pytest.approx(2.0, rel=0.1)


def test_a_task_runs_where_nothing_does_and_its_step_goes_on_at_home():
    machine = Machine([100, 100], Fifo(), least_ahead_bytes=None)
    for trial in (0, 1, 2):
        machine.handle(TrialAdded(trial, travels=True))
        machine.handle(PlanReady(trial, plan()))
        machine.handle(StepReady(trial))
    a, b, c = (task(trial, 0) for trial in (0, 1, 2))
    assert [machine.trials[trial].home for trial in (0, 1, 2)] == [0, 1, 0]
    assert machine.handle(TaskReady(a)) == [PromoteShard(a, 0, 0, 30)]
    assert machine.handle(TaskReady(c)) == [PromoteShard(c, 1, 0, 30)], "its home has a task"
    machine.handle(Promoted(c, 1))
    assert machine.handle(TaskReady(b)) == []
    machine.handle(Promoted(a, 0))
    assert machine.handle(Done(c, 1.0)) == [PromoteShard(b, 1, 30 + 40, 30)]
    assert (1, 0) in machine.trials[2].slots
    assert 2 in machine.devices[0].ledger.steps
    assert machine.handle(Invalidated(2)) == [Drop(2, 0, 1, 0, 30)]
    machine.validate()


def test_a_task_that_may_not_travel_waits_for_its_home():
    machine = Machine([100, 100], Fifo())
    for trial in (0, 1, 2):
        machine.handle(TrialAdded(trial))
        machine.handle(PlanReady(trial, plan()))
        machine.handle(StepReady(trial))
    machine.handle(TaskReady(task(0, 0)))
    assert machine.handle(TaskReady(task(2, 0))) == []
    machine.validate()


def three_on_two_devices(its_plan, **options):
    """Each has a ready step; the first device is home to trials 0 and 2, and runs a task of the former."""
    machine = Machine([100, 100], Fifo(), least_ahead_bytes=None, **options)
    for trial in (0, 1, 2):
        machine.handle(TrialAdded(trial, travels=True))
        machine.handle(PlanReady(trial, its_plan))
        machine.handle(StepReady(trial))
    machine.handle(TaskReady(task(0, 0)))
    return machine


def test_a_task_that_says_so_runs_at_home_though_its_trial_travels():
    machine = three_on_two_devices(plan())
    assert machine.handle(TaskReady(task(2, 0), at_home=True)) == []
    machine.handle(Promoted(task(0, 0), 0))
    assert machine.handle(Done(task(0, 0), 1.0)) == [Run(task(2, 0), 0, offset=70, num_bytes=30)]
    machine.validate()


def test_a_step_begins_where_fewer_trials_are_at_home():
    machine = Machine([100, 100], Fifo(), least_ahead_bytes=None)
    for trial in (0, 1, 2):
        machine.handle(TrialAdded(trial, travels=True))
        machine.handle(PlanReady(trial, plan()))
    machine.handle(TrialEnded(1))
    assert machine.handle(StepReady(2)) == [Move(2, 1), Enter(2)], "the second device is nobody's"
    machine.handle(StepReady(0))
    a, c = task(0, 0), task(2, 0)
    assert machine.handle(TaskReady(a)) == [PromoteShard(a, 0, 0, 30)]
    assert machine.handle(TaskReady(c)) == [PromoteShard(c, 1, 0, 30)]
    assert machine.trials[2].home == 1
    machine.handle(Promoted(c, 1))
    machine.handle(Done(c, 1.0))
    assert machine.handle(StepDone(2)) == []
    assert machine.handle(StepReady(2)) == [Enter(2)]
    machine.validate()


@pytest.mark.parametrize(("bytes_per_s", "goes"), [(50, True), (49, False)])
def test_a_task_goes_where_the_way_takes_no_longer_than_itself(bytes_per_s, goes):
    machine = three_on_two_devices(plan(boundary=10), links_bytes_per_s=[inf, bytes_per_s])
    travelled = [PromoteShard(task(2, 0), 1, 0, 30)] if goes else []
    assert machine.handle(TaskReady(task(2, 0))) == travelled, "a second to compute, and 30 + 10 + 10 bytes to move"
    machine.validate()


def test_a_pilot_that_lacked_room_counts_no_more_than_it_had():
    machine = Machine([100])
    for trial in (0, 1):
        machine.handle(TrialAdded(trial))
    machine.handle(PlanReady(0, plan(held=40)))
    assert machine.handle(PilotReady(1)) == [StartPilot(1, 60)]
    machine.handle(PilotDone(1, 90))
    assert machine.devices[0].ledger.peak_bytes == 100
    machine.validate()


def test_best_first_goes_by_the_direction_of_the_search():
    rank = BestFirst().rank
    progress = Progress(0, EndedTrials())
    progress.value = 2.0
    assert rank(task(0, 0), progress) == 2.0
    progress.maximizes = True
    assert rank(task(0, 0), progress) == -2.0
    assert BestFirst("minimize").rank(task(0, 0), progress) == 2.0


def test_what_was_promised_abroad_returns_if_its_task_is_to_run_at_home():
    """Trial 2's last step made its second visit where the first was; in this one that visit stays at home."""
    machine = Machine([100, 100], Fifo(), least_ahead_bytes=0)
    for trial in (0, 1, 2):
        machine.handle(TrialAdded(trial, travels=True))
        machine.handle(PlanReady(trial, plan()))
    first, second = task(2, 0), task(2, 1)
    machine.handle(StepReady(2))
    for now in (first, second):
        machine.handle(TaskReady(now))
        machine.handle(Promoted(now, 0))
        machine.handle(Done(now, 1.0))
    machine.handle(StepDone(2))
    machine.handle(Invalidated(2))
    machine.handle(StepReady(0))
    machine.handle(TaskReady(task(0, 0)))
    machine.handle(StepReady(2))
    first, second = task(2, 0, step=2), task(2, 1, step=2)
    assert machine.handle(TaskReady(first)) == [PromoteShard(first, 1, 0, 30)]
    assert PromoteShard(second, 1, 30, 30, ahead=True) in machine.handle(Promoted(first, 1))
    machine.handle(Promoted(second, 1))
    machine.handle(Promoted(task(0, 0), 0))
    promised_at_home = PromoteShard(second, 0, 30, 30, ahead=True)
    assert machine.handle(Done(first, 1.0, TaskReady(second, at_home=True))) == [promised_at_home]
    machine.validate()


def test_a_step_begins_on_the_device_with_fewer_trials():
    machine = Machine([100, 100], Fifo())
    for trial in range(4):
        machine.handle(TrialAdded(trial, travels=True))
        machine.handle(PlanReady(trial, plan()))
    machine.handle(TrialEnded(1))
    machine.handle(TrialEnded(3))
    assert machine.handle(StepReady(0)) == [Move(0, 1), Enter(0)]
    assert machine.handle(StepReady(2)) == [Enter(2)]
    machine.validate()


def test_a_step_leaves_room_for_the_work_of_a_traveller_whose_shard_is_on_its_way():
    """The step once entered meanwhile. Its task waited for the lease, and who had the lease for the step's bytes."""
    machine = Machine([100, 100], Fifo(), least_ahead_bytes=None)
    for trial in (0, 1, 2):
        machine.handle(TrialAdded(trial, travels=trial != 1))
        machine.handle(PlanReady(trial, plan((30,), step=40) if trial == 1 else plan((50,), work=40, step=5)))
    a, b, c = (task(trial, 0) for trial in (0, 1, 2))
    for now in (a, c):
        machine.handle(StepReady(now.trial))
    assert machine.handle(TaskReady(a)) == [PromoteShard(a, 0, 0, 50)]
    assert machine.handle(TaskReady(c)) == [PromoteShard(c, 1, 0, 50)], "its home has a task"
    assert machine.handle(StepReady(1)) == [], "40 + 50 + 40 > 100"
    assert machine.handle(Promoted(c, 1)) == [Run(c, 1)]
    assert machine.handle(Done(c, 1.0)) == [Enter(1)]
    assert machine.handle(TaskReady(b)) == [Drop(2, 0, 1, 0, 50), PromoteShard(b, 1, 70, 30)]
    machine.validate()


def test_a_trial_that_runs_out_of_memory_gets_what_can_go():
    machine = looking_ahead(0, 1, slots=(25, 25), work=5)
    a, b = task(0, 0, step=2), task(1, 0, step=2)
    machine.handle(TaskReady(a))
    machine.handle(Promoted(a, 0))
    machine.handle(Promoted(task(0, 1, step=2), 0))
    machine.handle(Done(a, 1.0))
    machine.handle(TaskReady(b))
    assert machine.handle(Promoted(b, 0))[0] == Run(b, 0)
    machine.handle(Promoted(task(1, 1, step=2), 0))
    dropped = machine.handle(OutOfMemory(1))
    assert [(drop.trial, drop.shard) for drop in dropped] == [(0, 0), (1, 1)]
    assert machine.handle(TaskReady(task(0, 1, step=2))) == [], "nothing is promoted beside it"
    assert machine.handle(Done(b, 1.0))[0].task.trial == 0
    machine.validate()


def test_trials_wait_for_host_memory_in_the_order_in_which_they_came():
    machine = Machine([100], host_bytes=50)
    assert machine.handle(TrialAdded(0, host_bytes=30)) == [Place(0, 0)]
    assert machine.handle(TrialAdded(1, host_bytes=30)) == []
    assert machine.handle(TrialAdded(2, host_bytes=10)) == [], "no trial overtakes"
    assert machine.handle(TrialEnded(0)) == [Place(1, 0), Place(2, 0)]
    machine.handle(TrialAdded(3, host_bytes=50))
    assert machine.handle(TrialEnded(3)) == [], "it has given up waiting"
    machine.validate()


def test_the_story_of_a_trial_and_of_a_shard():
    machine = looking_ahead(0, 1, slots=(25, 25), work=5)
    story = machine.story(1)
    assert "TrialAdded(trial=1" in story and "Place(trial=1, device=0)" in story and "trial=0" not in story
    assert "shard=1" not in machine.story(1, shard=0).replace("shard=1, direction", "")
    with pytest.raises(AssertionError, match=r"impossible Done.*\n(.*\n)*.*TrialAdded\(trial=1"):
        machine.handle(Done(task(1, 0)))


class Player:
    """Plays trials against the machine with random timing, and keeps the story. Copies arrive at any time after
    they were ordered; trials arrive late, fail, do not wait any more and ask again, and run out of memory."""

    def __init__(self, rng, machine, plans, *, steps=2, fails=0.0, withdrawn=0.0, lacks=0.0, travels=0.0, arrives=0.4):
        self.rng, self.machine, self.plans, self.steps = rng, machine, plans, steps
        self.shares = [rng.random() < 0.8 for _ in plans]
        self.fails, self.withdrawn, self.lacks, self.arrives = fails, withdrawn, lacks, arrives
        self.travels = [rng.random() < travels for _ in plans]
        self.granted = {t: [] for t in range(len(plans))}
        self.copies = []
        self.slot_of = {}  # of each copy that was ordered
        self.story = []
        self.passed_over = {}  # how often the home of a waiting task ran another one
        self.waiting = {}  # by trial, the answer that it waits for
        self.asked = {}  # and with which event

    def script(self, trial):
        """What a trial asks and which answer it waits for, as a generator of (event, answer). The plan of
        even trials has grown after their first step; every third says when it has been through."""
        final, grows = self.plans[trial], trial % 2 == 0
        total_steps = self.steps if trial % 3 else None
        yield TrialAdded(trial, total_steps, host_bytes=10, travels=self.travels[trial]), Place
        yield PilotReady(trial, empty=self.rng.random() < 0.1), StartPilot
        yield PilotDone(trial, self.rng.randrange(100)), None
        yield PlanReady(trial, replace(final, step_bytes=final.step_bytes // 2) if grows else final), Admit
        kept = False
        yield self.shared(trial), None
        for step in range(1, self.steps + 1):
            if step > 1 and grows and not kept:
                yield PlanReady(trial, final), Admit
                grows = False
            if not kept and self.rng.random() < 0.5:  # its last plan may have ended it
                yield self.shared(trial), None
            if not kept:
                yield StepReady(trial), Enter
            yield Invalidated(trial), None
            shards = range(len(self.plans[trial].shards))
            visits = [task(trial, s, step=step) for s in shards]
            visits += [task(trial, s, Direction.BACKWARD, step) for s in reversed(shards)]
            if trial % 5 == 4 and step == 2 and len(shards) > 1:  # not in the order of the step before
                visits[0], visits[1] = visits[1], visits[0]
            yield self.ready(visits[0]), Run
            for visit, after in zip(visits, [*visits[1:], None], strict=True):
                seconds = self.rng.random()
                if after is None or self.rng.random() < 0.3:
                    yield Done(visit, seconds), None
                    if after is not None:
                        yield self.ready(after), Run
                else:
                    yield Done(visit, seconds, self.ready(after)), Run
            yield Reported(trial, self.rng.random()), None
            kept = step < self.steps and self.rng.random() < 0.1
            yield StepDone(trial, keeps_bytes=kept), None
        yield TrialEnded(trial), None

    def shared(self, trial):
        """All shards of one place and size have the same weights, if the trial shares its weights."""
        sizes = [shard.slot_bytes for shard in self.plans[trial].shards]
        return Shared(trial, tuple(50 * i + size if self.shares[trial] else None for i, size in enumerate(sizes)))

    def ready(self, visit):
        return TaskReady(visit, at_home=self.rng.random() < 0.2)

    def send(self, event):
        for instruction in self.machine.handle(event):
            self.story.append(instruction)
            if isinstance(instruction, Move):
                assert self.machine.trials[instruction.trial].home == instruction.device
            elif isinstance(instruction, PromoteShard):
                self.copies.append(instruction)
                self.slot_of[instruction.task, instruction.device] = self.machine.slots.key(instruction.task)
            elif isinstance(instruction, Drop):
                gone = (instruction.trial, instruction.shard, instruction.device)
                self.copies = [c for c in self.copies if (*self.slot_of[c.task, c.device], c.device) != gone]
            elif isinstance(instruction, Run):
                self.granted[instruction.task.trial].append(instruction)
            else:
                self.granted[instruction.trial].append(instruction)
            if isinstance(instruction, Run):
                self.count_waits(instruction)
                self.check_place(instruction)
        self.machine.validate()
        for trial, answer in self.waiting.items():
            if answer is Run and trial in self.machine.trials and not self.granted[trial]:
                assert self.machine.task_state(trial) is not None, f"the task of trial {trial} is lost"

    def check_place(self, run):
        trial = self.machine.trials[run.task.trial]
        stays = trial.task_stays_home or not trial.travels
        assert run.device == trial.home or not stays, "a task that stays at home ran elsewhere"

    def count_waits(self, run):
        self.passed_over.pop(run.task.trial, None)
        for trial, waiting in self.machine.ready.by_trial.items():
            if waiting.home == run.device:
                self.passed_over[trial] = self.passed_over.get(trial, 0) + 1
                assert self.passed_over[trial] <= (STARVATION_LIMIT + 2) * (len(self.plans) + 1), "starved"

    def withdraw(self, trial):
        self.send(Withdrawn(trial))
        if not self.granted[trial]:
            self.send(self.asked[trial])

    def arrive(self, copy):
        if copy in self.copies:
            self.copies.remove(copy)
            self.send(Promoted(copy.task, copy.device))

    def play(self):
        live = {t: self.script(t) for t in self.granted}
        waiting = self.waiting
        while live:
            asking = [t for t in waiting if not self.granted[t] and waiting[t] in (StartPilot, Admit, Enter)]
            if asking and self.rng.random() < self.withdrawn:
                self.withdraw(self.rng.choice(asking))
            movable = [t for t in live if t not in waiting or self.granted[t]]
            assert movable or self.copies, f"deadlock: {waiting}"
            if self.copies and (not movable or self.rng.random() < self.arrives):
                self.arrive(self.rng.choice(self.copies))
                continue
            trial = self.rng.choice(movable)
            if trial in self.machine.trials and self.rng.random() < self.fails:
                self.send(TrialEnded(trial))
                waiting.pop(trial, None)
                del live[trial]
            elif trial in waiting:
                self.answer(trial, waiting)
            else:
                event, answer = next(live[trial])
                if answer is not None:
                    waiting[trial], self.asked[trial] = answer, event
                if isinstance(event, TrialEnded):
                    del live[trial]
                self.send(event)
        return self.story

    def answer(self, trial, waiting):
        instruction = self.granted[trial].pop(0)
        if isinstance(instruction, Run) and self.rng.random() < self.lacks:
            self.send(OutOfMemory(trial))
        answer = waiting.pop(trial)
        assert isinstance(instruction, answer)


POLICIES = [
    ShardedLRTF(),
    Fifo(),
    FairShare(),
    BestFirst(),
    BestFirst("maximize"),
    RungSynchronous(),
    OldestFirst(),
    Shuffled(3),
    ShardedLRTF(gathers=False),
]
RATES = {"fails": (0.0, 0.02), "withdrawn": (0.0, 0.05), "lacks": (0.0, 0.1), "travels": (0.0, 0.7, 1.0)}
RATES["arrives"] = (0.4, 0.05)  # copies that take long


@st.composite
def workloads(draw):
    budgets = draw(st.lists(st.integers(100, 200), min_size=1, max_size=4))
    plans, base = [], draw(st.lists(st.integers(1, 49), min_size=1, max_size=5))
    for _ in range(draw(st.integers(1, 8))):
        held = draw(st.one_of(st.integers(0, 20), st.integers(40, 60)))
        step, work = draw(st.integers(0, 30)), draw(st.integers(0, 45 if held < 40 else 10))
        rest = min(budgets) - held - step - work
        slots = draw(st.lists(st.integers(0, rest), min_size=1, max_size=5))
        if max(base) <= rest and draw(st.booleans()):
            slots = base
        plans.append(plan(slots, work=work, held=held, step=step, boundary=draw(st.integers(0, 10))))
    rates = {name: draw(st.sampled_from(values)) for name, values in RATES.items()}
    options = {
        "steps_let_by": draw(st.sampled_from([0, STEPS_LET_BY])),
        "policy": draw(st.sampled_from(POLICIES)),
        "least_ahead_bytes": draw(st.sampled_from([None, 0, 20])),
        "host_bytes": draw(st.sampled_from([None, 20])),
        "links_bytes_per_s": [draw(st.sampled_from([inf, 20])) for _ in budgets],
    }
    return budgets, plans, draw(st.integers(0, 2**16)), options, rates


def play(budgets, plans, seed, options, rates):
    options = dict(options)
    with mock.patch("hydra_tune.schedule.admission.STEPS_LET_BY", options.pop("steps_let_by")):
        return Player(random.Random(seed), Machine(budgets, **options), plans, **rates).play()


def check_any_mix(workload):
    _, plans, _, _, rates = workload
    story = play(*workload)
    assert story == play(*workload), "same seed, same story"
    if not (rates["fails"] or rates["withdrawn"] or rates["lacks"]):
        runs = [i.task for i in story if isinstance(i, Run)]
        for trial, its_plan in enumerate(plans):
            shards = range(len(its_plan.shards))
            once = [(s, Direction.FORWARD) for s in shards] + [(s, Direction.BACKWARD) for s in reversed(shards)]
            second = [once[1], once[0], *once[2:]] if trial % 5 == 4 and len(shards) > 1 else once
            assert [(t.shard, t.direction) for t in runs if t.trial == trial] == [*once, *second]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(workloads())
def test_any_mix_of_trials_that_fit_alone_finishes_within_budget(workload):
    check_any_mix(workload)


@pytest.mark.proof
@settings(max_examples=10_000, deadline=None, derandomize=True)
@given(workloads())
def test_any_mix_of_trials_that_fit_alone_finishes_within_budget_at_length(workload):
    check_any_mix(workload)


def test_a_task_that_goes_on_where_a_copy_for_another_is_on_its_way_waits_for_it():
    """It was lost: nobody else was ready, so that it need not stand in the queue, but its shard found no place."""
    machine = Machine([100, 100], Fifo(), least_ahead_bytes=0)
    for trial, slots in enumerate([(10, 60), (10,), (60, 60)]):
        machine.handle(TrialAdded(trial, travels=True))
        machine.handle(PlanReady(trial, plan(slots, work=0, step=0)))
        machine.handle(StepReady(trial))
    a, b, c = (task(trial, 0) for trial in (0, 1, 2))
    for device, now in enumerate((a, b)):
        machine.handle(TaskReady(now))
        assert machine.handle(Promoted(now, device)) == [Run(now, device)]
    assert machine.handle(TaskReady(c)) == [PromoteShard(c, 0, 40, 60, ahead=True)]
    assert machine.handle(Done(b, 1.0)) == [PromoteShard(c, 1, 40, 60)], "the other device was free first"
    after = task(0, 1)
    assert machine.handle(Done(a, 1.0, TaskReady(after))) == [Drop(0, 0, 0, 0, 10)]
    assert machine.task_state(0) is TaskState.WAITING
    assert machine.handle(Promoted(c, 0)) == [Drop(2, 0, 0, 40, 60), PromoteShard(after, 0, 40, 60)]
    machine.validate()


def test_what_another_device_promised_runs_at_home_if_that_is_free_first():
    """Device 1 gave the promise, has since chosen another task, and waits for the promised one's copy to make way."""
    machine = Machine([100, 100], OldestFirst(), least_ahead_bytes=0)
    for trial in range(4):
        machine.handle(TrialAdded(trial, travels=True))
        machine.handle(PlanReady(trial, plan((10, 60), work=0, step=0)))
        machine.handle(StepReady(trial))
    at_0, older, promised, at_1 = task(0, 0), task(1, 1), task(2, 1), task(3, 0)
    assert machine.handle(TaskReady(at_1)) == [PromoteShard(at_1, 1, 0, 10)]
    assert machine.handle(TaskReady(at_0)) == [PromoteShard(at_0, 0, 0, 10)]
    assert machine.handle(TaskReady(promised)) == []
    assert machine.handle(Promoted(at_1, 1)) == [Run(at_1, 1), PromoteShard(promised, 1, 10, 60, ahead=True)]
    assert machine.handle(Promoted(at_0, 0)) == [Run(at_0, 0)]
    assert machine.handle(TaskReady(older, at_home=True)) == []
    assert machine.handle(Done(at_1, 1.0)) == [Drop(3, 0, 1, 0, 10)], "60 + 60 > 100"
    assert machine.handle(Done(at_0, 1.0)) == [PromoteShard(promised, 0, 10, 60)]
    assert machine.handle(Promoted(promised, 1)) == [Drop(2, 1, 1, 10, 60), Run(older, 1, False, 40, 60)]
    machine.validate()


def test_steps_let_an_admission_by_that_awaits_only_their_end():
    machine = Machine([100])
    for trial in (0, 1, 2):
        machine.handle(TrialAdded(trial))
        machine.handle(PlanReady(trial, plan((10,), work=0, step=20)))
        assert machine.handle(StepReady(trial)) == [Enter(trial)]
    machine.handle(TrialAdded(3))
    assert machine.handle(PlanReady(3, plan((10,), work=0, held=55))) == [], "beside one step it would fit"
    for number in range(STEPS_LET_BY):
        trial = number % 3
        assert machine.handle(StepDone(trial)) == []
        assert machine.handle(StepReady(trial)) == [Enter(trial)]
    assert machine.handle(StepDone(0)) == []
    assert machine.handle(StepReady(0)) == []
    assert machine.handle(StepDone(1)) == [Admit(3)]
    machine.validate()


def test_slots_are_aligned_where_their_sizes_are_though_the_budget_is_not():
    """With 1,000 bytes the first slot began at 1,000 - 512, where some CPUs round otherwise than plain PyTorch."""
    ledger = Ledger(1_700, alignment_bytes=512)
    assert ledger.place((0, 0), 512) == 1_024
    assert ledger.place((0, 1), 1_024) == 0
    assert ledger.place((0, 2), 512) is None
    ledger.validate()


# ---- turns that last -----------------------------------------------------------------------------------


def resident(work=(10, 20), held=10, step=5):
    return TrialPlan(True, (Shard((0,), 0, *work),), (BlockProfile("0", 0),), held, step)


def live(machine, *trials, total_steps=None, plan=None):
    for trial in trials:
        machine.handle(TrialAdded(trial, total_steps))
        assert Admit(trial) in machine.handle(PlanReady(trial, plan or resident()))


def wants_turn(machine, trial, step=1):
    machine.handle(StepReady(trial))
    return machine.handle(TaskReady(task(trial, 0, step=step)))


def test_a_turn_lasts_where_all_are_resident(machine):
    live(machine, 0, 1)
    assert wants_turn(machine, 0) == [Run(task(0, 0), 0, lasts=True)]
    assert machine.devices[0].ledger.work_bytes == 20, "of all its tasks"
    assert wants_turn(machine, 1) == []
    assert machine.idle_cause(0) == "", "between two tasks, too"
    machine.validate()
    assert machine.handle(Worked(0, 3.0, steps=2)) == []
    assert machine.handle(Done(task(0, 0))) == [Run(task(1, 0), 0, lasts=True)]
    assert machine.handle(StepDone(0, trained=False)) == []
    assert machine.trials[0].progress.steps_done == 2 and machine.trials[0].progress.device_s == 3.0


def test_a_quantum_is_over_for_who_waits(machine):
    live(machine, 0, 1)
    wants_turn(machine, 0)
    assert machine.handle(Expired(0)) == [], "for nobody"
    wants_turn(machine, 1)
    assert machine.handle(Expired(0)) == [Recall(0, 0)]
    assert machine.handle(Expired(0)) == [], "it is recalled"


def test_at_the_end_of_a_quantum_the_policy_decides_but_nobody_starves():
    machine = Machine([100], OldestFirst(), least_ahead_bytes=None)
    live(machine, 0, 1)
    wants_turn(machine, 0)
    wants_turn(machine, 1)
    most = STARVATION_LIMIT * (2 + 1) + 1
    assert [machine.handle(Expired(0)) for _ in range(most)] == [[]] * most
    assert machine.handle(Expired(0)) == [Recall(0, 0)]
    machine.validate()


@pytest.mark.parametrize(
    "comes",
    [
        lambda machine: machine.handle(PilotReady(1)),
        lambda machine: machine.handle(PlanReady(1, resident(held=70))),
        lambda machine: machine.handle(PlanReady(1, plan())),
    ],
    ids=["a pilot that waits", "an admission that waits", "a trial that is spilled"],
)
def test_who_needs_turns_of_a_task_ends_one_that_lasts(machine, comes):
    live(machine, 0)
    machine.handle(TrialAdded(1))
    wants_turn(machine, 0)
    said = comes(machine)
    assert said[-1] == Recall(0, 0)
    machine.validate()
    machine.handle(Done(task(0, 0)))
    machine.handle(StepDone(0, trained=False))
    if said[0] == Admit(1):
        assert wants_turn(machine, 0) == [Run(task(0, 0), 0)], "each task"


def test_a_step_that_waits_for_bytes_ends_a_turn_that_lasts(machine):
    live(machine, 0, 1, plan=resident(held=10, step=40))
    wants_turn(machine, 0)
    assert machine.handle(StepReady(1)) == [Recall(0, 0)], "10 + 40 + 10 + 40 + 20 > 100"
    machine.handle(Done(task(0, 0)))
    assert machine.handle(StepDone(0, trained=False)) == [Enter(1)]


def test_a_turn_that_lasts_goes_with_its_trial(machine):
    live(machine, 0, 1)
    wants_turn(machine, 0)
    wants_turn(machine, 1)
    assert machine.handle(TrialEnded(0)) == [Run(task(1, 0), 0, lasts=True)]
    assert machine.handle(TrialEnded(1)) == []
    assert machine.devices[0].ledger.work_bytes == 0


def test_steps_of_a_turn_count_as_one_by_one():
    one_by_one, at_once = Progress(0, EndedTrials(), 10), Progress(0, EndedTrials(), 10)
    for progress in (one_by_one, at_once):
        progress.spend(1.0)
        progress.end_step(trained=True)
    for _ in range(5):
        one_by_one.spend(2.0)
        one_by_one.end_step(trained=True)
    at_once.spend(10.0)
    at_once.end_steps(5)
    assert at_once.remaining_s == pytest.approx(one_by_one.remaining_s) and at_once.steps_done == 6


@pytest.mark.parametrize("quantum_s", [-1, inf, float("nan"), True, "1s"])
def test_a_quantum_is_a_number_of_seconds(quantum_s):
    assert ShardedLRTF().quantum_s == 0.5 and Fifo(quantum_s=2).quantum_s == 2 and Shuffled(3, quantum_s=0).seed == 3
    with pytest.raises(ConfigError, match=r"quantum_s is for how many seconds .*Write Fifo\(quantum_s=0.5\)"):
        Fifo(quantum_s=quantum_s)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 5))
def test_whatever_resident_and_spilled_trials_do_no_turn_is_lost(seed, number):
    """Each trial wants so many turns, of so many steps, and gets them, whoever ends a turn."""
    rng = random.Random(seed)
    machine = Machine([1000], rng.choice([Fifo(), ShardedLRTF(), OldestFirst()]), least_ahead_bytes=None)
    plans = [resident() if rng.random() < 0.7 else plan((20,)) for _ in range(number)]
    left, ready, recalled = [6] * number, [], set()
    running = {}

    def tell(event):
        for said in machine.handle(event):
            if isinstance(said, Run):
                assert not running, "one lease a device"
                running[said.task.trial] = said
            elif isinstance(said, PromoteShard):
                ready.append(Promoted(said.task, said.device))
            elif isinstance(said, Recall):
                recalled.add(said.trial)
            elif isinstance(said, Admit):
                ready.append(StepReady(said.trial))
            elif isinstance(said, Enter):
                ready.append(TaskReady(task(said.trial, 0, step=left[said.trial])))
        machine.validate()

    for trial in range(number):
        tell(TrialAdded(trial))
        ready.append(PlanReady(trial, plans[trial]))
    while ready or running:
        if running and (not ready or rng.random() < 0.5):
            ((trial, run),) = running.items()
            if run.lasts and trial not in recalled and rng.random() < 0.5:
                tell(Worked(trial, 1.0, steps=1))
                tell(Expired(0))
                continue
            running.clear()
            recalled.discard(trial)
            left[trial] -= 1
            tell(Done(run.task, 1.0))
            tell(StepDone(trial))
            ready.append(StepReady(trial) if left[trial] else TrialEnded(trial))
        else:
            tell(ready.pop(rng.randrange(len(ready))))
    assert left == [0] * number
