"""Trials that have the same frozen weights: one slot for all of them, and they visit it one after another."""

from dataclasses import replace

import pytest

from hydra_tune.schedule.events import (
    Admit,
    Done,
    Drop,
    Enter,
    Invalidated,
    Place,
    PlanReady,
    Promoted,
    PromoteShard,
    Run,
    Shared,
    StepDone,
    StepReady,
    TaskReady,
    TrialAdded,
    TrialEnded,
)
from hydra_tune.schedule.ledger import SHARED
from hydra_tune.schedule.machine import Machine
from hydra_tune.schedule.plan import Direction, Shard, Task, TrialPlan
from hydra_tune.schedule.policy import BestFirst, FairShare, Fifo, RungSynchronous, ShardedLRTF

PLAN = TrialPlan(False, tuple(Shard((i,), 30, 0, 0) for i in range(3)), held_bytes=1, step_bytes=1)


def at(trial, shard, direction=Direction.FORWARD, step=1):
    return Task(trial, step, shard, direction)


def sharing(*trials, weights=(7, 8, 9), policy=None, budget=100, least_ahead_bytes=None):
    machine = Machine([budget], policy or Fifo(), least_ahead_bytes=least_ahead_bytes)
    for trial in trials:
        assert machine.handle(TrialAdded(trial)) == [Place(trial, 0)]
        assert machine.handle(PlanReady(trial, PLAN)) == [Admit(trial)]
        assert machine.handle(Shared(trial, weights)) == []
        assert machine.handle(StepReady(trial)) == [Enter(trial)]
    return machine


def test_a_shard_is_promoted_once_for_all_that_wait_for_it():
    machine = sharing(0, 1, 2)
    assert machine.handle(TaskReady(at(0, 0))) == [PromoteShard(at(0, 0), 0, 0, 30)]
    assert machine.handle(TaskReady(at(1, 0))) == []
    assert machine.handle(Promoted(at(0, 0), 0)) == [Run(at(0, 0), 0)]
    assert machine.handle(TaskReady(at(2, 0))) == []
    assert machine.handle(Done(at(0, 0), 1.0, TaskReady(at(0, 1)))) == [Run(at(1, 0), 0)], "before shard 1 is promoted"
    assert machine.handle(Done(at(1, 0), 1.0, TaskReady(at(1, 1)))) == [Run(at(2, 0), 0)]
    assert machine.handle(Done(at(2, 0), 1.0)) == [PromoteShard(at(0, 1), 0, 30, 30)]
    assert machine.handle(Promoted(at(0, 1), 0)) == [Run(at(0, 1), 0)]
    assert list(machine.devices[0].ledger.slots) == [(SHARED, 7), (SHARED, 8)]
    machine.validate()


def test_the_next_shard_is_promoted_while_all_visit_this_one():
    machine = sharing(0, 1, least_ahead_bytes=0)
    for trial in (0, 1):  # a step, from which the machine knows what comes next
        for task in [at(trial, s) for s in (0, 1, 2)] + [at(trial, s, Direction.BACKWARD) for s in (2, 1, 0)]:
            if Run(task, 0) not in machine.handle(TaskReady(task)):
                assert Run(task, 0) in machine.handle(Promoted(task, 0))
            machine.handle(Done(task, 1.0))
        machine.handle(StepDone(trial))
        machine.handle(StepReady(trial))
    machine.handle(Invalidated(0))
    a, b = at(0, 0, step=2), at(1, 0, step=2)
    (run,) = machine.handle(TaskReady(a))
    assert run == Run(a, 0), "frozen weights stay from step to step"
    machine.validate()
    assert machine.handle(TaskReady(b)) == []
    assert machine.handle(Done(a, 1.0, TaskReady(at(0, 1, step=2))))[0] == Run(b, 0)
    machine.validate()


def test_slots_that_a_ready_task_waits_for_make_room_last():
    machine = sharing(0, 1)
    for shard in (0, 1, 2):
        machine.handle(TaskReady(at(0, shard)))
        assert machine.handle(Promoted(at(0, shard), 0)) == [Run(at(0, shard), 0)]
        if shard < 2:
            machine.handle(Done(at(0, shard), 1.0))
    evictable = machine.slots.evictable
    assert list(evictable(machine.devices[0])) == [(SHARED, 7), (SHARED, 8)], "the oldest first"
    machine.handle(TaskReady(at(1, 0)))
    assert list(evictable(machine.devices[0])) == [(SHARED, 8), (SHARED, 7)]
    assert list(evictable(machine.devices[0], ahead=at(0, 1, Direction.BACKWARD))) == [(SHARED, 8)]
    machine.validate()


def test_the_last_trial_gives_the_slots_back():
    machine = sharing(0, 1)
    machine.handle(TaskReady(at(0, 0)))
    machine.handle(Promoted(at(0, 0), 0))
    machine.handle(Done(at(0, 0), 1.0))
    assert machine.handle(TrialEnded(0)) == [], "trial 1 uses it, too"
    assert machine.devices[0].ledger.slots == {(SHARED, 7): (0, 30)}
    assert machine.handle(TaskReady(at(1, 0))) == [Run(at(1, 0), 0)]
    assert machine.handle(Done(at(1, 0), 1.0)) == []
    assert machine.handle(TrialEnded(1)) == [Drop(SHARED, 7, 0, 0, 30)]
    assert machine.devices[0].ledger.used_bytes == 0
    assert machine.slots.users == {}
    machine.validate()


