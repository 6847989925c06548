"""A trial whose architecture is new has the device to itself in its first step, in which it is measured."""

import re
import threading
import time

import optuna
import pytest
import torch
from torch import nn

import hydra_tune
from comparison import assert_same
from hydra_tune.planning.pilot import Pilot
from hydra_tune.schedule import machine as schedule
from models import gpt
from waiting import wait_until

STEPS = 4
PATIENCE_S = 60  # of who waits for another trial's steps; then the test fails
WIDTH = 256
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, CUDA])])
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def whole_story(monkeypatch):
    """However many steps the neighbour takes meanwhile."""
    monkeypatch.setattr(schedule, "_STORY_EVENTS", None)


class Neighbour:
    """The trial that is there already, and trains until the newcomer has ended."""

    def __init__(self, pool, device):
        self.pool, self.device = pool, device
        self.losses = []
        self.is_to_hold, self.holds = threading.Event(), threading.Event()
        self.newcomer_has_ended = False
        self._stepped = threading.Condition()

    def train(self):
        torch.manual_seed(0)
        model = gpt()
        model, optimizer = hydra_tune.prepare(model, torch.optim.AdamW(model.parameters()))
        while not self.newcomer_has_ended or len(self.losses) < STEPS:
            x = torch.randint(0, 128, (2, 16)).to(self.device)
            loss = model(x).square().mean()
            self.hold()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with self._stepped:
                self.losses.append(loss.item())
                self._stepped.notify_all()

    def hold(self):
        """Once, within a step, until the newcomer has asked for its first step: between two steps it would be alone."""
        if self.is_to_hold.is_set() and not self.holds.is_set():
            self.holds.set()
            end = time.monotonic() + PATIENCE_S
            while not self._newcomer_asks():
                assert time.monotonic() < end, "nobody came"
                time.sleep(0.001)

    def _newcomer_asks(self):
        with self.pool.events.lock:
            return "PilotReady(trial=1" in self.pool.events.machine.story(1)

    def wait_for(self, steps):
        """More of its steps."""
        with self._stepped:
            goal = len(self.losses) + steps
            assert self._stepped.wait_for(lambda: len(self.losses) >= goal, PATIENCE_S), "it was stalled"


def newcomer(device, in_step=lambda: None, batch=8, keeps=0, forwards=1):
    """Its losses and weights. `in_step` is called between a forward and its backward; beside the loss stand `keeps`
    numbers, made of the outputs."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    model, optimizer = hydra_tune.prepare(model, torch.optim.AdamW(model.parameters()))
    losses = []
    for _ in range(STEPS):
        outputs = sum(model(torch.randn(batch, WIDTH).to(device)) for _ in range(forwards))
        kept = outputs.mean().expand(keeps).clone() if keeps else outputs
        in_step()
        loss = outputs.square().mean() + kept.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def run_together(device, memory="4MiB", **options):
    """Both in one pool, the newcomer after two steps of the other: what it gave, and its story."""
    found, under_way = {}, []
    started = threading.Event()

    def objective(trial):
        if trial.number == 0:
            started.set()
            neighbour.train()
            return 0.0
        started.wait()
        try:
            neighbour.wait_for(2)
            neighbour.is_to_hold.set()
            assert neighbour.holds.wait(PATIENCE_S)
            found["results"] = newcomer(device, in_step, **options)
        finally:
            neighbour.newcomer_has_ended = True
        return 0.0

    def in_step():
        with pool.events.lock:
            under_way.append({*pool.events.machine.devices[0].ledger.steps})

    with hydra_tune.ShardPool([device], memory) as pool:
        neighbour = Neighbour(pool, device)
        runner = hydra_tune.HydraTrialRunner(pool, concurrency=2)
        runner.optimize(optuna.create_study(), objective, n_trials=2)
        assert [device["used_bytes"] for device in pool.report()["devices"]] == [0]
        assert under_way[0] == {1}
        return found["results"], pool.events.machine.story(1)


def alone(device, **options):
    """Resident, but spilled on a GPU, where only then the optimizer rounds as it does in company: on the host."""
    found = []
    with hydra_tune.ShardPool([device], "64MiB" if device == "cpu" else "4MiB") as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(
            optuna.create_study(), lambda trial: found.append(newcomer(device, **options)) or 0.0, n_trials=1
        )
    return found[0]


@pytest.mark.parametrize("options", [{}, {"batch": 128}, {"keeps": 300_000}], ids=str)
def test_a_first_step_in_company_has_the_device_to_itself(device, options):
    """Also where blocks, or what its loss keeps, take nearly all of it."""
    results, _ = run_together(device, **options)
    assert_same(results, alone(device, **options))


def test_a_first_step_may_have_two_forwards(device):
    results, story = run_together(device, forwards=2)
    assert story.count("StartPilot(trial=1") == 1
    assert_same(results, alone(device, forwards=2))


def test_who_waited_for_a_first_step_of_its_like_makes_none(monkeypatch):
    measured, measure, first_is_in_step = set(), Pilot._measure, threading.Event()
    monkeypatch.setattr(Pilot, "_measure", lambda *a: measured.add(threading.get_ident()) or measure(*a))

    def other_asks():
        with pool.events.lock:
            return "PilotReady(trial=1" in pool.events.machine.story(1)

    def hold():
        if not first_is_in_step.is_set():
            first_is_in_step.set()
            wait_until(other_asks, "the other one asks for a first step")

    def objective(trial):
        if trial.number == 0:
            results.append(newcomer("cpu", hold))
        else:
            assert first_is_in_step.wait(PATIENCE_S)
            results.append(newcomer("cpu"))
        return 0.0

    results = []
    with hydra_tune.ShardPool(["cpu"], "64MiB") as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=2).optimize(optuna.create_study(), objective, n_trials=2)
    assert len(measured) == 1
    assert_same(*results)


def test_a_first_step_is_one_turn():
    """It has no tasks."""
    with hydra_tune.ShardPool(["cpu", "cpu"], "4MiB") as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(
            optuna.create_study(), lambda trial: newcomer("cpu")[0][-1], n_trials=1
        )
        story = pool.events.machine.story(0)
    assert set(re.findall(r"TaskReady\(task=Task\(trial=0, step=(\d+),", story)) == {"2", "3", "4"}
