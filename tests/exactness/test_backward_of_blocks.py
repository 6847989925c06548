"""What a block draws and writes in its own backward; and what is left where a forward or a backward is cut short."""

import pytest
import torch
from torch import nn

import hydra_tune
from comparison import Script, assert_trains_as_in_plain_pytorch
from models import WIDTH, Layer, Net


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0.1 * torch.randn_like(gradient)


class DrawsInAFunction(Script):
    class Layer(Layer):
        def forward(self, x):
            return Noise.apply(super().forward(x))


class DrawsInAHook(Script):
    class Layer(Layer):
        def forward(self, x):
            x = super().forward(nn.functional.dropout(x, 0.2))
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient + 0.1 * torch.randn_like(gradient))
            return x


class Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mean):
        ctx.mean = mean
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.mean.mul_(0.9).add_(gradient.abs().mean(), alpha=0.1)
        return gradient / (0.1 + ctx.mean), None


class Balanced(Layer):
    def set_up(self):
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x):
        return Balance.apply(super().forward(x), self.mean)


class WritesABufferInAFunction(Script):
    Layer = Balanced


class WritesABufferInAHook(Script):
    class Layer(Balanced):
        def forward(self, x):
            x = Layer.forward(self, x)
            if x.requires_grad:
                x.register_hook(self.note)
            return x

        def note(self, gradient):
            self.mean.mul_(0.9).add_(gradient.norm(), alpha=0.1)


class AssignsABufferInAHook(Script):
    class Layer(WritesABufferInAHook.Layer):
        def note(self, gradient):
            self.mean = 0.9 * self.mean + 0.1 * gradient.norm()


class WritesABufferThatAnEarlierForwardSaw(Script):
    Layer = Balanced

    def forward(self, model, x):
        return model(x) + model(-x)


SCRIPTS = [script for script in Script.__subclasses__() if script.__module__ == __name__]


@pytest.mark.parametrize("budget", ["few blocks", "three shards", "resident"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_it_trains_as_in_plain_pytorch(script, budget):
    assert_trains_as_in_plain_pytorch(script, budget)


def test_buffers_keep_what_an_interrupted_forward_has_made_of_them():
    calls_left = []  # until an interruption comes

    class Normed(Layer):
        def set_up(self):
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            x = self.norm(super().forward(x))
            if calls_left and not calls_left.pop():
                raise KeyboardInterrupt
            return x

    def run(pool=None):
        torch.manual_seed(0)
        model = Net(Normed)
        if pool is not None:
            hydra_tune.prepare(model, pool=pool)
        for number in range(3):
            x = torch.randn(8, WIDTH)
            if number == 1:
                calls_left[:] = [False, True, True]
                with pytest.raises(KeyboardInterrupt):
                    model(x)
            model(x).sum().backward()
        return model.state_dict()

    with hydra_tune.ShardPool(["cpu"], 64_000) as pool:
        prepared = run(pool)
    for name, value in run().items():
        assert torch.equal(prepared[name], value), name
