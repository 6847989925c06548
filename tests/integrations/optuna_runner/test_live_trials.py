"""Trials that are paused, resumed, stopped and cloned while they run; and as many as host memory holds."""

import threading
import time

import optuna
import pytest
import torch
from optuna.trial import TrialState

import hydra_tune
from hydra_tune.planning.optimizer_memory import training_bytes
from hydra_tune.process.interrupts import Stop
from models import BUDGETS, WIDTH, Net
from waiting import WAIT_S, wait_until


class Search:
    """In a thread, on a pool of its own; each trial trains until `enough`."""

    def __init__(self, tmp_path=None, n_trials=2, concurrency=2, budget="spilled"):
        self.pool = hydra_tune.ShardPool(["cpu"], BUDGETS[budget], seed=0)
        self.runner = hydra_tune.HydraTrialRunner(self.pool, concurrency, checkpoint_dir=tmp_path)
        self.study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
        self.steps, self.enough, self.first_weights = {}, threading.Event(), {}
        options = {"n_trials": n_trials}
        self.thread = threading.Thread(target=self.runner.optimize, args=(self.study, self.objective), kwargs=options)

    def objective(self, trial):
        lr = trial.suggest_float("lr", 0.01, 0.1)
        model = Net(depth=3)
        model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
        self.first_weights[trial.number] = model.head.weight.detach().clone()
        while not self.enough.is_set():
            loss = model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.steps[trial.number] = self.steps.get(trial.number, 0) + 1
            trial.report(float(self.steps[trial.number]), self.steps[trial.number])
        return loss.item()

    def __enter__(self):
        self.thread.start()
        wait_until(lambda: len(self.steps) >= min(2, self.runner.concurrency or 2))
        return self

    def __exit__(self, *error):
        self.enough.set()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        assert self.pool.devices[0].used_bytes == 0

    def state(self, number):
        return next(t["state"] for t in self.pool.report()["trials"] if t["name"] == f"trial {number}")

    def goes_on(self, number):
        before = self.steps[number]
        wait_until(lambda: self.steps[number] >= before + 3)


def test_a_paused_trial_rests_while_others_go_on(tmp_path):
    with Search() as search:
        search.runner.pause(0)
        search.goes_on(1)
        made = search.steps[0]
        search.goes_on(1)
        assert search.steps[0] <= made + 1
        assert search.state(0) == "paused" and search.state(1) == "live"
        search.runner.resume(0)
        search.goes_on(0)
        assert search.state(0) == "live"
    assert {t.state for t in search.study.trials} == {TrialState.COMPLETE}


def test_a_pause_that_is_asked_for_while_the_trial_is_stopped_holds_nobody(monkeypatch):
    """By two threads: `optimize` never came back."""
    stop = Stop()
    clear = stop.goes_on.clear
    monkeypatch.setattr(stop.goes_on, "clear", lambda: (stop("enough"), clear()))
    stop.goes_on.clear()
    assert not stop.is_paused


@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
def test_a_trial_that_is_stopped_is_told_as_pruned_at_its_last_value(paused):
    with Search() as search:
        if paused:
            search.runner.pause(search.study.trials[1])
        search.runner.stop(search.study.trials[1])
        wait_until(lambda: search.study.trials[1].state is TrialState.PRUNED)
        search.goes_on(0)
    stopped = search.study.trials[1]
    assert stopped.value == stopped.last_step and search.steps[1] - 1 <= stopped.last_step <= search.steps[1]
    assert stopped.user_attrs["hydra_tune: pruned because"] == "it was stopped by hand"


@pytest.mark.parametrize("concurrency", [2, None])
def test_a_whole_search_is_stopped_from_another_thread(concurrency):
    with Search(n_trials=1_000, concurrency=concurrency) as search:
        search.runner.pause(0)
        search.runner.stop()
        search.thread.join(WAIT_S)
        assert not search.thread.is_alive()
    assert {t.state for t in search.study.trials} == {TrialState.PRUNED} and len(search.study.trials) < 20


def test_a_clone_starts_from_a_live_trials_weights(tmp_path):
    with Search(tmp_path, n_trials=3) as search:
        search.runner.clone(0, lr=0.05)
        wait_until(lambda: len(search.study.trials) == 3)
        search.runner.stop(1)  # which makes room for it
        wait_until(lambda: 2 in search.steps)
    cloned = search.study.trials[2]
    assert cloned.params == {"lr": 0.05} and cloned.user_attrs["hydra_tune: cloned from"] == 0
    assert not torch.equal(search.first_weights[2], search.first_weights[0]), "it has trained since"


