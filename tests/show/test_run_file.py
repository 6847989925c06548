"""A run that is recorded as it happens: its report can be made after a crash, and no recording stops a training."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

import hydra_tune
from hydra_tune.cli import main
from hydra_tune.show import run_file
from hydra_tune.show.run_file import recorded_run, report_of_file
from models import BUDGETS, WIDTH, Net
from paths import TESTS


def train(pool, steps=3):
    model = Net()
    model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), pool=pool)
    for _ in range(steps):
        model(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
    hydra_tune.release(model)


def test_a_recorded_run_is_what_the_pool_reports(tmp_path):
    path = tmp_path / "run.jsonl"
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"], record=path) as pool:
        train(pool)
        spans, report, memory = pool.timeline(), pool.report(), list(pool.events.report.trace.memory)
    found = recorded_run(path)
    assert [{**span, "name": "trial 0"} for span in found.spans if span["trial"] == 0] == [
        span for span in spans if span["trial"] == 0
    ]
    assert len(found.spans) == len(spans) and found.memory == memory
    assert found.report["trials"][0]["steps"] == report["trials"][0]["steps"] == 3
    assert found.report["devices"][0]["peak_bytes"] == report["devices"][0]["peak_bytes"]
    assert "torch" in found.environment and found.title == "run"


def test_only_what_is_new_is_written_and_a_second_run_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(run_file, "EVERY_S", 0.001)
    path = tmp_path / "run.jsonl"
    for steps in (2, 5):
        with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"], record=path) as pool:
            train(pool, steps)
            runs = sum(span["kind"] == "run" for span in pool.timeline())
    found = recorded_run(path)
    assert sum(span["kind"] == "run" for span in found.spans) == runs
    assert [trial["steps"] for trial in found.report["trials"]] == [5]


def test_after_a_kill_the_report_is_made_from_what_was_written(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    script = f"""
        import os, signal, sys, time
        sys.path[:0] = [{str(TESTS)!r}, {str(TESTS / "helpers")!r}]
        import torch, hydra_tune
        from hydra_tune.show import run_file
        from models import BUDGETS, WIDTH, Net
        run_file.EVERY_S = 0.01
        pool = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"], record={str(path)!r})
        model = Net()
        model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), pool=pool)
        while '"kind"' or True:
            model(torch.randn(4, WIDTH)).sum().backward()
            optimizer.step()
            if os.path.getsize({str(path)!r}) > 20_000:
                os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    with path.open("ab") as file:
        file.write(b'{"elapsed_s": 3, "spa')  # a line that is torn
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out == f"written to {tmp_path / 'run.html'}\n"
    assert "trial 0" in (tmp_path / "run.html").read_text()


def test_a_full_disk_ends_the_recording_and_not_the_training(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(run_file, "EVERY_S", 0.001)
    path = tmp_path / "run.jsonl"
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"], record=path) as pool:
        monkeypatch.setattr(run_file.RunRecorder, "_write", fail)
        train(pool)
    assert caplog.messages == [
        f"the run is recorded no further in {path} (No space left on device); it goes on without"
    ]


def test_a_forked_child_records_nothing(tmp_path):
    path = tmp_path / "run.jsonl"
    pool = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"], record=path)
    recorder = pool._recorder
    recorder._process = os.getpid() + 1  # as a child sees it
    recorder.close()
    assert recorder._thread.is_alive()
    recorder._process = os.getpid()
    pool.close()
    assert not recorder._thread.is_alive()


def test_what_is_no_recording_is_refused(tmp_path):
    with pytest.raises(hydra_tune.ConfigError, match="record= is a file to which a run is written"):
        hydra_tune.ShardPool(["cpu"], 1 << 20, record=tmp_path)
    with pytest.raises(hydra_tune.ConfigError, match="No such file"):
        report_of_file(tmp_path / "none.jsonl")
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(hydra_tune.ConfigError, match="is no recording of a pool"):
        report_of_file(tmp_path / "other.jsonl")
