"""Workloads as data: what is read, what is refused, what a transformer costs, and the named sweeps."""

import json
from math import inf, nan

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.errors import BudgetError, ConfigError
from hydra_tune.simulation.cost import ADAMW_BYTES_PER_WEIGHT, CostModel, transformer_trial
from hydra_tune.simulation.sweeps import MIXED_DEVICES, SWEEPS, asha_arrivals, hydra_gpt2_xl, random_heterogeneous
from hydra_tune.simulation.workload import TrialWork, parse

PLAIN = {"steps": 100, "forward_s": [0.1, 0.2], "backward_s": [0.3, 0.4], "shard_bytes": [500, 600]}
SMALL = {"layers": 4, "width": 8, "feed_forward": 16, "sequence": 5, "batch": 2, "vocabulary": 11, "steps": 3}


def test_a_trial_is_read_from_a_dict_an_object_or_a_file(tmp_path):
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps([PLAIN]))
    (trial,) = parse([PLAIN])
    assert trial == TrialWork(100, (0.1, 0.2), (0.3, 0.4), (500, 600))
    assert parse([trial]) == parse(path) == parse(str(path)) == [trial]


def test_arrays_are_lists():
    plain = {"steps": 2, "forward_s": [0.1, 0.2], "backward_s": [0.3, 0.4], "shard_bytes": [5, 6]}
    arrays = {key: numpy.array(value) if isinstance(value, list) else value for key, value in plain.items()}
    assert parse([arrays]) == parse([plain])


def test_times_and_defaults_follow_from_what_was_given():
    (trial,) = parse([PLAIN | {"stops_after": 9}])
    assert trial.step_s == pytest.approx(1.0)
    assert trial.total_s == pytest.approx(9.0)
    assert (trial.num_shards, trial.steps_run) == (2, 9)
    assert (trial.shard_work_bytes, trial.shard_gradient_bytes) == ((0, 0), (500, 600))
    assert [f"{way.value}{shard}" for way, shard in trial.tasks()] == ["F0", "F1", "B1", "B0"]
    assert [trial.task_s(way, shard) for way, shard in trial.tasks()] == [0.1, 0.2, 0.4, 0.3]
    (given_bytes,) = parse([PLAIN | {"work_bytes": [1, 2], "gradient_bytes": [3, 0]}])
    assert (given_bytes.shard_work_bytes, given_bytes.shard_gradient_bytes) == ((1, 2), (3, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, r"trial 1 .*steps is a whole number of at least 1, got 0\. Write how many"),
        ({"steps": 2.0}, r"steps is a whole number .*got 2\.0"),
        ({"steps": True}, r"steps is a whole number .*got True"),
        ({"forward_s": []}, r"forward_s is positive seconds, one a shard, got \(\)"),
        ({"forward_s": 0.1}, r"forward_s is positive seconds, one a shard, got 0\.1"),
        ({"forward_s": [0.1, 0]}, r"forward_s is positive seconds.*got \(0\.1, 0\)"),
        ({"backward_s": [0.1, inf]}, r"backward_s is positive seconds.*inf"),
        ({"backward_s": [nan, 0.1]}, r"backward_s is positive seconds.*nan"),
        ({"backward_s": ["1", 0.1]}, r"backward_s is positive seconds"),
        ({"backward_s": [0.1]}, r"backward_s is one entry a shard, as forward_s, which has 2, got .*It has 1: give"),
        ({"shard_bytes": [1, 2, 3]}, r"shard_bytes is one entry a shard.*It has 3"),
        ({"shard_bytes": [1, -2]}, r"shard_bytes is whole bytes of at least 0"),
        ({"shard_bytes": [1, 2.5]}, r"shard_bytes is whole bytes of at least 0"),
        ({"shard_bytes": None}, r"shard_bytes is whole bytes of at least 0, one a shard, got None"),
        ({"work_bytes": [1]}, r"work_bytes is one entry a shard"),
        ({"gradient_bytes": []}, r"gradient_bytes is one entry a shard"),
        ({"optimizer_s": -1}, r"optimizer_s is finite seconds of at least 0, got -1"),
        ({"arrival_s": inf}, r"arrival_s is finite seconds"),
        ({"held_bytes": 0.5}, r"held_bytes is whole bytes of at least 0, got 0\.5"),
        ({"stops_after": 101}, r"stops_after is a whole number from 1 to steps, here 100, or None, got 101"),
        ({"stops_after": 0}, r"stops_after is a whole number from 1"),
        ({"name": 3}, r"name is text, got 3"),
        ({"foward_s": [1]}, r"trial 1 .*means nothing, 'foward_s'\. Did you mean forward_s\?"),
        ({"zzz": 1}, r"means nothing, 'zzz'\. The keys are steps, forward_s"),
    ],
)
def test_a_mistake_names_trial_key_and_next_step(change, message):
    with pytest.raises(ConfigError, match=message):
        parse([PLAIN, PLAIN | change])


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ([], "list of at least one trial, got \\[\\]"),
        ({"steps": 1}, "list of at least one trial"),
        ([3], "trial 0 .*a trial is a dict, got 3"),
        ([{"steps": 1}], "has no forward_s, backward_s, shard_bytes. Add it"),
        ("no/such.json", "no/such.json cannot be read: No such file.*Check the path"),
    ],
)
def test_what_is_no_workload_is_refused(workload, message):
    with pytest.raises(ConfigError, match=message):
        parse(workload)


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("3", "list of at least one trial, got 3")])
def test_a_file_that_is_no_workload_is_refused(tmp_path, text, message):
    path = tmp_path / "sweep.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse(path)


