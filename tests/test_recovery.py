"""A search that is killed at any moment: the same script again finishes it, and loses nothing."""

import inspect
import json
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

WAIT_S = 120.0
TRIALS, STEPS, EVERY = 6, 24, 3
SEARCH = """
import json, os, sys, threading, time
import optuna, torch
import hydra_tune
from optuna.trial import TrialState
from scripts import BUDGETS, WIDTH, Net

optuna.logging.set_verbosity(optuna.logging.ERROR)
kind, folder, trials, steps, every = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
torch.set_num_threads(1)

def storage():
    if kind == "sqlite":
        patient = {"connect_args": {"timeout": 60}}
        return optuna.storages.RDBStorage(f"sqlite:///{folder}/search.db", engine_kwargs=patient)
    lock = optuna.storages.journal.JournalFileOpenLock(f"{folder}/search.log", grace_period=2)
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(f"{folder}/search.log", lock))

def objective(trial):
    lr = trial.suggest_float("lr", 0.01, 0.1)
    model = Net(depth=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer = hydra_tune.prepare(model, optimizer)
    start = hydra_tune.resume_step()
    with open(f"{folder}/steps", "a") as file:
        file.write(json.dumps([trial.number, start]) + "\\n")
    for step in range(start, steps):
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with open(f"{folder}/steps", "a") as file:
            file.write(json.dumps([trial.number, step + 1]) + "\\n")
        trial.report(loss.item(), step)
    return loss.item()

study = optuna.create_study(storage=storage(), study_name="search", load_if_exists=True)
for i in range(trials):
    study.enqueue_trial({"lr": 0.01 * (1 + i)}, skip_if_exists=True)
left = sum(not t.state.is_finished() for t in study.trials)
print("begins", flush=True)
pool = hydra_tune.ShardPool(["cpu"], BUDGETS["few blocks"], seed=0)
runner = hydra_tune.HydraTrialRunner(pool, 3, checkpoint_dir=folder + "/checkpoints", checkpoint_every=every)
runner.optimize(study, objective, n_trials=left)
"""


def started(kind, folder):
    command = [sys.executable, "-c", SEARCH, kind, str(folder), *map(str, (TRIALS, STEPS, EVERY))]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=Path(__file__).parent
    )


def study_in(kind, folder):
    if kind == "sqlite":
        return optuna.load_study(study_name="search", storage=f"sqlite:///{folder}/search.db")
    backend = optuna.storages.journal.JournalFileBackend(f"{folder}/search.log")
    return optuna.load_study(study_name="search", storage=optuna.storages.JournalStorage(backend))


def finish(kind, folder):
    child = started(kind, folder)
    try:
        child.communicate(timeout=WAIT_S)
    finally:
        child.kill()
    assert child.returncode == 0
    return study_in(kind, folder).trials


def kill(kind, folder, after_s):
    """After so many seconds of searching; whether it was still at it."""
    child = started(kind, folder)
    try:
        assert child.stdout.readline() == "begins\n"
        threading.Event().wait(after_s)
        still = child.poll() is None
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=WAIT_S)
    finally:
        child.kill()
    return still


def steps_lost(folder):
    """What was repeated, each time that a trial went on."""
    made, lost = {}, []
    for number, step in map(json.loads, (folder / "steps").read_text().splitlines()):
        if number in made and step <= made[number]:
            lost.append(made[number] - step)
        made[number] = step
    return lost


def kill_often(kind, tmp_path, seed, kills):
    """Searches that are killed several times each, until so many kills have hit one; each ends as if none had."""
    plain = {t.number: t.value for t in finish(kind, tmp_path)}
    assert len(plain) == TRIALS
    rng, hit, number = random.Random(seed), 0, 0
    while hit < kills:
        folder = tmp_path / str(number)
        folder.mkdir()
        number += 1
        finished = {}
        for _ in range(min(5, kills - hit)):
            hit += kill(kind, folder, rng.uniform(0.0, 1.5))
            now = {
                t.number: (t.value, t.datetime_complete) for t in study_in(kind, folder).trials if t.state.is_finished()
            }
            assert finished.items() <= now.items(), "what has finished stays as it is"
            finished = now
        trials = finish(kind, folder)
        assert [t.number for t in trials] == list(range(TRIALS)), "each under its number"
        assert {t.state for t in trials} == {TrialState.COMPLETE}
        assert {t.number: t.value for t in trials} == plain
        assert all(steps <= EVERY for steps in steps_lost(folder))
        assert not list(folder.rglob("*.safetensors"))
    return hit


BREAKS_LOCKS = "grace_period" in inspect.signature(optuna.storages.journal.JournalFileOpenLock).parameters
JOURNAL = pytest.mark.skipif(not BREAKS_LOCKS, reason="this Optuna waits for ever for the lock of who was killed")


@pytest.mark.parametrize(("kind", "kills"), [pytest.param("journal", 3, marks=JOURNAL), ("sqlite", 2)])
def test_a_search_that_is_killed_goes_on_where_it_was(tmp_path, kind, kills):
    kill_often(kind, tmp_path, 0, kills)


@pytest.mark.proof
@pytest.mark.parametrize("kind", [pytest.param("journal", marks=JOURNAL), "sqlite"])
def test_a_search_that_is_killed_a_hundred_times_goes_on_where_it_was(tmp_path, kind):
    kill_often(kind, tmp_path, 1, 100)
