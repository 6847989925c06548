"""Another process looks at this one through its socket, and commands its trials: `hydra-tune top` and its like."""

import json
import os
import socket
import stat
import threading
from pathlib import Path

import optuna
import pytest
import torch

import hydra_tune
from hydra_tune.cli import main
from hydra_tune.errors import ConfigError
from hydra_tune.show import control_socket, top
from hydra_tune.show.control_socket import ControlServer, ask, processes
from hydra_tune.show.snapshot import DeviceSnapshot, PoolSnapshot, TrialSnapshot
from models import BUDGETS, WIDTH, Net
from waiting import wait_until

SNAPSHOT = PoolSnapshot(1.0, (DeviceSnapshot("cpu:0", 100, 50, 60),), (TrialSnapshot("trial 3", "resident", 7),))


class Shown:
    def __init__(self):
        self.commands = []

    def snapshot(self):
        return SNAPSHOT

    def command(self, command, trial):
        if trial != "trial 3":
            raise ConfigError(f"no {trial}")
        self.commands.append(command)
        return f"{trial}: {command}"


@pytest.fixture
def server(tmp_path_factory, monkeypatch):
    """In a folder of its own. The path of a Unix socket is short."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("r")))
    control_socket.control_server.close()  # it may be open in another folder
    server = ControlServer()
    yield server
    server.close()


def folder():
    return control_socket._folder()


def test_a_process_is_found_looked_at_and_commanded(server):
    shown = Shown()
    server.show(shown)
    assert processes() == [os.getpid()]
    assert top.look(os.getpid()) == [SNAPSHOT]
    assert top.command(os.getpid(), "stop", "3") == "trial 3: stop" and shown.commands == ["stop"]
    with pytest.raises(ConfigError, match="'trial 4' is not among"):
        top.command(os.getpid(), "stop", "4")


def test_nobody_else_may_open_the_socket(server):
    shown = Shown()
    server.show(shown)
    (path,) = folder().glob("*.sock")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder().stat().st_mode) == 0o700


def test_a_folder_that_others_may_open_is_not_used(server):
    folder().chmod(0o755)
    shown = Shown()
    server.show(shown)
    assert list(Path(os.environ["XDG_RUNTIME_DIR"], "hydra_tune").iterdir()) == []


def test_with_the_last_source_the_socket_is_gone(server):
    one, other = Shown(), Shown()
    server.show(one)
    server.show(other)
    assert len(top.look(os.getpid())) == 2
    server.hide(other)
    assert len(top.look(os.getpid())) == 1
    server.hide(one)
    assert list(Path(os.environ["XDG_RUNTIME_DIR"]).iterdir()) == []
    assert processes() == [] and not [t for t in threading.enumerate() if t.name == "hydra_tune control"]
    server.show(one)
    assert len(top.look(os.getpid())) == 1, "it opens again"


def test_a_folder_that_another_process_has_just_removed_is_made_again(server, monkeypatch):
    made = []

    def then_removed():
        made.append(folder_of_user())
        if len(made) == 2:  # after the look for sockets that were left
            made[-1].rmdir()
        return made[-1]

    folder_of_user = control_socket._folder
    monkeypatch.setattr(control_socket, "_folder", then_removed)
    shown = Shown()
    server.show(shown)
    assert processes() == [os.getpid()] and len(made) > 2


def left_by_a_killed_process():
    left = folder() / "1.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(left))
    return left


def test_a_socket_that_a_killed_process_has_left_is_removed_by_who_looks(server):
    left = left_by_a_killed_process()
    assert processes() == [] and not left.exists()


def test_a_socket_that_a_killed_process_has_left_is_removed_by_the_next_pool(server):
    """Each pool process of Ray Tune's was killed, and left one."""
    left, shown = left_by_a_killed_process(), Shown()
    server.show(shown)
    assert not left.exists() and processes() == [os.getpid()]