def test_weights_of_one_number_have_one_size():
    trial = {"steps": 1, "forward_s": [1.0], "backward_s": [1.0], "shard_bytes": [5]}
    assert parse([trial | {"shared_weights": [3]}, trial | {"shared_weights": [None]}])
    with pytest.raises(ConfigError, match="weights 3 have 6 bytes in trial 1 of the workload, and 5 before"):
        parse([trial | {"shared_weights": [3]}, trial | {"shard_bytes": [6], "shared_weights": [3]}])
    with pytest.raises(ConfigError, match="shared_weights is one entry a shard"):
        parse([trial | {"shared_weights": [3, 4]}])
    with pytest.raises(ConfigError, match="shared_weights is numbers or None"):
        parse([trial | {"shared_weights": ["a"]}])


# ---- costs --------------------------------------------------------------------------------------------


def test_a_cost_model_comes_back_from_its_file_infinite_rates_included(tmp_path):
    path = tmp_path / "cost.json"
    cost = CostModel(1e14, h2d_bytes_per_s=5e10, measured_on="a bench")
    cost.save(path)
    assert "Infinity" not in path.read_text()
    assert CostModel.load(path) == cost
    assert (cost.promote_s(10**11), cost.spill_s(10**11)) == (2.0, 0.0)


@pytest.mark.parametrize("rate", [0, -1.0, nan, "1", True, None])
def test_rates_are_positive(rate):
    with pytest.raises(ConfigError, match="h2d_bytes_per_s is a positive rate"):
        CostModel(h2d_bytes_per_s=rate)


@pytest.mark.parametrize(
    ("text", "message"), [("[", "not JSON"), ("[]", "not one object"), ('{"tflops": 1}', "tflops")]
)
def test_a_file_that_is_no_cost_model_is_refused(tmp_path, text, message):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        CostModel.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        CostModel.load(tmp_path / "none.json")


def test_a_transformer_costs_two_flop_forward_and_six_backward_a_weight_and_token():
    trial = transformer_trial(CostModel(100.0, host_bytes_per_s=1000.0), **SMALL, shards=2, weight_bytes=2)
    layer = 4 * 8 * 8 + 2 * 8 * 16 + 9 * 8 + 16  # 600
    table = 8 * 11
    multiplied = 4 * layer + table + 8  # the lookup adds a position of 8 numbers
    assert sum(trial.forward_s) == pytest.approx(2 * multiplied * 10 / 100)
    assert sum(trial.backward_s) == pytest.approx(6 * multiplied * 10 / 100)
    assert sum(trial.shard_bytes) == sum(trial.shard_gradient_bytes) == 2 * (4 * layer + 2 * table)
    assert trial.boundary_bytes == 2 * 10 * 8
    assert trial.step_bytes == 3 * trial.boundary_bytes
    assert trial.optimizer_s == pytest.approx(ADAMW_BYTES_PER_WEIGHT * (4 * layer + 2 * table) / 1000)


def test_over_a_frozen_base_a_step_is_six_flop_a_weight_and_only_adapters_have_gradients():
    plain = transformer_trial(CostModel(), **SMALL, shards=3)
    lora = transformer_trial(CostModel(), **SMALL, shards=3, adapter_rank=2)
    assert lora.step_s == pytest.approx(plain.step_s * 6 / 8)
    assert sum(lora.shard_gradient_bytes) == 4 * 4 * (8 * 8 * 2)
    assert sum(lora.shard_bytes) == sum(plain.shard_bytes) + sum(lora.shard_gradient_bytes)


