"""Weights and buffers have plain memory of their own, and nothing beside a model leads to it by another name."""

import types

import pytest
import torch
from torch import nn

import hydra_tune
from comparison import step
from models import BUDGETS, WIDTH, Net


class Marked(torch.Tensor):
    pass


def shared(model):
    model.layers[1].up.weight = nn.Parameter(model.layers[0].up.weight.data)


def attribute(model):
    model.alias = model.layers[0].up.weight.detach()


def kept_in_a_list(model):
    model.aliases = [(0, {"up": model.layers[0].up.weight.detach()[1:]})]


def kept_in_an_object(model):
    model.alias = types.SimpleNamespace()
    model.alias.up = [model.layers[0].up.weight.data]


def rows_of_one(model):
    both = torch.zeros(2, WIDTH)
    for row, layer in zip(both, model.layers[:2], strict=True):
        layer.register_buffer("mean", row)
        layer.register_buffer("both", both)


def subclass(model):
    model.layers[0].up.weight = nn.Parameter(model.layers[0].up.weight.data.as_subclass(Marked))


def lazy(model):
    model.layers[0].up = nn.LazyLinear(2 * WIDTH)


def scripted(model):
    model.layers[0].up = torch.jit.script(model.layers[0].up)


def sparse(model):
    model.register_buffer("adjacency", torch.eye(4).to_sparse())


def expanded(model):
    model.register_buffer("wide", torch.ones(4).expand(4, 4))


def gradient_in_another_dtype(model):
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("torch 2.10 is the first that has it")
    model.layers[0].up.weight.grad_dtype = torch.float64


WRONG = {
    shared: "share theirs", attribute: "share theirs", kept_in_a_list: "layers.0.up.weight and aliases share theirs",
    kept_in_an_object: "layers.0.up.weight and alias share theirs",
    rows_of_one: r"layers\.\d\.\w+ and layers\.\d\.\w+ share theirs without being one tensor",
    subclass: "is a Marked", lazy: "is lazy",
    gradient_in_another_dtype: r"gradients have their dtype, but \S+ is to have one in torch\.float64",
    scripted: r"was made by torch\.jit", sparse: r"buffers are dense.*to_dense", expanded: r"\.contiguous",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_weights_that_have_no_place_of_their_own_are_refused(change):
    model = Net()
    change(model)
    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
        with pytest.raises(hydra_tune.PrepareError, match=WRONG[change]):
            hydra_tune.prepare(model, pool=pool)
        assert pool.devices[0].used_bytes == 0


def itself(model):
    model.ring = []
    model.ring.append({"ring": model.ring})


def long(model):
    model.long = list(range(300_000))


def wide(model):
    model.masks = [torch.zeros(1).expand(3000, 3000)]


@pytest.mark.parametrize("change", [itself, long, wide], ids=lambda change: change.__name__)
def test_attributes_that_lead_to_no_weight_are_as_they_may(change):
    model, x = Net(), torch.randn(4, WIDTH)
    change(model)
    expected = model(x)
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        assert torch.equal(step(model, pool, lambda model, _: model(x)), expected)
