"""Trials on several devices that change their home: nothing but the place is different."""

import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional

import hydra_tune
from comparison import assert_same
from hydra_tune.schedule.events import Move
from turns import TurnsPool, run_in_turns

WIDTH = 24


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x, skip=None):
        x = x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))
        return x if skip is None else (x, skip.flip(0))


class Normed(Layer):
    """Has buffers, and stays at home."""

    def __init__(self, width):
        super().__init__(width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(self.batch_norm(x))


class Net(nn.Module):
    """A tuple between blocks, views of one memory, a transposed one, a tied weight, one outside of all blocks."""

    def __init__(self, depth, width):
        super().__init__()
        self.embedding = nn.Embedding(30, width)
        self.layers = nn.ModuleList([*(Layer(width) for _ in range(depth - 1)), Normed(width)])
        self.head = nn.Linear(width, 30)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, ids):
        x = self.embedding(ids) * self.scale
        for i, layer in enumerate(self.layers):
            if i == 1:
                x, skip = layer(x, skip=x.t().contiguous().t())
                x = x + skip
            else:
                x = layer(x)
        return self.head(x)


SHAPES = [(4, 24, 5), (6, 24, 3), (3, 32, 4), (5, 16, 6), (4, 24, 2), (7, 16, 4)]  # depth, width, steps
BUDGET = 90 << 10


def objective_of(results, *, prepared=True):
    def objective(number):
        depth, width, steps = SHAPES[number]
        torch.manual_seed(number)
        model = Net(depth, width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if prepared:
            model, optimizer = hydra_tune.prepare(model, optimizer, total_steps=steps)
        losses = []
        for step in range(steps):
            for _ in range(1 + step % 2):
                x, y = torch.randint(0, 30, (2, 8))
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses.append(model(torch.arange(8)).sum().item())
        state = {key: value.clone() for key, value in model.state_dict().items()}
        results[number] = losses, state, optimizer.state_dict()["state"], torch.rand(3)
        return losses[-1]

    return objective


def results_alone():
    results = {}
    for number in range(len(SHAPES)):
        objective_of(results, prepared=False)(number)
    return results


def in_order(results):
    return sorted(results.items())  # by number, each of which is there once


def in_turns(monkeypatch, seed, policy="sharded-lrtf"):
    results = {}
    with TurnsPool(["cpu", "cpu"], BUDGET, policy=policy, turns_seed=seed) as pool:
        run_in_turns(monkeypatch, pool, [objective_of(results)] * len(SHAPES))
        return results, pool


OFTEN_OR_NOT = {True: (), False: pytest.mark.proof}


@pytest.mark.parametrize(
    "policy",
    [pytest.param(p, marks=OFTEN_OR_NOT[p == "shuffled"]) for p in ("sharded-lrtf", "shuffled", "rung-synchronous")],
)
def test_six_unequal_trials_on_two_devices_equal_each_alone_in_turns(monkeypatch, policy):
    found, pool = in_turns(monkeypatch, 1, policy)
    assert_same(in_order(found), in_order(results_alone()))
    again, other = in_turns(monkeypatch, 1, policy)
    assert_same(in_order(again), in_order(found))
    assert other.story == pool.story, "same seed, same story"


@pytest.mark.proof
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_six_unequal_trials_equal_each_alone_in_threads(devices):
    results = {}
    objective = objective_of(results)
    with hydra_tune.ShardPool(["cpu"] * devices, BUDGET) as pool:
        runner = hydra_tune.HydraTrialRunner(pool, concurrency=6)
        runner.optimize(optuna.create_study(), lambda trial: objective(trial.number), n_trials=len(SHAPES))
        assert all(device.used_bytes == 0 for device in pool.devices)
    assert_same(in_order(results), in_order(results_alone()))


def test_a_trial_moves_home_with_all_it_has(monkeypatch):
    """The first device has two trials, the second none: one of them goes, with a weight outside of its blocks. The
    meters, which count each tensor where it is, would refuse to let tensors of two homes meet."""
    results = {}
    with TurnsPool(["cpu", "cpu"], BUDGET, turns_seed=2) as pool:
        run_in_turns(monkeypatch, pool, [objective_of(results)] * 3)
    said = [i for _, instructions in pool.story for i in instructions if isinstance(i, Move)]
    assert said
    assert_same(in_order(results), [(n, r) for n, r in in_order(results_alone()) if n in results])
