"""What the tests under Ray share: a local cluster, and how a function goes on from its checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray import tune

HERE = Path(__file__).parent


@contextmanager
def modules_of_tests() -> Iterator[None]:
    """Processes that Ray starts meanwhile import them, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
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


def first_step() -> int:
    """The one after that which the trial's checkpoint was made in."""
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        return int(Path(folder, "step").read_text()) + 1
