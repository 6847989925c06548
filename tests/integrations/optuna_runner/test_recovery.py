"""A search that is killed at any moment: the same script again finishes it, and loses nothing."""

import inspect
import json
import logging
import multiprocessing
import os
import random
import time
from contextlib import contextmanager
from pathlib import Path

import optuna
import pytest
import torch
from optuna.trial import TrialState

import hydra_tune
from hydra_tune.checkpoints.checkpoint_folder import Position
from hydra_tune.integrations.optuna_runner.recovery import MOST_DEATHS, StudyFolder
from hydra_tune.process.file_lock import FileLock
from models import BUDGETS, WIDTH, Net

WAIT_S = 120.0
TRIALS, STEPS, EVERY = 6, 24, 3
BREAKS_LOCKS = "grace_period" in inspect.signature(optuna.storages.journal.JournalFileOpenLock).parameters
SERVER = multiprocessing.get_context("forkserver")  # which imports but once
SERVER.set_forkserver_preload(["torch", "optuna", "hydra_tune"])


def storage_in(kind, folder):
    if kind == "sqlite":
        patient = {"connect_args": {"timeout": 60}}
        return optuna.storages.RDBStorage(f"sqlite:///{folder}/search.db", engine_kwargs=patient)
    breaks = {"grace_period": 2} if BREAKS_LOCKS else {}
    lock = optuna.storages.journal.JournalFileOpenLock(f"{folder}/search.log", **breaks)
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(f"{folder}/search.log", lock))


