"""A trial that is slow between two tasks (its loader blocks, its objective sleeps) holds up nobody."""

import threading

import pytest
import torch
from torch.optim import SGD

import hydra_tune
from hydra_tune.trials.context import trial_context
from models import BUDGETS, WIDTH, Net

WAIT_S = 30.0


def train(model, pool, steps, between):
    model, optimizer = hydra_tune.prepare(model, SGD(model.parameters(), lr=0.1), pool=pool)
    for number in range(steps):
        loss = model(torch.randn(4, WIDTH)).square().mean()
        between(number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("where", ["three shards", "resident"])
def test_a_trial_that_sleeps_within_its_step_has_no_lease_and_the_report_says_what_it_has(where):
    asleep, awake = threading.Event(), threading.Event()

    class Stopped(Exception):
        pass

    def sleep(step):
        if step == 1:
            asleep.set()
            assert awake.wait(WAIT_S)
            raise Stopped

    def slow():
        try:
            with trial_context(pool, 0):
                train(Net(), pool, 3, sleep)
        except Stopped:
            pass

    with hydra_tune.ShardPool(["cpu"], BUDGETS[where]) as pool:
        thread = threading.Thread(target=slow)
        thread.start()
        assert asleep.wait(WAIT_S)
        (sleeper,), (device,) = pool.report()["trials"], pool.devices
        if where == "three shards":  # else its turn lasts until another trial asks
            assert sleeper["reserved_bytes"] == device.used_bytes > 0
            assert pool.events.machine.devices[0].running is None
        with trial_context(pool, 1):
            train(Net(), pool, 3, lambda _: None)
        sleeper, other = pool.report()["trials"]
        assert (sleeper["steps"], other["steps"]) == (2, 3)
        assert sleeper["reserved_bytes"] == device.used_bytes > 0
        assert other["reserved_bytes"] == 0
        awake.set()
        thread.join(WAIT_S)
        assert pool.report()["trials"][0]["reserved_bytes"] == device.used_bytes == 0
