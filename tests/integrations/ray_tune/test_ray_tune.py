"""Ray Tune over one pool a node, against a real local Ray."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from torch import nn

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
pytest.importorskip("ray")

import ray
import ray.tune
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

import hydra_tune
from hydra_tune import HydraExecutor, tune
from hydra_tune.integrations.ray_tune import pool_figures, run_pools
from hydra_tune.integrations.ray_tune.pool_table import PoolTable
from hydra_tune.show import control_socket
from ray_local import empty_pool, first_step, local_ray
from waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore")
BUDGET = "256KiB"  # of a device; the models below do not fit


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    with local_ray():
        yield


@pytest.fixture
def executor():
    return HydraExecutor(BUDGET, devices=["cpu"], concurrency=6)


@pytest.fixture
def run(executor, tmp_path):
    """`tune.run` of a function over the pools, which stay for the test to look at."""

    def run(train: Any, **options: Any) -> Any:
        proxy = hydra_tune.trainable(train, executor)
        options = {"verbose": 0, "storage_path": str(tmp_path), "raise_on_failed_trial": False, **options}
        return ray.tune.run(proxy, **options)

    return run


def steps(config: dict[str, Any], prepare: bool = True) -> list[float]:
    """The losses of a few steps of a model with dropout; the weights are too large for the budget."""
    if "seed" in config:
        torch.manual_seed(config["seed"])
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Tanh()) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.get("lr", 1e-2))
    if prepare:
        model, optimizer = hydra_tune.prepare(model, optimizer)
    losses = []
    for _ in range(4):
        loss = model(torch.randn(16, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_steps(config: dict[str, Any]) -> dict[str, Any]:
    return {"losses": steps(config), "trained_in": os.getpid()}


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # as a pool on a node with two CPUs and one virtual device has
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("together", [pytest.param(1, marks=pytest.mark.proof), 6])
def test_numbers_are_those_of_plain_pytorch_alone_and_in_company(run, executor, together, two_threads):
    """In one process, and nothing of them is left there."""
    ended = run(train_steps, config={"seed": tune.grid_search(list(range(together)))}).trials
    plain = [steps({"seed": seed}, prepare=False) for seed in range(together)]
    assert [trial.last_result["losses"] for trial in ended] == plain
    assert len({trial.last_result["trained_in"] for trial in ended}) == 1
    assert {trial.last_result["pid"] for trial in ended}.isdisjoint({ended[0].last_result["trained_in"]})
    assert any(len(trial["shards"]) > 1 for trial in empty_pool(executor)["trials"])
    empty_pool(executor)


def fail_once(config: dict[str, Any]) -> dict[str, Any]:
    marker = Path(config["marker"])
    first = torch.rand(()).item()
    if not marker.exists():
        marker.write_text(str(first))
        raise OSError("once")
    return {"first": first}


@pytest.mark.proof
def test_without_a_seed_trials_differ_and_attempts_of_one_do_not(run, tmp_path):
    markers = [str(tmp_path / name) for name in "ab"]
    ended = run(fail_once, config={"marker": tune.grid_search(markers)}, max_failures=1).trials
    drawn = {trial.config["marker"]: trial.last_result["first"] for trial in ended}
    assert drawn == {marker: float(Path(marker).read_text()) for marker in markers}
    assert len(set(drawn.values())) == 2


def test_run_takes_resources_literally(tmp_path):
    proxies = []

    class Watch(ray.tune.Callback):
        def on_trial_result(self, iteration, trials, trial, result, **info):
            proxies.append(Path(f"/proc/{result['pid']}/maps").read_text())

    analysis = tune.run(
        train_reporting,
        config={"seed": 1},
        resources=HydraExecutor(BUDGET, devices=["cpu"], concurrency=6),
        verbose=0,
        storage_path=str(tmp_path),
        callbacks=[Watch()],
    )
    assert len(analysis.trials[0].metric_analysis["loss"]) > 0
    assert proxies
    assert not any("libtorch" in maps for maps in proxies)


@pytest.mark.proof
def test_stock_tunes_table_has_the_users_metric_and_then_numbers_of_the_pool(run, capsys):
    """Tune shows the first four numbers of a result, which were all the pool's."""
    run(train_reporting, config={"seed": 1}, verbose=1)
    header = next(line for line in reversed(capsys.readouterr().out.splitlines()) if "Trial name" in line)
    assert header.split()[-5:-1] == ["loss", "hydra/step_ms", "hydra/peak_mib", "hydra/steps"]


