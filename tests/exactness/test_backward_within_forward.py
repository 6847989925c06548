"""A model's forward that runs a backward through some blocks, then calls others: guidance, energies, saliency.

A step ended with the first backward in it, in the middle of the forward, and the next block's task was of no step: the
machine fell over its own assertion, and took the pool's other trials with it."""

import optuna
import pytest
import torch
from torch import nn

import hydra_tune
import models
from comparison import Script, assert_trains_as_in_plain_pytorch
from hydra_tune.blocks.root import trial_of
from models import BUDGETS, WIDTH, Guided, Net, TrainsWithin


class Starts(Guided):
    def forward(self, x):
        return self.rest(x - self.slope(x))


class KeepsTheGraph(Guided):
    def forward(self, x):
        return self.rest(x - self.slope(x, retain_graph=True))


class Walks(Guided):
    """More often than a step has backwards."""

    def forward(self, x):
        for _ in range(10):
            x = x - 0.1 * self.slope(x) + 0.01 * torch.randn_like(x)
        return self.rest(x)


class Between(Guided):
    """Blocks before the backward are in the outer graph as well."""

    def forward(self, x):
        x = self.layers[2](x)
        x = x - self.slope(x)
        return self.head(self.layers[4](self.layers[3](x)))


class UsesUp(Guided):
    """The graph in which something beside each block uses its input, too."""

    def forward(self, x):
        x = self.layers[0](x)
        for layer in self.layers[1:3]:
            x = x + layer(x) + 0.5 * x
        if torch.is_grad_enabled():
            x.square().mean().backward()
        return self.rest(x.detach())


class TrainsOnTheSlope(Guided):
    """Gradients of gradients: only the blocks behind these stay on the device."""

    def forward(self, x):
        return self.rest(x.detach() - self.slope(x, create_graph=True))


MODELS = [Starts, KeepsTheGraph, Walks, Between, TrainsWithin, UsesUp, TrainsOnTheSlope]


def script_of(kind):
    class WithABackward(Script):
        def model(self):
            return kind()

        def after(self, model, optimizer):
            """In an evaluation too, and what that draws is drawn."""
            with torch.no_grad():
                model(torch.randn(4, WIDTH))

    return WithABackward


@pytest.mark.parametrize("budget", ["spilled", "resident"])
@pytest.mark.parametrize("kind", MODELS)
def test_it_trains_as_in_plain_pytorch(kind, budget):
    assert_trains_as_in_plain_pytorch(script_of(kind), budget)


def test_the_step_lasts_as_long_as_the_graph_that_the_forward_goes_on_with():
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = hydra_tune.prepare(Between(), pool=pool)
        loss = model(torch.randn(4, WIDTH)).sum()
        trial = model.forward.trial
        trial.boundary()  # as at an optimizer's step, or a loader's next batch
        assert trial.steps.under_way
        loss.backward()
        assert not trial.steps.under_way


def test_its_backwards_are_none_of_the_steps(caplog):
    """After eight of these a step is taken for one that never ends."""
    with hydra_tune.ShardPool(["cpu"], BUDGETS["three shards"]) as pool:
        model = hydra_tune.prepare(Walks(), pool=pool)
        (model(torch.randn(4, WIDTH)) + model(torch.randn(4, WIDTH))).sum().backward()
        assert not pool.report()["trials"][0]["resident"]
    assert "keeps an output" not in caplog.text


def test_but_one_of_those_in_a_forward_is(caplog):
    """Where the script has none of its own, and keeps the output."""

    class Keeps(Guided):
        def forward(self, x):
            x = self.layers[1](self.layers[0](x))
            x.square().mean().backward(retain_graph=True)
            return self.rest(x)

    with hydra_tune.ShardPool(["cpu"], BUDGETS["three shards"]) as pool:
        model = hydra_tune.prepare(Keeps(), pool=pool)
        for _ in range(20):  # the first step has eight
            kept = model(torch.randn(4, WIDTH))
        assert kept.requires_grad and not pool.report()["trials"][0]["resident"]
    assert "keeps an output" in caplog.text


