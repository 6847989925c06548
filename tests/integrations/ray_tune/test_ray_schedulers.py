"""Tune's schedulers, searchers, stoppers and restarts over the pools, against a real local Ray."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
pytest.importorskip("ray")

import ray
import ray.tune
from ray.tune import schedulers
from ray.tune.schedulers.pb2 import PB2

import hydra_tune
from hydra_tune import HydraExecutor, tune
from ray_local import Results, empty_pool, local_ray

pytestmark = pytest.mark.filterwarnings("ignore")
EXECUTOR = HydraExecutor("256KiB", devices=["cpu"], concurrency=4)


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    with local_ray():
        yield


@pytest.fixture
def run(tmp_path):
    def run(train: Any, **options: Any) -> Any:
        options = {"verbose": 0, "storage_path": str(tmp_path), "reuse_actors": True, **options}
        analysis = ray.tune.run(hydra_tune.trainable(train, EXECUTOR), **options)
        empty_pool(EXECUTOR)
        return analysis

    return run


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.blake2b(digest_size=8)
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    for tensor in (*model.state_dict().values(), *momenta):
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


class Net(ray.tune.Trainable):
    """Its loss depends on its learning rate; says what it had when it was saved, and when it was loaded."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
        self.model, self.optimizer = hydra_tune.prepare(model, optimizer)
        self.loaded = ""

    def step(self) -> dict[str, Any]:
        if "apart" in self.config:
            time.sleep(9 + math.log10(self.config["lr"]))
        loss = self.model(torch.ones(4, 64)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        (group,) = self.optimizer.param_groups
        return {"loss": loss.item(), "loaded": self.loaded, "used_lr": group["lr"], "trained_in": os.getpid()}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], Path(checkpoint_dir, "state.pt"))
        Path(checkpoint_dir, "digest").write_text(digest(self.model, self.optimizer))

    def load_checkpoint(self, checkpoint: Any) -> None:
        model, optimizer = torch.load(Path(checkpoint, "state.pt"))
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config["lr"]
        self.loaded = digest(self.model, self.optimizer)
        assert self.loaded == Path(checkpoint, "digest").read_text(), "bit for bit"

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        hydra_tune.release(self.model)
        self.setup(new_config)
        return True


RATES = [1e-9, 1e-8, 1e-2, 2e-2]


def results_of(trial: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(trial.local_path, "result.json").read_text().splitlines()]


@pytest.mark.proof
def test_population_based_bandits_clone_trials(run):
    """Its rates are chosen by a model of what rates have brought so far: from the third time on, when whoever is cloned
    has had its rate for two intervals."""
    np.random.seed(0)  # from which PB2 draws
    scheduler = PB2(
        time_attr="training_iteration", metric="loss", mode="min", perturbation_interval=2,
        hyperparam_bounds={"lr": [1e-3, 4e-2]}, quantile_fraction=0.5, synch=True,
    )  # fmt: skip
    options = {"scheduler": scheduler, "stop": {"training_iteration": 8}, "fail_fast": True}
    ended = run(Net, config={"lr": tune.grid_search(RATES)}, **options).trials
    assert {trial.status for trial in ended} == {"TERMINATED"}
    lasts = [trial.last_result for trial in ended]
    assert any(last["loaded"] for last in lasts)
    assert {last["used_lr"] == last["config"]["lr"] for last in lasts} == {True}
    assert {last["used_lr"] for last in lasts} - set(RATES), "chosen rates reach the optimizer"


STEPS = 8


