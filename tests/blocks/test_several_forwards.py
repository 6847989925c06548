"""Several forwards before a backward: plain PyTorch adds the gradients of a weight's uses one by one, and casts it once
for all forwards of one autocast context."""

import threading
from contextlib import nullcontext
from functools import partial
from itertools import product

import optuna
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hydra_tune
from comparison import assert_as_in_plain_pytorch, both_budgets, left_by, made
from models import BUDGETS, WIDTH, Net, TiedLayer, TiedNet, batch, loss_on


class Twice(TiedNet):
    """Calls its layers twice, so that a weight has several uses in each forward."""

    def forward(self, x):
        h = self.embedding(x)
        for layer in [*self.layers, *self.layers]:
            h = layer(h)
        return self.head(h) * self.scale


class Chooses(TiedNet):
    """Which layers it calls depends on the batch."""

    def forward(self, x):
        h = self.embedding(x)
        for layer in self.layers if x.shape[0] > 2 else self.layers[1:3]:
            h = layer(h)
        return self.head(h) * self.scale


class Checkpointed(TiedLayer):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def net_of(kind):
    class NetOf(TiedNet):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([kind(WIDTH, True) for _ in range(4)])

    NetOf.__name__ = f"of {kind.__name__}"
    return NetOf


# not those that use a weight several times in a call: docs/limits.md
MODELS = [TiedNet, Twice, Chooses, net_of(Checkpointed)]


def smaller(x, y):
    return x[:2], y[: x[:2].numel()]


def one_backward(model):
    loss = loss_on(model, *batch()) + loss_on(model, *batch())
    loss.backward()
    return loss


def of_three_shapes(model):
    loss = loss_on(model, *batch()) + loss_on(model, *smaller(*batch())) * 2 + loss_on(model, *batch())
    loss.backward()
    return loss


def one_after_another(model):
    """Backward of each before the next."""
    losses = [loss_on(model, *batch()) for _ in range(1)]
    losses[0].backward()
    losses += [loss_on(model, *batch()), loss_on(model, *batch())]
    (losses[1] + losses[2]).backward()
    return sum(losses)


def a_backward_each(model):
    """As of a discriminator's two losses: the second has the first one's casts in its graph."""
    losses = [loss_on(model, *batch()), loss_on(model, *batch())]
    for loss in losses:
        loss.backward()
    return sum(losses)


def kept_graph(model):
    first, second = loss_on(model, *batch()), loss_on(model, *batch())
    (first + second).backward(retain_graph=True)
    (first * 0.5).backward(retain_graph=True)
    (first + 3 * second).backward()
    return first + second


def of_some_weights(model):
    """`inputs=`, and a gradient that only one forward has."""
    first, second = loss_on(model, *batch()), loss_on(model, *batch())
    weights = [p for name, p in model.named_parameters() if "layers.1" in name or "layers.2" in name]
    (first + second).backward(inputs=weights, retain_graph=True)
    found = torch.autograd.grad(first + 2 * second, weights, retain_graph=True)
    for p, gradient in zip(weights, found, strict=True):
        p.grad += gradient
    second.backward()
    return first + second


def beside_evaluation(model):
    first = loss_on(model, *batch())
    with torch.no_grad():
        judged = loss_on(model, *batch())
    second = loss_on(model, *batch())
    (first + judged * second).backward()
    return first


WAYS = [
    one_backward,
    of_three_shapes,
    one_after_another,
    a_backward_each,
    kept_graph,
    of_some_weights,
    beside_evaluation,
]


def script(way, model, dtype):
    def scenario(prepare):
        torch.manual_seed(0)
        trained, optimizer = made(prepare, model())
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                losses.append(way(trained).detach())
            optimizer.step()
        return losses, left_by(trained, optimizer)

    return scenario


def is_often(way, model, dtype):
    """The others are proofs."""
    return model is Twice if dtype is None else way in (one_backward, a_backward_each)


@pytest.mark.parametrize(
    ("way", "model", "dtype"),
    [
        pytest.param(
            *each,
            id=f"{each[0].__name__}-{each[1].__name__}-{'fp32' if each[2] is None else 'bf16'}",
            marks=() if is_often(*each) else pytest.mark.proof,
        )
        for each in product(WAYS, MODELS, [None, torch.bfloat16])
    ],
)
def test_gradients_are_added_as_in_plain_pytorch(way, model, dtype):
    assert_as_in_plain_pytorch(script(way, model, dtype), num_bytes=400 * 1024)


@both_budgets
def test_hooks_on_weights_see_the_sum(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        seen = []
        for p in model.layers[1].parameters():
            p.register_hook(lambda gradient: seen.append(gradient.norm()))
        for _ in range(2):
            for _ in range(2):  # the second is added to the first's
                one_backward(model)
            optimizer.step()
            optimizer.zero_grad()
        return sorted(seen), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


@pytest.mark.parametrize("model", [TiedNet, Twice])
def test_autocast_in_some_steps_only(model):
    def scenario(prepare):
        torch.manual_seed(0)
        trained, optimizer = made(prepare, model())
        for enabled in (True, False, True, False):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                one_backward(trained)
            optimizer.step()
        return left_by(trained, optimizer)

    assert_as_in_plain_pytorch(scenario, "spilled")


@both_budgets
def test_contexts_of_their_own_are_apart(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        losses = []
        for _ in range(2):
            loss = torch.zeros(())
            for _ in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = loss + loss_on(model, *batch())
            with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.float16):
                loss = loss + loss_on(model, *batch())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


def test_another_thread_that_clears_the_casts_parts_nothing():
    """In company: as alone."""

    def trained(prepare, between=lambda: None):
        torch.manual_seed(0)
        model = prepare(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(8, WIDTH)).float().square().mean()
                between()
                loss = loss + model(torch.randn(8, WIDTH)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    def elsewhere_cleared():
        thread = threading.Thread(target=torch.clear_autocast_cache)
        thread.start(), thread.join()

    found = {}

    def objective(trial):
        found[trial.number] = trained(hydra_tune.prepare, elsewhere_cleared)
        return 0.0

    with hydra_tune.ShardPool(["cpu"], 2 * BUDGETS["spilled"]) as pool:
        hydra_tune.HydraTrialRunner(pool, 2).optimize(optuna.create_study(), objective, n_trials=3)
    expected = trained(lambda model: model)
    assert len(found) == 3
    for weights in found.values():
        assert all(map(torch.equal, weights, expected))


# ---- weights that change in the context ----


def changed_within(prepare, change, context, evaluates=False):
    torch.manual_seed(0)
    model, optimizer = made(prepare)
    with context:
        with torch.no_grad() if evaluates else nullcontext():
            loss = loss_on(model, *batch())
        if not evaluates:
            loss.backward()
        change(model, optimizer)
        with torch.no_grad() if evaluates else nullcontext():
            return loss_on(model, *batch()).detach()


def step(model, optimizer):
    optimizer.step()


def load(model, optimizer):
    model.load_state_dict(TiedNet().state_dict())


def shift_norms(model, optimizer):
    """Which autocast does not cast."""
    with torch.no_grad():
        for layer in model.layers:
            layer.norm.weight.add_(1)


@pytest.mark.parametrize("change", [step, load])
def test_not_without_a_cache(change):
    for context in (torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), nullcontext()):
        assert_as_in_plain_pytorch(partial(changed_within, change=change, context=context))


def test_nor_where_they_are_not_cast():
    context = torch.autocast("cpu", dtype=torch.bfloat16)
    assert_as_in_plain_pytorch(partial(changed_within, change=shift_norms, context=context))
