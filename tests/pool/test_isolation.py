"""A trial that ends in any way changes no other trial's numbers."""

import functools
import gc
import weakref

import optuna
import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune.blocks.ambient_settings import remembers_casts
from models import gpt

STEPS = 6
FAULTY = 1


class FaultyLayer(nn.Module):
    """Raises at its n-th call, in forward or in backward."""

    def __init__(self, layer, where, call=5):
        super().__init__()
        self.layer, self.where, self.remaining = layer, where, call

    def forward(self, x):
        y = self.layer(x)
        if torch.is_grad_enabled() or self.where != "backward":
            self.remaining -= 1
        if self.remaining == 0 and self.where == "forward":
            raise FloatingPointError("forward")
        if self.where == "backward" and y.requires_grad and self.remaining <= 0:
            y.register_hook(self._fail)
        return y

    def _fail(self, grad):
        raise FloatingPointError("backward")


def objective_with(where, results):
    def objective(trial):
        torch.manual_seed(trial.number)
        model = gpt()
        if trial.number == FAULTY and where in ("forward", "backward"):
            model.layers[3] = FaultyLayer(model.layers[3], where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = hydra_tune.prepare(model, optimizer)
        losses = []
        for step in range(STEPS):
            x, y = torch.randint(0, 128, (2, 16)), torch.randint(0, 128, (2, 16))
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            if trial.number == FAULTY and step == 4 and where == "between":
                raise FloatingPointError("between")
            if trial.number == FAULTY and step == 4 and where == "pruned":
                raise optuna.TrialPruned
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results[trial.number] = losses
        return losses[-1]

    return objective


@functools.cache
def sweep(where, num_threads):
    weights = sum(p.numel() * p.element_size() for p in gpt().parameters())
    results, study = {}, optuna.create_study()
    with hydra_tune.ShardPool(["cpu"], weights // 2) as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=4).optimize(
            study, objective_with(where, results), n_trials=4, catch=(FloatingPointError,)
        )
    return results, study


@pytest.mark.parametrize(
    "where", ["backward", *(pytest.param(name, marks=pytest.mark.proof) for name in ("pruned", "forward", "between"))]
)
def test_a_trial_that_ends_early_changes_no_other(where):
    healthy, _ = sweep("nowhere", torch.get_num_threads())
    results, study = sweep(where, torch.get_num_threads())
    state = optuna.trial.TrialState.PRUNED if where == "pruned" else optuna.trial.TrialState.FAIL
    assert [t.state == state for t in study.trials] == [False, True, False, False]
    assert results == {n: losses for n, losses in healthy.items() if n != FAULTY}


LEFT = {
    "gradients off": lambda: torch.set_grad_enabled(False),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16).__enter__(),
    "a device": lambda: torch.set_default_device("meta"),
    "no cache of casts": lambda: torch.set_autocast_cache_enabled(False),
}


@pytest.mark.parametrize("leaves", LEFT)
def test_what_a_trial_leaves_set_in_its_thread_no_later_one_finds(leaves):
    def settings():
        cache = torch.is_autocast_cache_enabled()
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.empty(0).device.type, cache

    found, before = [], (*settings(), remembers_casts())

    def objective(trial):
        found.append(settings())
        LEFT[leaves]()
        raise optuna.TrialPruned

    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(optuna.create_study(), objective, n_trials=3)
    assert found == [(True, False, "cpu", True)] * 3
    assert (*settings(), remembers_casts()) == before


def test_casts_of_a_trial_that_leaves_autocast_on_are_forgotten():
    weights = []

    def objective(trial):
        torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
        weight = nn.Parameter(torch.randn(4, 4))
        weights.append(weakref.ref(weight))
        return (weight @ weight).sum().item()

    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(optuna.create_study(), objective, n_trials=1)
    gc.collect()
    assert weights[0]() is None
