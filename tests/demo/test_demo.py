"""`hydra-tune demo --quick`, whole: what it prints, what it asserts, what it writes."""

import json
import os
import subprocess
import sys

import optuna
import pytest
import torch

from hydra_tune.demo import sweep
from hydra_tune.demo.text import Windows, documentation


def test_quick_demo(tmp_path):
    environment = {**os.environ, "HYDRA_TUNE_CHECKS": "0"}
    command = [sys.executable, "-W", "error", "-m", "hydra_tune.cli", "demo", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "losses equal, final weights equal, bit for bit" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["proof"] == {"trial": report["best"]["trial"], "losses_equal": True, "weights_equal": True}
    (device,) = report["pool"]["devices"]
    smallest = min(t["weight_bytes"] for t in report["pool"]["trials"])
    assert device["budget_bytes"] <= smallest / 2
    assert device["peak_bytes"] <= device["budget_bytes"]
    assert device["used_bytes"] == 0
    for trial in report["pool"]["trials"]:
        assert len(trial["shards"]) >= 8
        assert trial["promoted_bytes"] / trial["steps"] >= trial["weight_bytes"] / 2
    assert "plain     PyTorch there: OutOfMemoryError: cpu:0 (virtual) holds" in done.stdout
    assert "GPT is spilled, in" in done.stdout and "4 trials in " in done.stdout and "devices computed" in done.stdout
    page = (tmp_path / "report.html").read_text()
    assert "<title>hydra_tune demo</title>" in page and "Optimization history" in page
    assert all(f"</span>trial {trial['number']}</td>" in page for trial in report["trials"])


def test_lines_of_several_trials_stay_whole(monkeypatch):
    written = []
    monkeypatch.setattr(sys.stdout, "write", written.append)
    sweep.say_line("trial 0   starts")
    sweep.say_line("trial 1   starts")
    assert written == ["trial 0   starts\n", "trial 1   starts\n"]


def test_what_trains_on_a_gpu_with_its_optimizer_on_the_host_is_the_plain_model():
    """Where the device is the host, both are the same."""
    torch.manual_seed(0)
    model, x = sweep.GPT(depth=2, context=8), torch.randint(0, 256, (2, 9))
    gradients = []
    for called in (model, sweep.OnDevice(model, torch.device("cpu"))):
        sweep.loss_of(called(x[:, :-1]), x[:, 1:]).backward()
        gradients.append([p.grad for p in model.parameters()])
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert sweep.OnDevice(model, torch.device("meta"))(x[:, :-1]).device.type == "meta", "it computes there"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_demos_proof_holds_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    verbosity, said = optuna.logging.get_verbosity(), []
    report = sweep.run(sweep.QUICK, tmp_path, said.append)
    optuna.logging.set_verbosity(verbosity)
    assert report["proof"]["losses_equal"] and report["proof"]["weights_equal"], said
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_text_is_cut_without_overlap():
    train, validation = documentation()
    assert len(train) > 8 * len(validation) > 0
    x, y = Windows(train, 64)[1]
    assert x[1:].tolist() == y[:-1].tolist()
    assert x.tolist() == train[64:128].tolist()
