"""What the pools of a run do now, asked without waiting for them: a result tells nothing of a trial between its
reports, and a trial that waits for memory has none."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.tune import Callback

from hydra_tune.integrations.ray_node.pool_spec import PoolSpec
from hydra_tune.integrations.ray_tune.executor import HydraExecutor, spec_of
from hydra_tune.integrations.ray_tune.run_pools import keeper_of
from hydra_tune.show.live_table import plain_line
from hydra_tune.show.snapshot import PoolSnapshot, TrialSnapshot

ASK_S = 2.0
LINE_S = 30.0
BRIEF_S = 1.0  # trials that take turns wait again and again, for less
# columns of Tune's table
STATE, SINCE, DEVICE_MIB, SHARDS = COLUMNS = ("state", "since", "MiB", "shards")


class PoolFigures:
    """Of the pools of one run, a few seconds old; nothing before the first have come."""

    def __init__(self, specs: Sequence[PoolSpec]) -> None:
        self.specs = list(dict.fromkeys(specs))
        self._pools: list[tuple[str, PoolSnapshot]] = []  # with their nodes' addresses
        self._seen_s = 0.0
        self._asked: list[Any] = []
        self._asked_s = float("-inf")

    def look(self) -> None:
        """In each step of Tune's: ask every few seconds, and take in a later step what has come, so that Tune waits for
        no pool."""
        if self._asked and len(ray.wait(self._asked, num_returns=len(self._asked), timeout=0)[1]) == 0:
            asked, self._asked = self._asked, []
            with suppress(RayError):  # a pool or its keeper starts again
                self._pools = [pool for snapshots in ray.get(asked) for pool in snapshots.items()]
                self._seen_s = time.time()
        elif not self._asked and time.monotonic() - self._asked_s >= ASK_S:
            self._asked_s = time.monotonic()
            keepers = [keeper for spec in self.specs if (keeper := keeper_of(spec)) is not None]
            self._asked = [keeper.snapshots.remote() for keeper in keepers]

    def lines(self) -> list[str]:
        return [f"pool on {node}: {plain_line(snapshot)}" for node, snapshot in self._pools]

    def over(self, trials: Sequence[Any]) -> tuple[list[Any], list[str]]:
        """Tune's trials, as its tables read them, with our columns in their last results; and the names of these."""
        metrics = {metric for trial in trials for metric in trial.last_result}
        names = {column: f"hydra {column}" if column in metrics else column for column in COLUMNS}
        models: dict[str, list[TrialSnapshot]] = defaultdict(list)
        for _, snapshot in self._pools:
            for model in snapshot.trials:
                models[model.name].append(model)
        rows = []
        for trial in trials:
            columns = self._columns(trial, models.get(str(trial), []))
            rows.append(_Row(trial, {names[column]: str(value) for column, value in columns.items() if value}))
        return rows, list(names.values())

    def _columns(self, trial: Any, models: list[TrialSnapshot]) -> dict[str, Any]:
        """What the models of a live trial do now, or how one that has ended ran."""
        result = trial.last_result
        if trial.status in (trial.PENDING, trial.PAUSED):
            return {}
        if trial.status != trial.RUNNING or not models:
            early = "before prepare" if trial.status == trial.RUNNING else None
            return {STATE: result.get("hydra/state", early), SHARDS: result.get("hydra/shards")}
        columns: dict[str, Any] = {STATE: models[-1].state, SHARDS: sum(model.shards for model in models)}
        columns[DEVICE_MIB] = f"{sum(model.device_bytes for model in models) / 2**20:.2f}"
        waits_s = max((model.waits_s or 0.0 for model in models if model.state.startswith("waits")), default=None)
        if waits_s is not None and waits_s < BRIEF_S and "hydra/state" in result:
            columns[STATE] = result["hydra/state"]
        elif waits_s is not None:
            columns[STATE] = "waits"  # for what, its pool's line tells: it is too long for a column
            columns[SINCE] = time.strftime("%H:%M:%S", time.localtime(self._seen_s - waits_s))
        return columns


class _Row:
    """A trial of Tune's whose last result has our columns instead of our figures. They are text: of the numbers in a
    result Tune takes the first few for the user's metrics."""

    def __init__(self, trial: Any, columns: dict[str, str]) -> None:
        self._trial = trial
        own = {key: value for key, value in trial.last_result.items() if not key.startswith("hydra/")}
        self.last_result = {**own, **columns}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trial, name)

    def __str__(self) -> str:
        return str(self._trial)


class PoolLines(Callback):
    """A line for each node's pool every 30 s, for stock `ray.tune` and for a progress reporter of one's own:
    `callbacks=[hydra_tune.tune.PoolLines(executor)]`."""

    def __init__(self, executor: HydraExecutor) -> None:
        self._figures = PoolFigures([spec_of(executor)])
        self._printed_s = time.monotonic()

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self._figures.look()
        if time.monotonic() - self._printed_s >= LINE_S and (lines := self._figures.lines()):
            self._printed_s = time.monotonic()
            print(*lines, sep="\n")

    def __getstate__(self) -> dict[str, Any]:
        """Tune keeps callbacks with the experiment."""
        return {"_figures": PoolFigures(self._figures.specs), "_printed_s": 0.0}
