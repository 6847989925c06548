"""Attributes on weights; and attributes and hooks that blocks' forwards put on weights and modules, where the first
batch showed none."""

import pytest
import torch
from torch import nn

import hydra_tune
from comparison import Script, assert_trains_as_in_plain_pytorch, at_each_budget
from models import WIDTH, Layer, Net


class NotesOnWeights(Script):
    class Layer(Layer):
        def set_up(self):
            self.up.weight.gain = 3.0

        def forward(self, x):
            return super().forward(x * self.up.weight.gain)


class NotesBetweenBlocks(NotesOnWeights):
    """On weights of blocks whose shard is on the device by then."""

    class Noting(Net):
        def forward(self, x):
            for i, layer in enumerate(self.layers):
                layer.up.weight.gain = 0.5 * i
                x = layer(x)
            return self.head(x)

    def model(self):
        return self.Noting(self.Layer)


class NotesOnWeightsAnew(NotesOnWeights):
    """Where nobody sees it but who asks the weight."""

    def after(self, model, optimizer):
        for layer in model.layers:
            layer.up.weight.gain -= 0.5


class NotesOnWeightsChange(Script):
    class Layer(Layer):
        def set_up(self):
            self.up.weight.gain = 1.5

        def forward(self, x):
            return super().forward(x * getattr(self.up.weight, "gain", 1))

    def between(self, model):
        for layer in model.layers[::2]:
            layer.up.weight.gain -= 0.25
        del model.layers[1].up.weight.gain

    def after(self, model, optimizer):
        model.layers[1].up.weight.gain = 1.25


SCRIPTS = [NotesOnWeights, NotesBetweenBlocks, NotesOnWeightsAnew, NotesOnWeightsChange]


@at_each_budget(SCRIPTS)
def test_it_trains_as_in_plain_pytorch(script, budget):
    assert_trains_as_in_plain_pytorch(script, budget)


def halve(weight):
    weight.grad.mul_(0.5)


MARKS = [
    None,
    lambda layer: layer.weight.register_hook(lambda grad: 0.5 * grad),
    lambda layer: layer.weight.register_post_accumulate_grad_hook(halve),
    lambda layer: setattr(layer.weight, "scale", 0.5),
    lambda layer: layer.register_forward_hook(lambda *_: None),
]
NAMES = ["none", "hook", "hook on its gradient", "attribute", "hook on the module"]


class Marking(nn.Module):
    mark = 0  # a number, and no flag that asks for a new pilot

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x):
        if self.mark:
            MARKS[self.mark](self)
        return x + x @ self.weight * getattr(self.weight, "scale", 1)


def trained(pool, mark=0, *, evaluates=False):
    """Weights after three steps; before the last one a forward is refused, if it is to `mark`."""
    torch.manual_seed(0)
    model, x = Net(Marking), torch.randn(8, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hydra_tune.prepare(model, optimizer, pool=pool)
    for step in range(3):
        if mark and step == 2:
            model.layers[1].mark = mark
            refused = pytest.raises(
                (hydra_tune.PrepareError, RuntimeError),
                match=r"layers\.1 puts a hook on a weight in|hooks cannot be registered on non-leaf",
            )
            with refused, torch.set_grad_enabled(not evaluates):
                model(x)
            model.layers[1].mark = 0
        with torch.no_grad():
            model(x)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    (trial,) = pool.report()["trials"]
    assert not trial["resident"]
    hydra_tune.release(model)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("mark", "evaluates"),
    [(mark, evaluates) for mark in (1, 2) for evaluates in (False, True)],
    ids=lambda value: NAMES[value] if type(value) is int else ("in evaluation" if value else "in training"),
)
def test_what_a_later_forward_puts_on_weights_is_refused_and_leaves_nothing_there(mark, evaluates):
    with hydra_tune.ShardPool(["cpu"], 48 << 10) as pool:
        expected = trained(pool)
    with hydra_tune.ShardPool(["cpu"], 48 << 10) as pool:
        left = trained(pool, mark, evaluates=evaluates)
    assert all(map(torch.equal, left, expected))


def test_a_hook_that_an_evaluation_puts_on_a_module_stays_there():
    with hydra_tune.ShardPool(["cpu"], 48 << 10) as pool, torch.no_grad():
        model = Net(Marking)
        hydra_tune.prepare(model, pool=pool)
        for mark in (0, 4, 0):
            model.layers[1].mark = mark
            model(torch.ones(8, WIDTH))
        assert len(model.layers[1]._forward_hooks) == 1
