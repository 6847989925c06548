"""Runs a scenario of ordinary PyTorch code twice, plain and prepared, and compares all it returns bit for bit."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

import hydra_tune

BUDGETS = {"spilled": 200 * 1024, "resident": 8 * 1024 * 1024}
WIDTH, VOCABULARY, POSITIONS = 32, 32, 6
CHECKED = pytest.param(True, marks=pytest.mark.checks)
with_and_without_checks = pytest.mark.parametrize("checked", [False, CHECKED], ids=["as users run it", "checked"])


class Shift(nn.Module):
    """Its operator keeps no tensor for the backward."""

    def __init__(self, width):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x + self.bias


class Layer(nn.Module):
    def __init__(self, width, residual):
        super().__init__()
        self.residual = residual
        self.shift = Shift(width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.batch_norm = nn.BatchNorm1d(2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        h = nn.functional.gelu(self.up(self.norm(self.shift(x))))
        h = self.batch_norm(h.flatten(0, 1)).view_as(h)
        y = self.drop(self.down(h))
        return x + y if self.residual else y


class Net(nn.Module):
    """Six blocks: an embedding, four layers, a head tied to the embedding; and a weight outside of them all."""

    def __init__(self, depth=4, width=WIDTH, sparse=False, residual=True):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, sparse=sparse)
        self.layers = nn.ModuleList([Layer(width, residual) for _ in range(depth)])
        self.head = nn.Linear(width, VOCABULARY)
        if not sparse:
            self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x):
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h) * self.scale


def batch():
    return torch.randint(0, VOCABULARY, (4, POSITIONS)), torch.randint(0, VOCABULARY, (4 * POSITIONS,))


def loss_on(model, x, y):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y)


def made(prepare, model=None):
    """A model and its optimizer, after `prepare`; one made from the current random state if none is given."""
    model = model or Net()
    return prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))


def left_by(model, *optimizers):
    """Copies of the weights, gradients, buffers and optimizer states."""
    parameters = list(model.parameters())
    state = [v for o in optimizers for p in parameters for v in o.state[p].values() if isinstance(v, torch.Tensor)]
    return [
        None if t is None else t.detach().clone()
        for t in (*parameters, *(p.grad for p in parameters), *model.buffers(), *state)
    ]


def train(model, optimizer, steps=3):
    """The plainest loop; its losses."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_on(model, *batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_as_in_plain_pytorch(scenario, budget="spilled", num_bytes=None, tolerance=0.0):
    """`scenario(prepare)` returns the same, to the bit or within `tolerance`, if `prepare` is ours or does nothing."""
    plain = scenario(lambda model, *rest: (model, *rest) if rest else model)
    prepared = []
    with hydra_tune.ShardPool(["cpu"], num_bytes or BUDGETS[budget]) as pool:

        def prepare(model, *rest):
            prepared.append(model)
            return hydra_tune.prepare(model, *rest, pool=pool)

        try:
            got = scenario(prepare)
        finally:
            for model in prepared:
                hydra_tune.release(model)
        assert pool.devices[0].used_bytes == 0
        (trial,) = pool.report()["trials"]
        assert trial["steps"] > 0 and trial["resident"] == (budget == "resident")
        assert trial["resident"] or len(trial["shards"]) > 1
    assert_same(got, plain, tolerance)


def assert_same(got, plain, tolerance=0.0):
    got_leaves, got_spec = tree_flatten(got)
    plain_leaves, plain_spec = tree_flatten(plain)
    assert got_spec == plain_spec
    for a, b in zip(got_leaves, plain_leaves, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance, equal_nan=True)
        else:
            assert abs(a - b) <= tolerance if tolerance else repr(a) == repr(b)  # exact for floats, and nan equals nan


def refused(words):
    """Around what is refused with these words; around what is not, if there are none."""
    return pytest.raises((hydra_tune.PrepareError, hydra_tune.BudgetError), match=words) if words else nullcontext()
