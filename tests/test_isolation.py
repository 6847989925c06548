"""A trial that ends in any way changes no other trial's numbers and leaves no byte behind."""

import gc
import weakref

import optuna
import pytest
import torch
from torch import nn

import hydra_tune
from models import gpt

optuna.logging.set_verbosity(optuna.logging.ERROR)
STEPS = 8
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


def objective_with(where, results, references):
    def objective(trial):
        torch.manual_seed(trial.number)
        model = gpt()
        if trial.number == FAULTY and where in ("forward", "backward"):
            model.layers[3] = FaultyLayer(model.layers[3], where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = hydra_tune.prepare(model, optimizer)
        references[trial.number] = [weakref.ref(p) for p in model.parameters()]
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


def sweep(where):
    weights = sum(p.numel() * p.element_size() for p in gpt().parameters())
    results, references, study = {}, {}, optuna.create_study()
    with hydra_tune.ShardPool(["cpu"], weights // 2) as pool:
        before = [d.used_bytes for d in pool.devices]
        hydra_tune.HydraTrialRunner(pool, concurrency=4).optimize(
            study, objective_with(where, results, references), n_trials=4, catch=(FloatingPointError,)
        )
        assert [d.used_bytes for d in pool.devices] == before
        assert all(d.meter.live_bytes == 0 for d in pool._devices)
    return results, references, study


@pytest.mark.parametrize("where", ["forward", "backward", "between", "pruned"])
def test_a_trial_that_ends_early_changes_no_other_and_leaves_nothing(where):
    healthy, _, _ = sweep("nowhere")
    results, references, study = sweep(where)
    state = optuna.trial.TrialState.PRUNED if where == "pruned" else optuna.trial.TrialState.FAIL
    assert [t.state == state for t in study.trials] == [False, True, False, False]
    assert results == {n: losses for n, losses in healthy.items() if n != FAULTY}
    gc.collect()
    assert [r() for refs in references.values() for r in refs if r() is not None] == []


def test_a_closed_pool_stops_its_trials_at_their_next_task():
    steps = []

    def objective(trial):
        model = gpt(depth=4)
        model = hydra_tune.prepare(model)
        for step in range(100):
            model(torch.randint(0, 128, (2, 16)))
            steps.append(step)
            if step == 2:
                pool.close()
        return 0.0

    pool = hydra_tune.ShardPool(["cpu"], "2MiB")
    with pytest.raises(hydra_tune.PoolClosedError, match="stopped"):
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(optuna.create_study(), objective, n_trials=3)
    assert steps == [0, 1, 2]
    with pytest.raises(hydra_tune.PoolClosedError, match="Make a new ShardPool"):
        hydra_tune.HydraTrialRunner(pool).optimize(optuna.create_study(), objective, n_trials=1)


def test_a_plain_script_that_drops_its_model_gives_its_bytes_back():
    with hydra_tune.ShardPool(["cpu"], "4MiB") as pool:
        model = hydra_tune.prepare(gpt(depth=4), pool=pool)
        model(torch.randint(0, 128, (2, 16)))
        assert pool.devices[0].used_bytes > 0
        del model
        gc.collect()
        assert pool.devices[0].used_bytes == 0
        assert pool.report()["trials"][0]["steps"] == 1
