"""A trial whose architecture is new is measured beside the others: its first step does not stall them."""

import functools
import re
import threading
import time

import optuna
import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune import schedule
from hydra_tune.meter import TrialMeter
from models import gpt

STEPS = 4
PATIENCE_S = 60  # of who waits for another trial's steps; then the test fails
WIDTH = 256
BLOCK_BYTES = 4 * (WIDTH + 1) * WIDTH
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
        with self.pool._lock:
            return "PilotReady(trial=1" in self.pool._machine.story(1)

    def wait_for(self, steps):
        """More of its steps."""
        with self._stepped:
            goal = len(self.losses) + steps
            assert self._stepped.wait_for(lambda: len(self.losses) >= goal, PATIENCE_S), "it was stalled"


class Calling(nn.Module):
    """A layer that calls something whenever it runs."""

    def __init__(self, call):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.call = call

    def forward(self, x):
        self.call()
        return torch.tanh(self.linear(x))


def newcomer(device, in_forward=lambda: None, in_step=lambda: None, batch=8, keeps=0, forwards=1):
    """Its losses and weights. `in_step` is called between a forward and its backward; beside the loss stand `keeps`
    numbers, made of the outputs."""
    torch.manual_seed(1)
    model = nn.Sequential(Calling(in_forward), *(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
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


def run_together(device, waits_in=(), memory="4MiB", **options):
    """Both in one pool, the newcomer after two steps of the other: what it gave, and its story."""
    found = {}
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
            # once, in the first step; and so that no measuring puts it back
            calls = {name: functools.cache(lambda: neighbour.wait_for(3)) for name in waits_in}
            found["results"] = newcomer(device, **calls, **options)
        finally:
            neighbour.newcomer_has_ended = True
        return 0.0

    with hydra_tune.ShardPool([device], memory) as pool:
        neighbour = Neighbour(pool, device)
        runner = hydra_tune.HydraTrialRunner(pool, concurrency=2)
        runner.optimize(optuna.create_study(), objective, n_trials=2)
        assert [device["used_bytes"] for device in pool.report()["devices"]] == [0]
        return found["results"], pool._machine.story(1)


def alone(device, **options):
    """Resident, but spilled on a GPU, where only then the optimizer rounds as it does in company: on the host."""
    found = []
    with hydra_tune.ShardPool([device], "64MiB" if device == "cpu" else "4MiB") as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(
            optuna.create_study(), lambda trial: found.append(newcomer(device, **options)) or 0.0, n_trials=1
        )
    return found[0]


def assert_same(a, b):
    assert a[0] == b[0]
    assert all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def test_the_others_go_on_while_a_block_is_measured(device):
    results, story = run_together(device, waits_in=["in_forward"])
    assert "beside=True" in story and "Alone" not in story
    assert_same(results, alone(device))


def test_the_others_go_on_during_a_first_step(device):
    results, story = run_together(device, waits_in=["in_step"])
    assert "beside=True" in story and "Alone" not in story
    assert_same(results, alone(device))


def test_a_first_step_that_lacks_room_beside_the_others_has_the_device_to_itself(device):
    """They spare the least that any first step of this model needs, but not what its activations take."""
    memory = "3MiB" if device == "cpu" else "4MiB"  # gradients wait there on their way to the host
    results, story = run_together(device, memory=memory, batch=128)
    assert story.index("beside=True") < story.index("Alone(trial=1)")
    assert_same(results, alone(device, batch=128))


def test_a_first_step_beside_others_can_take_no_more_than_they_spare(device, monkeypatch):
    """Of which a block that is on the device has its weights' share."""
    limits, limit = [], TrialMeter.limit

    def noting(meter, num_bytes):
        limits.append(num_bytes)
        limit(meter, num_bytes)

    monkeypatch.setattr(TrialMeter, "limit", noting)
    _, story = run_together(device)
    spare_bytes = int(re.search(r"StartPilot\(trial=1, free_bytes=(\d+), beside=True\)", story)[1])
    of_step = [limit for limit in limits if limit is not None]
    assert max(of_step) >= spare_bytes and max(of_step) - min(of_step) == BLOCK_BYTES
    assert limits[-1] is None


def test_a_first_step_that_keeps_more_than_others_spare_waits_for_them(device):
    """Its loss keeps more than any block has shown."""
    results, story = run_together(device, keeps=300_000)
    assert story.count("Alone(trial=1)") == 1
    assert_same(results, alone(device, keeps=300_000))


def test_a_first_step_may_have_two_forwards(device):
    results, story = run_together(device, forwards=2)
    assert story.count("StartPilot(trial=1") == 1
    assert_same(results, alone(device, forwards=2))


def test_a_first_step_is_one_turn():
    """It has no tasks."""
    with hydra_tune.ShardPool(["cpu", "cpu"], "4MiB") as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(
            optuna.create_study(), lambda trial: newcomer("cpu")[0][-1], n_trials=1
        )
        story = pool._machine.story(0)
    assert set(re.findall(r"TaskReady\(task=Task\(trial=0, step=(\d+),", story)) == {"2", "3", "4"}


def test_an_operator_for_which_the_allocator_has_no_room_runs_again_with_the_device_to_itself(monkeypatch):
    """Nobody can ask a GPU's before: it raises where a virtual device's meter would have waited."""
    keeps, raised, add = 1_000, [], TrialMeter.add

    def add_or_raise(meter, outputs):
        if any(t.numel() == keeps for t in outputs) and not raised:
            raised.append(True)
            raise torch.OutOfMemoryError("no room")
        add(meter, outputs)

    monkeypatch.setattr(TrialMeter, "add", add_or_raise)
    results, story = run_together("cpu", keeps=keeps)
    assert raised and story.count("Alone(trial=1)") == 1
    assert_same(results, alone("cpu", keeps=keeps))
