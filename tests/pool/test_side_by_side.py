"""A trial gives the same numbers alone and in company: four in four threads, on one device and on two."""

import functools
import multiprocessing
import threading

import optuna
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hydra_tune
from comparison import assert_same
from hydra_tune.integrations.optuna_runner import attempt
from hydra_tune.trials.context import current_context
from models import gpt
from waiting import WAIT_S, wait_until

STEPS = 6
RATES = {0: 1e-3, 1: 3e-3, 2: 5e-4, 3: 2e-3}


def objective_with(num_workers, results, prepared=True):
    """Trains with dropout, its own seed and a shuffling loader; leaves losses and weights in `results`."""

    def objective(trial):
        torch.manual_seed(100 + trial.number)
        data = TensorDataset(torch.randint(0, 128, (48, 16)), torch.randint(0, 128, (48, 16)))
        loader = DataLoader(data, batch_size=2, shuffle=True, num_workers=num_workers)
        model = gpt(dropout=0.2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATES[trial.number])
        if prepared:
            model, optimizer, loader = hydra_tune.prepare(model, optimizer, loader)
        losses = []
        for _, (x, y) in zip(range(STEPS), loader, strict=False):
            loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert len(losses) == STEPS
        results[trial.number] = losses, [p.detach().clone() for p in model.parameters()], torch.rand(3)
        return losses[-1]

    return objective


class FixedTrial:
    def __init__(self, number):
        self.number = number


@functools.cache
def plain_results(num_workers, num_threads):
    results = {}
    for number in RATES:
        objective_with(num_workers, results, prepared=False)(FixedTrial(number))
    return results


def run_in_pool(devices, num_workers, concurrency):
    weights = sum(p.numel() * p.element_size() for p in gpt().parameters())
    results = {}
    with hydra_tune.ShardPool(devices, weights // 2) as pool:
        runner = hydra_tune.HydraTrialRunner(pool, concurrency=concurrency)
        runner.optimize(optuna.create_study(), objective_with(num_workers, results), n_trials=len(RATES))
        report = pool.report()
    assert {t["steps"] for t in report["trials"]} == {STEPS}
    assert all(not t["resident"] and len(t["shards"]) > 2 for t in report["trials"])
    assert all(device["used_bytes"] == 0 for device in report["devices"])
    return results, report


def in_order(results):
    return sorted(results.items())  # by number, each of which is there once


@functools.cache
def results_alone(num_workers, num_threads):
    return run_in_pool(["cpu"], num_workers, concurrency=1)[0]


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.proof), 2])
@pytest.mark.parametrize(
    "devices",
    [pytest.param(["cpu"], marks=pytest.mark.proof), ["cpu", "cpu"]],
    ids=["one device", "two devices"],
)
def test_four_trials_in_four_threads_equal_each_alone_and_plain_pytorch(devices, num_workers):
    together, report = run_in_pool(devices, num_workers, concurrency=4)
    for others in (results_alone, plain_results):
        assert_same(in_order(together), in_order(others(num_workers, torch.get_num_threads())))
    assert {t["device"] for t in report["trials"]} == {d["name"] for d in report["devices"]}
    assert len({str(t["shards"]) for t in report["trials"]}) == 1, "trials of one architecture share one partition"
    assert len({t["step_bytes"] for t in report["trials"]}) == 1


def test_loader_workers_of_a_trial_end_without_an_error():
    """They are forked in an executor's thread. CPython then tried to join that thread from itself, every worker
    ended with exit code 1, and PyTorch raised in the main thread if it noticed before the loader was gone."""
    codes = []

    def objective(trial):
        loader = iter(DataLoader(TensorDataset(torch.zeros(4)), num_workers=2))
        workers = multiprocessing.active_children()
        assert len(list(loader)) == 4
        del loader
        for worker in workers:
            worker.join()
        codes.extend(worker.exitcode for worker in workers)
        return 0.0

    hydra_tune.HydraTrialRunner(hydra_tune.ShardPool(["cpu"], "1MiB"), 2).optimize(
        optuna.create_study(), objective, n_trials=1
    )
    assert codes == [0, 0]