def prepare_and_stay(config: dict[str, Any]) -> None:
    """The first one stays until the file `seen` is there, the second gets no host memory before."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9))
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    wait_until(Path(config["seen"]).exists)
    tune.report({"loss": 1.0})


@pytest.mark.parametrize("classic", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_tunes_table_has_columns_of_the_pool_also_for_a_trial_that_waits(classic, tmp_path, monkeypatch, capsys):
    """It has no result yet, and looked as if it trained."""
    monkeypatch.setattr(pool_figures, "ASK_S", 0.0)
    monkeypatch.setattr(PoolTable, "_heartbeat_freq", 0)
    monkeypatch.setattr(ray.tune.CLIReporter, "should_report", lambda self, trials, done=False: True)
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0" if classic else "1")
    printed: list[str] = []

    class Look(ray.tune.Callback):
        def on_step_end(self, iteration, trials, **info):
            printed.append(capsys.readouterr().out)
            if "waits" in printed[-1] and "spilled" in printed[-1]:
                (tmp_path / "seen").touch()

    tune.run(
        prepare_and_stay,
        resources=HydraExecutor("1MiB", devices=["cpu"], concurrency=2, host_memory="8MiB"),
        config={"lr": tune.grid_search([0.1, 0.2]), "seen": str(tmp_path / "seen")},
        storage_path=str(tmp_path),
        verbose=3 if classic else 1,
        callbacks=[Look()],
    )
    (table,) = [text for text in printed if "waits" in text and "spilled" in text][:1]
    header, *rows = [line for line in table.splitlines() if line[1:].strip().startswith(("Trial name", "prepare_and"))]
    assert re.findall(r"[\w/]+", header)[-4:] == ["state", "since", "MiB", "shards"]
    trains, waits = sorted(rows, key=lambda row: "waits" in row)
    assert "spilled" in trains and re.search(r"waits .*\d\d:\d\d:\d\d .*0 ", waits), rows
    assert re.search("pool on .*: cpu:0 .*; .* waits for 6.0 MiB of host memory", table), table
    last = re.split("Trial status:|== Status ==", "".join(printed) + capsys.readouterr().out)[-1]
    assert "waits" not in last and last.count("spilled") >= 2, "what its last result says"


def train_reporting(config: dict[str, Any]) -> None:
    for loss in steps(config):
        print("seed", config["seed"])
        tune.report({"loss": loss, "directory": tune.get_context().get_storage().trial_working_directory})


@pytest.mark.proof
def test_a_tuner_takes_resources(tmp_path):
    tuner = tune.Tuner(
        train_reporting,
        resources=HydraExecutor(BUDGET, devices=["cpu"], concurrency=6),
        param_space={"seed": tune.grid_search([1, 2])},
        run_config=tune.RunConfig(storage_path=str(tmp_path), name="sweep", verbose=0, log_to_file=("out", "err")),
    )
    results = tuner.fit()
    assert [result.metrics["training_iteration"] for result in results] == [4, 4]
    for result in results:
        log = Path(result.metrics["directory"], "out").read_text()
        assert log.splitlines().count(f"seed {result.config['seed']}") == 4
    again = tune.Tuner.restore(
        str(tmp_path / "sweep"), train_reporting, True, resources=HydraExecutor(BUDGET, devices=["cpu"], concurrency=6)
    )
    assert {result.metrics["loss"] for result in again.fit()} == {result.metrics["loss"] for result in results}


def test_an_only_nodes_pool_starts_before_a_trial_comes_and_ends_with_the_run():
    """It started after the first proxy, which waited for it: two seconds of each short run. When it was killed at the
    end, its socket stayed."""
    spec = HydraExecutor("1MiB", devices=["cpu"], concurrency=5).spec
    (node,) = ray.nodes()
    name = f"{spec.name} on {node['NodeID']}"
    with run_pools.pools_for(spec, "of nothing"):
        pool = ray.get_actor(name)
        address = ray.get(pool.address.remote())
        assert ray.get(ray.get_actor(spec.name).address_on.remote(node["NodeID"])) == address, "trials come to this one"
        socket = control_socket._folder() / f"{ray.get(pool.__ray_call__.remote(lambda _: os.getpid()))}.sock"
        assert socket.exists()
    assert not socket.exists()
    wait_until(lambda: spec.name not in ray.util.list_named_actors() and name not in ray.util.list_named_actors())
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(pool.address.remote())


@pytest.mark.proof
def test_what_the_pools_do_is_printed_under_stock_tune_and_reported_afterwards(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pool_figures, "LINE_S", 0.0)
    monkeypatch.setattr(pool_figures, "ASK_S", 0.0)
    executor = HydraExecutor(BUDGET, devices=["cpu"], concurrency=5)  # pools that no other test has
    config = ray.tune.RunConfig(storage_path=str(tmp_path), callbacks=[tune.PoolLines(executor)])
    train = hydra_tune.trainable(train_reporting, executor)
    ray.tune.Tuner(train, run_config=config, param_space={"seed": 1}).fit()
    (report,) = hydra_tune.report(executor).values()
    assert [trial["steps"] for trial in report["trials"]] == [4] and report["live"] == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("pool on ")]
    assert lines and "cpu:0 (virtual) busy" in lines[0], lines
    assert hydra_tune.report(HydraExecutor(BUDGET, devices=["cpu"], concurrency=7)) == {}
    empty_pool(executor)


def prepared_elsewhere(config: dict[str, Any]) -> None:
    model = hydra_tune.prepare(nn.Linear(2, 2), pool=hydra_tune.ShardPool(["cpu"], BUDGET) if config["own"] else None)
    tune.report({"loss": model(torch.ones(1, 2)).sum().item(), "trained_in": os.getpid()})
    if config.get("die_at") and not Path(config["die_at"]).exists():
        raise RuntimeError("interrupted")


class PreparesElsewhere(ray.tune.Trainable):
    def setup(self, config: dict[str, Any]) -> None:
        hydra_tune.prepare(nn.Linear(2, 2))


@pytest.mark.proof
def test_no_trial_trains_past_its_pool(tmp_path):
    """What Tune itself prints for a restore names no resources, and trials trained in processes of their own."""
    config = tune.RunConfig(storage_path=str(tmp_path), name="sweep", verbose=0)
    executor = HydraExecutor(BUDGET, devices=["cpu"], concurrency=6)
    space = {"own": False, "die_at": str(tmp_path / "goes on")}
    (failed,) = tune.Tuner(prepared_elsewhere, resources=executor, run_config=config, param_space=space).fit()
    assert "interrupted" in str(failed.error)
    (tmp_path / "goes on").touch()
    (again,) = tune.Tuner.restore(str(tmp_path / "sweep"), prepared_elsewhere, restart_errored=True).fit()
    assert again.error is None and again.metrics["trained_in"] != again.metrics["pid"]


@pytest.mark.parametrize("train", [prepared_elsewhere, pytest.param(PreparesElsewhere, marks=pytest.mark.proof)])
def test_a_trial_without_a_pool_is_refused(train, tmp_path):
    config = ray.tune.RunConfig(storage_path=str(tmp_path), verbose=0)
    (result,) = ray.tune.Tuner(train, run_config=config, param_space={"own": False}).fit()
    assert "uses the pool of a HydraExecutor, but this trial was given none" in str(result.error)


@pytest.mark.proof
def test_a_trial_may_have_a_pool_of_its_own(tmp_path):
    config = ray.tune.RunConfig(storage_path=str(tmp_path), verbose=0)
    (result,) = ray.tune.Tuner(prepared_elsewhere, run_config=config, param_space={"own": True}).fit()
    assert result.error is None and result.metrics["trained_in"] == result.metrics["pid"]


def report_tensors(config: dict[str, Any]) -> dict[str, Any]:
    loss = torch.tensor(config["n"] / 8, requires_grad=True)
    tune.report({"loss": loss, "nested": {"bf16": loss.bfloat16()}})
    return {"loss": 2 * loss, "trained_in": os.getpid()}


def test_the_config_may_come_second_and_metrics_may_be_tensors_of_one_number(executor, tmp_path):
    results = []

    class Watch(ray.tune.Callback):
        def on_trial_result(self, iteration, trials, trial, result, **info):
            results.append((result["loss"], type(result["loss"])))

    options = {"verbose": 0, "storage_path": str(tmp_path), "callbacks": [Watch()]}
    tune.run(report_tensors, {"n": 3}, resources=executor, **options)
    assert results == [(0.375, float), (0.75, float)]


def test_experiments_take_resources(executor, tmp_path):
    """Each its own, or all the same."""
    options = {"config": {"n": 1}, "storage_path": str(tmp_path)}
    experiments = [
        tune.Experiment("a", report_tensors, resources=executor, **options),
        tune.Experiment("b", report_tensors, **options),
    ]
    ended = tune.run_experiments(experiments, resources=executor, verbose=0)
    assert {(trial.status, trial.experiment_dir_name) for trial in ended} == {("TERMINATED", "a"), ("TERMINATED", "b")}
    (pool,) = {trial.last_result["trained_in"] for trial in ended}
    assert pool not in {trial.last_result["pid"] for trial in ended}


@pytest.mark.proof
def test_experiments_may_be_specifications_or_given_to_run(executor, tmp_path):
    spec = {"run": report_tensors, "config": {"n": 1}, "storage_path": str(tmp_path)}
    (trial,) = tune.run_experiments({"a": spec}, resources=executor, verbose=0)
    assert trial.last_result["trained_in"] != trial.last_result["pid"]
    experiment = tune.Experiment("b", **spec)
    (trial,) = tune.run(experiment, resources=executor, verbose=0).trials
    assert trial.last_result["trained_in"] != trial.last_result["pid"]


def leave(config: dict[str, Any]) -> None:
    tune.report({"a": 1})
    sys.exit(config["code"])


@pytest.mark.proof
def test_who_exits_fails_whatever_the_code_as_under_stock_tune(run, executor, tmp_path):
    """There a trial's process dies, or waits for a result that never comes; here it would be everybody's."""
    config = {"code": tune.grid_search([0, None, 1])}
    stock = {"verbose": 0, "storage_path": str(tmp_path), "raise_on_failed_trial": False}
    for ended in (run(leave, config=config).trials, ray.tune.run(leave, config=config, **stock).trials):
        assert [(trial.status, trial.last_result["a"]) for trial in ended] == [("ERROR", 1)] * 3
    (trial,) = run(leave, config={"code": 0}).trials
    assert "returning or by an exception, got SystemExit(0)" in Path(trial.error_file).read_text()
    empty_pool(executor)


def train_with_checkpoints(config: dict[str, Any]) -> None:
    first = first_step()
    for step in range(first, 6):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step").write_text(str(step))
            tune.report({"step": step, "first": first}, checkpoint=tune.Checkpoint.from_directory(folder))
        assert first_step() == step + 1, "what it has reported is its checkpoint, as Tune keeps it"
        if step == 2 and first == 0:
            raise ArithmeticError("of the third step")


def test_a_trial_that_raises_goes_on_from_its_checkpoint(run, executor):
    (trial,) = run(train_with_checkpoints, max_failures=1).trials
    assert (trial.status, trial.last_result["step"], trial.last_result["first"]) == ("TERMINATED", 5, 3)
    assert [Path(trial.checkpoint.path, "step").read_text()] == ["5"]
    empty_pool(executor)


@pytest.mark.proof
def test_checkpoints_go_through_rays_storage(executor, tmp_path):
    """To a filesystem that is not the local one, as a bucket is not; and back, for the next attempt."""
    bucket = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    analysis = tune.run(
        train_with_checkpoints, resources=executor, max_failures=1, verbose=0,
        storage_path="experiments", storage_filesystem=bucket, name="sweep",
    )  # fmt: skip
    (trial,) = analysis.trials
    assert (trial.status, trial.last_result["first"]) == ("TERMINATED", 3)
    assert {path.read_text() for path in (tmp_path / "experiments" / "sweep").glob("*/checkpoint_*/step")} == set(
        "012345"
    )


def test_the_error_is_the_functions_own(run):
    (trial,) = run(train_with_checkpoints).trials
    assert trial.status == "ERROR"
    text = Path(trial.error_file).read_text()
    assert "ArithmeticError: of the third step" in text
    assert "train_with_checkpoints" in text, "where it was raised"


def generate(config):
    yield {"a": 1}
    yield 2.5


def count(config, data):
    return {"length": len(data)}


@pytest.mark.proof
def test_generators_outputs_and_parameters(run):
    (trial,) = run(generate).trials
    assert trial.last_result["_metric"] == 2.5 and trial.last_result["training_iteration"] == 2
    (trial,) = run(tune.with_parameters(count, data=[1, 2, 3])).trials
    assert trial.last_result["length"] == 3


def tell(config):
    context = tune.get_context()
    print("told to its own log", config["n"])
    tune.report({})
    assert Path("stdout").read_text().endswith(f"own log {config['n']}\n"), "while it runs"
    return {
        "told": [context.get_trial_id(), context.get_trial_name(), context.get_experiment_name()],
        "dir": context.get_trial_dir(),
    }


def test_context_and_output_are_the_trials_own(run):
    ended = run(tell, config={"n": tune.grid_search([1, 2])}, log_to_file=True).trials
    for n, trial in enumerate(ended, 1):
        assert trial.last_result["told"] == [trial.trial_id, str(trial), trial.experiment_dir_name]
        log = Path(trial.storage.trial_working_directory, "stdout").read_text()
        assert [line for line in log.splitlines() if "told" in line] == [f"told to its own log {n}"]


def train_with_relative_checkpoints(config: dict[str, Any]) -> None:
    """As Ray's own example of population based training does."""
    folder = Path("my_model")
    folder.mkdir(exist_ok=True)
    for step in range(3):
        (folder / "whose").write_text(f"{config['n']} {step}")
        others_write_too = torch.utils.data.DataLoader(WorkingDirectory(), num_workers=1, batch_size=None)
        directories = [os.getcwd(), *others_write_too]  # noqa: PTH109
        report = {"step": step, "directories": directories, "pool": os.getpid()}
        tune.report(report, checkpoint=tune.Checkpoint.from_directory("my_model"))


