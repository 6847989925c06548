"""The simulator against schedules worked out by hand, what its figures have in common, and what it refuses."""

import random
import statistics
from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydra_tune
from hydra_tune.errors import BudgetError, ConfigError
from hydra_tune.schedule.policy import Shuffled
from hydra_tune.show.timeline import chrome_trace
from hydra_tune.simulation.baselines import optimum
from hydra_tune.simulation.replay import SimulatedDevice
from hydra_tune.simulation.simulate import simulate
from hydra_tune.simulation.sweeps import MIXED_DEVICES, asha_arrivals, lora_70b, random_heterogeneous
from hydra_tune.simulation.workload import TrialWork


def trial(forward=(1.0, 1.0), backward=(1.0, 1.0), steps=1, size=0, shard_bytes=None, **options):
    return TrialWork(steps, tuple(forward), tuple(backward), shard_bytes or (size,) * len(forward), **options)


def spans(simulation, kind, device=0):
    """Who, from when to when."""
    return [
        (s["trial"], f"{s['direction']}{s['shard']}", s["start_s"], s["end_s"])
        for s in simulation.timeline
        if (s["kind"], s["device"]) == (kind, device)
    ]


# ---- by hand ------------------------------------------------------------------------------------------


def test_the_example_of_the_paper_takes_6_task_times():
    """Arrivals of one moment are told one after another, so the third trial finds both devices taken."""
    found = simulate([trial()] * 3, 2, timeline=True)
    assert found.makespan_s == found.lower_bound_s == 6
    assert (found.busy_s, found.stalled_s, found.utilisation) == ((6, 6), ({}, {}), (1, 1))
    assert sorted(found.ended_s) == [4, 6, 6]
    assert [who for who, *_ in spans(found, "run", 0)] != [0] * 6, "a trial's tasks need not stay together"


LINKED = [trial([2.0, 2.0], [4.0, 4.0], steps=2, size=10)]  # a second for each copy over a link of 10 B/s


def test_the_next_shard_is_promoted_meanwhile_once_a_step_has_shown_the_order():
    """
    step 1   P0 F0 F0 P1 F1 F1 B1 B1 B1 B1 B0 B0 B0 B0 up
    step 2   P0 F0 F0 F1 F1 B1 B1 B1 B1 B0 B0 B0 B0 up      P1 beside F0, gradients of shard 1 beside B0
    """
    found = simulate(LINKED, 1, link_bytes_per_s=10, timeline=True)
    assert found.makespan_s == 15 + 14
    assert found.stalled_s == ({"promotion": 3, "no ready task": 2},)
    promoted = [(0, "F0", 0, 1), (0, "F1", 3, 4), (0, "F0", 15, 16), (0, "F1", 16, 17)]
    assert spans(found, "promote") == promoted
    assert found.promoted_bytes == 10 * len(promoted)
    assert spans(found, "spill") == [(0, "B1", 10, 11), (0, "B0", 14, 15), (0, "B1", 24, 25), (0, "B0", 28, 29)]
    assert spans(found, "run")[-4:] == [(0, "F0", 16, 18), (0, "F1", 18, 20), (0, "B1", 20, 24), (0, "B0", 24, 28)]


def test_without_double_buffering_copies_and_tasks_take_turns():
    """P0 F0 F0 P1 F1 F1 B1 B1 B1 B1 up B0 B0 B0 B0 up, twice."""
    found = simulate(LINKED, 1, link_bytes_per_s=10, double_buffering=False)
    assert found.makespan_s == 2 * 16
    assert found.stalled_s == ({"promotion": 4, "gradients": 4},)


def test_a_shard_that_made_way_is_promoted_again():
    """Room for two of three: shard 0 goes for shard 2, and comes back beside B1, when shard 2 is done with."""
    work = [trial([2.0] * 3, [4.0] * 3, steps=2, size=10)]
    found = simulate(work, 1, memory=20, link_bytes_per_s=10)
    first, second = 1 + 2 + 1 + 2 + 1 + 2 + 4 + 4 + 1 + 4 + 1, 1 + 6 + 12 + 1
    assert found.makespan_s == first + second
    assert found.promoted_bytes == 2 * 4 * 10


