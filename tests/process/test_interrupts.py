"""Ctrl-C while several trials run: they stop at their next task boundary, are told, and leave nothing."""

import itertools
import json
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import optuna
import pytest
import torch
from optuna.trial import TrialState

import hydra_tune
from hydra_tune.integrations.optuna_runner import live_trials
from hydra_tune.planning.optimizer_memory import training_bytes
from models import BUDGETS, WIDTH, Net
from paths import HELPERS

WAIT_S = 60.0
SEARCH = """
import json, signal, sys, threading, time
import optuna, torch
import hydra_tune
from models import BUDGETS, WIDTH, Net

optuna.logging.set_verbosity(optuna.logging.ERROR)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells switch off for what runs in the background

def objective(trial):
    model = Net()
    model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(100_000):
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            print("trains", flush=True)
    return 0.0

study = optuna.create_study(storage=sys.argv[1], study_name="search")
pool = hydra_tune.ShardPool(["cpu", "cpu"], BUDGETS["spilled"])
try:
    hydra_tune.HydraTrialRunner(pool, 4).optimize(study, objective, n_trials=100)
except KeyboardInterrupt:
    left = [thread.name for thread in threading.enumerate() if "copies" not in thread.name]
    print(json.dumps({"used": [d.used_bytes for d in pool.devices], "threads": left}), flush=True)
"""


def interrupt_a_search(after_s, tmp_path, search=SEARCH):
    """What it prints at its end; and the states of its trials."""
    storage = f"sqlite:///{tmp_path / 'search.db'}"
    child = subprocess.Popen([sys.executable, "-c", search, storage], stdout=subprocess.PIPE, text=True, cwd=HELPERS)
    try:
        assert child.stdout.readline().startswith("trains")  # perhaps of two at once
        threading.Event().wait(after_s)
        child.send_signal(signal.SIGINT)
        output, _ = child.communicate(timeout=WAIT_S)
    finally:
        child.kill()
    states = [t.state for t in optuna.load_study(study_name="search", storage=storage).trials]
    last = output.splitlines()[-1:]
    return child.returncode, json.loads(last[0]) if last and last[0].startswith("{") else None, states


@pytest.mark.proof
def test_a_search_in_another_thread_is_interrupted_with_the_main_one(tmp_path):
    """Which ends of Ctrl-C, and then the process waited until the search was over."""
    search = SEARCH.replace("try:\n    hydra_tune.", "def run():\n  try:\n    hydra_tune.").replace(
        "except Key", "  except Key"
    )
    waits = "thread = threading.Thread(target=run{daemon})\nthread.start()\n{wait}"
    ways = itertools.product(("", ", daemon=True"), ("thread.join()", "threading.Event().wait()"), (4, 1))
    for number, (daemon, wait, concurrency) in enumerate(ways):
        folder = tmp_path / str(number)
        folder.mkdir()
        variant = search.replace("Runner(pool, 4)", f"Runner(pool, {concurrency})")
        status, left, states = interrupt_a_search(0.5, folder, variant + waits.format(daemon=daemon, wait=wait))
        assert status == -signal.SIGINT, "as any script ends of it"
        if not daemon and wait != "thread.join()":  # for the others the interpreter does not wait: see bpo-45274
            assert left["used"] == [0, 0]
        assert set(states) == {TrialState.FAIL}


def check_interruptions(seed, times, tmp_path):
    rng = random.Random(seed)
    for number in range(times):
        folder = tmp_path / str(number)
        folder.mkdir()
        status, left, states = interrupt_a_search(rng.uniform(0.0, 1.0), folder)
        assert status == 0
        assert left == {"used": [0, 0], "threads": ["MainThread"]}
        assert set(states) == {TrialState.FAIL}, "none is left running"
        assert 1 <= len(states) <= 4


def test_a_search_that_is_interrupted_ends_and_leaves_nothing(tmp_path):
    check_interruptions(0, 2, tmp_path)


@pytest.mark.proof
def test_a_search_that_is_interrupted_at_fifty_moments_ends_and_leaves_nothing(tmp_path):
    check_interruptions(1, 50, tmp_path)


def search_with(objective, n_trials=2, **options):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    pool = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"], **options)
    hydra_tune.HydraTrialRunner(pool, 2).optimize(study, objective, n_trials=n_trials)
    return study