class WorkingDirectory(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return os.getcwd()  # noqa: PTH109


@pytest.mark.skipif(sys.platform != "linux", reason="threads share it elsewhere")
def test_each_trial_has_its_own_working_directory(run):
    """And the processes that it starts."""
    ended = run(train_with_relative_checkpoints, config={"n": tune.grid_search([1, 2, 3, 4])}).trials
    assert len({trial.last_result["pool"] for trial in ended}) == 1
    for n, trial in enumerate(ended, 1):
        assert trial.last_result["directories"] == [trial.storage.trial_working_directory] * 2
        kept = [Path(trial.path, f"checkpoint_00000{step}", "whose").read_text() for step in range(3)]
        assert kept == [f"{n} {step}" for step in range(3)]


def where(config: dict[str, Any]) -> dict[str, Any]:
    return {"directory": os.getcwd()}  # noqa: PTH109


@pytest.mark.proof
def test_trials_stay_in_the_processs_directory_where_stock_tunes_do(run, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_CHDIR_TO_TRIAL_DIR", "0")
    (stock,) = ray.tune.run(where, verbose=0, storage_path=str(tmp_path)).trials
    (ours,) = run(where).trials
    assert ours.last_result["directory"] == stock.last_result["directory"]


class Moves(ray.tune.Trainable):
    def step(self):
        return {"directory": os.getcwd(), "done": True}  # noqa: PTH109

    def save_checkpoint(self, folder):
        pass

    def load_checkpoint(self, folder):
        pass

    def reset_config(self, config):
        return True


@pytest.mark.proof
@pytest.mark.skipif(sys.platform != "linux", reason="threads share it elsewhere")
def test_a_class_that_is_reset_moves_to_the_next_trials_directory(run):
    ended = run(Moves, config={"n": tune.grid_search([1, 2])}, reuse_actors=True, max_concurrent_trials=1).trials
    assert len({trial.last_result["pid"] for trial in ended}) == 1
    assert all(trial.last_result["directory"] == trial.storage.trial_working_directory for trial in ended)


def test_a_node_has_memory_for_as_many_slots_as_places_and_half_a_one(executor):
    (slot,) = HydraExecutor.slot(executor.spec).bundles
    assert ray.cluster_resources()["memory"] / slot["memory"] == pytest.approx(6.5)
    assert slot["CPU"] < 1e-3


@ray.remote(memory=2**20)  # as those of Ray Data ask for some
def evaluate(step: int) -> int:
    return step + 1


def train_with_child_tasks(config: dict[str, Any]) -> None:
    for step in range(2):
        tune.report({"evaluated": ray.get(evaluate.remote(step))})


def test_trials_that_fill_the_pool_leave_cpus_to_the_tasks_that_they_wait_for(run):
    """Their proxies once held all CPUs of the node, and such tasks never began. Nor do proxies hold all its memory."""
    ended = run(train_with_child_tasks, config={"n": tune.grid_search(list(range(6)))}, time_budget_s=120).trials
    results = [trial.last_result for trial in ended]
    assert [(result["training_iteration"], result["evaluated"]) for result in results] == [(2, 2)] * 6


class Counting(ray.tune.Trainable):
    def setup(self, config):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
        self.model, self.optimizer = hydra_tune.prepare(model, self.optimizer)

    def step(self):
        loss = self.model(torch.ones(4, 64)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss.item(), "done": self.iteration >= 5, "trained_in": os.getpid()}

    def save_checkpoint(self, folder):
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], Path(folder, "state.pt"))

    def load_checkpoint(self, folder):
        model, optimizer = torch.load(Path(folder, "state.pt"))
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def reset_config(self, config):
        for group in self.optimizer.param_groups:
            group["lr"] = config["lr"]
        return True