def test_gradients_reach_the_host_before_its_optimizer_steps():
    work = [trial([2.0], [4.0], steps=2, size=10, gradient_bytes=(30,), optimizer_s=0.5)]
    found = simulate(work, 1, link_bytes_per_s=10)
    assert found.makespan_s == 2 * (1 + 6 + 3 + 0.5)
    assert found.stalled_s == ({"promotion": 2, "no ready task": 7},)


def test_one_optimizer_at_a_time_steps_on_the_host():
    """Both step 1 end at 4, their optimizers at 7 and 10; both step 2 at 11 and 14, their optimizers at 14 and 17."""
    assert simulate([trial(steps=2, optimizer_s=3.0)] * 2, 2).ended_s == (14, 17)


def test_other_trials_hide_an_optimizer():
    """
    device   0 1 0 1 . 0 0 1 1 . .
    host     . . . 0 0 1 1 0 0 1 1
    """
    found = simulate([trial([1.0], [1.0], steps=2, optimizer_s=2.0)] * 2, 1, "fifo", timeline=True)
    assert [(who, start) for who, _, start, _ in spans(found, "run")] == list(
        zip([0, 1, 0, 1, 0, 0, 1, 1], [0, 1, 2, 3, 5, 6, 7, 8], strict=True)
    )
    assert found.ended_s == (9, 11)


def test_speeds_divide_seconds():
    """The fast device is free at 1 and takes the third trial's forward, which is furthest behind; at 2 both go on."""
    found = simulate([trial([2.0], [2.0])] * 3, [{"speed": 2.0}, {}], timeline=True)
    assert found.makespan_s == found.lower_bound_s == 4
    assert spans(found, "run", 0) == [(0, "F0", 0, 1), (2, "F0", 1, 2), (0, "B0", 2, 3), (2, "B0", 3, 4)]
    assert spans(found, "run", 1) == [(1, "F0", 0, 2), (1, "B0", 2, 4)]


def test_the_way_to_the_host_may_be_slower():
    one = [trial([1.0], [1.0], size=10)]
    assert simulate(one, 1, link_bytes_per_s=10).makespan_s == 1.0 + 2.0 + 1.0
    assert simulate(one, 1, link_bytes_per_s=10, d2h_bytes_per_s=2).makespan_s == 1.0 + 2.0 + 5.0
    own_link = [{"link_bytes_per_s": 10}]
    assert simulate(one, own_link, d2h_bytes_per_s=2).makespan_s == 4.0
    assert simulate(one, [SimulatedDevice("1GiB", link_bytes_per_s=10, d2h_bytes_per_s=2)]).makespan_s == 8.0


def test_slow_devices_never_keep_fast_ones_waiting():
    slow, fast = {"speed": 0.01}, {"speed": 1.0}
    for devices in ([slow, fast], [fast, slow]):
        for trials in (1, 2, 3):
            assert simulate([trial(steps=2)] * trials, devices).makespan_s == pytest.approx(8.0 * trials)
    work = random_heterogeneous(24, 4)
    four = simulate(work, MIXED_DEVICES[:4]).makespan_s
    assert simulate(work, MIXED_DEVICES).makespan_s < 1.01 * four
    assert simulate(work, MIXED_DEVICES[::-1]).makespan_s < 1.1 * four


def test_trials_arrive():
    found = simulate([trial(), trial(arrival_s=10.0)], 1)
    assert found.ended_s == (4, 14)
    assert found.stalled_s == ({"too few trials": 6},)
    assert simulate([trial(arrival_s=2.0)], 1).stalled_s == ({"too few trials": 2},), "before the first, too"


def test_a_pruned_trial_ends_early_but_was_expected_to_go_on():
    """Longest remaining time first takes the one that seems to have nine steps to go."""
    found = simulate([trial(steps=3), trial(steps=10, stops_after=1), trial(steps=2)], 1)
    assert found.makespan_s == 4 * (3 + 1 + 2)
    assert found.ended_s[1] == min(found.ended_s)


def test_inputs_follow_a_task_and_outputs_return():
    """From 8 on the last backward of the third trial runs away from home, a second's copy before and one after."""
    work = [trial([4.0], [4.0], boundary_bytes=10)] * 3
    found = simulate(work, 2, link_bytes_per_s=10, timeline=True)
    assert spans(found, "run", 0) == [(0, "F0", 0, 4), (2, "F0", 4, 8), (0, "B0", 8, 12)]
    assert spans(found, "run", 1) == [(1, "F0", 0, 4), (1, "B0", 4, 8), (2, "B0", 9, 13)]
    assert spans(found, "promote", 1) == [(2, "B0", 8, 9)]
    assert spans(found, "spill", 1) == [(2, "B0", 13, 14)]
    assert found.makespan_s == 14
    assert found.stalled_s == ({"too few trials": 2}, {"move": 2})
    slow = simulate(work, 2, link_bytes_per_s=4, timeline=True)
    assert spans(slow, "run", 1) == [(1, "F0", 0, 4), (1, "B0", 4, 8)], "5 s to move for a task of 4: it stays"


