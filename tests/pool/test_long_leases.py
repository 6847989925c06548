"""Turns that last: what resident trials pay the pool, counted; nothing here looks at a clock's seconds."""

import gc
import threading
import time
from collections import Counter
from itertools import pairwise
from math import inf

import optuna
import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune.pool import lease, long_leases
from hydra_tune.pool.lease import Lease
from hydra_tune.schedule.events import Done, Recall, Run, StepReady, TaskReady
from hydra_tune.schedule.machine import Machine
from hydra_tune.schedule.plan import Direction
from hydra_tune.schedule.policy import Fifo
from hydra_tune.trials.context import current_context
from waiting import WAIT_S, wait_until

STEPS, TRIALS, WIDTH = 50, 8, 16


@pytest.fixture
def told(monkeypatch):
    """What the machine was told, and what it said."""
    events, handle = [], Machine.handle

    def handle_and_note(machine, event):
        said = handle(machine, event)
        events.append((event, said))
        return said

    monkeypatch.setattr(Machine, "handle", handle_and_note)
    return events


def net(width=WIDTH, layers=2):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def train(number, steps=STEPS, model=None, each=lambda step: None):
    torch.manual_seed(number)
    model = model or net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = hydra_tune.prepare(model, optimizer)
    loss = torch.zeros(())
    for step in range(steps):
        each(step)
        loss = model(torch.randn(4, model[0].in_features)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def search(pool, objective, trials=TRIALS, concurrency=TRIALS):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    hydra_tune.HydraTrialRunner(pool, concurrency=concurrency).optimize(study, objective, n_trials=trials)
    return study


def test_resident_trials_pay_a_turn_and_not_a_task(told, monkeypatch):
    """400 steps of two tasks were 800 turns, and 2000 events. Here no holder seems idle, however slow the machine."""
    monkeypatch.setattr(long_leases, "LOOK_S", 3600.0)
    monkeypatch.setattr(lease, "LEAST_PAUSE_S", inf)
    with hydra_tune.ShardPool(["cpu"], "64MiB", policy=Fifo(quantum_s=60.0)) as pool:
        study = search(pool, lambda trial: train(trial.number))
        trials, timeline = pool.report()["trials"], pool.timeline()
    kinds = Counter(type(event) for event, _ in told)
    assert len(told) < TRIALS * STEPS / 2, kinds
    assert kinds[TaskReady] <= 3 * TRIALS, "one each; more where a pilot of another has ended it"
    ran = Counter((span["trial"], span["direction"]) for span in timeline if span["kind"] == "run")
    first = {number: STEPS - counted for (number, _), counted in ran.items()}  # is measured, and no task
    assert ran == {(number, way): STEPS - first[number] for number in range(TRIALS) for way in "FB"}
    assert set(first.values()) <= {0, 1} and 1 in first.values(), "each task is told all the same"
    assert [trial["steps"] for trial in trials] == [STEPS] * TRIALS
    busy_s = Counter()
    for span in timeline:
        busy_s[span["trial"]] += (span["end_s"] - span["start_s"]) * (span["kind"] == "run")
    assert all(trial["busy_s"] == pytest.approx(busy_s[trial["trial"]]) for trial in trials)
    assert [trial.value for trial in study.trials] == plain_values()


def plain_values(trials=TRIALS, steps=STEPS):
    values = []
    for number in range(trials):
        torch.manual_seed(number)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(steps):
            loss = model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        values.append(loss.item())
    return values


class CountingLock:
    """Counts what the main thread takes, where a lone trial runs: not what the threads of the faces take."""

    def __init__(self, lock):
        self._lock, self.count = lock, 0

    def __enter__(self):
        self.count += threading.current_thread() is threading.main_thread()
        return self._lock.__enter__()

    def __exit__(self, *error):
        return self._lock.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self._lock, name)


def test_a_step_within_a_turn_takes_no_lock():
    with hydra_tune.ShardPool(["cpu"], "64MiB") as pool:
        lock = pool.events.lock = pool.events.report.lock = CountingLock(pool.events.lock)
        counts = []
        search(pool, lambda trial: train(0, each=lambda step: counts.append(lock.count)), trials=1, concurrency=1)
    assert counts[2:] == [counts[2]] * (STEPS - 2)


