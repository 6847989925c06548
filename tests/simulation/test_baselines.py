"""Baselines by hand on small cases, the optimum against brute force, and how they are ordered."""

import sys
from functools import cache
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.errors import ConfigError
from hydra_tune.simulation.baselines import (
    lower_bound,
    model_parallelism,
    one_spilled_at_a_time,
    optimum,
    task_parallelism,
)
from hydra_tune.simulation.cost import CostModel
from hydra_tune.simulation.workload import TrialWork


def trial(forward=(1.0, 1.0), backward=(1.0, 1.0), steps=1, **options):
    return TrialWork(steps, tuple(forward), tuple(backward), (100,) * len(forward), **options)


THREE = [trial()] * 3  # 3 trials x 4 tasks


def test_the_example_of_the_paper_takes_12_8_and_6_task_times():
    assert model_parallelism(THREE, 2) == 12
    assert task_parallelism(THREE, 2) == 8
    assert optimum(THREE, 2).makespan_s == lower_bound(THREE, [1, 1]) == 6


def test_model_parallelism_waits_for_arrivals_and_gains_nothing_from_devices():
    trials = [trial(), trial(arrival_s=10.0)]
    assert model_parallelism(trials, 1) == model_parallelism(trials, 8) == 14


def test_kept_activations_save_the_repeated_forward():
    trials = [trial([1.0], [3.0], steps=2), trial([1.0], [3.0])]
    assert model_parallelism(trials, 2, recompute=False) == 9
    assert task_parallelism(trials, 2, recompute=False) == 6


def test_task_parallelism_takes_the_longest_first_or_the_first():
    trials = [trial([1.0], [1.0]), trial([1.0], [1.0]), trial([2.0], [2.0])]
    assert task_parallelism(trials, 2) == 4
    assert task_parallelism(trials, 2, longest_first=False) == 6


def test_task_parallelism_leaves_a_trial_that_has_not_arrived():
    assert task_parallelism([trial(arrival_s=3.0)] * 3, 2) == 11  # not even the second device starts before 3
    trials = [trial([5.0], [5.0], arrival_s=1.0), trial([1.0], [1.0])]
    assert task_parallelism(trials, 1) == 12
    assert task_parallelism(trials, 2) == 11


def test_one_spilled_trial_hides_copies_behind_its_compute_and_nothing_else():
    work = trial([2.0], [5.0], steps=3, boundary_bytes=50, gradient_bytes=(30,), optimizer_s=0.5)
    cost = CostModel(h2d_bytes_per_s=25.0, d2h_bytes_per_s=5.0)
    forward, backward = (2.0, 4.0), (5.0, 6.0, 6.0)  # compute, promotion of 100 and of 150 bytes, return of 30
    assert one_spilled_at_a_time([work], cost) == 3 * (max(forward) + max(backward) + 0.5)
    assert one_spilled_at_a_time([work], cost, prefetch=False) == 3 * (sum(forward) + sum(backward) + 0.5)
    assert one_spilled_at_a_time([work] * 4, cost, devices=2) == 2 * one_spilled_at_a_time([work], cost)
    assert one_spilled_at_a_time([work], CostModel(), prefetch=False) == 3 * 7.5


def test_the_lower_bound_is_work_over_speeds_or_a_trial_or_late_arrivals():
    assert lower_bound(THREE, [1.0, 1.0]) == 6
    assert lower_bound(THREE, [1.0] * 8) == 4
    assert lower_bound(THREE, [2.0, 1.0]) == 4
    assert lower_bound([trial()], [2.0, 1.0]) == 2
    late = [trial(), *[trial(arrival_s=5.0)] * 4]
    assert lower_bound(late, [1.0, 1.0]) == 13
    assert lower_bound([trial(optimizer_s=9.0)]) == 4


@pytest.mark.parametrize("baseline", [model_parallelism, task_parallelism, optimum])
@pytest.mark.parametrize("devices", [0, -1, 2.0, True])
def test_devices_are_counted(baseline, devices):
    with pytest.raises(ConfigError, match=r"devices is a whole number of at least 1, got .*Write how many"):
        baseline(THREE, devices)


def test_what_has_no_optimum_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"1 to 120 tasks, got 400\. Lower steps"):
        optimum([trial(steps=100)], 2)
    with pytest.raises(ConfigError, match="1 to 120 tasks, got 0"):
        optimum([], 2)
    with pytest.raises(ConfigError, match="time_limit_s is positive"):
        optimum(THREE, 2, 0)
    for speeds in ([0.0], [inf], [-1.0]):
        with pytest.raises(ConfigError, match="speed is positive and finite"):
            lower_bound(THREE, speeds)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ConfigError, match=r'pip install "hydra-tune\[simulate\]"'):
        optimum(UNEVEN, 2)


# ---- the optimum --------------------------------------------------------------------------------------

UNEVEN = [trial([3.0], [4.0]), trial([3.0], [4.0]), trial([2.0], [4.0])]


