"""The runner over Optuna's storages: heartbeats, sessions, other processes, and every argument of `optimize`.

Optuna's own tests run through the runner too (docs/conformance.md); they do not notice a heartbeat that stops, nor a
session that a worker thread leaves behind.
"""

import concurrent.futures
import copy
import datetime
import gc
import json
import os
import pickle
import subprocess
import sys
import threading
import time
import types
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path

import optuna
import pytest
import sqlalchemy
import torch
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import _optimize
from optuna.trial import TrialState

import hydra_tune
from models import BUDGETS, WIDTH, Net
from paths import python_path

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
WAIT_S = 60.0
LOCK = {"connect_args": {"timeout": WAIT_S}}  # of SQLite's file, in seconds
KINDS = ["memory", "sqlite", "journal", "grpc"]


def search(study, objective, concurrency=4, **options):
    pool = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"])
    hydra_tune.HydraTrialRunner(pool, concurrency).optimize(study, objective, **options)


def study_on(storage=None, **options):
    return optuna.create_study(storage=storage, sampler=optuna.samplers.RandomSampler(0), **options)


def square(trial):
    return trial.suggest_float("x", -1.0, 1.0) ** 2


def train(trial):
    """One step of a spilled model; the trial's value is that of `square`."""
    value = square(trial)
    model = Net()
    model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    trial.report(value, 1)
    trial.set_user_attr("x", trial.params["x"])
    return value


def check_told(trials, numbers):
    assert [t.number for t in trials] == list(numbers)
    for trial in trials:
        x = trial.params["x"]
        assert (trial.state, trial.value) == (TrialState.COMPLETE, x**2)
        assert trial.intermediate_values == {1: x**2} and trial.user_attrs["x"] == x
        assert trial.user_attrs["hydra/steps"] == 1


# ---- every kind of storage -----------------------------------------------------------------------------


@contextmanager
def storage_of(kind, folder):
    if kind == "memory":
        yield optuna.storages.InMemoryStorage()
    elif kind == "journal":
        yield JournalStorage(JournalFileBackend(str(folder / "journal")))
    elif kind == "sqlite":
        storage = RDBStorage(f"sqlite:///{folder / 'study.db'}", engine_kwargs=LOCK)
        yield storage
        storage.engine.dispose()
    else:
        pytest.importorskip("grpc")
        server = pytest.importorskip("optuna.storages._grpc.server")
        with storage_of("journal", folder) as behind, concurrent.futures.ThreadPoolExecutor(4) as threads:
            proxied = server.make_server(behind, "localhost", 0, threads)
            port = proxied.add_insecure_port("localhost:0")  # the first one is not told
            proxied.start()
            storage = optuna.storages.GrpcStorageProxy(port=port)
            yield storage
            storage.close()
            proxied.stop(None).wait()


@pytest.mark.parametrize("kind", KINDS)
def test_all_trials_are_told_with_their_values(kind, tmp_path):
    with storage_of(kind, tmp_path) as storage:
        study = study_on(storage)
        search(study, train, n_trials=8)
        check_told(study.trials, range(8))
        assert study.best_value == min(t.value for t in study.trials)


OTHER = """
import json, sys
from test_storages import share

print("ready", flush=True)
sys.stdin.readline()
print(json.dumps(share(sys.argv[1], 5)))
"""


def share(url, n_trials):
    """The numbers of the trials that this process runs."""
    storage = RDBStorage(url, engine_kwargs=LOCK)
    ran = []

    def objective(trial):
        ran.append(trial.number)
        return train(trial)

    search(study_on(storage, study_name="search", load_if_exists=True), objective, 2, n_trials=n_trials)
    storage.engine.dispose()
    return ran


