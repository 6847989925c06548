"""The columns that a pool adds to Tune's table, without Ray: what they say of each kind of trial."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
pytest.importorskip("ray")

import hydra_tune
from hydra_tune import ConfigError, HydraExecutor, tune
from hydra_tune.integrations.ray_tune.pool_figures import PoolFigures
from hydra_tune.show.snapshot import PoolSnapshot, TrialSnapshot

SPEC = HydraExecutor("1MiB").spec
MIB = 2**20


class TuneTrial(SimpleNamespace):
    """What the table reads of `ray.tune`'s."""

    PENDING, PAUSED, RUNNING = "PENDING", "PAUSED", "RUNNING"

    def __str__(self) -> str:
        return str(self.name)


def rows(*models: TrialSnapshot, status: str = "RUNNING", result: dict[str, Any] | None = None) -> dict[str, Any]:
    """The last result, as the table shows it, of a trial of this name with these models."""
    figures = PoolFigures([SPEC, SPEC])
    figures._pools = [("192.0.2.2", PoolSnapshot(1.0, (), models))]
    figures._seen_s = time.mktime((2026, 11, 30, 12, 0, 30, 0, 0, -1))
    ((row,), columns) = figures.over([TuneTrial(name="a", status=status, last_result=result or {})])
    assert str(row) == "a" and row.status == status and set(row.last_result) <= {*columns, *(result or {})}
    shown: dict[str, Any] = row.last_result
    return shown


def test_a_live_trial_shows_what_its_pool_says_now():
    model = TrialSnapshot("a", "spilled", device_bytes=MIB // 2, shards=8)
    assert rows(model, result={"loss": 1, "hydra/state": "starts"}) == {
        "loss": 1, "state": "spilled", "MiB": "0.50", "shards": "8",
    }  # fmt: skip


def test_a_trial_that_waits_shows_since_when():
    model = TrialSnapshot("a", "waits for 6.0 MiB of host memory", waits_s=25.0)
    assert rows(model) == {"state": "waits", "since": "12:00:05", "MiB": "0.00"}


def test_a_trial_that_waits_for_its_turn_trains():
    """Two spilled trials side by side: each waited in every other look."""
    model = TrialSnapshot("a", "waits for memory of cpu:0", waits_s=0.2, device_bytes=MIB, shards=8)
    assert rows(model, result={"loss": 1, "hydra/state": "spilled"}) == {
        "loss": 1, "state": "spilled", "MiB": "1.00", "shards": "8",
    }  # fmt: skip
    assert rows(model)["state"] == "waits", "it has no result yet"


def test_a_trial_with_two_models_shows_their_sum():
    """Also where two experiments have one executor: its pool was counted once for each."""
    models = [TrialSnapshot("a", "resident", device_bytes=MIB, shards=n) for n in (1, 2)]
    assert rows(*models) == {"state": "resident", "MiB": "2.00", "shards": "3"}
    assert PoolFigures([SPEC, SPEC]).specs == [SPEC]


def test_a_trial_that_the_pool_has_not_heard_of_has_not_prepared():
    assert rows() == {"state": "before prepare"}


def test_a_trial_that_has_ended_shows_how_it_ran():
    result = {"loss": 1, "hydra/state": "spilled", "hydra/shards": 8, "hydra/step_ms": 1.5}
    assert rows(status="TERMINATED", result=result) == {"loss": 1, "state": "spilled", "shards": "8"}


@pytest.mark.parametrize("status", ["PENDING", "PAUSED"])
def test_a_trial_that_tune_lets_wait_shows_nothing_of_a_pool(status):
    assert rows(status=status, result={"loss": 1, "hydra/state": "spilled"}) == {"loss": 1}


def test_a_users_metric_of_the_same_name_stays_apart():
    """The two were mixed in one column."""
    model = TrialSnapshot("a", "spilled", device_bytes=MIB, shards=8)
    assert rows(model, result={"state": 3.5, "shards": 99}) == {
        "state": 3.5, "shards": 99, "hydra state": "spilled", "MiB": "1.00", "hydra shards": "8",
    }  # fmt: skip


@pytest.mark.parametrize("takes", [tune.PoolLines, hydra_tune.report])
def test_what_is_no_executor_is_refused(takes):
    with pytest.raises(ConfigError, match="executor is a HydraExecutor, got None"):
        takes(None)