def brute_force(trials, devices):
    """The least makespan over every order of tasks on every device, each as early as it can be."""
    tasks = [[t.task_s(way, shard) for _ in range(t.steps_run) for way, shard in t.tasks()] for t in trials]

    @cache
    def least(done, ready, free):
        """The least end of the last of the tasks left; what can no longer matter is levelled, to be met again."""
        left = [i for i, queue in enumerate(tasks) if done[i] < len(queue)]
        if not left:
            return 0.0
        free = tuple(sorted(max(at, min(ready[i] for i in left)) for at in free))
        ends = []
        for i in left:
            for device in {free.index(at) for at in free}:
                end = max(ready[i], free[device]) + tasks[i][done[i]]
                more = (*done[:i], done[i] + 1, *done[i + 1 :])
                then = end if more[i] < len(tasks[i]) else 0.0
                after = (*free[:device], end, *free[device + 1 :])
                ends.append(max(end, least(more, (*ready[:i], then, *ready[i + 1 :]), tuple(sorted(after)))))
        return min(ends)

    return least((0,) * len(trials), tuple(t.arrival_s for t in trials), (0.0,) * devices)


def check_schedule(trials, devices, found):
    """Each task once and in order, none before its trial arrives, no two on a device at once."""
    for number, work in enumerate(trials):
        mine = [placed for placed in found.schedule if placed.task.trial == number]
        wanted = [(step, shard, way) for step in range(work.steps_run) for way, shard in work.tasks()]
        assert [(p.task.step, p.task.shard, p.task.direction) for p in mine] == wanted
        starts, ends = [p.start_s for p in mine], [p.end_s for p in mine]
        assert all(start >= end for start, end in zip(starts, [work.arrival_s, *ends[:-1]], strict=True))
        for placed in mine:
            took_s = work.task_s(placed.task.direction, placed.task.shard)
            assert placed.end_s - placed.start_s == pytest.approx(took_s)
    assert {placed.device for placed in found.schedule} <= set(range(devices))
    for device in range(devices):
        mine = sorted((p.start_s, p.end_s) for p in found.schedule if p.device == device)
        assert all(after[0] >= before[1] for before, after in pairwise(mine))
    assert found.makespan_s == max(placed.end_s for placed in found.schedule)


SECONDS = st.integers(1, 9).map(float)


@st.composite
def small_sweeps(draw):
    """Three trials of 2 or 4 tasks, some alike, some late."""
    kinds = []
    for _ in range(draw(st.integers(1, 3))):
        shards = draw(st.integers(1, 2))
        times = st.lists(SECONDS, min_size=shards, max_size=shards)
        steps = draw(st.integers(1, 2)) if shards == 1 else 1
        late = draw(st.sampled_from([0.0, 0.0, 3.0]))
        kinds.append(trial(draw(times), draw(times), steps=steps, arrival_s=late))
    return [*kinds, *[kinds[0]] * (3 - len(kinds))]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(trials=small_sweeps(), devices=st.integers(1, 2))
def test_the_optimum_is_that_of_brute_force(trials, devices):
    found = optimum(trials, devices)
    assert found.proven
    assert found.bound_s == pytest.approx(found.makespan_s)
    assert found.makespan_s == pytest.approx(brute_force(trials, devices))
    check_schedule(trials, devices, found)


def test_the_solver_finds_what_the_rule_does_not():
    """Longest remaining time first takes 36 here, and the bound is not reached."""
    trials = [trial([8.0, 9.0], [8.0, 8.0]), trial([9.0], [4.0]), trial([3.0, 9.0], [8.0, 3.0])]
    found = optimum(trials, 2)
    assert found.proven
    assert found.makespan_s == brute_force(trials, 2) == 35
    assert lower_bound(trials, [1, 1]) == 34.5
    check_schedule(trials, 2, found)


def test_out_of_time_there_is_still_a_schedule_and_a_bound():
    trials = [trial([1.0 + i / 7, 2.0 + i / 3], [3.0 - i / 5, 2.0 + i / 9], steps=3) for i in range(5)]
    found = optimum(trials, 3, time_limit_s=0.01)
    assert not found.proven
    assert lower_bound(trials, [1.0] * 3) <= found.bound_s <= found.makespan_s <= task_parallelism(trials, 3)
    check_schedule(trials, 3, found)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(trials=small_sweeps(), devices=st.integers(1, 4))
def test_no_baseline_beats_the_bound_and_sharing_devices_never_hurts(trials, devices):
    bound = lower_bound(trials, [1.0] * devices)
    side_by_side = task_parallelism(trials, devices)
    assert bound <= side_by_side + 1e-9
    assert side_by_side <= model_parallelism(trials, devices) + 1e-9
    assert lower_bound(trials) <= one_spilled_at_a_time(trials, CostModel(h2d_bytes_per_s=30.0)) + 1e-9