def test_a_trial_waits_for_memory_that_another_holds():
    found = simulate([trial(optimizer_s=3.0, held_bytes=15)] * 2, 1, memory=20)
    assert found.makespan_s == 2 * 7
    assert found.stalled_s == ({"memory": 3, "no ready task": 3},)


def test_a_device_without_a_trial_has_too_few():
    found = simulate([trial(size=10, steps=2)], 3, link_bytes_per_s=5)
    assert found.busy_s == (8, 0, 0)
    assert found.stalled_s[1:] == ({"too few trials": found.makespan_s},) * 2


def test_a_trial_must_fit_the_smallest_device():
    work = [trial(), trial(size=60, held_bytes=30, step_bytes=20, name="large")]
    with pytest.raises(
        BudgetError, match=r"trial 1 \(large\) does not fit: it needs 110 B, and the smallest device has 100"
    ):
        simulate(work, [{"memory": 200}, {"memory": 100}])
    assert simulate(work, [{"memory": 200}, {"memory": 110}]).makespan_s == 4


# ---- what every simulation has in common ----------------------------------------------------------------


def check_consistent(work, found):
    tracks = {}
    for span in found.timeline:
        stream = "compute" if span["kind"] in ("run", "stall") else span["kind"]
        tracks.setdefault((span["device"], stream), []).append(span)
    for mine in tracks.values():
        assert all(a["end_s"] <= b["start_s"] + 1e-9 for a, b in pairwise(mine)), "two at once on one stream"
    for device, (busy_s, stalled_s) in enumerate(zip(found.busy_s, found.stalled_s, strict=True)):
        compute = tracks.get((device, "compute"), [])
        seconds = {"run": 0.0}
        for span in compute:
            assert (span["kind"] == "stall") == bool(span["cause"])
            key = span["cause"] or "run"
            seconds[key] = seconds.get(key, 0.0) + span["end_s"] - span["start_s"]
        assert seconds == pytest.approx({"run": busy_s, **stalled_s})
        assert busy_s + sum(stalled_s.values()) == pytest.approx(found.makespan_s), "a device computes or stalls"
    for number, one in enumerate(work):
        mine = [s for s in found.timeline if s["kind"] == "run" and s["trial"] == number]
        asked = [(step, shard, way.value) for step in range(1, one.steps_run + 1) for way, shard in one.tasks()]
        assert [(s["step"], s["shard"], s["direction"]) for s in mine] == asked, "each task once and in order"
        assert all(a["end_s"] <= b["start_s"] + 1e-9 for a, b in pairwise(mine)), "one task of a trial at a time"
        assert one.arrival_s <= mine[0]["start_s"] and mine[-1]["end_s"] <= found.ended_s[number]
        for copy in (s for s in found.timeline if s["kind"] == "spill" and s["trial"] == number and not s["cause"]):
            later = [s["start_s"] for s in mine if s["step"] > copy["step"]]
            assert copy["end_s"] <= min([*later, found.ended_s[number]]) + 1e-9, "gradients arrive within their step"
    assert max(found.ended_s) == found.makespan_s >= found.lower_bound_s * (1 - 1e-9)


SECONDS = st.floats(0.1, 5.0)


@st.composite
def sweeps(draw):
    sweep = []
    for _ in range(draw(st.integers(1, 6))):
        shards = draw(st.integers(1, 3))
        each = {"min_size": shards, "max_size": shards}
        sweep.append(
            trial(
                draw(st.lists(SECONDS, **each)),
                draw(st.lists(SECONDS, **each)),
                steps=draw(st.integers(1, 3)),
                shard_bytes=tuple(draw(st.lists(st.sampled_from([0, 10, 25, 40]), **each))),
                work_bytes=tuple(draw(st.lists(st.integers(0, 20), **each))),
                boundary_bytes=draw(st.integers(0, 10)),
                held_bytes=draw(st.integers(0, 20)),
                step_bytes=draw(st.integers(0, 20)),
                optimizer_s=draw(st.sampled_from([0.0, 1.0])),
                arrival_s=draw(st.sampled_from([0.0, 0.0, 7.0])),
            )
        )
    return sweep


