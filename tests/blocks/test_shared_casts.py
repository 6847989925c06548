"""Autocast casts a weight once a context, for all calls of its block."""

from contextlib import suppress

import pytest
import torch
from torch import nn

from comparison import assert_as_in_plain_pytorch

WIDTH = 64


def trained(forward):
    """Gradients of two steps of eight layers, the first of which is measured."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, found = prepare(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))), []
        for _ in range(2):
            model.zero_grad()
            forward(model).float().square().mean().backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found

    return scenario


def once(model):
    with torch.autocast("cpu", torch.bfloat16):
        return model(torch.randn(8, WIDTH))


def twice_in_one_context(model):
    with torch.autocast("cpu", torch.bfloat16):
        return model(torch.randn(8, WIDTH)) + model(torch.randn(8, WIDTH))


def in_two_contexts(model):
    return once(model) + once(model)


def after_an_exception(model):
    """Which has left a context with casts."""
    with suppress(ValueError), torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(8, WIDTH))
        raise ValueError
    return once(model)


@pytest.mark.parametrize("forward", [twice_in_one_context, in_two_contexts, after_an_exception])
def test_gradients_are_those_of_plain_pytorch(forward):
    assert_as_in_plain_pytorch(trained(forward), num_bytes=128 * 1024)


@pytest.mark.parametrize("first", [None, torch.float16])
def test_another_dtype_is_measured_later(first):
    """What was measured with the first one, or without autocast, was all that later steps knew."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, found = prepare(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))), []
        for dtype in (first, torch.bfloat16, torch.bfloat16):
            model.zero_grad()
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = sum(model(torch.randn(8, WIDTH)).float().square().mean() for _ in range(2))
            loss.backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found

    assert_as_in_plain_pytorch(scenario, num_bytes=128 * 1024)


class AsksForTheDtype(nn.Module):
    """As peft's adapters do: by its weight's dtype it decides in which precision it drops."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        assert self.linear.weight.dtype is torch.float32
        return self.linear(self.drop(x.to(self.linear.weight.dtype)))


class AsksForParameters(nn.Module):
    """As peft's DoRA over GPT-2's layers does: another branch, by what its weight is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x):
        weight = self.linear.weight
        turned = nn.Parameter(weight.T) if isinstance(weight, nn.Parameter) else weight.T * 2
        return self.linear(x) * (self.scale / turned.norm(dim=0).detach())


class ReadsApart(nn.Module):
    """Reads its weight without a gradient, beside a layer that autocast casts it for."""

    def __init__(self, how):
        super().__init__()
        self.how, self.linear, self.scale = how, nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        weight = self.linear.weight
        if self.how == "detach":
            norm = weight.detach().norm(dim=0)
        elif self.how == "a part":
            norm = weight.detach()[3:].norm(dim=0)
        else:
            with torch.no_grad():
                norm = weight.norm(dim=0)
        return self.linear(x) * (self.scale / norm)


@pytest.mark.parametrize("how", ["detach", "no_grad", "a part"])
def test_a_weight_that_is_also_read_without_a_gradient_is_read_as_it_is(how):
    """It was autocast's copy, and gave another norm, in silence."""

    def scenario(prepare):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(8)]
        model, found = prepare(nn.Sequential(ReadsApart(how), *layers)), []
        for _ in range(3):
            model.zero_grad()
            once(model).float().square().mean().backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found

    assert_as_in_plain_pytorch(scenario, num_bytes=200 * 1024)


@pytest.mark.parametrize(
    ("frozen", "casts"), [(False, False), (True, False), (True, True)], ids=["trained", "frozen", "frozen, autocast"]
)
def test_a_weight_is_a_parameter_in_each_run(frozen, casts):
    """The first run was given other tensors, and the repetition took another branch: it was refused."""

    def scenario(prepare):
        torch.manual_seed(0)
        layers = nn.Sequential(*(AsksForParameters() for _ in range(8)))
        for layer in layers:
            layer.linear.requires_grad_(not frozen)
        model, found = prepare(layers), []
        for _ in range(3):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                loss = model(torch.ones(4, 64)).float().square().mean()
            loss.backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    assert_as_in_plain_pytorch(scenario, num_bytes=160 * 1024)


def test_a_weight_s_dtype_is_its_own_under_autocast():
    """It was that of autocast's copy, as which the weight came, so that dropout drew in the lower precision."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, found = prepare(nn.Sequential(*(AsksForTheDtype() for _ in range(8)))), []
        for _ in range(3):
            model.zero_grad()
            once(model).float().square().mean().backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found

    assert_as_in_plain_pytorch(scenario, num_bytes=128 * 1024)
