"""Backwards of resident models, of which no hook tells."""

import threading

import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune.trials.forwards import Forwards

WIDTH, STEPS = 8, 6


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def simple(model, x):
    model(x).square().sum().backward()


def of_two_forwards(model, x):
    a, b = model(x), model(2 * x)
    (a * b).sum().backward()


def of_two_backwards(model, x):
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def of_a_part(model, x):
    torch.autograd.grad(model(x).sum(), model[0].weight)
    simple(model, x)


def beside_another(model, x):
    loss = model(x).square().sum()
    (torch.ones(2, requires_grad=True) * 2).sum().backward()
    loss.backward()


def without_backward(model, x):
    model(x)
    simple(model, x)


def evaluating(model, x):
    with torch.no_grad():
        model(x)
    simple(model, x)


def stumbling(model, x):
    loss = model(x).square().sum()
    handle = model[2].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    model.zero_grad()
    simple(model, x)


def in_another_thread(model, x):
    loss = model(x).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def losing_its_turn(model, x):
    loss = model(x).square().sum()
    if (trial := getattr(model.forward, "trial", None)) is not None:
        trial.events.hear(trial, ends=True)
    loss.backward()


def losing_its_turn_meanwhile(model, x):
    loss = model(x).square().sum()
    if (trial := getattr(model.forward, "trial", None)) is not None:
        handle = model[2].weight.register_hook(lambda _: setattr(trial.lease, "revoked", True))
        loss.backward()
        handle.remove()
    else:
        loss.backward()


KINDS = [
    simple, of_two_forwards, of_two_backwards, of_a_part, beside_another, without_backward, evaluating, stumbling,
    in_another_thread, losing_its_turn, losing_its_turn_meanwhile,
]  # fmt: skip


def train(step, prepares):
    """Simple steps, `step`, simple steps."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with hydra_tune.ShardPool(["cpu"], "64MiB") as pool:
        if prepares:
            hydra_tune.prepare(model, optimizer, pool=pool)
        for i in range(3 * STEPS):
            (step if STEPS <= i < 2 * STEPS else simple)(model, torch.randn(2, WIDTH))
            optimizer.step()
            optimizer.zero_grad()
        if prepares:
            assert pool.report()["trials"][0]["resident"]
            hydra_tune.release(model)
            assert pool.devices[0].used_bytes == 0
    return list(model.state_dict().values())


@pytest.mark.parametrize("checks", ["0", "1"])
@pytest.mark.parametrize("step", KINDS)
def test_it_trains_as_in_plain_pytorch(step, checks, monkeypatch):
    monkeypatch.setenv("HYDRA_TUNE_CHECKS", checks)
    for ours, plain in zip(train(step, prepares=True), train(step, prepares=False), strict=True):
        assert torch.equal(ours, plain)


def test_steps_of_one_forward_and_one_backward_have_no_hook(monkeypatch):
    announced, announce = [], Forwards._announce_backward
    monkeypatch.setattr(Forwards, "_announce_backward", lambda *args: announced.append(args) or announce(*args))
    with hydra_tune.ShardPool(["cpu"], "64MiB") as pool:
        model = hydra_tune.prepare(net(), pool=pool)
        for _ in range(STEPS):
            simple(model, torch.randn(2, WIDTH))
        assert 0 < len(announced) <= 2  # the first step, and the one that shows that it fits
        trial = model.forward.trial
        assert trial.lease.num_steps >= STEPS - 2 and not trial.lease.in_step
        of_two_forwards(model, torch.randn(2, WIDTH))
        num_announced = len(announced)
        simple(model, torch.randn(2, WIDTH))
        assert len(announced) == num_announced + 1  # there may be other such steps: their graphs are followed
        hydra_tune.release(model)


@pytest.mark.parametrize("step", [simple, of_two_backwards, losing_its_turn])
def test_each_backward_has_the_device(step):
    """One that runs beside another trial's task would draw from its generator on a GPU."""
    has = []
    with hydra_tune.ShardPool(["cpu"], "64MiB") as pool:
        model = hydra_tune.prepare(net(), pool=pool)
        trial, device = model.forward.trial, pool.events.machine.devices[0]
        for _ in range(STEPS):
            step(model, torch.randn(2, WIDTH))
        model[2].weight.register_hook(
            lambda _: has.append(trial.tasks.current is not None and device.running.trial == trial.id)
        )
        for _ in range(STEPS):
            step(model, torch.randn(2, WIDTH))
        hydra_tune.release(model)
    assert has == [True] * STEPS * (1 + (step is of_two_backwards))
