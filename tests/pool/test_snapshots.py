"""Snapshots of a pool: what its trials do, in words that tell apart, and figures that count up."""

import threading

import pytest
import torch

import hydra_tune
from hydra_tune.trials.context import trial_context
from models import BUDGETS, WIDTH, Net
from waiting import WAIT_S, wait_until


def step(model, optimizer, within=lambda: None):
    loss = model(torch.randn(4, WIDTH)).sum()
    within()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def prepared(pool, **options):
    model = Net()
    return hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), pool=pool, **options)


@pytest.mark.parametrize("state", ["spilled", "resident"])
def test_a_trial_is_measured_and_then_runs_as_it_fits(state):
    pool = hydra_tune.ShardPool(["cpu"], BUDGETS[state])
    model, optimizer = prepared(pool, total_steps=5)
    assert [t.state for t in pool.snapshot().trials] == ["starts"]
    seen = []
    for _ in range(3):
        step(model, optimizer, lambda: seen.append(pool.snapshot()))
    assert [s.trials[0].state for s in seen] == ["measuring", state, state]
    assert seen[0].devices[0].computes == "trial 0"
    (now,) = pool.snapshot().trials
    assert (now.name, now.steps, now.total_steps, now.value) == ("trial 0", 3, 5, None)
    assert now.step_s > 0 and now.left_s == pytest.approx(2 * now.step_s) and 0 < now.device_share <= 1
    assert now.host_bytes > 0 and (now.device_bytes >= now.host_bytes) == (state == "resident")


@pytest.mark.parametrize("state", ["spilled", "resident"])
def test_a_step_takes_what_the_script_takes_between_steps_too_in_all_views(state, monkeypatch):
    """The study's attribute and the report left out the time between steps, as that of a loader."""
    pool = hydra_tune.ShardPool(["cpu"], BUDGETS[state])
    now_s = 0.0
    monkeypatch.setattr(pool.events.report.trace, "now_s", lambda: now_s)
    with trial_context(pool, 0) as context:
        model, optimizer = prepared(pool)
        told = []
        for _ in range(4):
            told.append(pool.figures(context.trials[0])["hydra/step_ms"])
            step(model, optimizer)
            now_s += 30.0  # the clock stands still else
        assert pool.snapshot().trials[0].step_s == 30
    (ended,) = pool.report()["trials"]
    assert (ended["trained_steps"], ended["step_s"]) == (4, 30)
    assert told[:2] == [None, None] and told[3] == 30_000


def test_nothing_is_told_before_it_is_known():
    """The first attributes of a trial were zeros."""
    pool = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"])
    with trial_context(pool, 0) as context:
        model, optimizer = prepared(pool)
        known = {key: told for key, told in pool.figures(context.trials[0]).items() if told is not None}
        assert known == {"hydra/state": "starts", "hydra/device": pool.devices[0].name}
        for _ in range(3):
            step(model, optimizer)
        assert None not in pool.figures(context.trials[0]).values()


def test_a_trial_that_waits_says_for_what_and_an_ended_one_is_gone():
    pool = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"])
    model, optimizer = prepared(pool)

    def other():
        waiting, its_optimizer = prepared(pool)
        step(waiting, its_optimizer)
        hydra_tune.release(waiting)

    def another_comes():
        thread.start()
        wait_until(lambda: states()[1:] == ["waits for trial 0's first step"])

    def states():
        return [trial.state for trial in pool.snapshot().trials]

    thread = threading.Thread(target=other)
    step(model, optimizer, another_comes)
    thread.join(WAIT_S)
    assert states() == ["spilled"]
    hydra_tune.release(model)
    assert pool.snapshot().trials == () and pool.snapshot().devices[0].used_bytes == 0


def test_a_device_says_why_it_did_not_compute():
    pool = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"])
    model, optimizer = prepared(pool)
    for _ in range(2):
        step(model, optimizer)
    device = pool.report()["devices"][0]
    assert {"pilot", "promotion"} <= device["stalled_by"].keys()
    assert sum(device["stalled_by"].values()) == pytest.approx(device["stalled_s"])
    assert pool.snapshot().devices[0].stalled_by == device["stalled_by"]
