"""`hydra-tune simulate`: what it prints, and what it writes; and how each command refuses. The demo has tests of its
own."""

import json
import sys

import pytest

from hydra_tune.cli import main

TRIAL = {"steps": 1, "forward_s": [1.0, 1.0], "backward_s": [1.0, 1.0], "shard_bytes": [10, 10]}


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps([TRIAL] * 3))
    return str(path)


def test_a_table_shows_the_schedule_beside_what_others_take(workload, capsys):
    assert main(["simulate", workload, "--devices", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "                                              makespan_s  of simulated",
        "simulated                                            6.0         1.000",
        "lower bound                                          6.0         1.000",
        "model parallelism                                   12.0         2.000",
        "model parallelism, activations kept                  6.0         1.000",
        "task parallelism, as if each trial fitted            8.0         1.333",
        "one spilled trial at a time, prefetched             12.0         2.000",
        "one spilled trial a device, prefetched               8.0         1.333",
        "",
        "promoted to devices: 80 B",
        "",
        "device      busy_s    busy",
        "0              6.0  100.0%",
        "1              6.0  100.0%",
    ]


def test_stalls_are_told_by_cause_and_every_option_counts(workload, capsys):
    options = ["--devices", "1", "--memory", "10B", "--link", "10", "--policy", "fifo", "--no-double-buffering"]
    assert main(["simulate", workload, *options]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "device      busy_s    busy       gradients       promotion",
        "0             12.0   40.0%             6.0            12.0",
    ]


def test_json_has_all_figures(workload, capsys):
    assert main(["simulate", workload, "--devices", "2", "--link", "10B", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == [
        *("makespan_s", "lower_bound_s", "ratio", "promoted_bytes", "ended_s"),
        *("devices", "baselines_s"),
    ]
    assert figures["lower_bound_s"] == 6 < figures["makespan_s"] == max(figures["ended_s"])
    for device in figures["devices"]:
        assert device["busy_s"] + sum(device["stalled_s"].values()) == pytest.approx(figures["makespan_s"])
        assert device["utilisation"] == device["busy_s"] / figures["makespan_s"]


def test_a_timeline_is_saved_and_a_sweep_has_a_name(tmp_path, capsys):
    out = tmp_path / "run.json"
    assert main(["simulate", "random-heterogeneous", "--devices", "4", "--timeline", str(out)]) == 0
    assert "simulated" in capsys.readouterr().out
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} >= {"device 0", "device 3"}
    assert any(event.get("cat") == "run" for event in events)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.json"], "a workload is a JSON file or one of hydra-bert, "),
        (["hydra-bert", "--memory", "1GB"], "it needs 8.4 GiB, and the smallest device has 953.7 MiB. What"),
        (["random-heterogeneous", "--policy", "lifo"], "policy is a Policy or one of sharded-lrtf, "),
        (["random-heterogeneous", "--devices", "0"], "devices is how many, at least 1, "),
        (["random-heterogeneous", "--link", "fast"], "a positive number of bytes, got 'fast'"),
        (["random-heterogeneous", "--link", "nan"], "h2d_bytes_per_s is a positive rate, got nan"),
        (["random-heterogeneous", "--timeline", "run.png"], "saved as .json (for ui.perfetto.dev) or .html"),
        (
            ["random-heterogeneous", "--timeline", "no/such/run.json"],
            "saved in a folder that there is, got 'no/such/run.json'",
        ),
        (["."], "cannot be read: Is a directory"),
    ],
)
def test_what_means_nothing_is_one_line_and_status_2(arguments, message, capsys):
    assert main(["simulate", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("hydra-tune: ") and printed.err.count("\n") == 1
    assert message in printed.err


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with odd files, and no process to show."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "some_model", raising=False)  # of another test
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "notes.txt").write_text("no recording")
    (tmp_path / "began.jsonl").write_text('{"hydra_tune_run": 1}\n')
    (tmp_path / "damaged.jsonl").write_text('{"hydra_tune_run": 1}\n{"elapsed_s": 1}\n')
    (tmp_path / "some_model.py").write_text(
        "from torch import nn, ones\n"
        "def pair():\n    return nn.Linear(2, 2), None, (ones(1, 2), ones(1))\n"
        "class Odd(nn.Linear):\n    def forward(self, x):\n        raise ValueError('of\\ntwo lines')\n"
        "def odd():\n    return Odd(2, 2), None, ones(1, 2)\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("doctor --devices tpu", "got 'tpu'"),
        ("doctor --devices cpu,", "names such as cuda:0 or cpu,cpu; got 'cpu,'"),
        ("calibrate --devices cpu,meta", "got 'cpu,meta'"),
        ("plan some_model:pair", "write loss=lambda model, batch:"),
        ("plan some_model:odd", "raised ValueError: of two lines (some_model.py:6)."),
        ("plan some_model:none", "it has no function 'none'"),
        ("plan no_such_model:f", "can be imported from this folder, but 'no_such_model' raised ModuleNotFoundError"),
        ("plan some_model:odd --cost notes.txt", "notes.txt is not JSON"),
        ("report none.jsonl", "No such file"),
        ("report .", "Is a directory"),
        (
            "report notes.txt",
            "'notes.txt' is no recording of a pool. A pool writes one where it is made with ShardPool(",
        ),
        ("report began.jsonl", "ended before anything was recorded"),
        ("report damaged.jsonl", "it is damaged, or of another version of hydra_tune (KeyError: 'devices')"),
        ("report began.jsonl -o .", 'Write "report.html"'),
        ("top", "no process of this user has a pool"),
        ("top 1", "process 1 has no pool"),
        ("pause 3", "no process of this user has a pool"),
        ("resume 3 --pid 1", "process 1 has no pool"),
        ("stop odd", "no process of this user has a pool"),
        ("clone 3 --pid -1", "process -1 has no pool"),
        ("demo --out notes.txt/folder", "cannot be made (Not a directory)"),
    ],
)
def test_wrong_input_of_each_command_is_one_line_and_status_2(words, message, here, capsys):
    assert main(words.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("hydra-tune: ") and printed.err.count("\n") == 1
    assert message in printed.err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["simulate"], ["simulate", "hydra-bert", "--devices", "two"]])
def test_an_unknown_word_is_one_line_and_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    printed = capsys.readouterr()
    assert left.value.code == 2 and printed.out == ""
    assert printed.err.startswith("hydra-tune: ") and printed.err.count("\n") == 1 and "--help" in printed.err
