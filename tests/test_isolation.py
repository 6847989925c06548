"""A trial that ends in any way changes no other trial's numbers."""

import functools

import optuna
import pytest
import torch
from torch import nn

import hydra_tune
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
def sweep(where):
    weights = sum(p.numel() * p.element_size() for p in gpt().parameters())
    results, study = {}, optuna.create_study()
    with hydra_tune.ShardPool(["cpu"], weights // 2) as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=4).optimize(
            study, objective_with(where, results), n_trials=4, catch=(FloatingPointError,)
        )
    return results, study


@pytest.mark.parametrize(
    "where", ["backward", "pruned", *(pytest.param(name, marks=pytest.mark.proof) for name in ("forward", "between"))]
)
def test_a_trial_that_ends_early_changes_no_other(where):
    healthy, _ = sweep("nowhere")
    results, study = sweep(where)
    state = optuna.trial.TrialState.PRUNED if where == "pruned" else optuna.trial.TrialState.FAIL
    assert [t.state == state for t in study.trials] == [False, True, False, False]
    assert results == {n: losses for n, losses in healthy.items() if n != FAULTY}
