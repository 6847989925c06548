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