DEVICES = st.fixed_dictionaries(
    {
        "memory": st.integers(100, 200),
        "speed": st.sampled_from([0.5, 1.0, 2.0]),
        "link_bytes_per_s": st.sampled_from([5.0, 50.0, inf]),
    }
)
POLICIES = st.sampled_from(["sharded-lrtf", "fifo", "fair-share", "rung-synchronous", "shuffled"])


def check_any_sweep(work, devices, policy, double_buffering):
    options = {"double_buffering": double_buffering, "timeline": True}
    found = simulate(work, devices, policy, **options)
    check_consistent(work, found)
    assert simulate(work, devices, policy, **options) == found


ANY_SWEEP = given(sweeps(), st.lists(DEVICES, min_size=1, max_size=4), POLICIES, st.booleans())


@settings(max_examples=150, deadline=None, derandomize=True)
@ANY_SWEEP
def test_the_figures_agree_with_the_timeline_and_come_out_the_same_again(work, devices, policy, double_buffering):
    check_any_sweep(work, devices, policy, double_buffering)


@pytest.mark.proof
@settings(max_examples=10_000, deadline=None, derandomize=True)
@ANY_SWEEP
def test_the_figures_agree_with_the_timeline_at_length(work, devices, policy, double_buffering):
    check_any_sweep(work, devices, policy, double_buffering)


def test_a_named_sweep_on_unlike_devices_draws_a_timeline():
    work = asha_arrivals(trials=6)
    found = simulate(work, MIXED_DEVICES, timeline=True)
    check_consistent(work, found)
    assert len(chrome_trace(found.timeline, [f"device {n}" for n in range(8)])["traceEvents"]) > len(found.timeline)
    assert simulate(work, MIXED_DEVICES).timeline == []


def test_a_random_order_is_its_seeds():
    makespans = [simulate(random_heterogeneous(3, 4), 2, Shuffled(seed)).makespan_s for seed in (1, 1, 2)]
    assert makespans[0] == makespans[1] != makespans[2]


# ---- what is refused ------------------------------------------------------------------------------------


PLAIN = {"steps": 1, "forward_s": [1.0], "backward_s": [1.0], "shard_bytes": [1]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workload": []}, "list of at least one trial"),
        ({"policy": "lifo"}, "policy is a Policy or one of sharded-lrtf, .*got 'lifo'"),
        ({"workload": [{**PLAIN, "forward_s": [10**400]}]}, "forward_s is positive seconds, one a shard"),
        ({"workload": [{**PLAIN, "shard_bytes": [10**400]}]}, "shard_bytes is whole bytes of at least 0"),
        ({"memory": "9" * 400}, "memory is a positive number of bytes"),
        ({"devices": 0}, r"devices is how many, at least 1, .*got 0\. Write devices=8"),
        ({"devices": True}, "devices is how many, .*got True"),
        ({"devices": 2.0}, r"devices is how many, .*got 2\.0"),
        ({"devices": []}, r"devices is how many, .*got \[\]"),
        ({"devices": [{}, 3]}, "device 1 is a dict, got 3. Its keys are memory, speed, link_bytes_per_s"),
        ({"devices": [{"sped": 1}]}, "device 0 is a dict, got {'sped': 1}"),
        ({"devices": [{"speed": 0}]}, "speed of a device is a positive number, got 0"),
        ({"devices": [{"speed": nan}]}, "speed of a device is a positive number, got nan"),
        ({"devices": [{"speed": "2"}]}, "speed of a device is a positive number, got '2'"),
        ({"devices": [{"speed": inf}]}, "speed is finite, got inf"),
        ({"devices": [{"memory": "4 parsecs"}]}, "memory is a positive number of bytes, got '4 parsecs'"),
        ({"memory": 0}, "memory is a positive number of bytes, got 0"),
        ({"double_buffering": "no"}, "double_buffering is True or False, got 'no'"),
        ({"link_bytes_per_s": -1}, "link_bytes_per_s of a device is a positive number, got -1"),
        ({"link_bytes_per_s": True}, "link_bytes_per_s of a device is a positive number, got True"),
    ],
)
def test_what_means_nothing_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        simulate(**{"workload": [trial()], **arguments})