def train_without_checkpoints(config: dict[str, Any]) -> None:
    """The pool keeps its state. Says what it began with, and what it has now. Begins once all have come."""
    torch.manual_seed(0)
    os.environ[f"HAS_COME_{config['lr']}"] = "1"  # the pool's process is one for all
    while sum("HAS_COME" in name for name in os.environ) < len(RATES):
        time.sleep(0.05)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    model, optimizer = hydra_tune.prepare(model, optimizer)
    start = hydra_tune.resume_step()
    began = digest(model, optimizer) if start else ""
    for step in range(start, max(STEPS, start + 1)):  # who is cloned from one that has ended has a step to report, too
        loss = model(torch.ones(4, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        (group,) = optimizer.param_groups
        now = {"step": step + 1, "has": digest(model, optimizer), "used_lr": group["lr"]}
        tune.report({"loss": loss.item(), "start": start, "began": began, **now})
        time.sleep(0.2)  # they go on side by side


@pytest.mark.proof
@pytest.mark.parametrize("synch", [False, True], ids=["at any time", "in step"])
def test_functions_that_keep_no_checkpoint_are_cloned_by_their_pool_within_host_memory(run, synch):
    random.seed(0)
    scheduler = schedulers.PopulationBasedTraining(
        time_attr="training_iteration", metric="loss", mode="min", perturbation_interval=2,
        hyperparam_mutations={"lr": [3e-2, 4e-2]}, quantile_fraction=0.5, resample_probability=1.0, synch=synch,
    )  # fmt: skip
    results, space = Results(), {"lr": tune.grid_search(RATES)}
    options = {"scheduler": scheduler, "callbacks": [results], "fail_fast": True}
    ended = run(train_without_checkpoints, config=space, **options).trials
    assert {trial.status for trial in ended} == {"TERMINATED"}
    reported = [result for each in results.of.values() for result in each]
    states = {(result["step"], result["has"]) for result in reported}
    began = {(result["start"], result["began"]) for result in reported if result["start"]}
    assert began and began <= states, "bit for bit what a trial had"
    lasts = [each[-1] for each in results.of.values()]
    assert {last["step"] for last in lasts} <= {STEPS, STEPS + 1}
    assert {last["used_lr"] == last["config"]["lr"] for last in lasts} == {True}, "perturbed rates reach the optimizer"
    assert {last["used_lr"] for last in lasts} & {3e-2, 4e-2}
    pool = empty_pool(EXECUTOR)
    in_memory, from_checkpoint = pool["continued"].values()
    if synch:
        assert in_memory >= len(began)
    else:  # who is cloned goes on meanwhile, and the pool keeps its last state alone
        assert in_memory and in_memory + from_checkpoint >= len(began)


def train_logging_rates(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    model, optimizer = hydra_tune.prepare(model, optimizer)
    for step in range(hydra_tune.resume_step(), STEPS):
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        (group,) = optimizer.param_groups
        tune.report({"step": step, "used_lr": group["lr"], "given_lr": config["lr"]})


@pytest.mark.proof
def test_a_replayed_schedule_of_configurations_reaches_the_optimizer(run, tmp_path):
    """Where a trial goes on from its own state, with another configuration."""
    policy = Path(tmp_path, "policy.txt")
    policy.write_text(json.dumps(["0", "1", 4, 4, {"lr": 1e-3}, {"lr": 5e-3}]) + "\n")
    (trial,) = run(train_logging_rates, scheduler=schedulers.PopulationBasedTrainingReplay(str(policy))).trials
    last = trial.last_result
    assert (last["step"], last["given_lr"], last["used_lr"]) == (STEPS - 1, 5e-3, 5e-3)


def test_population_based_training_clones_weights_and_optimizer(run):
    scheduler = schedulers.PopulationBasedTraining(
        time_attr="training_iteration", metric="loss", mode="min", perturbation_interval=2,
        hyperparam_mutations={"lr": [3e-2, 4e-2]},
        quantile_fraction=0.5, resample_probability=1.0, synch=True, require_attrs=True,
    )  # fmt: skip
    config = {"lr": tune.grid_search(RATES[1:3])}
    ended = run(Net, config=config, scheduler=scheduler, stop={"training_iteration": 4}, fail_fast=True).trials
    assert {trial.status for trial in ended} == {"TERMINATED"}
    lasts = [trial.last_result for trial in ended]
    cloned = [last for last in lasts if last["loaded"]]
    assert cloned, "the worse half starts from the better half's weights"
    assert {last["used_lr"] for last in cloned} <= {3e-2, 4e-2, *RATES}
    assert {last["used_lr"] for last in lasts} & {3e-2, 4e-2}, "perturbed rates reach the optimizer"
    assert {last["used_lr"] == last["config"]["lr"] for last in lasts} == {True}


class KeptByItsPool(ray.tune.Trainable):
    """Has no `save_checkpoint`. Says what it began with, and what it has now."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
        self.model, self.optimizer = hydra_tune.prepare(model, optimizer)
        self.began = digest(self.model, self.optimizer) if self.optimizer.state else ""

    def step(self) -> dict[str, Any]:
        loss = self.model(torch.ones(4, 64)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        (group,) = self.optimizer.param_groups
        has = digest(self.model, self.optimizer)
        return {"loss": loss.item(), "began": self.began, "has": has, "used_lr": group["lr"]}


@pytest.mark.proof
def test_classes_that_keep_no_checkpoint_are_cloned_by_their_pool_within_host_memory(run):
    random.seed(0)
    scheduler = schedulers.PopulationBasedTraining(
        time_attr="training_iteration", metric="loss", mode="min", perturbation_interval=2,
        hyperparam_mutations={"lr": [3e-2, 4e-2]}, quantile_fraction=0.5, resample_probability=1.0, synch=True,
    )  # fmt: skip
    results, space = Results(), {"lr": tune.grid_search(RATES)}
    options = {"scheduler": scheduler, "callbacks": [results], "stop": {"training_iteration": 6}, "fail_fast": True}
    ended = run(KeptByItsPool, config=space, **options).trials
    assert {trial.status for trial in ended} == {"TERMINATED"}
    reported = [result for each in results.of.values() for result in each]
    began = {result["began"] for result in reported} - {""}
    assert began and began <= {result["has"] for result in reported}, "bit for bit what a trial had"
    lasts = [each[-1] for each in results.of.values()]
    assert {last["training_iteration"] for last in lasts} == {6}
    assert {last["used_lr"] == last["config"]["lr"] for last in lasts} == {True}, "perturbed rates reach the optimizer"
    assert {last["used_lr"] for last in lasts} & {3e-2, 4e-2}
    pool = empty_pool(EXECUTOR)
    assert pool["continued"]["in_memory"] >= len(began), pool["continued"]


class PauseOnce(schedulers.FIFOScheduler):
    """Every trial after its first result; it is taken up again when there is a place."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        return self.PAUSE if result["training_iteration"] == 1 and not result["loaded"] else self.CONTINUE


@pytest.mark.proof
def test_paused_trials_go_on_where_they_were(run):
    config = {"lr": tune.grid_search(RATES[1:3])}
    paused = run(Net, config=config, scheduler=PauseOnce(), stop={"training_iteration": 3}).trials
    straight = run(Net, config=config, stop={"training_iteration": 3}).trials
    assert all(trial.last_result["loaded"] for trial in paused)
    assert not any(trial.last_result["loaded"] for trial in straight)
    assert [trial.last_result["loss"] for trial in paused] == [trial.last_result["loss"] for trial in straight]


@pytest.mark.proof
def test_hyperband_halves_its_brackets(run):
    """Results of one bracket come apart: where two come at once, stock Tune may leave a trial paused for ever."""
    scheduler = schedulers.HyperBandScheduler(metric="loss", mode="min", max_t=2, reduction_factor=2)
    config = {"lr": tune.grid_search([1e-8, 1e-7, 1e-2, 2e-2]), "apart": True}
    ended = run(Net, config=config, scheduler=scheduler).trials
    assert {trial.status for trial in ended} == {"TERMINATED"}
    assert sorted(trial.last_result["training_iteration"] for trial in ended) == [1, 2, 2, 2]


def train(config: dict[str, Any], prepare: Any = hydra_tune.prepare) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=config["lr"]))
    for _ in range(5):
        loss = model(torch.ones(4, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tune.report({"loss": loss.item()})


@pytest.mark.proof
def test_median_stopping_and_stoppers(run):
    scheduler = schedulers.MedianStoppingRule(metric="loss", mode="min", grace_period=1, min_samples_required=2)
    ended = run(
        train, config={"lr": tune.grid_search(RATES)}, scheduler=scheduler, stop={"training_iteration": 4}
    ).trials
    assert max(trial.last_result["training_iteration"] for trial in ended) == 4


@pytest.mark.proof
def test_optuna_searches_with_as_many_trials_as_there_are_places(tmp_path):
    from ray.tune.search.optuna import OptunaSearch

    analysis = tune.run(
        train,
        resources=EXECUTOR,
        config={"lr": tune.loguniform(1e-4, 1e-2)},
        search_alg=OptunaSearch(metric="loss", mode="min", seed=0),
        num_samples=4,
        verbose=0,
        reuse_actors=True,
        storage_path=str(tmp_path),
    )
    assert len({trial.config["lr"] for trial in analysis.trials}) == 4
    assert [trial.last_result["training_iteration"] for trial in analysis.trials] == [5] * 4


@pytest.mark.proof
def test_a_concurrency_limiter_is_the_users(tmp_path):
    from ray.tune.search import ConcurrencyLimiter
    from ray.tune.search.optuna import OptunaSearch

    search = ConcurrencyLimiter(OptunaSearch(metric="loss", mode="min", seed=0), max_concurrent=1)
    analysis = tune.run(
        train, resources=EXECUTOR, config={"lr": tune.loguniform(1e-4, 1e-2)}, search_alg=search, num_samples=2,
        verbose=0, storage_path=str(tmp_path),
    )  # fmt: skip
    assert len(analysis.trials) == 2


def train_for_ever(config: dict[str, Any]) -> None:
    while True:
        train(config)


@pytest.mark.proof
def test_a_time_budget_ends_trials(run):
    ended = run(train_for_ever, config={"lr": tune.grid_search([1e-3, 1e-2])}, time_budget_s=40).trials
    assert {trial.status for trial in ended} == {"TERMINATED"}


def fail_at_second(config: dict[str, Any]) -> None:
    tune.report({"loss": 1.0})
    if config["n"] == 0 and not Path(config["mended"]).exists():
        raise OSError("until it is mended")
    tune.report({"loss": 0.5})


@pytest.mark.proof
def test_a_failed_sweep_is_resumed(run, tmp_path):
    config = {"n": tune.grid_search([0, 1]), "mended": str(tmp_path / "mended")}
    first = run(fail_at_second, config=config, name="sweep", raise_on_failed_trial=False)
    assert sorted(trial.status for trial in first.trials) == ["ERROR", "TERMINATED"]
    Path(tmp_path, "mended").touch()
    again = run(fail_at_second, config=config, name="sweep", resume="AUTO+ERRORED")
    assert {(trial.status, trial.last_result["loss"]) for trial in again.trials} == {("TERMINATED", 0.5)}


@pytest.mark.proof
def test_fail_fast_ends_the_run(run, tmp_path):
    config = {"n": tune.grid_search([0, 1, 1]), "mended": str(tmp_path / "mended")}
    with pytest.raises(ray.tune.TuneError):
        run(fail_at_second, config=config, fail_fast=True, max_concurrent_trials=1)


@pytest.mark.proof
def test_loggers_write_what_they_write_in_stock_tune(run):
    (trial,) = run(train, config={"lr": 1e-3}).trials
    folder = Path(trial.local_path)
    assert {"result.json", "progress.csv", "params.json"} <= {path.name for path in folder.iterdir()}
    reported = [result["loss"] for result in results_of(trial)]
    (events,) = folder.glob("events.out.tfevents*")
    assert [loss for loss in scalars(events, "ray/tune/loss") if loss] == pytest.approx(reported)


def scalars(path: Path, tag: str) -> Iterator[float]:
    """Of a file for TensorBoard: records of a length, its checksum, an event and its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        yield from (value.simple_value for value in event.summary.value if value.tag == tag)
        data = data[16 + length :]


@pytest.mark.proof
def test_resources_that_change_are_refused(tmp_path):
    def more(controller, trial, result, scheduler):
        return tune.PlacementGroupFactory([{"CPU": 1}])

    scheduler = schedulers.ResourceChangingScheduler(schedulers.FIFOScheduler(), more)
    analysis = tune.run(
        Net, resources=EXECUTOR, config={"lr": 1e-2}, scheduler=scheduler, stop={"training_iteration": 6}, verbose=0,
        storage_path=str(tmp_path), raise_on_failed_trial=False,
    )  # fmt: skip
    (trial,) = analysis.trials
    assert trial.status == "ERROR"
    assert "ResourceChangingScheduler" in Path(trial.error_file).read_text()


@pytest.mark.proof
def test_asha_over_trials_none_of_which_fits_finds_what_stock_tune_finds(run, tmp_path):
    rates = random.Random(0).sample([10 ** (-6 + i / 8) for i in range(32)], 32)

    def sweep(go: Any, train: Any, **options: Any) -> Any:
        scheduler = schedulers.ASHAScheduler(metric="loss", mode="min", grace_period=1, reduction_factor=2, max_t=5)
        return go(train, config={"lr": tune.grid_search(rates)}, scheduler=scheduler, reuse_actors=True, **options)

    ours = sweep(run, train)
    stock = sweep(ray.tune.run, train_plainly, verbose=0, storage_path=str(tmp_path / "stock"))
    assert {trial.status for trial in ours.trials} == {"TERMINATED"}
    stopped = [trial for trial in ours.trials if trial.last_result["training_iteration"] < 5]
    assert len(stopped) >= 8, "pruned"
    pool = empty_pool(EXECUTOR)
    assert not any(trial["resident"] for trial in pool["trials"]), "none fits"
    bests = [analysis.get_best_trial("loss", "min") for analysis in (ours, stock)]
    assert bests[0].config == bests[1].config
    assert bests[0].last_result["loss"] == pytest.approx(bests[1].last_result["loss"], rel=1e-6)


def train_plainly(config: dict[str, Any]) -> None:
    train(config, prepare=lambda *given: given)
