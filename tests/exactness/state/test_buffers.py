"""Buffers: shared, replaced, filled late, written by other names; and who they are."""

import pytest
import torch
from torch import nn

import hydra_tune
from comparison import Script, assert_trains_as_in_plain_pytorch, at_each_budget, step
from models import BUDGETS, WIDTH, Layer, Net


class RebindsABuffer(Script):
    class Centred(Net):
        def set_up(self):
            self.register_buffer("centre", torch.zeros(WIDTH))

        def forward(self, x):
            out = super().forward(x - self.centre)
            self.centre = 0.9 * self.centre + 0.1 * x.mean(0)
            return out

    def model(self):
        return self.Centred()


class FillsABufferLater(Script):
    class Layer(Layer):
        def set_up(self):
            self.register_buffer("positions", None)

        def forward(self, x):
            if self.positions is None:
                self.positions = torch.arange(WIDTH, device=x.device) / WIDTH
            return super().forward(x + self.positions)


class RoundsToNegativeZeros(Script):
    class Layer(Layer):
        def set_up(self):
            self.register_buffer("rounded", torch.zeros(WIDTH))

        def forward(self, x):
            y = super().forward(x)
            self.rounded = (0.01 * y.detach().mean(0)).round()
            return y

    def after(self, model, optimizer):
        model.signs = torch.stack([layer.rounded.signbit() for layer in model.layers])
        assert model.signs.any()
        with torch.no_grad():
            model.head.bias += model.signs.float().mean()


class SharesABuffer(Script):
    class Shared(Net):
        def set_up(self):
            norm, mean = nn.BatchNorm1d(WIDTH), torch.zeros(WIDTH)
            for layer in self.layers:
                layer.norm = norm
                layer.register_buffer("mean", mean)

    class Layer(Layer):
        def forward(self, x):
            self.mean.mul_(0.9).add_(x.detach().mean(0))
            return super().forward(self.norm(x) + self.mean)

    def model(self):
        return self.Shared(self.Layer)


class ReplacesABuffer(Script):
    """Of a block, from outside of it and within a forward, once for each of two calls."""

    class Root(Net):
        def forward(self, x):
            for layer in [*self.layers, *self.layers]:
                layer.shift = x.detach().mean(0)
                x = layer(x)
            return self.head(x)

    class Layer(Layer):
        def set_up(self):
            self.register_buffer("shift", torch.zeros(WIDTH))

        def forward(self, x):
            return super().forward(x + self.shift)

    def model(self):
        return self.Root(self.Layer)


class BuffersInAList(Script):
    """And in an attribute: written there, and read as the module's own."""

    class Layer(Layer):
        def set_up(self):
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("count", torch.zeros(()))
            self.kept, self.counter = [self.mean], self.count

        def forward(self, x):
            self.kept[0].mul_(0.9).add_(0.1 * x.detach().mean(0))
            self.counter += 1
            return super().forward(x - self.mean / self.count)


class BuffersOfAnInference(Script):
    """Made by an evaluation, before a batch that needs another plan."""

    class Evaluating(Net):
        def set_up(self):
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x):
            if not self.training:
                self.mean = x.mean(0)
            return super().forward(x + self.mean)

    batch = 8

    def model(self):
        return self.Evaluating(self.Layer)

    def forward(self, model, x):
        self.batch += 8
        return model(x) + model(x.new_ones(self.batch, WIDTH))[:8]

    def after(self, model, optimizer):
        model.eval()
        with torch.inference_mode():
            model(torch.ones(3, WIDTH, device=self.device))
        model.train()


SCRIPTS = [
    RebindsABuffer, FillsABufferLater, RoundsToNegativeZeros, SharesABuffer, ReplacesABuffer, BuffersInAList,
    BuffersOfAnInference,
]  # fmt: skip


@at_each_budget(SCRIPTS)
def test_it_trains_as_in_plain_pytorch(script, budget):
    assert_trains_as_in_plain_pytorch(script, budget)


def test_a_block_with_buffers_that_is_called_twice_is_not_opened():
    class Norms(Layer):
        def set_up(self):
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return super().forward(self.norm(x))

    class Twice(Net):
        def forward(self, x):
            for layer in self.layers:
                x = layer(layer(x))
            return self.head(x)

    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        step(Twice(Norms), pool).sum().backward()
        (trial,) = pool.report()["trials"]
        assert not trial["resident"] and not any(trial["cut"].values())


@pytest.mark.parametrize("budget", ["spilled", "resident"])
def test_buffers_stay_who_they_are(budget):
    class Counting(Layer):
        def set_up(self):
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return super().forward(self.norm(x))

    model = Net(Counting)
    before = list(model.buffers())
    with hydra_tune.ShardPool(["cpu"], BUDGETS[budget]) as pool:
        for size in (4, 8, 24):  # the last needs another plan
            hydra_tune.prepare(model, pool=pool) if size == 4 else None
            model(torch.randn(size, WIDTH)).sum().backward()
            assert all(a is b for a, b in zip(before, model.buffers(), strict=True))
        hydra_tune.release(model)
    assert all(a is b for a, b in zip(before, model.buffers(), strict=True))


class Narrows(Script):
    """A buffer is replaced by one of another shape between two calls of its block."""

    def model(self):
        class Root(ReplacesABuffer.Root):
            def forward(self, x):
                y = super().forward(x)
                self.layers[0].shift = torch.zeros(1)
                y = y + self.head(self.layers[0](x))
                self.layers[0].shift = torch.ones(WIDTH)
                return y

        return Root(ReplacesABuffer.Layer)


@pytest.mark.parametrize("budget", ["spilled", "resident"])
def test_a_buffer_that_is_replaced_by_one_of_another_shape_within_a_step(budget):
    assert_trains_as_in_plain_pytorch(Narrows, budget)


def test_a_buffer_that_a_later_forward_writes_by_another_name_is_refused():
    class Late(Layer):
        writes = 0  # a number, and no flag that asks for another measure

        def set_up(self):
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.kept = [self.mean]

        def forward(self, x):
            if self.writes:
                self.kept[0].add_(1)
            return super().forward(x - self.mean)

    model = Net(Late)
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        step(model, pool).sum().backward()
        model.layers[2].writes = 1
        loss = model(torch.randn(4, WIDTH)).sum()
        with pytest.raises(RuntimeError, match=r"buffers stay as they are .*layers\.2 was changed"):
            loss.backward()
