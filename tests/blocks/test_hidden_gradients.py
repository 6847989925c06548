"""A frozen block that is given no tensor with a gradient, but an object with one, as the cache of peft's prefixes."""

import torch
from torch import nn

import hydra_tune
from comparison import assert_same


class Cache:
    def __init__(self, prefix):
        self.prefix = prefix


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, cache):
        return x + self.two(torch.tanh(self.one(x + cache.prefix)))


class Prefixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(64))
        self.layers = nn.ModuleList(Layer() for _ in range(6)).requires_grad_(False)

    def forward(self, x):
        cache = Cache(self.prefix * 2)
        for layer in self.layers:
            x = layer(x, cache)
        return x


def trained(prepare):
    torch.manual_seed(0)
    model = Prefixed()
    optimizer = torch.optim.SGD([model.prefix], lr=0.1)
    prepare(model, optimizer)
    gradients = []
    for _ in range(3):
        model(torch.randn(2, 64)).square().mean().backward()
        gradients.append(model.prefix.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def test_its_saved_weights_are_there_in_the_backward():
    """The prefix had a wrong gradient, without a word: the first layer was evaluated, and by the time of the backward
    another shard was in its slot."""
    plain = trained(lambda *_: None)
    with hydra_tune.ShardPool(["cpu"], 80_000) as pool:
        assert_same(trained(lambda *given: hydra_tune.prepare(*given, pool=pool)), plain)
        assert not pool.report()["trials"][0]["resident"]