def test_classes_train_in_the_pool(run, executor):
    ended = run(
        Counting,
        config={"lr": tune.grid_search([0.1, 0.2])},
        checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
    ).trials
    assert [trial.last_result["training_iteration"] for trial in ended] == [6, 6]
    assert len({trial.last_result["trained_in"] for trial in ended}) == 1
    assert all(Path(trial.checkpoint.path, "state.pt").exists() for trial in ended)
    empty_pool(executor)


class StopsTheSlow(ray.tune.schedulers.FIFOScheduler):
    """At their second result, whichever trial reports first."""

    def on_trial_result(self, tune_controller, trial, result):
        return self.STOP if trial.config["lr"] < 1e-5 and result["training_iteration"] == 2 else self.CONTINUE


@pytest.mark.proof
def test_schedulers_stop_trials_and_nothing_is_left(run, executor):
    ended = run(
        train_reporting,
        config={"seed": 0, "lr": tune.grid_search([1e-9, 1e-8, 1e-7, 1e-2, 2e-2, 3e-2])},
        scheduler=StopsTheSlow(),
    ).trials
    assert {trial.status for trial in ended} == {"TERMINATED"}
    assert [trial.last_result["training_iteration"] for trial in ended] == [2, 2, 2, 4, 4, 4]
    empty_pool(executor)