def test_an_interruption_stops_also_who_waits_for_host_memory_and_who_only_reports(monkeypatch):
    """Ctrl-C is raised in the main thread, which waits for the search; here that wait raises by itself."""
    now = threading.Event()

    def interrupted(ended):
        assert now.wait(WAIT_S)
        raise KeyboardInterrupt

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    pool = hydra_tune.ShardPool(["cpu"], BUDGETS["resident"], host_memory=training_bytes(Net(), None) * 3 // 2)

    def objective(trial):
        hydra_tune.prepare(Net())  # the other one waits
        for step in itertools.count():
            if any("waits" in t["state"] for t in pool.report()["trials"]):
                now.set()
            trial.report(0.0, step)

    monkeypatch.setattr(live_trials, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hydra_tune.HydraTrialRunner(pool, 2).optimize(study, objective, n_trials=10)
    assert [t.state for t in study.trials] == [TrialState.FAIL] * 2
    assert pool.devices[0].used_bytes == 0


def test_a_trial_that_can_never_fit_and_one_whose_value_is_nan_are_pruned_with_the_reason():
    def objective(trial):
        if trial.number == 0:
            return float("nan")
        model = hydra_tune.prepare(Net(depth=6 if trial.number == 2 else 600))
        model(torch.randn(4, WIDTH)).sum().backward()
        return 1.0

    need = training_bytes(Net(), None)
    study = search_with(objective, 3, host_memory=4 * need)
    assert [t.state for t in study.trials] == [TrialState.PRUNED, TrialState.PRUNED, TrialState.COMPLETE]
    reasons = [t.user_attrs.get("hydra_tune: pruned because") for t in study.trials]
    assert reasons[0] == "its value is nan"
    assert "of host memory" in reasons[1]
    assert reasons[2] is None


def test_a_trial_carries_the_pools_figures():
    def objective(trial):
        model = hydra_tune.prepare(Net())
        for _ in range(3):
            model(torch.randn(4, WIDTH)).sum().backward()
            if trial.number:
                raise optuna.TrialPruned
        return 1.0

    done, pruned = search_with(objective).trials
    assert (done.user_attrs["hydra/steps"], pruned.user_attrs["hydra/steps"]) == (3, 1)
    figures = done.user_attrs
    assert figures["hydra/state"] == "spilled"
    assert figures["hydra/busy_s"] > 0 and figures["hydra/promoted_mib"] > 0 and figures["hydra/shards"] > 1
    assert all(isinstance(value, (str, int, float)) for value in figures.values()), "a dashboard sorts them"


def test_of_several_models_a_trial_carries_the_figures_of_the_one_that_made_the_most_steps():
    """A model that was released and prepared again to be evaluated left the evaluation's."""

    def objective(trial):
        for steps, depth in ((3, 2), (3, 6), (1, 2)):
            model = hydra_tune.prepare(Net(depth=depth))
            for _ in range(steps):
                model(torch.randn(4, WIDTH)).sum().backward()
            hydra_tune.release(model)
        return 1.0

    figures = search_with(objective, 1).trials[0].user_attrs
    assert figures["hydra/steps"] == 3
    weights_mib = sum(4 * p.numel() for p in Net(depth=6).parameters()) / 2**20
    assert figures["hydra/weights_mib"] >= weights_mib - 0.001, "the last among equals"


def test_errors_of_a_search_are_its_own_in_the_thread_it_was_called_in():
    def objective(trial):
        raise ValueError(f"of trial {trial.number}")

    with pytest.raises(ValueError, match="of trial"):  # of the last two, stock Optuna says nothing either
        search_with(objective, 6)
    study = optuna.create_study()
    runner = hydra_tune.HydraTrialRunner(hydra_tune.ShardPool(["cpu"], "1MiB"), 2)
    runner.optimize(study, objective, n_trials=4, catch=ValueError)
    assert [t.state for t in study.trials] == [TrialState.FAIL] * 4
    with pytest.raises(TypeError):
        runner.optimize(study, objective, n_trials="many")


def test_a_study_that_is_stopped_lets_running_trials_end():
    def objective(trial):
        trial.study.stop()
        return 1.0

    assert 1 <= len(search_with(objective, 20).trials) <= 3


@pytest.mark.parametrize("when", ["before it began", "after it began"])
def test_an_interruption_while_a_search_begins_waits_for_no_search_that_will_not(monkeypatch, when):
    begun, stopped, late = threading.Event(), threading.Event(), []

    class Executor(ThreadPoolExecutor):
        def submit(self, *call):
            late.append(call)
            if when == "after it began":
                super().submit(*call)
                assert begun.wait(WAIT_S)
            raise KeyboardInterrupt

    def optimize():
        begun.set()
        assert stopped.wait(WAIT_S)

    monkeypatch.setattr(live_trials, "ThreadPoolExecutor", Executor)
    with pytest.raises(KeyboardInterrupt):
        live_trials.LiveTrials().wait_for(optimize, stopped.set)
    ((call, *arguments),) = late
    call(*arguments)
    assert begun.is_set() == (when == "after it began")