def test_a_trial_with_a_layer_of_its_own_shares_the_others():
    machine = sharing(0)
    machine.handle(TrialAdded(1))
    machine.handle(PlanReady(1, PLAN))
    machine.handle(Shared(1, (7, None, 9)))
    machine.handle(StepReady(1))
    for trial, shard in ((0, 0), (0, 1), (1, 1)):
        machine.handle(TaskReady(at(trial, shard)))
        machine.handle(Promoted(at(trial, shard), 0))
        machine.handle(Done(at(trial, shard), 1.0))
    assert list(machine.devices[0].ledger.slots) == [(SHARED, 7), (SHARED, 8), (1, 1)]
    assert machine.handle(TaskReady(at(1, 0))) == [Run(at(1, 0), 0)]
    machine.handle(Done(at(1, 0), 1.0))
    assert machine.handle(Invalidated(1)) == [Drop(1, 1, 0, 70, 30)], "what is shared is frozen, and stays"
    machine.validate()


def test_a_new_plan_ends_it_until_the_trial_says_it_again():
    machine = sharing(0)
    machine.handle(TaskReady(at(0, 0)))
    machine.handle(Promoted(at(0, 0), 0))
    machine.handle(Done(at(0, 0), 1.0))
    machine.handle(StepDone(0))
    assert machine.handle(PlanReady(0, replace(PLAN, step_bytes=2))) == [Drop(SHARED, 7, 0, 0, 30), Admit(0)]
    assert machine.trials[0].weights == ()
    machine.validate()


@pytest.mark.parametrize(
    ("policy", "gathers"),
    [
        (ShardedLRTF(), True),
        (Fifo(), True),
        (FairShare(), True),
        (RungSynchronous(), True),
        (FairShare(gathers=False), False),
        (BestFirst(), False),
    ],
    ids=repr,
)
def test_a_policy_says_whether_tasks_at_hand_go_first(policy, gathers):
    """Trial 1 is at a shard on the device. Trial 0 is a little behind, and has the better value;
    its shard must be promoted."""
    machine = sharing(0, 1, policy=policy)
    for trial in (0, 1):
        progress = machine.trials[trial].progress
        progress.total_steps, progress.step_s, progress.value = 10, 6.0, trial
    for shard, trial in ((0, 1), (2, 0)):
        machine.handle(TaskReady(at(trial, shard)))
        machine.handle(Promoted(at(trial, shard), 0))
        if trial == 1:
            machine.handle(Done(at(trial, shard), 0.5))
    machine.handle(TaskReady(at(1, 0, Direction.BACKWARD)))
    happens = machine.handle(Done(at(0, 2), 0.0, TaskReady(at(0, 1))))
    if gathers:
        assert happens == [Run(at(1, 0, Direction.BACKWARD), 0)]
    else:
        assert happens == [PromoteShard(at(0, 1), 0, 30, 30)]
    machine.validate()


# ---- weights that are held ----------------------------------------------------------------------------


def test_held_weights_count_once_and_go_with_the_last_that_holds_them():
    machine = Machine([100], Fifo())
    plans = [TrialPlan(True, (Shard((), 0, 5, 5),), (), 10, 5, held_weights=((1, 40), (n, 10))) for n in (2, 3)]
    for trial, plan in enumerate(plans):
        machine.handle(TrialAdded(trial))
        assert machine.handle(PlanReady(trial, plan)) == [Admit(trial)]
    ledger = machine.devices[0].ledger
    assert ledger.held_bytes == 10 + 10 + 40 + 10 + 10
    assert plans[0].need_bytes == 10 + 50 + 5 + 5
    machine.handle(TrialAdded(2))
    assert machine.handle(PlanReady(2, replace(plans[0], held_bytes=11))) == [], "80 + 11 + 10 > 100"
    machine.handle(TrialEnded(0))
    assert ledger.held_bytes == 11 + 10 + 40 + 10 + 10
    machine.handle(TrialEnded(1))
    assert ledger.held_bytes == 11 + 40 + 10
    machine.validate()
    machine.handle(TrialEnded(2))
    assert (ledger.held_bytes, ledger.shared, ledger.holders) == (0, {}, {})


def test_weights_in_host_memory_count_once():
    machine = Machine([100], Fifo(), host_bytes=56)
    base = ((1, 30), (2, 10))
    assert machine.handle(TrialAdded(0, host_bytes=5, host_weights=base)) == [Place(0, 0)]
    assert machine.handle(TrialAdded(1, host_bytes=5, host_weights=base)) == [Place(1, 0)]
    assert machine.host_used_bytes == 5 + 5 + 40
    assert machine.handle(TrialAdded(2, host_bytes=5, host_weights=((3, 10),))) == []
    assert machine.handle(TrialEnded(0)) == []
    assert machine.handle(TrialEnded(1)) == [Place(2, 0)]
    assert machine.host_used_bytes == 15