def test_the_progress_of_a_turn_is_counted():
    with hydra_tune.ShardPool(["cpu"], "64MiB") as pool:
        seen = []

        def objective(trial):
            train(0, each=lambda step: step == STEPS - 1 and (pool.report(), seen.append(progress())))
            return 0.0

        def progress():
            (trial,) = pool.events.machine.trials.values()
            return trial.progress.steps_done, trial.progress.device_s > 0.0

        search(pool, objective, trials=1, concurrency=1)
    assert seen == [(STEPS - 1, True)]


def test_two_resident_trials_beside_a_spilled_one_take_turns_of_a_task(told):
    """Once it is admitted, until it ends."""
    steps, wide = 12, 64
    both = threading.Barrier(3, timeout=WAIT_S)
    with hydra_tune.ShardPool(["cpu"], 90_000) as pool:

        def objective(trial):
            model = net(wide, layers=6) if trial.number == 0 else net()
            return train(trial.number, steps, model, lambda step: step == 1 and both.wait())

        search(pool, objective, trials=3, concurrency=3)
        resident = [trial["resident"] for trial in pool.report()["trials"]]
    assert sorted(resident) == [False, True, True]
    spilled = resident.index(False)
    runs = [said for _, all_said in told for said in all_said if isinstance(said, Run)]
    of_spilled = [i for i, run in enumerate(runs) if run.task.trial == spilled]
    between = [run for run in runs[of_spilled[0] : of_spilled[-1]] if run.task.trial != spilled]
    assert between and not any(run.lasts for run in between)


def test_a_holder_that_computes_on_the_host_keeps_nobody_waiting():
    """Trial 0 goes on once trial 1 has trained; its turn would last for an hour."""
    trained, begun = threading.Event(), threading.Event()

    def objective(trial):
        def each(step):
            if trial.number == 0 and step == 5:
                begun.set()
                assert trained.wait(WAIT_S)
            if trial.number == 1 and step == 0:
                assert begun.wait(WAIT_S)

        value = train(trial.number, 10, each=each)
        if trial.number == 1:
            trained.set()
        return value

    with hydra_tune.ShardPool(["cpu"], "64MiB", policy=Fifo(quantum_s=3600.0)) as pool:
        search(pool, objective, trials=2, concurrency=2)
        assert [trial["steps"] for trial in pool.report()["trials"]] == [10, 10]


def test_trials_that_pause_between_steps_share_the_device_step_by_step(told, monkeypatch):
    """Though nobody's quantum ends, and no holder is idle for long: there was no turn at all. How often one trial comes
    too late for one depends on the machine. Who waits looks at the holder first after LOOK_S, some 70 steps here."""
    monkeypatch.setattr(lease, "LEAST_PAUSE_S", 0.0)
    steps = 8 * STEPS
    with hydra_tune.ShardPool(["cpu"], "64MiB", policy=Fifo(quantum_s=3600.0)) as pool:
        begun = threading.Barrier(2, timeout=WAIT_S)
        study = search(pool, lambda trial: train(trial.number, steps, each=lambda n: n == 2 and begun.wait()), 2, 2)
    runs = [said.task for _, all_said in told for said in all_said if isinstance(said, Run)]
    first = max(min(run.step for run in runs if run.trial == number) for number in (0, 1))
    both = [run for run in runs if first + 4 < run.step < steps - 4]
    turns = sum(one.trial != other.trial for one, other in pairwise(both))
    assert turns > 10 and all(run.direction is Direction.FORWARD for run in both), "a turn is a whole step"
    assert [trial.value for trial in study.trials] == plain_values(2, steps)


def test_a_lease_learns_how_long_its_holder_pauses():
    """Between its steps, not within them, nor before the first one, for which it may have waited."""
    of = Lease(0, time.perf_counter, threading.Condition())
    forward, backward = Direction.FORWARD, Direction.BACKWARD
    of.ran.extend([(1, forward, 5.0, 6.0), (1, backward, 6.5, 7.0)])
    of.read()
    assert not of.pauses and of.ended_s == 7.0
    of.ran.extend(
        [(2, forward, 9.0, 10.0), (2, backward, 11.0, 12.0), (3, forward, 12.1, 13.0), (4, forward, 13.3, 14)]
    )
    assert len(of.read()) == 4
    assert of.pauses and of.pause_s == pytest.approx(0.2)
    of.ran.extend([(5, forward, (14.0, "mark"), (15.0, "mark")), (6, forward, (15.001, "mark"), (16.0, "mark"))])
    of.read()
    assert not of.pauses and of.pause_s == pytest.approx(0.001)


