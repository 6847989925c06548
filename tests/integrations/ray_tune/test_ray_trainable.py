"""What stands for a `tune.Trainable` of a pool: when one is made there, made anew, or reset. Without a cluster."""

import os
from types import SimpleNamespace

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
pytest.importorskip("ray")

from ray.tune import Trainable
from ray.tune.result import TRIAL_INFO

import hydra_tune
from hydra_tune import HydraExecutor
from hydra_tune.integrations.ray_tune import trainable as ray_trainable
from hydra_tune.integrations.ray_tune.pool_connection import PoolLostError

pytestmark = pytest.mark.filterwarnings("ignore")  # of older Rays' own loggers


class Plain(Trainable):
    def step(self):
        return {}


class ResetsItself(Plain):
    def reset_config(self, config):
        return True


class Link:
    """Notes what it is told, and has lost an attempt if `gone` says so."""

    def __init__(self, spec):
        self.told = []
        self.gone = False
        MADE.append(self)

    def begin(self, payload, config, tune_context):
        assert config[TRIAL_INFO].trial_id == tune_context["trial_id"]
        self.gone = False
        self.told.append(("begins", tune_context["trial_id"], config["lr"]))

    def await_value(self):
        self.told.append("is made")

    def call(self, method, *arguments, **options):
        if self.gone:
            raise PoolLostError("another attempt of this trial has begun")
        self.told.append(method)
        return {} if method == "train" else True

    def stop(self, reason):
        self.told.append("stops")


MADE: list[Link] = []


def config_of(trial_id, lr):
    info = SimpleNamespace(trial_id=trial_id, trial_name=trial_id, trial_resources=None, experiment_name="e")
    return {"lr": lr, TRIAL_INFO: info}


@pytest.fixture
def started(monkeypatch):
    """As Tune starts one for trial a; and its link."""
    monkeypatch.setattr(ray_trainable, "PoolConnection", Link)

    def started(kind):
        proxy = hydra_tune.trainable(kind, HydraExecutor("1MiB", devices=["cpu"]))(config=config_of("a", 0.1))
        return proxy, MADE.pop()

    return started


def test_an_actor_that_tune_never_calls_begins_nothing(started):
    """It would end the attempt of the actor that Tune has reused for the same trial."""
    proxy, link = started(Plain)
    proxy.stop()
    assert link.told == ["stops"]


def test_one_without_a_reset_is_made_anew_for_the_next_trial(started):
    proxy, link = started(Plain)
    proxy.train()
    assert proxy.reset(config_of("b", 0.2))
    assert link.told == [("begins", "a", 0.1), "is made", "train"]
    proxy.restore("checkpoint")
    proxy.train()
    assert link.told[3:] == [("begins", "b", 0.2), "is made", "restore", "train"]


def test_one_that_resets_itself_does_so_unless_it_is_gone(started):
    """Its former trial may have begun elsewhere, while this actor waited for another one."""
    proxy, link = started(ResetsItself)
    proxy.train()
    assert proxy.reset(config_of("b", 0.2))
    proxy.train()
    assert link.told[3:] == ["reset", "train"]
    link.gone = True
    assert proxy.reset(config_of("c", 0.3))
    proxy.train()
    assert link.told[5:] == [("begins", "c", 0.3), "is made", "train"]
