"""What blocks are built of changes: children, classes, and forwards that are set on modules."""

from unittest import mock

import pytest
import torch
from torch import nn

import hydra_tune
from comparison import Script, assert_trains_as_in_plain_pytorch, at_each_budget, step
from models import BUDGETS, WIDTH, Dropping, Layer, Net


class SwapsAChild(Script):
    """For one forward, by a module of the same class."""

    Layer = Dropping

    def swap(self, model):
        for layer in model.layers:
            layer.drop, self.former = nn.Dropout(0.9), layer.drop

    def forward(self, model, x):
        self.swap(model)
        return model(x)

    between = swap


class SwapsBetweenForwards(SwapsAChild):
    def forward(self, model, x):
        return model(x) + super().forward(model, x)


class SwapsWithBuffers(Script):
    class Layer(Layer):
        def set_up(self):
            self.norm = nn.BatchNorm1d(WIDTH, affine=False)

        def forward(self, x):
            return super().forward(self.norm(x))

    def between(self, model):
        for layer in model.layers:
            layer.norm = nn.BatchNorm1d(WIDTH, affine=False, eps=0.1).to(self.device)


class SwapsForAnEvaluation(SwapsWithBuffers):
    """And puts back what the graph has."""

    def between(self, model):
        norms = [layer.norm for layer in model.layers]
        super().between(model)
        with torch.no_grad():
            model(torch.ones(8, WIDTH, device=self.device))
        for layer, norm in zip(model.layers, norms, strict=True):
            layer.norm = norm


class InsertsChildren(Script):
    class Layer(Layer):
        def set_up(self):
            self.more = nn.Sequential(nn.Tanh())

        def forward(self, x):
            return super().forward(self.more(x))

    def between(self, model):
        for layer in model.layers:
            layer.more.append(nn.Hardtanh(-0.1, 0.1))


class ExchangesChildren(Script):
    """Which have weights, and their places in the model."""

    def between(self, model):
        a, b = model.layers[1], model.layers[3]
        a.up, b.up = b.up, a.up


class Growing(Net):
    def __init__(self, kind):
        super().__init__(kind)
        self.a, self.b, self.c, self.d, self.e, self.f = self.layers
        del self.layers

    def forward(self, x):
        for layer in (self.a, self.b, self.c, self.d, self.e, self.f):
            x = layer(x)
        return self.head(x)


class GrowsAStack(Script):
    """Where blocks are no elements of one, its elements are cut apart."""

    class Layer(Layer):
        def set_up(self):
            self.act = nn.Identity()

        def forward(self, x):
            return super().forward(self.act(x))

    def model(self):
        return Growing(self.Layer)

    def after(self, model, optimizer):
        model.b.act = nn.Sequential() if type(model.b.act) is nn.Identity else nn.Identity()


class MovesIntoAStack(GrowsAStack):
    """Weights keep their places in the order of modules, whose classes are the same."""

    class Layer(Layer):
        def set_up(self):
            self.act, self.last = nn.Sequential(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = super().forward(self.act(x))
            return x if self.last is None else self.last(x)

    def after(self, model, optimizer):
        if model.b.last is not None:
            model.b.act, model.b.last = nn.Sequential(model.b.last), None


class Halving(nn.Linear):
    def forward(self, x):
        return 0.5 * super().forward(x)


class ChangesClasses(Script):
    def between(self, model):
        for layer in model.layers[::2]:
            layer.up.__class__ = nn.Linear if type(layer.up) is Halving else Halving


class PatchesWithin(Script):
    def between(self, model):
        for layer in model.layers[::2]:
            layer.up.forward = lambda x, up=layer.up: 0.5 * type(up).forward(up, x)

    def after(self, model, optimizer):
        for layer in model.layers[::2]:
            del layer.up.forward


class PatchesForOneForward(PatchesWithin):
    def forward(self, model, x):
        super().between(model)
        return model(x)

    def between(self, model):
        super().after(model, None)

    def after(self, model, optimizer):
        pass


class WrapsABlockForOneForward(Script):
    def forward(self, model, x):
        layer = model.layers[1]
        with mock.patch.object(layer, "forward", lambda x, forward=layer.forward: 0.5 * forward(x)):
            y = model(x)
        return y + model(x)


class WrapsABlockForLong(Script):
    """By a forward that stays where the model is cut anew, for batches of other sizes."""

    batch = 8

    def forward(self, model, x):
        self.batch += 8
        return model(x) + model(x.new_ones(self.batch, WIDTH))[:8]

    def after(self, model, optimizer):
        layer = model.layers[1]
        layer.forward = lambda x, forward=layer.forward: 0.5 * forward(x)


SCRIPTS = [
    SwapsAChild, SwapsForAnEvaluation, GrowsAStack, MovesIntoAStack,
    PatchesWithin, PatchesForOneForward, WrapsABlockForOneForward, WrapsABlockForLong,
]  # fmt: skip
REFUSED = [SwapsBetweenForwards, SwapsWithBuffers, InsertsChildren, ExchangesChildren, ChangesClasses]


@at_each_budget(SCRIPTS)
def test_it_trains_as_in_plain_pytorch(script, budget):
    assert_trains_as_in_plain_pytorch(script, budget)


@pytest.mark.parametrize("script", REFUSED)
def test_what_a_block_is_built_of_stays_from_its_forward_to_its_backward(script):
    with (
        hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool,
        pytest.raises(RuntimeError, match=r"modules stay as they are .* but a child, or the class of a module"),
    ):
        script().run(pool)


def test_a_child_that_is_made_anew_in_each_step_asks_for_no_plan():
    class Noisy(Layer):
        def set_up(self):
            self.drop = nn.Dropout(0.1)

        def forward(self, x):
            return super().forward(self.drop(x))

    model = Net(Noisy)
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        step(model, pool).sum().backward()
        for i in range(20):
            model.layers[2].drop = nn.Dropout(0.2 + i / 100)
            model(torch.randn(4, WIDTH)).sum().backward()
        assert len(pool.plans) == 1


@pytest.mark.parametrize("budget", ["spilled", "resident"])
def test_a_forward_that_a_user_has_put_around_a_blocks_stays_after_the_end(budget):
    model, x = Net(), torch.randn(4, WIDTH)
    with hydra_tune.ShardPool(["cpu"], BUDGETS[budget]) as pool:
        hydra_tune.prepare(model, pool=pool)
        model(x).sum().backward()
        layer = model.layers[1]
        with mock.patch.object(layer, "forward", lambda x, forward=layer.forward: 0.5 * forward(x)):
            halved = model(x)
            hydra_tune.release(model)
            assert torch.equal(model(x), halved)
            hydra_tune.prepare(model, pool=pool)
            assert torch.equal(model(x), halved)
            hydra_tune.release(model)


class MakesABlockAnewBeforeItsFirstCall(Script):
    """Which no first step has measured."""

    def model(self):
        class Deepening(Net):
            depth = 2

            def forward(self, x):
                for layer in self.layers[: self.depth]:
                    x = layer(x)
                return self.head(x)

        return Deepening(Dropping)

    def after(self, model, optimizer):
        model.layers[5].drop = nn.Dropout(0.1)
        model.depth += 2


@pytest.mark.parametrize("budget", ["three shards", "resident"])
def test_a_block_that_is_made_anew_before_its_first_call(budget):
    assert_trains_as_in_plain_pytorch(MakesABlockAnewBeforeItsFirstCall, budget)