def test_a_clones_weights_are_the_donors_to_the_bit(tmp_path):
    donor = {}

    def objective(trial):
        model = hydra_tune.prepare(model := Net(depth=3))
        weights = [p.detach().clone() for p in model.parameters()]
        trial.suggest_float("lr", 0.0, 1.0)
        if trial.number == 1:
            assert hydra_tune.resume_step() == 0
            assert all(map(torch.equal, weights, donor["weights"]))
            return 1.0
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        donor["weights"] = [p.detach().clone() for p in model.parameters()]
        runner.clone(trial, lr=0.25)
        model(torch.randn(4, WIDTH))
        return 0.0

    pool = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"])
    runner = hydra_tune.HydraTrialRunner(pool, 1, checkpoint_dir=tmp_path)
    study = optuna.create_study()
    runner.optimize(study, objective, n_trials=2)
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 2
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_does_not_live_or_fit_is_refused_with_what_does(tmp_path):
    with Search(tmp_path) as search:
        for ask in (search.runner.pause, search.runner.resume, search.runner.stop, search.runner.clone):
            with pytest.raises(hydra_tune.ConfigError, match=r"but 7 is not among those that do, \[0, 1\]"):
                ask(7)
        with pytest.raises(hydra_tune.ConfigError, match=r"\['lr'\]; \['rate'\] are not among them"):
            search.runner.clone(0, rate=1.0)
        for outside in (7.0, "fast"):
            with pytest.raises(hydra_tune.ConfigError, match=f"but lr is {outside!r}, not in Float"):
                search.runner.clone(0, lr=outside)
        for nothing in ("0", None, True):
            with pytest.raises(hydra_tune.ConfigError, match="a trial is optuna's, or its number"):
                search.runner.pause(nothing)
    with Search() as search, pytest.raises(hydra_tune.ConfigError, match="checkpoint_dir"):
        search.runner.clone(0)


# ---- concurrency by host memory ----------------------------------------------------------------------


def most_at_once(host_memory, n_trials=8, devices=("cpu",), **options):
    live, most, lock = set(), [], threading.Lock()

    def objective(trial):
        model = hydra_tune.prepare(Net(depth=3))
        with lock:
            live.add(trial.number)
            most.append(len(live))
        for _ in range(10):
            model(torch.randn(4, WIDTH)).sum().backward()
            time.sleep(0.01)
        with lock:
            live.discard(trial.number)
        return 0.0

    pool = hydra_tune.ShardPool(list(devices), BUDGETS["spilled"], host_memory=host_memory)
    study = optuna.create_study()
    hydra_tune.optimize(study, objective, n_trials, pool=pool, **options)
    assert {t.state for t in study.trials} == {TrialState.COMPLETE} and len(study.trials) == n_trials
    return max(most)


def test_as_many_trials_live_as_host_memory_holds():
    a_trial = training_bytes(Net(depth=3), None)
    assert most_at_once(5 * a_trial + 100) in (4, 5), "five fit; the last may come when the first has ended"
    assert most_at_once(2 * a_trial) == 2
    assert most_at_once(a_trial) == 1, "two may ask, one waits for the other's memory"


def test_no_more_live_than_are_asked_for():
    a_trial = training_bytes(Net(depth=3), None)
    assert most_at_once(8 * a_trial, concurrency=3) == 3
    assert most_at_once(8 * a_trial, n_trials=1) == 1


@pytest.mark.parametrize(("n_jobs", "instead"), [(4, "Write concurrency=4"), (1, "Write concurrency=1"), (-1, "Leave")])
def test_n_jobs_is_refused_with_the_name_of_what_says_it_here(n_jobs, instead):
    """It was a TypeError."""
    pool, study = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]), optuna.create_study()
    for call in (
        lambda: hydra_tune.HydraTrialRunner(pool, n_jobs=n_jobs),
        lambda: hydra_tune.HydraTrialRunner(pool).optimize(study, lambda trial: 0.0, 1, n_jobs=n_jobs),
        lambda: hydra_tune.optimize(study, lambda trial: 0.0, 1, pool=pool, n_jobs=n_jobs),
    ):
        with pytest.raises(hydra_tune.ConfigError, match=rf"^concurrency, of .*; got n_jobs={n_jobs}\. {instead}"):
            call()
    assert not study.trials
    with pytest.raises(TypeError, match="n_job"):
        hydra_tune.HydraTrialRunner(pool, n_job=2)


def test_a_search_that_grows_ends_when_it_is_stopped_or_its_time_is_over():
    def objective(trial):
        hydra_tune.prepare(Net(depth=3))(torch.randn(4, WIDTH)).sum().backward()
        if trial.number == 3:
            trial.study.stop()
        return 0.0

    pool = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"], host_memory="1MiB")
    study = optuna.create_study()
    hydra_tune.optimize(study, objective, 1_000, pool=pool)
    assert 4 <= len(study.trials) < 100, "all that live at once may have begun"
    hydra_tune.optimize(study, lambda trial: time.sleep(0.2) or 0.0, timeout=0.3, pool=pool)
    assert all(t.state is TrialState.COMPLETE for t in study.trials)
    assert "ask" not in vars(study) and "stop" not in vars(study), "the study is the user's again"


