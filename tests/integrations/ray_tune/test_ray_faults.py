"""What dies under Ray Tune, and what is left of it: proxies, pools, nodes, drivers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
pytest.importorskip("ray")

import ray
import ray.tune
from ray.cluster_utils import Cluster

import hydra_tune
from hydra_tune import HydraExecutor, tune
from hydra_tune.integrations.ray_node.messages import Order
from paths import HELPERS
from ray_local import Results, empty_pool, first_step, local_ray, modules_of_tests
from waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def cluster():
    with modules_of_tests():
        own = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        yield own
        own.shutdown()


@pytest.fixture
def job(cluster):
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()


def processes(name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if f"ray::{name}" in " ".join(process.info["cmdline"] or ()):
            found.append(process)
    return found


def train_for_long(config: dict[str, Any]) -> None:
    first = first_step()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    folder = Path(config["folder"], f"{os.getpid()} {time.monotonic_ns()}")
    folder.mkdir()
    for step in range(first, 8):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        Path(folder, "step").write_text(str(step))
        tune.report(
            {"step": step, "first": first, "pool": os.getpid()}, checkpoint=tune.Checkpoint.from_directory(folder)
        )
        while step == 3 and not Path(config["folder"], "go on").exists():
            time.sleep(0.1)


class OnResult(ray.tune.Callback):
    """Calls once, in the driver, when a trial has reported so many times."""

    def __init__(self, reports: int, call: Callable[[dict[str, Any]], None]) -> None:
        self._left, self._call = reports, call

    def on_trial_result(self, iteration, trials, trial, result, **info):
        self._left -= 1
        if self._left == 0:
            self._call(result)


def sweep(executor: HydraExecutor, tmp_path: Path, **options: Any) -> Any:
    proxy = hydra_tune.trainable(train_for_long, executor)
    defaults = {"verbose": 0, "storage_path": str(tmp_path / "results"), "raise_on_failed_trial": False}
    return ray.tune.run(proxy, config={"folder": str(tmp_path)}, **{**defaults, **options})


def kill_and_go_on(pid: int, folder: Path) -> None:
    os.kill(pid, signal.SIGKILL)
    Path(folder, "go on").touch()


@pytest.mark.proof
def test_a_killed_proxys_trial_starts_again_and_the_former_attempt_ends(job, tmp_path):
    executor = HydraExecutor("256KiB", devices=["cpu"], concurrency=1)
    watch = OnResult(4, lambda result: kill_and_go_on(result["pid"], tmp_path))
    (trial,) = sweep(executor, tmp_path, callbacks=[watch], max_failures=1).trials
    assert (trial.status, trial.last_result["step"]) == ("TERMINATED", 7)
    assert trial.last_result["first"] == 3, "from the last checkpoint that Tune had heard of"
    empty_pool(executor)


@pytest.mark.proof
def test_a_killed_proxy_is_noticed(job, tmp_path):
    executor = HydraExecutor("256KiB", devices=["cpu"], concurrency=1)
    watch = OnResult(4, lambda result: os.kill(result["pid"], signal.SIGKILL))
    (trial,) = sweep(executor, tmp_path, callbacks=[watch]).trials
    assert trial.status == "ERROR"
    Path(tmp_path, "go on").touch()
    empty_pool(executor)


@pytest.mark.proof
def test_trials_of_a_killed_pool_start_again_in_a_new_one(job, tmp_path):
    executor = HydraExecutor("256KiB", devices=["cpu"], concurrency=2)
    watch = OnResult(8, lambda result: kill_and_go_on(result["pool"], tmp_path))
    ended = sweep(executor, tmp_path, callbacks=[watch], max_failures=2, num_samples=2).trials
    assert {(trial.status, trial.last_result["step"]) for trial in ended} == {("TERMINATED", 7)}
    assert {trial.last_result["first"] for trial in ended} <= {3, 4}
    empty_pool(executor)


@pytest.mark.proof
def test_a_killed_pool_without_max_failures_is_an_error_that_says_so(job, tmp_path):
    executor = HydraExecutor("256KiB", devices=["cpu"], concurrency=1)
    watch = OnResult(2, lambda result: kill_and_go_on(result["pool"], tmp_path))
    (trial,) = sweep(executor, tmp_path, callbacks=[watch]).trials
    assert trial.status == "ERROR"
    said = Path(trial.error_file).read_text()
    assert re.search(r"PoolLostError: the pool's process has died: \S.*\w", said), said


def lose_device(config: dict[str, Any]) -> dict[str, Any]:
    from hydra_tune.integrations.ray_node import trial_thread

    trial_thread.is_lost = lambda error: "CUDA error" in str(error)  # what a GPU would say
    marker = Path(config["folder"], "lost")
    if not marker.exists():
        marker.write_text(str(os.getpid()))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return {"lost": int(marker.read_text()), "pool": os.getpid()}


@pytest.mark.proof
def test_a_lost_device_ends_the_pools_process_and_the_trial_starts_again_in_a_new_one(job, tmp_path):
    executor = HydraExecutor("256KiB", devices=["cpu"], concurrency=1)
    (trial,) = ray.tune.run(
        hydra_tune.trainable(lose_device, executor), config={"folder": str(tmp_path)}, verbose=0, max_failures=3,
        storage_path=str(tmp_path / "results"),
    ).trials  # fmt: skip
    wait_until(lambda: not psutil.pid_exists(trial.last_result["lost"]), "the former process is gone")
    assert trial.last_result["lost"] != trial.last_result["pool"]


def stop_oneself(config: dict[str, Any]) -> None:
    raise hydra_tune.TrialStopped("of its own")


def test_a_stop_that_nobody_asked_for_is_an_error(job, tmp_path):
    executor = HydraExecutor("256KiB", devices=["cpu"], concurrency=1)
    assert "though Tune has not asked for it" in error_of(executor, tmp_path)


@pytest.mark.proof
def test_a_pool_whose_devices_do_not_exist_says_so(job, tmp_path):
    executor = HydraExecutor("256KiB", devices=["cuda:0"], concurrency=1)
    assert "1, but Ray knows of 0 on this node" in error_of(executor, tmp_path)


def error_of(executor: HydraExecutor, tmp_path: Path) -> str:
    (trial,) = ray.tune.run(
        hydra_tune.trainable(stop_oneself, executor), verbose=0, storage_path=str(tmp_path), raise_on_failed_trial=False
    ).trials
    assert trial.status == "ERROR"
    return Path(trial.error_file).read_text()


@pytest.mark.proof
def test_a_pool_whose_devices_are_taken_says_so(tmp_path):
    own = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1, "include_dashboard": False})
    try:
        ray.init(address=own.address, log_to_driver=False)
        taker = ray.remote(num_cpus=0, num_gpus=1)(Counter).remote()
        ray.get(taker.total.remote())
        executor = HydraExecutor("256KiB", devices="cuda:0", concurrency=1)
        assert "could not have them within 60 s: of the node's 1, others" in error_of(executor, tmp_path)
    finally:
        ray.shutdown()
        own.shutdown()


@pytest.mark.proof
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_of_a_driver_that_is_stopped_within_a_step(cluster, tmp_path, how):
    driver = subprocess.Popen([sys.executable, str(HELPERS / "ray_driver.py"), cluster.address, str(tmp_path)])
    try:
        wait_until(lambda: len(list(tmp_path.glob("under way*"))) == 2, "both trials are under way")
        driver.send_signal(how)
        driver.wait(60)
    finally:
        driver.kill()
    wait_until(lambda: not [p for name in ("Pool", "long_step") for p in processes(name)], "no process is left", 30)


# ---- several nodes, several jobs ----


def several_steps(config: dict[str, Any]) -> None:
    """Sixteen of them, which go on from the last checkpoint; says on which node."""
    first = first_step()
    torch.manual_seed(config["n"])
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(first, 16):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        node = ray.get_runtime_context().get_node_id()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step").write_text(str(step))
            metrics = {"step": step, "node": node, "pool": os.getpid()}
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))
        time.sleep(config.get("rest_s", 0))


@pytest.fixture
def three_nodes():
    with modules_of_tests():
        own = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        others = [own.add_node(num_cpus=1) for _ in range(2)]
        ray.init(address=own.address, log_to_driver=False)
        yield own, others
        ray.shutdown()
        own.shutdown()


@pytest.mark.proof
def test_every_node_has_a_pool_and_one_that_dies_takes_no_history_along(three_nodes, tmp_path):
    cluster, others = three_nodes
    executor = HydraExecutor("256KiB", devices=["cpu"], concurrency=2)
    head = ray.get_runtime_context().get_node_id()
    lost: list[str] = []

    class LoseNode(ray.tune.Callback):
        def on_trial_result(self, iteration, trials, trial, result, **info):
            if not lost and result["step"] == 6 and result["node"] != head:
                lost.append(result["node"])
                (node,) = (node for node in others if node.node_id == result["node"])
                cluster.remove_node(node, allow_graceful=False)
                cluster.add_node(num_cpus=1)

    proxy = hydra_tune.trainable(several_steps, executor)
    results = Results()
    ray.tune.run(
        proxy, config={"n": tune.grid_search(list(range(6))), "rest_s": 0.5}, verbose=0, max_failures=3,
        storage_path=str(tmp_path), callbacks=[LoseNode(), results],
    )  # fmt: skip
    assert lost
    histories = list(results.of.values())
    assert len(histories) == 6
    assert len({result["node"] for history in histories for result in history}) >= 3
    for history in histories:
        steps = [result["step"] for result in history]
        assert sorted(set(steps)) == list(range(16)), "whole"
        assert len(steps) <= 17, "no step but the last before the loss is repeated"


@pytest.mark.proof
def test_a_trial_starts_on_a_node_that_has_memory_for_it(tmp_path):
    """Of three nodes with slots for all, one has memory for none, one for one trial at a time, one for two."""
    gib = 2**30
    with modules_of_tests():
        head = {"num_cpus": 1, "memory": gib // 2, "include_dashboard": False}
        own = Cluster(initialize_head=True, head_node_args=head)
        for places in (1, 2):
            own.add_node(num_cpus=1, memory=places * gib)
        ray.init(address=own.address, log_to_driver=False)
        try:
            memory = {node["NodeID"]: node["Resources"]["memory"] // gib for node in ray.nodes()}
            executor = HydraExecutor("256KiB", devices=["cpu"], concurrency=4, trial_memory="1GiB")
            ended = ray.tune.run(
                hydra_tune.trainable(several_steps, executor), config={"n": tune.grid_search(list(range(6)))},
                verbose=0, storage_path=str(tmp_path),
            ).trials  # fmt: skip
            assert {trial.status for trial in ended} == {"TERMINATED"}
            assert {memory[trial.last_result["node"]] for trial in ended} == {1, 2}
        finally:
            ray.shutdown()
            own.shutdown()


@pytest.mark.proof
def test_another_cluster_in_the_same_process_has_pools_of_its_own(tmp_path):
    """As in a notebook after `ray.shutdown()`: the job's number is the same again."""
    executor, jobs = HydraExecutor("256KiB", devices=["cpu"], concurrency=1), []
    for _ in range(2):
        with local_ray():
            jobs.append(ray.get_runtime_context().get_job_id())
            (trial,) = ray.tune.run(
                hydra_tune.trainable(several_steps, executor), config={"n": 0}, verbose=0, storage_path=str(tmp_path)
            ).trials
            assert trial.status == "TERMINATED"
    assert jobs[0] == jobs[1]


