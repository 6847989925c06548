"""Weights and buffers that hooks, a forward, or other blocks write through `.data` or NumPy, which no version tells of:
in a forward, when a copy of them may be on the device already."""

import torch
from torch import nn

import hydra_tune
from scripts import BUDGETS, WIDTH, Layer, Net, Script, assert_trains_as_in_plain_pytorch, at_each_budget


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


class HooksComeLater(HookScales):
    """In the place of others."""

    def model(self):
        model = Net(self.Layer)
        self.hooks = [layer.register_forward_pre_hook(lambda *_: None) for layer in model.layers]
        return model

    def after(self, model, optimizer):
        while self.hooks:
            self.hooks.pop().remove()
            model.layers[len(self.hooks)].register_forward_pre_hook(lambda layer, _: self.write(layer))


class HookIsSwitchedOn(HookScales):
    def model(self):
        model = super().model()
        for layer in model.layers:
            layer.scales = False
        return model

    def write(self, layer):
        if layer.scales:
            super().write(layer)

    def after(self, model, optimizer):
        for layer in model.layers:
            layer.scales = True


class HookScalesWhereNothingIsTrained(HookScales):
    """With gradients: of the input, or of weights where dropout is off."""

    def write(self, layer):
        if not layer.training:
            super().write(layer)

    def after(self, model, optimizer):
        model.eval()


class HookScalesAndBlocksComeLater(HookScales):
    Later = Layer

    class Net(Net):
        used = 3

        def forward(self, x):
            for layer in self.layers[: self.used]:
                x = layer(x)
            return self.head(x)

    def after(self, model, optimizer):
        model.used += 1

    def model(self):
        model = self.Net(self.Layer)
        for i in range(3, len(model.layers)):
            model.layers[i] = self.Later()
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda layer, _: self.write(layer))
        return model


class HookScalesAndOtherBlocksComeLater(HookScalesAndBlocksComeLater):
    """So that a forward is begun anew, whose hooks have written already."""

    class Later(Layer):
        def forward(self, x):
            return super().forward(2 * x)


class HookSwapsRows(Hooked):
    """Of which no sum tells."""

    def write(self, layer):
        layer.down.weight.data[[0, 1]] = layer.down.weight.data[[1, 0]]


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


class HookWritesTheNext(Script):
    def model(self):
        model = Net(self.Layer)
        for layer, following in zip(model.layers, model.layers[1:], strict=False):
            layer.register_forward_hook(lambda *_, weight=following.up.weight: (weight.data.mul_(0.9), None)[1])
        return model


class WritesInEvaluation(Script):
    """Where no pilot has seen the forward."""

    class Net(Net):
        def forward(self, x):
            for layer in self.layers:
                if not self.training:
                    self.write(layer.up.weight)
                x = layer(x)
            return self.head(x)

        def write(self, weight):
            weight.data.mul_(0.75)

    def model(self):
        return self.Net()

    def after(self, model, optimizer):
        model.eval()
        with torch.no_grad():
            out = model(torch.ones(2, WIDTH).to(self.device)).mean()
            model.head.bias += out.to(model.head.bias.device)
        model.train()


class WritesThroughNumPy(WritesInEvaluation):
    class Net(WritesInEvaluation.Net):
        def write(self, weight):
            array = weight.detach().numpy()
            array *= 0.75


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


SCRIPTS = [
    HookScales, HookScalesBatchesThatGrow, HookScalesAndBlocksComeLater, HookScalesAndOtherBlocksComeLater,
    HookScalesWhereNothingIsTrained, HookIsSwitchedOn, HooksComeLater, HookSwapsRows, HookCounts, HookSetsABuffer,
    HookWritesTheNext, WritesInEvaluation, BlockWritesTheNext, BlockCountsForTheNext,
]  # fmt: skip


@at_each_budget([*SCRIPTS, WritesThroughNumPy])
def test_it_trains_as_in_plain_pytorch(script, budget):
    assert_trains_as_in_plain_pytorch(script, budget)
