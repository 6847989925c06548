"""Benchmarks run, and tell what they are for."""

import json

import torch

from benchmarks import measure, overhead, small_trials


def test_the_overhead_of_a_block_is_compared_with_pytorchs_checkpoint(tmp_path, monkeypatch):
    results = tmp_path / "benchmarks" / "results"
    results.parent.mkdir()
    monkeypatch.setenv("HYDRA_TUNE_CHECKS", "0")  # which the benchmark sets itself
    monkeypatch.setattr(measure, "RESULTS", results)
    monkeypatch.setattr("sys.argv", ["overhead", "--quick", "--threads", str(torch.get_num_threads())])
    overhead.main()
    figures = json.loads((results / "overhead_cpu.json").read_text())
    for where in ("script", "runner"):
        found = figures[where]
        assert found["us_a_block"].keys() == {"checkpointed", "spilled"}
        assert all(us > 0 for ways in found["us_a_block"].values() for us in ways.values())
        calls = found["calls_a_block"]
        assert calls["plain"] < calls["checkpointed"] < calls["spilled"] < 600


def test_small_trials_are_compared_with_stock_optuna(tmp_path, monkeypatch):
    results = tmp_path / "benchmarks" / "results"
    results.parent.mkdir()
    monkeypatch.setattr(measure, "RESULTS", results)
    monkeypatch.setattr(small_trials, "TRIALS", 2)
    monkeypatch.setattr("sys.argv", ["small_trials", "--quick"])
    small_trials.main()
    figures = json.loads((results / "small_trials_cpu.json").read_text())
    for kind in small_trials.STEPS:
        assert figures[kind]["median_us_a_step"].keys() == {"stock", "runner, 1 at a time", "runner, 8 at a time"}
        assert all(over["ratio_of_medians"] > 0 for over in figures[kind]["over_stock"].values())
