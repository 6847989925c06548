"""Buffers, and weights of blocks that grow, which hooks write through `.data`, of which no version tells. What is so
written into weights while a step is under way is seen at the next step: docs/limits.md."""

import torch

from comparison import Script, assert_trains_as_in_plain_pytorch, at_each_budget
from models import WIDTH, Layer, Net


class Hooked(Script):
    """A hook on each layer, called before it."""

    def model(self):
        model = Net(self.Layer)
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda layer, _: self.write(layer))
        return model


class HookScales(Hooked):
    def write(self, layer):
        layer.down.weight.data.mul_(0.9)


class HookScalesBatchesThatGrow(HookScales):
    """What one plan's blocks have shown holds for those of the next one."""

    steps = 0

    def forward(self, model, x):
        self.steps += 1
        return model(torch.cat(self.steps * [x]))[: len(x)]


class HookCounts(Hooked):
    class Layer(Layer):
        def set_up(self):
            self.register_buffer("calls", torch.zeros(()))

    def write(self, layer):
        layer.calls.data.add_(1)


class HookSetsABuffer(Hooked):
    class Layer(Layer):
        def set_up(self):
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, x):
            return super().forward(x * self.scale)

    def write(self, layer):
        layer.scale.data.mul_(0.75)


class BlockWritesTheNext(Script):
    """A block's forward that is repeated would do so again."""

    class Layer(Layer):
        following = ()

        def forward(self, x):
            x = super().forward(x)
            for layer in self.following:
                self.write(layer)
            return x

        def set_up(self):
            self.register_buffer("calls", torch.zeros(()))

        def write(self, layer):
            layer.up.weight.data.mul_(0.9)

    def model(self):
        model = Net(self.Layer)
        for layer, following in zip(model.layers, model.layers[1:], strict=False):
            layer.following = [following]
        return model


class BlockCountsForTheNext(BlockWritesTheNext):
    class Layer(BlockWritesTheNext.Layer):
        def write(self, layer):
            layer.calls.data.add_(1)


SCRIPTS = [HookScalesBatchesThatGrow, HookCounts, HookSetsABuffer, BlockCountsForTheNext]


@at_each_budget(SCRIPTS)
def test_it_trains_as_in_plain_pytorch(script, budget):
    assert_trains_as_in_plain_pytorch(script, budget)