def test_a_waiting_trial_that_two_threads_get_begins_once(monkeypatch):
    """As SQLite gives it: the second one asks again."""
    study, begun = optuna.create_study(), []
    first = study.ask()
    given = iter([first, first, study.ask()])
    monkeypatch.setattr(study, "ask", lambda: next(given))
    pool = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"])
    hydra_tune.optimize(study, lambda trial: begun.append(trial.number) or 0.0, 2, pool=pool, concurrency=1)
    assert begun == [0, 1]


def test_an_error_ends_a_search_that_grows():
    def objective(trial):
        if trial.number == 2:
            raise ZeroDivisionError
        return 0.0

    with pytest.raises(ZeroDivisionError):
        hydra_tune.optimize(optuna.create_study(), objective, 100, pool=hydra_tune.ShardPool(["cpu"], "1MiB"))


def test_a_trial_stops_at_the_next_block_of_its_first_step_too():
    """Which may take long, for each block is measured."""
    ran = []

    class Notes(torch.nn.Linear):
        def __init__(self, number):
            super().__init__(WIDTH, WIDTH)
            self.number = number

        def forward(self, x):
            ran.append(self.number)
            if len(ran) == 2:
                runner.stop()
            return super().forward(x)

    def objective(trial):
        model = hydra_tune.prepare(torch.nn.Sequential(*map(Notes, range(6))))
        model(torch.randn(4, WIDTH)).sum().backward()

    runner = hydra_tune.HydraTrialRunner(hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]), 2)
    study = optuna.create_study()
    runner.optimize(study, objective, n_trials=1)
    assert study.trials[0].state is TrialState.PRUNED
    assert {*ran} == {0}, "no other block was run"
    assert runner.pool.devices[0].used_bytes == 0


# ---- memory as a constraint --------------------------------------------------------------------------


def test_a_model_that_needs_more_lacks_more():
    """Whether it is the block's weights that are too large, or what it computes, or the sum of all."""
    pool, widths = hydra_tune.ShardPool(["cpu"], "64KiB"), (16, 80, 100, 120, 200, 400)

    def objective(trial):
        width = trial.suggest_categorical("width", widths)
        model = hydra_tune.prepare(torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3))))
        model(torch.randn(4, width)).sum().backward()
        return 0.0

    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"width": list(widths)}, seed=0))
    hydra_tune.optimize(study, objective, len(widths), pool=pool, concurrency=1)
    lack = {trial.params["width"]: hydra_tune.memory_constraint(trial)[0] for trial in study.trials}
    assert lack[16] == 0
    assert [lack[w] for w in widths] == sorted(lack.values())
    assert len({lack[w] for w in widths if lack[w]}) == len([w for w in widths if lack[w]]) >= 4, lack


@pytest.mark.filterwarnings("ignore:Argument ``constraints_func`` is an experimental")
def test_a_sampler_with_the_constraint_learns_what_does_not_fit():
    def objective(trial):
        if hasattr(trial, "set_constraint"):
            assert hydra_tune.memory_constraint(trial) == (0.0,)
        depth = trial.suggest_int("depth", 1, 40)
        hydra_tune.prepare(Net(depth=depth))(torch.randn(4, WIDTH)).sum().backward()
        return 1.0 / depth  # the deeper the better, as far as it fits

    pool = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"], host_memory=training_bytes(Net(depth=10), None))
    before = {} if hasattr(optuna.Trial, "set_constraint") else {"constraints_func": hydra_tune.memory_constraint}
    sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=8, **before)
    study = optuna.create_study(sampler=sampler)
    hydra_tune.optimize(study, objective, 40, pool=pool, concurrency=1)
    lack = [hydra_tune.memory_constraint(t)[0] for t in study.trials]
    for trial, value in zip(study.trials, lack, strict=True):
        need = training_bytes(Net(depth=trial.params["depth"]), None) / pool.host_memory_bytes
        assert value == pytest.approx(max(0.0, need - 1.0))
        first = min(n for n, each in enumerate(lack) if each == 0)  # before it there is no value to tell
        told = not before and trial.number > first
        assert trial.state is (TrialState.PRUNED if value > 0 and not told else TrialState.COMPLETE)
        assert value == 0 or not told or "of host memory" in trial.user_attrs["hydra_tune: infeasible because"]
    assert sum(value > 0 for value in lack[20:]) <= sum(value > 0 for value in lack[:20])
    assert study.best_params["depth"] in (9, 10)


# ---- errors of the last trials, which Optuna drops where several run together --------------------------


def leave(trial):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("objective", "callback", "error"),
    [
        (lambda trial: "1.5", None, (RuntimeError, AssertionError)),
        (leave, None, SystemExit),
        (lambda trial: 1.0, lambda study, trial: 1 / 0, ZeroDivisionError),
    ],
    ids=["a value that is no number", "an exit", "in a callback"],
)
def test_errors_of_the_last_trials_are_raised(objective, callback, error):
    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool, pytest.raises(error):
        hydra_tune.HydraTrialRunner(pool, concurrency=3).optimize(
            optuna.create_study(), objective, n_trials=3, callbacks=callback and [callback]
        )
