"""Prints what the pools of a run do, for Tune's table tells nothing of a trial between its reports."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.tune import Callback

from hydra_tune.integrations.ray_node.pool_spec import PoolSpec
from hydra_tune.integrations.ray_tune.pool_keeper import keeper_of

LINE_S = 30.0


class PoolLines(Callback):
    """A line for each node's pool every 30 s, between Tune's tables. Asks in one step of Tune's and prints in a later
    one, so that Tune waits for no pool."""

    def __init__(self, spec: PoolSpec) -> None:
        self._spec = spec
        self._asked: Any = None
        self._asked_s = time.monotonic()

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        with suppress(RayError):  # a pool or its keeper starts again
            if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
                lines, self._asked = ray.get(self._asked), None
                for node, line in lines.items():
                    print(f"pool on {node}: {line}")
            elif self._asked is None and time.monotonic() - self._asked_s >= LINE_S:
                self._asked_s = time.monotonic()
                keeper = keeper_of(self._spec)
                self._asked = None if keeper is None else keeper.lines.remote()

    def __getstate__(self) -> dict[str, Any]:
        return {"_spec": self._spec, "_asked": None, "_asked_s": 0.0}


def with_lines(callbacks: list[Callback] | None, spec: PoolSpec, verbose: Any) -> list[Callback]:
    """A run's callbacks, and one that prints the pools' lines, unless Tune prints nothing."""
    quiet = verbose is not None and int(verbose) == 0
    return [*(callbacks or []), *([] if quiet else [PoolLines(spec)])]