def test_actors_are_reused(run, executor):
    ended = run(
        train_reporting, config={"seed": tune.grid_search([1, 2, 3, 4])}, reuse_actors=True, max_concurrent_trials=1
    )
    assert len({trial.last_result["pid"] for trial in ended.trials}) == 1
    assert len({trial.last_result["loss"] for trial in ended.trials}) == 4
    empty_pool(executor)


def test_an_executor_given_to_stock_tune_is_an_error_of_the_trial(tmp_path):
    analysis = ray.tune.run(
        train_reporting,
        resources_per_trial=HydraExecutor(BUDGET, devices=["cpu"]),
        verbose=0,
        storage_path=str(tmp_path),
        raise_on_failed_trial=False,
    )
    (trial,) = analysis.trials
    assert trial.status == "ERROR"
    assert "past the pool" in Path(trial.error_file).read_text()


def test_what_cannot_be_run_is_refused(executor, tmp_path):
    with pytest.raises(hydra_tune.ConfigError, match="takes its config"):
        hydra_tune.trainable(lambda: None, executor)
    with pytest.raises(hydra_tune.ConfigError, match=r"ray\.tune\.Trainable, got the class dict"):
        hydra_tune.trainable(dict, executor)
    with pytest.raises(hydra_tune.ConfigError, match="resources is a HydraExecutor"):
        tune.run(train_steps, resources={"cpu": 1})
    with pytest.raises(hydra_tune.ConfigError, match="resources_per_trial"):
        tune.run(train_steps, resources=executor, resources_per_trial={"cpu": 1})
    with pytest.raises(hydra_tune.ConfigError, match=r"'train_steps' was made by ray\.tune\.Experiment"):
        tune.run(ray.tune.Experiment("a", train_steps, storage_path=str(tmp_path)), resources=executor)
    with pytest.raises(hydra_tune.ConfigError, match=r"registered as a name; got 'train'\. Give the function"):
        tune.run("train", resources=executor)
    trainer = TorchTrainer(train_steps, scaling_config=ScalingConfig(num_workers=1))
    with pytest.raises(hydra_tune.ConfigError, match="a TorchTrainer of Ray Train starts processes of its own"):
        tune.Tuner(trainer, resources=executor)
    lock = threading.Lock()
    with pytest.raises(hydra_tune.ConfigError, match=r"It refers to lock\. Make that within the function"):
        tune.run(lambda config: lock, resources=executor, storage_path=str(tmp_path), verbose=0)


def a_base() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))


def train_head(config: dict[str, Any], base: nn.Module | None = None) -> dict[str, Any]:
    """A head over a frozen base, which is shared unless one is given."""
    model = nn.Sequential(*(hydra_tune.share(a_base) if base is None else base))
    place = model[0][0].weight.data_ptr()
    torch.manual_seed(config["seed"])
    model.append(nn.Linear(64, 4))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    if base is None:
        model, optimizer = hydra_tune.prepare(model, optimizer)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(16, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "trained_in": os.getpid(), "place": place}


@pytest.mark.proof
def test_trials_of_a_node_have_one_copy_of_a_base(run, executor, two_threads):
    ended = run(train_head, config={"seed": tune.grid_search(list(range(4)))}).trials
    assert len({(trial.last_result["trained_in"], trial.last_result["place"]) for trial in ended}) == 1
    plain = [train_head({"seed": seed}, a_base().requires_grad_(False))["losses"] for seed in range(4)]
    assert [trial.last_result["losses"] for trial in ended] == plain
