"""What a machine is measured to do, what a pool has recorded of its trials: both are workloads for the simulator."""

import json

import pytest
import torch

import hydra_tune
from comparison import Script, step
from hydra_tune import calibration, cli
from hydra_tune.pool.recording import recorded
from hydra_tune.simulation.cost import CostModel
from hydra_tune.simulation.workload import parse
from late_arrivals import come_late
from models import BUDGETS, Net


def span(kind, start_s, end_s, shard=0, direction="F", step=1, trial=0):
    whose = {"trial": trial, "step": step, "shard": shard, "direction": direction}
    return {"kind": kind, "device": 0, **whose, "start_s": start_s, "end_s": end_s, "cause": ""}


def trial_of(shards, number=0):
    sizes = {"slot_bytes": 8, "boundary_bytes": 3, "forward_work_bytes": 1, "backward_work_bytes": 2}
    return {"trial": number, "name": f"t{number}", "held_bytes": 5, "step_bytes": 6, "shards": [sizes] * shards}


def test_a_recording_has_the_medians_of_tasks_and_of_what_passes_between_them():
    """Three steps of F0 B0; the second's backward waits for 4 s, which is nobody's work."""
    spans = [
        span("run", 0, 1), span("run", 2, 5, direction="B"),
        span("run", 7, 8, step=2), span("wait", 9, 13, direction="B", step=2),
        span("run", 13, 18, direction="B", step=2),
        span("stall", 18, 21, trial=-1),
        span("run", 21, 23, step=3), span("run", 24, 27, direction="B", step=3),
    ]  # fmt: skip
    (work,) = recorded(spans, [trial_of(1)])
    assert (work.steps, work.forward_s, work.backward_s) == (3, (1,), (3,))
    assert work.loop_s == 3, "1 + 2, 1 + 3, and 1 after the last forward"
    assert (work.shard_bytes, work.work_bytes, work.gradient_bytes) == ((8,), (2,), (0,))
    assert (work.boundary_bytes, work.held_bytes, work.step_bytes, work.name) == (3, 5, 6, "t0")


def test_who_has_not_trained_is_not_recorded_and_a_frozen_shard_has_no_backward():
    spans = [span("run", 0, 1, trial=1), span("run", 1, 2), span("run", 2, 3, 1), span("run", 3, 4, 1, "B")]
    (work,) = recorded(spans, [trial_of(2, 0), trial_of(1, 1), trial_of(1, 2)])
    assert work.name == "t0"
    assert work.backward_s[0] < 1e-6 < work.backward_s[1]


@pytest.mark.parametrize("where", ["spilled", "resident"])
def test_a_pool_records_what_the_simulator_reads(where, tmp_path):
    with hydra_tune.ShardPool(["cpu"], BUDGETS[where]) as pool:
        Script().run(pool)
        (work,), path = pool.workload(), pool.save_workload(tmp_path / "mine.json")
        (trial,) = pool.report()["trials"]
    assert parse(path) == [work]
    assert work.num_shards == len(trial["shards"])
    assert work.total_s == pytest.approx(trial["busy_s"], rel=0.9)
    found = hydra_tune.simulate(path, 2, memory=BUDGETS[where])
    assert found.makespan_s >= work.total_s


def test_a_pool_that_has_trained_nothing_has_no_workload():
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = Net()
        with torch.no_grad():
            step(model, pool)
        assert pool.workload() == []


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(calibration, "_LEAST_S", 0.001)
    monkeypatch.setattr(calibration, "WIDTHS", {"cpu": 64, "cuda": 64})
    monkeypatch.setattr(calibration, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(calibration, "NUM_TRAINED", 1 << 10)
    torch.set_num_threads(1)


def test_every_rate_is_measured(quick):
    cost = hydra_tune.calibrate(["cpu", "cpu"], repeats=1)
    rates = {key: value for key, value in cost.to_dict().items() if key != "measured_on"}
    assert all(0 < value < float("inf") for value in rates.values()), rates
    assert "cpu:0 (virtual), cpu:1 (virtual)" in cost.measured_on
    assert torch.is_grad_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_every_rate_of_a_gpu_is_measured(monkeypatch):
    monkeypatch.setattr(calibration, "_LEAST_S", 0.05)
    cost = hydra_tune.calibrate("cuda:0", repeats=2)
    assert cost.flops_per_s > 1e12 and min(cost.h2d_bytes_per_s, cost.d2h_bytes_per_s) > 1e9
    assert 0 < cost.task_s < 0.1


def test_a_task_can_be_measured_where_gradients_arrive_late(quick, monkeypatch):
    come_late(monkeypatch)
    assert hydra_tune.calibrate(["cpu"], repeats=1).task_s > 0


@pytest.mark.proof
def test_the_command_writes_what_simulate_reads(quick, tmp_path, capsys):
    path = tmp_path / "cost.json"
    assert cli.main(["calibrate", "--devices", "cpu", "--out", str(path)]) == 0
    cost = CostModel.load(path)
    assert f"{cost.flops_per_s:.4g}" in capsys.readouterr().out
    CostModel(8e12, 12e9, 11e9).save(path)
    assert cli.main(["simulate", "hydra-gpt2-xl", "--cost", str(path), "--json"]) == 0
    fast = json.loads(capsys.readouterr().out)["makespan_s"]
    assert cli.main(["simulate", "hydra-gpt2-xl", "--link", "11e9", "--json"]) == 0
    assert fast < 0.7 * json.loads(capsys.readouterr().out)["makespan_s"], "4e12 flop/s unless said"


def test_what_cannot_be_measured_or_computed_says_so(tmp_path, capsys):
    assert cli.main(["calibrate", "--devices", "tpu", "--out", str(tmp_path / "cost.json")]) == 2
    assert "--devices is" in capsys.readouterr().err
    CostModel().save(tmp_path / "cost.json")
    assert cli.main(["simulate", "asha-arrivals", "--cost", str(tmp_path / "cost.json")]) == 2
    assert "drawn at random" in capsys.readouterr().err


def test_a_task_of_a_slow_machine_takes_its_own_time_for_each_block():
    shape = {"layers": 2, "width": 8, "feed_forward": 32, "sequence": 4, "batch": 1, "vocabulary": 10, "steps": 1}
    fast, slow = (
        hydra_tune.simulation.cost.transformer_trial(CostModel(flops_per_s=1e9, task_s=task_s), shards=2, **shape)
        for task_s in (0.0, 0.5)
    )
    assert [b - a for a, b in zip(fast.forward_s, slow.forward_s, strict=True)] == pytest.approx([1.0, 1.0])
    assert [b - a for a, b in zip(fast.backward_s, slow.backward_s, strict=True)] == pytest.approx([1.0, 1.0])


def test_a_recording_of_a_gpu_which_the_host_is_ahead_of():
    """Its runs are known after the next tasks have waited, which may be asked for before they end."""
    spans = []
    for number, start_s in ((1, 0), (2, 8), (3, 16)):
        spans += [
            span("wait", start_s + 1, start_s + 2, step=number),
            span("wait", start_s + 2.1, start_s + 2.5, direction="B", step=number),
            span("run", start_s + 2, start_s + 4, step=number),
            span("run", start_s + 4, start_s + 8, direction="B", step=number),
        ]
    (work,) = recorded(spans, [trial_of(1)])
    assert (work.forward_s, work.backward_s) == ((2,), (4,))
    assert work.loop_s == 1, "from a backward's end until the next forward is asked for"
