"""The seconds that Tune counts as a trial's: those in which it waits for memory are none. By a clock that tests set."""

import os
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
pytest.importorskip("ray")

from ray import cloudpickle
from ray.tune import Trainable

import hydra_tune
from hydra_tune.integrations.ray_node import trial_thread, user_code
from hydra_tune.integrations.ray_node.kept_state import KeptStates
from hydra_tune.integrations.ray_node.messages import CallMethod, Ended, Order, ResultReported
from hydra_tune.integrations.ray_node.trial_thread import TrialThread
from hydra_tune.planning.optimizer_memory import training_bytes
from waiting import WAIT_S, wait_until


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(trial_thread, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def pool(clock):
    """With room for one model in host memory."""
    with hydra_tune.ShardPool(["cpu"], "1MiB", host_memory=training_bytes(nn.Linear(64, 64), None) * 3 // 2) as pool:
        pool.events.report.trace.now_s = clock
        yield pool


def waits(pool):
    return any("waits" in trial["state"] for trial in pool.report()["trials"])


def attempt_of(pool, work, said, payload=b""):
    tune_context = {"trial_id": "t", "trial_name": "t", "experiment_name": "e", "loaded_checkpoint": None}
    order = Order("job", payload, {}, {**tune_context, "storage": None, "trial_dir": None})
    proxy = SimpleNamespace(say=said.append)
    return TrialThread(pool, order, proxy, work, lambda: None, KeptStates(lambda: 0.0))


def test_a_wait_in_prepare_is_not_training(pool, clock):
    first, said = hydra_tune.prepare(nn.Linear(64, 64), pool=pool), []

    def work(attempt):
        clock.now_s += 2.0  # its model is built
        model = hydra_tune.prepare(nn.Linear(64, 64))
        model(torch.ones(1, 64)).sum().backward()
        clock.now_s += 3.0
        attempt.report({"loss": 1.0}, None)
        clock.now_s += 0.5
        attempt.report({"loss": 0.5}, None)
        attempt.report({"loss": 0.5, "time_this_iter_s": 77.0}, None)

    attempt = attempt_of(pool, work, said)
    for _ in range(3):
        attempt.answer(SimpleNamespace(checkpoint=None))
    attempt.start()
    wait_until(lambda: waits(pool))
    clock.now_s += 100.0
    hydra_tune.release(first)
    attempt._thread.join(WAIT_S)
    assert [type(message) for message in said] == [ResultReported] * 3 + [Ended], said
    assert [message.metrics["time_this_iter_s"] for message in said[:-1]] == [5.0, 0.5, 77.0]


class Steps(Trainable):
    def setup(self, config):
        self.layer = nn.Linear(64, 64)

    def step(self):
        self.model = hydra_tune.prepare(self.layer)
        return {"loss": self.model(torch.ones(1, 64)).sum().item()}


def test_a_wait_in_a_trainables_step_is_not_training(pool, clock, monkeypatch):
    monkeypatch.setattr(user_code.TrialSession, "enter", lambda self, storage: None)
    first, said = hydra_tune.prepare(nn.Linear(64, 64), pool=pool), []
    attempt = attempt_of(pool, user_code.train, said, cloudpickle.dumps(Steps))
    attempt.answer(CallMethod("train", (), {}))
    attempt.start()
    wait_until(lambda: waits(pool))
    clock.now_s += 100.0
    hydra_tune.release(first)
    for _ in range(int(WAIT_S / 0.01)):
        if len(said) > 1:
            break
        time.sleep(0.01)
    attempt.stop("it was stopped")
    attempt._thread.join(WAIT_S)
    assert said[1].value["time_this_iter_s"] == said[1].value["time_total_s"] == 0.0, said