def test_two_processes_share_a_study_and_run_each_trial_once(tmp_path):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    study = study_on(url, study_name="search")
    environment = {**os.environ, "PYTHONPATH": python_path(Path(__file__).parent)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    other = subprocess.Popen([sys.executable, "-c", OTHER, url], env=environment, **pipes)
    try:
        assert other.stdout.readline() == "ready\n"
        other.stdin.write("go\n")
        other.stdin.flush()
        here = share(url, 7)
        there = json.loads(other.communicate(timeout=WAIT_S)[0])
    finally:
        other.kill()
        other.wait()
    assert (len(here), len(there)) == (7, 5)
    assert sorted(here + there) == list(range(12))
    check_told(study.trials, range(12))


def test_two_threads_search_one_study_at_once():
    """Each search once put its own `ask` into the study, so that each waited for a place in the other."""
    study = study_on()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        searches = [threads.submit(search, study, train, concurrency, n_trials=4) for concurrency in (1, 2)]
        assert [done.result(WAIT_S) for done in searches] == [None, None]
    check_told(study.trials, range(8))
    assert vars(study).keys() == vars(study_on()).keys(), "nothing is left in it"


# ---- heartbeats ----------------------------------------------------------------------------------------

BEATS = "SELECT heartbeat > datetime('now', '-1 minute') FROM trial_heartbeats"
STALE = "UPDATE trial_heartbeats SET heartbeat = datetime('now', '-1 hour')"


def beating(folder, **options):
    """A storage whose trials beat each second and are stale after a minute."""
    return RDBStorage(
        f"sqlite:///{folder / 'study.db'}", engine_kwargs=LOCK, heartbeat_interval=1, grace_period=60, **options
    )


def wait_for_beat(storage, timeout_s):
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        with storage.engine.connect() as connection:
            if connection.execute(sqlalchemy.text(BEATS)).scalar():
                return
        threading.Event().wait(0.05)


def seen_by_another_worker(folder, timeout_s):
    """The state of a trial after a step in which an hour has passed for all beats but those of the step itself."""
    storage, elsewhere = beating(folder), beating(folder)
    study = study_on(storage, study_name="search")
    inside, go_on = threading.Event(), threading.Event()

    class Slow(torch.nn.Module):
        def forward(self, x):
            inside.set()
            assert go_on.wait(WAIT_S)
            return x

    def objective(trial):
        model = hydra_tune.prepare(torch.nn.Sequential(Net(), Slow()))
        model(torch.randn(4, WIDTH)).sum().backward()
        return 1.0

    def look():
        try:
            assert inside.wait(WAIT_S)
            with elsewhere.engine.begin() as connection:
                connection.execute(sqlalchemy.text(STALE))
            wait_for_beat(elsewhere, timeout_s)
            optuna.storages.fail_stale_trials(optuna.load_study(study_name="search", storage=elsewhere))
        finally:
            go_on.set()

    other = threading.Thread(target=look)
    other.start()
    with suppress(ValueError, optuna.exceptions.UpdateFinishedTrialError):  # of a trial that was failed
        search(study, objective, 2, n_trials=1)
    other.join()
    storage.engine.dispose(), elsewhere.engine.dispose()
    (trial,) = study.trials
    return trial.state


def test_a_step_longer_than_the_grace_period_lets_no_other_worker_take_its_trial_for_dead(tmp_path):
    assert seen_by_another_worker(tmp_path, WAIT_S) is TrialState.COMPLETE


def test_without_heartbeats_another_worker_fails_the_trial(tmp_path, monkeypatch):
    """So the test above would notice."""
    monkeypatch.setattr(
        optuna.storages._heartbeat.HeartbeatThread,
        "_record_heartbeat",
        staticmethod(lambda trial, storage, _: storage.record_heartbeat(trial)),
    )
    assert seen_by_another_worker(tmp_path, 1.2) is TrialState.FAIL


def test_a_trial_whose_worker_died_is_run_again(tmp_path):
    retry = getattr(optuna.storages, "RetryHeartbeatStaleTrialCallback", None)
    argument = "heartbeat_stale_trial_callback" if retry else "failed_trial_callback"  # before Optuna 4.9
    retry = retry or optuna.storages.RetryFailedTrialCallback
    storage = beating(tmp_path, **{argument: retry(max_retry=1)})
    study = study_on(storage)
    with pytest.warns(UserWarning, match="Heartbeat"):
        dead = study.ask()
    x = square(dead) and dead.params["x"]
    storage.record_heartbeat(dead._trial_id)
    with storage.engine.begin() as connection:
        connection.execute(sqlalchemy.text(STALE))
    search(study, square, 2, n_trials=1)
    lost, again = study.trials
    assert (lost.state, again.state) == (TrialState.FAIL, TrialState.COMPLETE)
    assert again.params["x"] == x and again.value == x**2
    assert retry.retried_trial_number(again) == 0 and retry.retry_history(again) == [0]
    storage.engine.dispose()


# ---- sessions ------------------------------------------------------------------------------------------


def threads_with_a_session(folder, concurrency):
    """Those that ran objectives and hold a session of the storage's when the search is over; and how many ran some."""
    storage = RDBStorage(f"sqlite:///{folder / 'study.db'}", engine_kwargs=LOCK)
    study = study_on(storage)
    hold, ran, together = set(), set(), threading.Barrier(concurrency)
    remove = storage.remove_session

    def remove_session():
        remove()
        if not storage.scoped_session.registry.has():
            hold.discard(threading.get_ident())

    def objective(trial):
        ran.add(threading.get_ident())
        together.wait(WAIT_S)
        if trial.number % 4 == 1:
            raise optuna.TrialPruned
        if trial.number % 4 == 2:
            raise KeyError
        return float("nan") if trial.number % 4 == 3 else square(trial)

    storage.remove_session = remove_session
    sqlalchemy.event.listen(
        storage.scoped_session.session_factory, "after_begin", lambda *_: hold.add(threading.get_ident())
    )
    search(study, objective, concurrency, n_trials=8, catch=KeyError)
    storage.engine.dispose()
    return hold & ran, len(ran)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_every_thread_that_ran_a_trial_gives_its_session_back(concurrency, tmp_path, monkeypatch):
    """Optuna puts a cache before each RDBStorage, which does not pass this on: here it does."""
    cache = optuna.storages._CachedStorage
    monkeypatch.setattr(cache, "remove_session", lambda cached: cached._backend.remove_session())
    assert threads_with_a_session(tmp_path, concurrency) == (set(), concurrency)
    (tmp_path / "study.db").unlink()
    monkeypatch.setattr(cache, "remove_session", lambda _: None)
    left, ran = threads_with_a_session(tmp_path, concurrency)
    assert len(left) == ran == concurrency, "were they kept, it would be noticed"


# ---- arguments of optimize -----------------------------------------------------------------------------


def test_callbacks_get_each_trial_once_as_it_was_told():
    """Also a failed one whose exception is caught, and a pruned one. The pool's figures are among what was told."""
    got = []

    def objective(trial):
        train(trial)
        if trial.number == 1:
            raise KeyError("caught")
        if trial.number == 2:
            raise optuna.TrialPruned
        return 1.0

    study = study_on()
    search(study, objective, n_trials=6, catch=(KeyError,), callbacks=iter([lambda s, t: got.append((s, t))]))
    trials = study.trials
    assert {t.number: t.state for t in trials if t.state is not TrialState.COMPLETE} == {
        1: TrialState.FAIL,
        2: TrialState.PRUNED,
    }
    assert all(of is study for of, _ in got)
    assert sorted((t for _, t in got), key=lambda t: t.number) == trials
    assert all(t.user_attrs["hydra/steps"] == 1 for _, t in got)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_an_objective_may_search_another_study_but_not_its_own(concurrency):
    def objective(trial):
        with pytest.raises(RuntimeError):
            search(study, square, concurrency, n_trials=1)
        other = study_on()
        search(other, square, concurrency, n_trials=2)
        return other.best_value

    study = study_on()
    search(study, objective, concurrency, n_trials=4)
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 4


def test_a_callback_that_stops_the_study_lets_those_that_run_end():
    def stop(study, trial):
        if len(study.get_trials(states=[TrialState.COMPLETE])) >= 5:
            study.stop()

    study = study_on()
    search(study, square, n_trials=100, callbacks=[stop])
    assert {t.state for t in study.trials} == {TrialState.COMPLETE}
    assert 5 <= len(study.trials) <= 5 + 4


def test_after_the_timeout_no_trial_begins(monkeypatch):
    """Seconds pass as a trial says."""
    passed, zero = [0.0], datetime.datetime.now()
    now = types.SimpleNamespace(now=lambda: zero + datetime.timedelta(seconds=passed[0]))
    monkeypatch.setattr(_optimize, "datetime", types.SimpleNamespace(datetime=now))

    def objective(trial):
        if trial.number == 5:
            passed[0] = 61.0
        return square(trial)

    study = study_on()
    search(study, objective, n_trials=100, timeout=60.0)
    assert {t.state for t in study.trials} == {TrialState.COMPLETE}
    assert 6 <= len(study.trials) <= 6 + 4


def test_enqueued_trials_run_once_each_and_added_ones_count():
    study = study_on()
    study.add_trial(
        optuna.create_trial(
            params={"x": 0.0}, distributions={"x": optuna.distributions.FloatDistribution(-1, 1)}, value=0.0
        )
    )
    queued = [0.25, 0.5, 0.75]
    for x in queued:
        study.enqueue_trial({"x": x})
    search(study, square, n_trials=6)
    trials = study.trials
    assert [t.number for t in trials] == list(range(7))
    assert [t.params["x"] for t in trials[:4]] == [0.0, *queued]
    assert all(t.value == t.params["x"] ** 2 for t in trials)
    assert study.best_trial.number == 0


def test_several_objectives_are_told_and_one_that_is_nan_prunes_the_trial():
    def objective(trial):
        x = square(trial) and trial.params["x"]
        return (float("nan") if trial.number == 2 else x, 1.0 - x)

    study = study_on(directions=["minimize", "maximize"])
    search(study, objective, n_trials=6)
    trials = study.trials
    assert {t.state for t in trials if t.number != 2} == {TrialState.COMPLETE}
    assert trials[2].state is TrialState.PRUNED
    assert "nan" in trials[2].user_attrs["hydra_tune: pruned because"]
    assert all(t.values == [t.params["x"], 1.0 - t.params["x"]] for t in trials if t.number != 2)
    assert [t.values[0] for t in study.best_trials] == [min(t.values[0] for t in trials if t.values)]


@pytest.mark.parametrize("collects", [True, False])
def test_what_trials_leave_is_collected_after_each_if_asked_for(collects):
    left, alive = [], []

    class Cycle:
        def __init__(self):
            self.itself = self

    def objective(trial):
        alive.append(any(cycle() is not None for cycle in left))
        left.append(weakref.ref(Cycle()))
        return square(trial)

    gc.disable()
    try:
        search(study_on(), objective, 1, n_trials=3, gc_after_trial=collects)
    finally:
        gc.enable()
    assert alive == ([False] * 3 if collects else [False, True, True])


def test_progress_counts_all_trials(caplog):
    """Where there is no terminal, in a line of the log."""
    caplog.set_level("INFO", "hydra_tune")
    search(study_on(), square, n_trials=8, show_progress_bar=True)
    assert any("8 of 8 done, 0 running" in line for line in caplog.messages)


def test_a_copy_of_the_study_that_an_objective_has_is_plain():
    copies = []

    def objective(trial):
        copies.extend([copy.deepcopy(trial.study), pickle.loads(pickle.dumps(trial.study))])
        return 0.0

    study = optuna.create_study(study_name="mine")
    hydra_tune.optimize(study, objective, 1, pool=hydra_tune.ShardPool(["cpu"], "1MiB"))
    for each in copies:
        assert type(each) is optuna.Study and each.study_name == "mine"
        each.tell(each.ask(), 1.0)