def test_models_are_built_one_after_another(monkeypatch):
    """Threads that build at once hand the interpreter on at each operator, which takes several times as long."""
    monkeypatch.setattr(attempt, "STAGGER_S", WAIT_S)
    building, most_building, trained = [], [], threading.Barrier(4, timeout=WAIT_S)

    def objective(trial):
        building.append(trial.number)
        most_building.append(len(building))
        model = nn.Linear(2, 2)
        building.remove(trial.number)
        model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters()))
        trained.wait()  # all four live together
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return 0.0

    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=4).optimize(optuna.create_study(), objective, n_trials=4)
    assert most_building == [1] * 4


def test_an_objective_that_prepares_nothing_yet_keeps_the_next_one_waiting_for_a_moment_only():
    all_started = threading.Barrier(3, timeout=WAIT_S)

    def objective(trial):
        all_started.wait()
        return 0.0

    study = optuna.create_study()
    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=3).optimize(study, objective, n_trials=3)
    assert [trial.value for trial in study.trials] == [0.0] * 3, "the barrier was passed by all three"


class LargeTable(nn.Module):
    """Holds for life more than its blocks need: a parameter outside of them."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(2000, 32))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(4))

    def forward(self, ids):
        x = self.table[ids]
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_steps_that_prove_too_large_to_run_beside_each_other_take_turns():
    """Both trials are admitted by the estimate; then the first step measures a loss that no pilot sees. Each
    waited for the bytes that the other holds."""
    losses, together = {}, threading.Barrier(2, timeout=WAIT_S)

    def others_wait():
        device = pool.events.machine.devices[0]
        return device.entries or device.admissions

    def train(number, prepared):
        torch.manual_seed(number)
        model = LargeTable()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if prepared:
            model, optimizer = hydra_tune.prepare(model, optimizer)
            together.wait()  # the second one's pilot is asked for before the first one's step
        for step in range(3):
            output = model(torch.randint(0, 2000, (16,)))
            if prepared and step == 0 and not losses:
                losses[number] = []
                wait_until(others_wait, "the other is admitted, and waits for its first step")
            loss = (output.flatten().repeat(10) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    def objective(trial):
        losses[trial.number] = list(train(trial.number, prepared=True))
        return losses[trial.number][-1]

    with hydra_tune.ShardPool(["cpu"], 1_650_000) as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=2).optimize(optuna.create_study(), objective, n_trials=2)
        report = pool.report()
    trial = report["trials"][0]
    task_bytes = max(s["slot_bytes"] + s["backward_work_bytes"] for s in trial["shards"])
    assert 2 * trial["held_bytes"] + trial["step_bytes"] + task_bytes > 1_650_000, "both would fit"
    assert losses == {number: list(train(number, prepared=False)) for number in (0, 1)}


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_what_objectives_report_reaches_the_policy(direction):
    seen = {}

    def objective(trial):
        model = hydra_tune.prepare(gpt(depth=1))
        for step, value in enumerate((3.0, trial.number + 1)):
            trial.report(value, step)
            progress = pool.events.machine.trials[current_context().trials[0].id].progress
            seen[trial.number, step] = progress.value, progress.maximizes
        hydra_tune.release(model)
        trial.report(9.0, 2)
        return 0.0

    study = optuna.create_study(direction=direction)
    with hydra_tune.ShardPool(["cpu"], "8MiB", policy="best-first") as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=2).optimize(study, objective, n_trials=2)
    maximizes = direction == "maximize"
    values = {(0, 0): 3.0, (0, 1): 1.0, (1, 0): 3.0, (1, 1): 2.0}
    assert seen == {key: (value, maximizes) for key, value in values.items()}
    assert [trial.intermediate_values for trial in study.trials] == [{0: 3.0, 1: n + 1.0, 2: 9.0} for n in range(2)]


def test_held_weights_stay_where_they_are_once_training_and_evaluation_have_been_measured():
    places, steps = [], 4

    def objective(trial):
        torch.manual_seed(0)
        model = Scaled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hydra_tune.prepare(model, optimizer)
        for _ in range(steps):
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            places.append(model.scale.data)  # kept, so that no other memory gets its address
            with torch.no_grad():
                model(torch.randn(4, 64))
        return 0.0

    with hydra_tune.ShardPool(["cpu"], "130KiB") as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(optuna.create_study(), objective, n_trials=1)
        (trial,) = pool.report()["trials"]
    assert not trial["resident"] and len(places) == steps
    assert len({place.data_ptr() for place in places[1:]}) == 1


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])

    def forward(self, x):
        x = x * self.scale
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x