def search(kind, folder, begins):
    """In a process of its own."""

    def objective(trial):
        lr = trial.suggest_float("lr", 0.01, 0.1)
        model = Net(depth=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        model, optimizer = hydra_tune.prepare(model, optimizer)
        start = hydra_tune.resume_step()
        with (folder / "steps").open("a") as file:
            file.write(json.dumps([trial.number, start]) + "\n")
        for step in range(start, STEPS):
            loss = model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with (folder / "steps").open("a") as file:
                file.write(json.dumps([trial.number, step + 1]) + "\n")
            trial.report(loss.item(), step)
        return loss.item()

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("hydra_tune").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    study = optuna.create_study(storage=storage_in(kind, folder), study_name="search", load_if_exists=True)
    for i in range(TRIALS):
        study.enqueue_trial({"lr": 0.01 * (1 + i)}, skip_if_exists=True)
    left = sum(not t.state.is_finished() for t in study.trials)
    begins.set()
    pool = hydra_tune.ShardPool(["cpu"], BUDGETS["few blocks"], seed=0)
    runner = hydra_tune.HydraTrialRunner(pool, 3, checkpoint_dir=folder / "checkpoints", checkpoint_every=EVERY)
    runner.optimize(study, objective, n_trials=left)


@contextmanager
def searching(kind, folder):
    """A process that does; killed at the end."""
    begins = SERVER.Event()
    child = SERVER.Process(target=search, args=(kind, folder, begins))
    child.start()
    try:
        yield child, begins
    finally:
        child.kill()
        child.join()


def study_in(kind, folder):
    if kind == "sqlite":
        return optuna.load_study(study_name="search", storage=storage_in(kind, folder))
    backend = optuna.storages.journal.JournalFileBackend(f"{folder}/search.log")
    return optuna.load_study(study_name="search", storage=optuna.storages.JournalStorage(backend))


def finish(kind, folder):
    with searching(kind, folder) as (child, _):
        child.join(WAIT_S)
        assert child.exitcode == 0
    return study_in(kind, folder).trials


def kill(kind, folder, after_s):
    """After so many seconds of searching; whether it was still at it."""
    with searching(kind, folder) as (child, begins):
        assert begins.wait(WAIT_S)
        child.join(after_s)
        return child.is_alive()


def steps_lost(folder):
    """What was repeated, each time that a trial went on."""
    made, lost = {}, []
    for number, step in map(json.loads, (folder / "steps").read_text().splitlines()):
        if number in made and step <= made[number]:
            lost.append(made[number] - step)
        made[number] = step
    return lost


def assert_ends_as_if_not_killed(kind, tmp_path, seed, kills):
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


JOURNAL = pytest.mark.skipif(not BREAKS_LOCKS, reason="this Optuna waits for ever for the lock of who was killed")
SQLITE = pytest.mark.proof if BREAKS_LOCKS else ()  # one of the two runs always


@pytest.mark.parametrize(
    ("kind", "kills"), [pytest.param("journal", 2, marks=JOURNAL), pytest.param("sqlite", 1, marks=SQLITE)]
)
def test_a_search_that_is_killed_goes_on_where_it_was(tmp_path, kind, kills):
    assert_ends_as_if_not_killed(kind, tmp_path, 0, kills)


@pytest.mark.proof
@pytest.mark.parametrize("kind", [pytest.param("journal", marks=JOURNAL), "sqlite"])
def test_a_search_that_is_killed_a_hundred_times_goes_on_where_it_was(tmp_path, kind):
    assert_ends_as_if_not_killed(kind, tmp_path, 1, 100)


# ---- its parts ---------------------------------------------------------------------------------------


def test_a_waiting_trial_that_two_processes_get_is_one_of_theirs(tmp_path):
    """As SQLite gives it: the second one asks again."""
    study = optuna.create_study()
    first, second = StudyFolder(tmp_path, study), StudyFolder(tmp_path, study)
    trial = first.ask(study.ask)
    given = iter([trial, study.ask()])
    assert second.ask(lambda: next(given)).number == 1
    assert trial.number == 0
    first.close(), second.close()


def test_a_trial_that_another_process_runs_is_left_to_it(tmp_path):
    study = optuna.create_study()
    other, here = StudyFolder(tmp_path, study), StudyFolder(tmp_path, study)
    other.ask(study.ask)
    here.recover(study)
    assert study.trials[0].state is TrialState.RUNNING
    other.close()  # as the system does when it ends
    here.recover(study)
    assert study.trials[0].state is TrialState.WAITING


@pytest.mark.parametrize("died", [False, True], ids=["nobody has died", "one died while it asked"])
def test_a_trial_without_a_folder_is_taken_only_if_somebody_died_while_asking(tmp_path, died):
    """Another process may run it that keeps no checkpoints."""
    study = optuna.create_study()
    folder = StudyFolder(tmp_path, study)
    if died:
        (folder.path / "asks" / "it").touch()
    study.ask()
    study.ask().suggest_float("x", 0.0, 1.0)
    folder.recover(study)
    states = [TrialState.WAITING if died else TrialState.RUNNING, TrialState.RUNNING]
    assert [t.state for t in study.trials] == states, "one that has got so far was another's"


def test_a_loaders_workers_do_not_keep_the_locks_of_who_was_killed(tmp_path):
    lock = FileLock(tmp_path / "claim")
    assert lock.try_take()
    (read, write), (from_child, to_parent) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(to_parent, b"x")
        os.read(read, 1)
        os._exit(0)
    os.read(from_child, 1)
    lock.close()  # the parent dies, the child lives on
    another = FileLock(tmp_path / "claim")
    taken = another.try_take()
    another.close()
    os.write(write, b"x")
    os.waitpid(child, 0)
    for end in (read, write, from_child, to_parent):
        os.close(end)
    assert taken


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning", "ignore:Heartbeat of storage is supposed")
def test_a_trial_that_goes_on_does_not_begin_stale(tmp_path):
    """Its last heartbeat was its process's; Optuna would fail it before its first own one."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/study.db", heartbeat_interval=1, grace_period=2)
    study = optuna.create_study(storage=storage)
    folder = StudyFolder(tmp_path, study)
    trial = folder.ask(study.ask)
    storage.record_heartbeat(trial._trial_id)
    folder.close()
    time.sleep(3)
    folder.recover(study)
    assert study.ask().number == 0
    optuna.storages.fail_stale_trials(study)
    assert study.trials[0].state is TrialState.RUNNING
    storage.remove_session()
    storage.engine.dispose()


def test_where_a_storage_takes_no_trial_back_it_goes_on_as_a_retry(tmp_path, monkeypatch):
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"x": [0.0, 1.0]}))
    folder = StudyFolder(tmp_path, study)
    folder.ask(study.ask).suggest_float("x", 0.0, 1.0)
    folder.close()
    take = study._storage.set_trial_state_values

    def refuse(trial_id, state, values=None):
        if state is TrialState.WAITING:
            raise NotImplementedError("no way back")
        return take(trial_id, state, values)

    monkeypatch.setattr(study._storage, "set_trial_state_values", refuse)
    folder.recover(study)
    first, retry = study.trials
    assert (first.state, retry.state) == (TrialState.FAIL, TrialState.WAITING)
    assert retry.user_attrs["hydra_tune: continues trials"] == [0] and retry.params == first.params
    assert retry.system_attrs == first.system_attrs, "or its sampler would give it another point of its grid"
    assert folder.of(0).path.is_dir(), "from which it goes on"


def test_a_trial_that_takes_its_process_with_it_is_given_up(tmp_path, caplog):
    """The tenth time at the same place; a new checkpoint is another place."""
    study = optuna.create_study()

    def die():
        folder = StudyFolder(tmp_path, study)
        number = folder.ask(study.ask).number
        folder.close()
        folder.recover(study)
        return number

    for _ in range(MOST_DEATHS - 1):
        assert die() == 0
    StudyFolder(tmp_path, study).of(0).write(Position(0, 5), {})
    for _ in range(MOST_DEATHS):
        assert study.trials[0].state is TrialState.WAITING
        assert die() == 0
    assert study.trials[0].state is TrialState.FAIL
    assert "died 10 times at the same place" in caplog.text
    assert not StudyFolder(tmp_path, study).of(0).path.is_dir()


def test_who_counts_deaths_may_be_killed_meanwhile(tmp_path, monkeypatch):
    """Halfway through what it writes."""
    study, write = optuna.create_study(), Path.write_text
    folder = StudyFolder(tmp_path, study)
    folder.ask(study.ask)
    folder.close()
    folder.recover(study)
    folder.ask(study.ask)
    folder.close()

    def torn(path, text):
        write(path, "")
        raise SystemExit("killed")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", torn)
        with pytest.raises(SystemExit):
            folder.recover(study)
    StudyFolder(tmp_path, study).recover(study)
    assert study.trials[0].state is TrialState.WAITING
    assert (folder.of(0).path / "deaths").read_text().split()[-1] == "2"


def test_checkpoints_of_trials_that_failed_are_removed_at_the_end(tmp_path):
    study = optuna.create_study()
    folder = StudyFolder(tmp_path, study)
    for state in (TrialState.FAIL, TrialState.PRUNED):
        trial = folder.ask(study.ask)
        folder.of(trial.number).write(Position(0, 5), {})
        study.tell(trial, state=state)
    live = folder.ask(study.ask)
    folder.tidy(study)
    assert [path.name for path in folder.path.glob("trial-*")] == [f"trial-{live.number:05d}"]
    folder.close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(hydra_tune.ConfigError, match="checkpoint_dir is a folder that can be made"):
        hydra_tune.optimize(optuna.create_study(), lambda trial: 0.0, 1, checkpoint_dir=tmp_path / "file")
    with pytest.raises(hydra_tune.ConfigError, match="checkpoint_dir is the path of a folder, got 5"):
        hydra_tune.HydraTrialRunner(checkpoint_dir=5)
