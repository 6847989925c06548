"""A benchmark that takes functions apart by their names fails when one has moved."""

import json

import torch

from benchmarks import measure, overhead, small_trials


def test_the_overhead_of_a_task_is_told_by_its_parts(tmp_path, monkeypatch):
    results = tmp_path / "benchmarks" / "results"
    results.parent.mkdir()
    monkeypatch.setattr(measure, "RESULTS", results)
    monkeypatch.setattr("sys.argv", ["overhead", "--rounds", "10", "--threads", str(torch.get_num_threads())])
    overhead.main()
    figures = json.loads((results / "overhead_cpu.json").read_text())
    for where in ("script", "runner"):
        parts = figures[where]["parts_us_a_task"]
        assert parts.keys() >= {"lease", "promotion", "gradients to host", "substitution", "random state", "arithmetic"}
        assert all(us > 0 for us in parts.values())


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