@pytest.mark.proof
def test_a_pool_is_its_jobs_own(job, tmp_path):
    executor = HydraExecutor("256KiB", devices=["cpu"], concurrency=1)
    ray.tune.run(hydra_tune.trainable(several_steps, executor), config={"n": 0}, verbose=0, storage_path=str(tmp_path))
    keeper = ray.get_actor(executor.spec.name)
    address, key = ray.get(keeper.address_on.remote(ray.get_runtime_context().get_node_id()))
    line = Client(address, authkey=key)
    order = Order("another job", b"", {}, {"trial_id": "t", "trial_name": "t"})
    line.send_bytes(ray.cloudpickle.dumps(order))
    error = ray.cloudpickle.loads(ray.cloudpickle.loads(line.recv_bytes()).error)
    assert isinstance(error, PermissionError) and "a pool runs code of its own Ray job" in str(error)
    with pytest.raises(AuthenticationError):
        Client(address, authkey=b"another")
    address, name = ray.get_runtime_context().gcs_address, executor.spec.name
    elsewhere = f"import ray; ray.init(address={address!r}); ray.get_actor({name!r})"
    other = subprocess.run([sys.executable, "-c", elsewhere], capture_output=True, text=True, timeout=300)
    assert other.returncode != 0 and "Failed to look up actor" in other.stderr


@pytest.mark.proof
def test_jobs_that_ask_for_it_share_a_pool(cluster, tmp_path):
    driver = subprocess.Popen(
        [sys.executable, str(HELPERS / "ray_driver.py"), cluster.address, str(tmp_path), "shared"]
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("under way*"))) == 2, "both trials are under way")
        ray.init(address=cluster.address, log_to_driver=False)
        executor = HydraExecutor("256KiB", devices=["cpu"], concurrency=4, pool="shared")
        (trial,) = ray.tune.run(
            hydra_tune.trainable(several_steps, executor), config={"n": 0}, verbose=0, storage_path=str(tmp_path)
        ).trials
        assert [process.pid for process in processes("PoolActor")] == [trial.last_result["pool"]]
        other = HydraExecutor("1MiB", devices=["cpu"], concurrency=4, pool="shared")
        with pytest.raises(hydra_tune.ConfigError, match="is shared as its first job made it"):
            ray.tune.run(hydra_tune.trainable(several_steps, other), verbose=0, storage_path=str(tmp_path))
    finally:
        ray.shutdown()
        driver.kill()
    wait_until(lambda: not processes("Pool"), "no process is left", 30)