def test_a_client_that_sends_nonsense_or_leaves_harms_nobody(server):
    shown = Shown()
    server.show(shown)
    path = str(folder() / f"{os.getpid()}.sock")
    for line in (b"", b"nonsense\n", b"[]\n"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            client.sendall(line)
    with pytest.raises(ConfigError, match="a request is to look, or one of pause"):
        ask(os.getpid(), {"do": "dance"})
    assert top.look(os.getpid()) == [SNAPSHOT]


def test_a_source_that_is_gone_is_not_shown(server):
    shown = Shown()
    server.show(shown)
    del shown
    assert top.look(os.getpid()) == []


def test_an_error_in_a_source_is_the_answer(server):
    class Breaks(Shown):
        def snapshot(self):
            raise RuntimeError("closed")

    shown = Breaks()
    server.show(shown)
    with pytest.raises(ConfigError, match="closed"):
        top.look(os.getpid())


def test_the_command_line_prints_a_table_and_says_what_it_did(server, capsys):
    shown = Shown()
    server.show(shown)
    assert main(["top", "--once"]) == 0
    assert "trial 3  resident" in capsys.readouterr().out
    assert main(["top", "--json"]) == 0
    assert [PoolSnapshot.from_dict(pool) for pool in json.loads(capsys.readouterr().out)] == [SNAPSHOT]
    assert main(["pause", "3"]) == 0
    assert capsys.readouterr().out == "trial 3: pause\n" and shown.commands == ["pause"]


@pytest.mark.parametrize("arguments", [["top"], ["top", "1"], ["pause", "3"], ["pause", "3", "--pid", "1"]])
def test_without_a_process_one_line_says_so(server, arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("hydra-tune: ")


def test_keys_that_come_together_are_each_a_key(monkeypatch):
    """Of two arrows in one frame neither was heard."""
    ours, its = os.openpty()
    with os.fdopen(its) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        with top._keys() as next_key:
            os.write(ours, b"\x1b[B\x1b[Aps")
            assert [next_key(60) for _ in range(4)] == ["down", "up", "p", "s"]
            assert next_key(0) == ""
    os.close(ours)


# ---- what is shown ----


def test_a_search_is_shown_while_it_runs_and_its_trials_are_commanded(monkeypatch, server):
    monkeypatch.setattr("hydra_tune.integrations.optuna_runner.live_attributes.control_server", server)
    pool = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"], seed=0)
    seen = []

    def objective(trial):
        model = Net()
        model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        while True:
            model(torch.randn(4, WIDTH)).sum().backward()
            optimizer.step()
            trial.report(1.0, len(seen))
            if not seen:
                (shown,) = top.look(os.getpid())
                seen.append(shown)
                assert top.command(os.getpid(), "stop", "0") == "trial 0: stops at its next task"

    study = optuna.create_study(study_name="digits")
    hydra_tune.HydraTrialRunner(pool, 1).optimize(study, objective, n_trials=1)
    assert (seen[0].search.name, seen[0].search.running, seen[0].trials[0].name) == ("digits", 1, "trial 0")
    assert study.trials[0].state is optuna.trial.TrialState.PRUNED
    assert processes() == []


def test_a_plain_scripts_pool_is_shown_and_its_trial_paused(monkeypatch, server):
    monkeypatch.setattr("hydra_tune.trials.preparation.control_server", server)
    pool = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"])
    model = Net()
    model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), pool=pool)
    (shown,) = top.look(os.getpid())
    assert [t.name for t in shown.trials] == ["trial 0"] and shown.search is None
    assert top.command(os.getpid(), "pause", "0") == "trial 0: paused"
    steps = []

    def train():
        for _ in range(3):
            model(torch.randn(4, WIDTH)).sum().backward()
            optimizer.step()
            steps.append(1)

    thread = threading.Thread(target=train)
    thread.start()
    wait_until(lambda: top.look(os.getpid())[0].trials[0].state == "paused")
    assert top.command(os.getpid(), "resume", "0") == "trial 0: resumed"
    thread.join(60)
    assert len(steps) == 3
    with pytest.raises(ConfigError, match="is paused or resumed; got 'stop'"):
        top.command(os.getpid(), "stop", "0")
    hydra_tune.release(model)
