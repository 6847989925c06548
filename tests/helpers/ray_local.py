"""What the tests under Ray share: a local cluster, and how a function goes on from its checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune

from hydra_tune import HydraExecutor
from hydra_tune.integrations.ray_tune.run_pools import report
from paths import TESTS, python_path


@contextmanager
def modules_of_tests() -> Iterator[None]:
    """Processes that Ray starts meanwhile import them, too: a function of a test is sent by its module's name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path(*(TESTS / "integrations").iterdir()))
        yield


@contextmanager
def local_ray() -> Iterator[None]:
    """Two CPUs, apart from any other cluster of this machine."""
    with modules_of_tests():
        ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()


def empty_pool(executor: HydraExecutor) -> dict[str, Any]:
    """What the one pool of this executor says, in which nothing is left. Tune does not wait for the actors that it
    stops: the last ones may still be cleaning up."""
    deadline_s = time.monotonic() + 30
    while True:
        (pool,) = report(executor).values()
        if (pool["live"], [device["used_bytes"] for device in pool["devices"]]) == (0, [0]):
            return pool
        assert time.monotonic() < deadline_s, pool
        time.sleep(0.1)


class Results(tune.Callback):
    """Of all trials, in the order in which they came; Tune's own file forgets some when a trial goes on elsewhere."""

    def __init__(self) -> None:
        self.of: dict[str, list[dict[str, Any]]] = {}

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self.of.setdefault(trial.trial_id, []).append(dict(result))


def first_step() -> int:
    """The one after that which the trial's checkpoint was made in."""
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        return int(Path(folder, "step").read_text()) + 1