@pytest.mark.parametrize("budget", ["spilled", "resident"])
def test_a_gradient_by_what_an_earlier_forward_has_given(budget):
    """A resident trial took its lease for that backward, in a pilot, where there is none."""

    class Fed(Guided):
        def forward(self, x):
            x = x if x.requires_grad else x.detach().requires_grad_()
            y = self.rest(x)
            (slope,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
            return y.sum() + 0.1 * slope

    class Feeds(Script):
        def model(self):
            return Fed()

        def forward(self, model, x):
            return model(model(x))[:, :8]

    assert_trains_as_in_plain_pytorch(Feeds, budget)


def test_gradients_of_gradients_leave_the_model_spilled():
    with hydra_tune.ShardPool(["cpu"], BUDGETS["three shards"]) as pool:
        script_of(TrainsOnTheSlope)().run(pool)
        (trial,) = pool.report()["trials"]
    assert not trial["cut"]["kept"] and not trial["resident"]


def test_gradients_of_gradients_through_another_models_blocks(monkeypatch):
    monkeypatch.setenv("HYDRA_TUNE_CHECKS", "0")  # devices of two pools are no neighbours

    class Judges(Net):
        def forward(self, x):
            h = x + self.layers[0](x)
            (slope,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
            for layer in self.layers[1:]:
                h = layer(h)
            return h.square().mean() + slope.square().mean()

    class Gives(Net):
        def set_up(self):
            self.head = nn.Linear(WIDTH, WIDTH)

    def trained(*pools):
        torch.manual_seed(0)
        models, left = (Gives(), Judges()), []
        for model, pool in zip(models, pools, strict=False):
            hydra_tune.prepare(model, pool=pool)
        for batch in 4, 6:
            models[1](models[0](torch.randn(batch, WIDTH))).backward()
            left += [p.grad.clone() for model in models for p in model.parameters() if p.grad is not None]
            for model in models:
                model.zero_grad()
        return left

    budget = BUDGETS["three shards"]
    with hydra_tune.ShardPool(["cpu"], budget) as one, hydra_tune.ShardPool(["cpu"], budget) as other:
        found = trained(one, other)
        (gives,), (judges,) = one.report()["trials"], other.report()["trials"]
    assert not gives["resident"] and not judges["resident"]
    assert judges["cut"]["kept"] == gives["cut"]["kept"] == {}
    assert all(map(torch.equal, trained(), found))


def test_a_graph_that_the_forward_has_used_up_is_used_up():
    class Twice(Guided):
        def forward(self, x):
            y = self.layers[1](self.layers[0](x))
            torch.autograd.grad(y.sum(), self.layers[0].up.bias)
            return self.rest(y)

    model = Twice()
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        hydra_tune.prepare(model, pool=pool)
        loss = model(torch.randn(4, WIDTH)).sum()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        del loss
        assert not pool.report()["trials"][0]["resident"]
        hydra_tune.release(model)
        assert pool.devices[0].used_bytes == 0


def test_trials_beside_one_finish():
    def objective(trial):
        model = Starts() if trial.number == 1 else Net(models.Layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hydra_tune.prepare(model, optimizer)
        for _ in range(3):
            loss = nn.functional.mse_loss(model(torch.randn(4, WIDTH)), torch.zeros(4, 8))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    study = optuna.create_study()
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"], seed=0) as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=3).optimize(study, objective, n_trials=5)
        assert pool.devices[0].used_bytes == 0
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 5


def test_an_evaluation_is_no_step_of_training():
    """It counted as one: trials were believed to be nearly done, and checkpoints stopped."""
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = hydra_tune.prepare(Starts(), pool=pool, total_steps=10)
        for _ in range(3):
            model(torch.randn(4, WIDTH)).sum().backward()
            for _ in range(4):
                with torch.no_grad():
                    model(torch.randn(4, WIDTH))
        progress = pool.events.machine.trials[model.forward.trial.id].progress
        assert progress.steps_done == 3


def test_a_step_whose_only_backward_is_within_the_forward_is_one():
    class All(Guided):
        def forward(self, x):
            loss = self.head(self.layers[1](self.layers[0](x))).square().mean()
            loss.backward()
            return loss.detach()

    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = hydra_tune.prepare(All(), pool=pool, total_steps=10)
        for _ in range(3):
            model(torch.randn(4, WIDTH))
        model.forward.trial.boundary()
        assert pool.events.machine.trials[model.forward.trial.id].progress.steps_done == 3


def test_gradients_of_gradients_through_another_models_blocks_alone(monkeypatch):
    """They were refused by the core of before."""
    monkeypatch.setenv("HYDRA_TUNE_CHECKS", "0")  # devices of two pools are no neighbours

    class Judges(Net):
        def forward(self, x, origin):
            (slope,) = torch.autograd.grad(x.square().sum(), origin, create_graph=True)
            return super().forward(slope)

    class Gives(Net):
        def set_up(self):
            self.head = nn.Linear(WIDTH, WIDTH)

    def trained(*pools):
        torch.manual_seed(0)
        models, left = (Gives(), Judges()), []
        for model, pool in zip(models, pools, strict=False):
            hydra_tune.prepare(model, pool=pool)
        for _ in range(3):
            x = torch.randn(4, WIDTH, requires_grad=True)
            models[1](models[0](x), x).square().sum().backward()
            left += [p.grad.clone() for model in models for p in model.parameters() if p.grad is not None]
        return left

    budget = BUDGETS["three shards"]
    with hydra_tune.ShardPool(["cpu"], budget) as one, hydra_tune.ShardPool(["cpu"], budget) as other:
        found = trained(one, other)
        assert not any(pool.report()["trials"][0]["resident"] for pool in (one, other))
    assert all(map(torch.equal, trained(), found))


@pytest.mark.parametrize("with_closure", [False, True], ids=["", "by a closure"])
@pytest.mark.parametrize("budget", ["spilled", "resident"])
def test_an_optimizer_is_stepped_within_the_forward(budget, with_closure):
    """A resident trial let go of its lease there, where its forwards are not all alike for what the pool sees, and
    computed on while another had it. A spilled one, whose closure has computed, was under way when its weights had
    changed."""
    left, holds = [], []
    for pool in (None, hydra_tune.ShardPool(["cpu"], BUDGETS[budget])):

        class Steps(TrainsWithin):
            def forward(self, batch):
                x = batch["x"]

                def closure():
                    loss = self.layers[1](self.layers[0](x)).square().mean()
                    loss.backward()
                    return loss

                self.optimizer.step(closure) if with_closure else (closure(), self.optimizer.step())
                self.optimizer.zero_grad()
                if trial_of(self) is not None:
                    holds.append(self.forward.trial.tasks.current is not None)
                return self.rest(self.layers[0](x))

        torch.manual_seed(0)
        model = Steps()
        optimizer = model.__dict__["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        if pool is not None:
            hydra_tune.prepare(model, optimizer, pool=pool)
        losses = []
        for _ in range(4):
            loss = model({"x": torch.randn(4, WIDTH)}).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if pool is not None:
            assert pool.report()["trials"][0]["resident"] == (budget == "resident")
            hydra_tune.release(model)
            pool.close()
        left.append((losses, [p.detach().clone() for p in model.parameters()]))
    (losses, weights), (found, found_weights) = left
    assert found == losses and all(map(torch.equal, found_weights, weights))
    assert holds[1:] == [budget == "resident"] * 3  # a spilled trial takes it for each task