def test_a_quantum_ends_at_the_next_boundary(told):
    """Of none: whoever waits has the device next, at the end of a task."""
    with hydra_tune.ShardPool(["cpu"], "64MiB", policy=Fifo(quantum_s=0.0)) as pool:
        begun = threading.Barrier(2, timeout=WAIT_S)
        search(pool, lambda trial: train(trial.number, 30, each=lambda step: step == 2 and begun.wait()), 2, 2)
    recalls = [said for _, all_said in told for said in all_said if isinstance(said, Recall)]
    dones = [event for event, _ in told if isinstance(event, Done)]
    assert len(dones) >= len(recalls)


def prepared_elsewhere(pool, model):
    """By another thread: one has a model in a pool."""
    thread = threading.Thread(target=hydra_tune.prepare, args=(model,), kwargs={"pool": pool})
    thread.start()
    thread.join()
    return model


def test_two_models_of_one_thread_do_not_wait_for_each_other(monkeypatch):
    """Though two threads have prepared them: who asks is the holder's own thread, which cannot be in a task."""
    monkeypatch.setattr(long_leases, "LOOK_S", 3600.0)
    with hydra_tune.ShardPool(["cpu"], "64MiB", policy=Fifo(quantum_s=3600.0)) as pool:
        models = [prepared_elsewhere(pool, net()) for _ in range(2)]
        for _ in range(5):
            for model in models:
                model(torch.randn(2, WIDTH)).sum().backward()
        assert [trial["steps"] for trial in pool.report()["trials"]] == [5, 5]
        for model in models:
            hydra_tune.release(model)


@pytest.mark.parametrize("how", ["stop", "close", "pause"])
def test_a_turn_that_lasts_is_stopped_at_the_next_boundary(how):
    stops, steps = threading.Event(), []
    with hydra_tune.ShardPool(["cpu"], "64MiB") as pool:

        def objective(trial):
            context = current_context()

            def each(step):
                steps.append(step)
                if step == 5 and how == "stop":
                    context.stop("enough")
                elif step == 5 and how == "close":
                    pool.close()
                elif step == 5:
                    context.stop.goes_on.clear()
                    threading.Thread(target=goes_on_later, args=(context.stop, stops)).start()

            return train(0, 10, each=each)

        try:
            search(pool, objective, trials=1, concurrency=1)
        except hydra_tune.PoolClosedError:
            assert how == "close"
    assert steps == list(range(10 if how == "pause" else 6))
    assert stops.is_set() == (how == "pause")


def goes_on_later(stop, stops):
    time.sleep(0.05)
    stops.set()
    stop.goes_on.set()


def test_what_a_trial_that_was_collected_has_done_is_reported():
    with hydra_tune.ShardPool(["cpu"], "64MiB") as pool:
        model = hydra_tune.prepare(net(), pool=pool)
        for _ in range(7):
            model(torch.randn(2, WIDTH)).sum().backward()
        del model
        gc.collect()
        wait_until(lambda: pool.report()["trials"][0]["state"] == "ended")
        (trial,) = pool.report()["trials"]
        assert trial["steps"] == 7 and trial["busy_s"] > 0.0
        assert pool.devices[0].used_bytes == 0


def test_an_estimated_or_waiting_newcomer_enters_at_once(told):
    """A trial that has a turn that lasts, and is idle, gives what its step reserves to a pilot that wants all."""
    with hydra_tune.ShardPool(["cpu"], "64MiB", policy=Fifo(quantum_s=3600.0)) as pool:
        first = prepared_elsewhere(pool, net())
        for _ in range(3):
            first(torch.randn(2, WIDTH)).sum().backward()
        second = prepared_elsewhere(pool, net(layers=3))  # of another shape: it has a pilot of its own
        second(torch.randn(2, WIDTH)).sum().backward()
        hydra_tune.release(first)
        hydra_tune.release(second)
    assert sum(isinstance(event, StepReady) for event, _ in told) <= 4


@pytest.mark.parametrize("trains", [True, False])
def test_between_its_tasks_a_trial_is_not_busy(trains):
    """Or one that loads data, or validates on the host, would keep the others waiting."""
    with hydra_tune.ShardPool(["cpu"], "64MiB") as pool:
        model = net()
        hydra_tune.prepare(model, pool=pool)
        trial = model.forward.trial
        for _ in range(4):
            with torch.set_grad_enabled(trains):
                loss = model(torch.randn(2, WIDTH)).sum()
            assert not trial.lease.busy
            if trains:
                loss.backward()
            assert not trial.lease.busy
        assert trial.planner.covered and trial.lease.device is not None
        hydra_tune.release(model)