def test_devices_take_what_they_do_not_say_from_the_others():
    work = [trial(size=10)]
    given = simulate(work, [{"speed": 1.0}], memory=40, link_bytes_per_s=10)
    assert given == simulate(work, 1, memory=40, link_bytes_per_s=10)
    assert given == simulate(work, [SimulatedDevice(40, link_bytes_per_s=10)])
    assert given.makespan_s > simulate(work, [{"link_bytes_per_s": inf}], link_bytes_per_s=10).makespan_s


def test_the_package_has_the_function():
    assert hydra_tune.simulate is simulate


# ---- must show: the makespan over what no schedule beats --------------------------------------------------


def random_sweep(seed):
    """At least two trials a device."""
    rng = random.Random(seed)
    devices = rng.choice((2, 4, 8))
    return random_heterogeneous(seed, devices * rng.choice((2, 3))), devices


def ratios(policy, seeds):
    return [simulate(*random_sweep(seed), policy).ratio for seed in seeds]


def check_makespans(seeds):
    found = {policy: ratios(policy, seeds) for policy in ("sharded-lrtf", "fifo", "shuffled")}
    median = {policy: statistics.median(of) for policy, of in found.items()}
    print({policy: (median[policy], max(of)) for policy, of in found.items()})
    assert median["sharded-lrtf"] <= 1.01
    assert max(found["sharded-lrtf"]) <= 1.03
    assert min(median["fifo"], median["shuffled"]) > 1.02


def test_longest_remaining_first_comes_near_the_lower_bound():
    check_makespans(range(8))


@pytest.mark.proof
def test_longest_remaining_first_comes_near_the_lower_bound_in_100_sweeps():
    """Of the four hundred seeds below 400 five are over 1.03, for the reason below: 136, 266, 280, 319 and 395."""
    check_makespans(range(100))


def small_sweep(seed):
    """Three trials a device, few enough tasks for the exact optimum, and of them a few dozen a device."""
    rng = random.Random(seed)
    forward_s = [rng.uniform(0.5, 1.5) for _ in range(6)]
    return [trial([f], [f * rng.uniform(2.5, 3.5)], steps=rng.randint(6, 10)) for f in forward_s]


@pytest.mark.proof
def test_longest_remaining_first_comes_near_the_optimum():
    """Where the solver's time runs out, beside what no schedule beats: that is less than the optimum."""
    for seed in range(20):
        work = small_sweep(seed)
        assert simulate(work, 2).makespan_s <= 1.05 * optimum(work, 2, time_limit_s=2.0).bound_s


TURN = [trial([1.0], [1.0], steps=4), trial([2.0], [2.0]), trial([2.0], [2.0])]


@pytest.mark.xfail(strict=True, reason="between two steps a trial is not ready when its device is given away")
def test_the_longest_trial_keeps_its_turn_from_step_to_step():
    """
    optimum   device 0   0 0 0 0 0 0 0 0              here   device 0   0 0 2 2 2 2 0 0 0 0
              device 1   1 1 1 1 2 2 2 2                     device 1   1 1 1 1 0 0 . . . .

    At 2 trial 0 has made its first step. The machine is told first that its task is done, and gives the device to
    trial 2; that the next step is ready it hears later, if at the same time. A task is not interrupted. So each step
    may cost the longest trial a task of another; that matters where steps are few and others' tasks long.
    """
    assert simulate(TURN, 2).makespan_s <= 1.05 * optimum(TURN, 2).makespan_s


# ---- shared weights -----------------------------------------------------------------------------------


def test_sixteen_adapters_promote_a_base_nearly_as_often_as_one():
    """Their base is 140 GB in bf16, and the device has 80 GB. One alone keeps 72 GB of it there; of sixteen each takes
    1.4 GB a step for boundary tensors, and up to 2.7 GB for its adapters."""
    sweep = lora_70b(steps=5)
    options = {"devices": 1, "memory": "80GB", "link_bytes_per_s": 50e9}
    together, alone = simulate(sweep, **options), simulate(sweep[:1], **options)
    apart = simulate(sweep, sharing=False, **options)
    assert together.promoted_bytes < 1.6 * alone.promoted_bytes
    assert apart.promoted_bytes > 15 * alone.promoted_bytes
    assert together.makespan_s < 1.1 * together.lower_bound_s
    assert apart.makespan_s > 6 * together.makespan_s