def need_bytes(trial):
    """Of its largest shard, the weights twice for the double buffer, and of a step's boundary tensors."""
    return max(2 * s + w for s, w in zip(trial.shard_bytes, trial.shard_work_bytes, strict=True)) + trial.step_bytes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(memory=st.integers(6_000, 60_000), batch=st.integers(1, 4))
def test_a_cut_by_memory_has_the_fewest_shards_that_fit_or_none_does(memory, batch):
    model = SMALL | {"batch": batch}
    every = [transformer_trial(CostModel(), **model, shards=shards) for shards in range(1, 7)]
    fitting = [trial for trial in every if need_bytes(trial) <= memory]
    if not fitting:
        with pytest.raises(BudgetError, match=r"a block does not fit: .* larger memory="):
            transformer_trial(CostModel(), **model, memory=memory)
        return
    trial = transformer_trial(CostModel(), **model, memory=memory)
    assert need_bytes(trial) <= memory
    assert trial.num_shards == fitting[0].num_shards
    for other in every:
        assert sum(other.shard_bytes) == sum(trial.shard_bytes)
        assert other.step_s == pytest.approx(trial.step_s)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of shards= and memory=, got shards=None, memory=None"),
        ({"shards": 1, "memory": 10}, "one of shards= and memory="),
        ({"shards": 7}, "from 1 to 6, the blocks, got 7"),
        ({"shards": 2, "width": 0}, "width is a whole number of at least 1, got 0"),
    ],
)
def test_a_transformer_that_means_nothing_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        transformer_trial(CostModel(), **SMALL | options)


# ---- sweeps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [("hydra-bert", 12), ("hydra-vit", 12), ("hydra-gpt2-xl", 12),
    ("saturn-mix", 18), ("lora-sweep", 12), ("lora-70b", 16), ("asha-arrivals", 27),
    ("random-heterogeneous", 16)])  # fmt: skip
def test_a_named_sweep_has_the_published_number_of_trials_and_is_always_the_same(name, count):
    sweep = SWEEPS[name]()
    assert len(sweep) == len({trial.name for trial in sweep}) == count
    assert parse(sweep) == SWEEPS[name]() == sweep


def test_every_sweep_is_tried():
    assert len(SWEEPS) == 8


def test_models_are_as_large_as_published():
    weights = {name: [sum(t.shard_bytes) / 4 for t in SWEEPS[name]()] for name in ("hydra-bert", "hydra-vit")}
    assert weights["hydra-bert"] == pytest.approx([1e9] * 12, rel=0.05)
    sizes = [3e8, 6e8, 8e8, 1e9, 1.5e9, 2e9]
    assert weights["hydra-vit"] == pytest.approx([size for size in sizes for _ in range(2)], rel=0.05)
    gpt2 = hydra_gpt2_xl()
    assert [trial.num_shards for trial in gpt2] == [13] * 6 + [8] * 6
    head = 4 * 50257 * 1600  # published models share it with the input table
    assert [sum(t.shard_bytes) - head for t in gpt2] == pytest.approx([4 * 1.558e9] * 12, rel=0.01)


def test_the_cut_rule_comes_near_the_published_numbers_of_shards():
    model = {"layers": 48, "width": 1600, "feed_forward": 6400, "sequence": 512, "vocabulary": 50257, "heads": 25}
    cuts = [transformer_trial(CostModel(), **model, batch=b, steps=1, memory="11GB").num_shards for b in (16, 8)]
    assert cuts == [13, 7]  # published: 13, 8


def test_lora_returns_nothing_to_the_host_and_holds_its_adapters():
    first, *others = SWEEPS["lora-sweep"]()
    assert sum(first.shard_gradient_bytes) == 0
    assert first.held_bytes == 16 * 32 * 8 * 4096 * 8  # rank 8: pairs beside four projections of 32 layers
    assert all(trial.shared_weights == first.shared_weights for trial in others)
    with pytest.raises(ConfigError, match="Write the adapters' rank"):
        transformer_trial(CostModel(), **SMALL, base=0)


def test_asha_stops_most_trials_at_rungs_and_they_arrive_over_time():
    sweep = asha_arrivals(1, trials=200)
    stops = [trial.stops_after for trial in sweep]
    assert {9, 27, 81, None} == set(stops)
    assert 0.55 < stops.count(9) / 200 < 0.78
    arrivals = [trial.arrival_s for trial in sweep]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    assert asha_arrivals(1) != asha_arrivals(2)


def test_random_sweeps_depend_on_their_seed_alone():
    assert random_heterogeneous(7, 5) == random_heterogeneous(7, 5) != random_heterogeneous(8, 5)


def test_unlike_devices_say_memory_speed_and_link():
    assert all(set(device) == {"memory", "speed", "link_bytes_per_s"} for device in MIXED_DEVICES)
