"""What a model keeps beside its weights, and who writes these: a pilot and repeated forwards leave nothing behind."""

import copy
import functools
import gc
import random
import types
import weakref
from collections import UserList

import numpy
import pytest
import torch
from torch import nn

import hydra_tune
from comparison import Script, assert_same, assert_trains_as_in_plain_pytorch, at_each_budget, step
from models import BUDGETS, WIDTH, Layer, Net

# ---- what a model keeps beside its weights -----------------------------------------------------------


class Stats:
    calls = 0


class OwnGenerator(Script):
    class Layer(Layer):
        def set_up(self):
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x):
            return super().forward(x) * (torch.rand(WIDTH, generator=self.generator) > 0.2).to(x.device)


class CountsInContainers(Script):
    """Of classes of one's own, with attributes beside the items; some with very many of these."""

    class Layer(Layer):
        class Items(dict):
            calls = 0

        class Rows(list):
            __slots__ = ("calls",)

        def set_up(self):
            self.items, self.rows, self.user = self.Items(), self.Rows(), UserList()
            self.rows.calls, self.many = 0, [0] * 20_000

        def forward(self, x, *_):
            self.items.calls += 1
            self.rows.calls += 1
            self.user.append(1)
            self.many.append(1)
            scale = self.items.calls + self.rows.calls + len(self.user) + len(self.many) - 20_000
            return super().forward(x) * (1 + 0.01 * scale)


class GeneratorsOfOthers(Script):
    class Layer(Layer):
        def set_up(self):
            self.random, self.numpys = random.Random(1), numpy.random.default_rng(1)

        def forward(self, x):
            return super().forward(x) * (1 + self.random.random() + float(self.numpys.random()))


class ForkedRandomState(Script):
    class Layer(Layer):
        def forward(self, x):
            with torch.random.fork_rng():
                noise = torch.rand_like(x)
            return super().forward(x * noise)


class KeptInObjects(Script):
    class Layer(Layer):
        def set_up(self):
            self.stats, self.nested, self.array = Stats(), {"n": []}, numpy.zeros(1)

        def forward(self, x):
            self.stats.calls += 1
            self.nested["n"].append(1)
            self.array += 1
            return super().forward(x / (self.stats.calls + len(self.nested["n"]) + self.array.item()))


class Slotted:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class Schedule:
    """An object to call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, state):
        self.calls += 1
        state.calls += 1
        return 1 + 0.1 * self.calls + 0.01 * state.calls


class KeptInOtherObjects(Script):
    class Layer(Layer):
        def set_up(self):
            self.names, self.schedule = types.SimpleNamespace(calls=0), functools.partial(Schedule(), Slotted())

        def forward(self, x):
            self.names.calls += 1
            return super().forward(x * self.schedule() + self.names.calls)


class HidesATeacher(Script):
    """In a list, where it is no child, and follows the model."""

    class Taught(Net):
        def set_up(self):
            self.teacher = [nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8)).requires_grad_(False)]

        def forward(self, x):
            (teacher,) = self.teacher
            teacher[0].weight.mul_(0.9).add_(0.1 * self.head.weight.detach().cpu())
            return super().forward(x) + teacher(x.cpu()).to(x.device)

    def model(self):
        model = self.Taught()
        model.register_buffer("at_the_end", torch.zeros(()))
        return model

    def after(self, model, optimizer):
        (teacher,) = model.teacher
        model.at_the_end.copy_(teacher[1].running_mean.sum() + teacher[0].weight.sum())


class NotesOnActivations(Script):
    class Layer(Layer):
        def forward(self, x):
            y = super().forward(x * getattr(x, "scale", 1.0))
            y.scale = 1.5
            return y

    def forward(self, model, x):
        x.scale = 0.5
        return model(x)


class KeptInATensor(Script):
    class Layer(Layer):
        def set_up(self):
            self.mean = torch.zeros(())

        def forward(self, x):
            self.mean.mul_(0.9).add_(0.1 * x.detach().abs().mean())
            return super().forward(x * (1 + self.mean))


class ReadsWhatItKept(Script):
    class Layer(Layer):
        def set_up(self):
            self.last = torch.zeros(())

        def forward(self, x):
            before, self.last = self.last, x.detach()
            return super().forward(x + 0.1 * before)


class CountsFromALaterStep(Script):
    """The first batch is a check in eval mode, without gradients."""

    class Layer(Layer):
        calls = 0

        def forward(self, x):
            if self.training:
                self.calls += 1
            return super().forward(x * (1 + 0.1 * self.calls))

    def forward(self, model, x):
        if not model.layers[0].calls:
            with torch.no_grad():
                model.eval()(x)
        return model.train()(x)


class KeepsFromTraining(Script):
    """Only in training mode, which the first batch is not in."""

    class Layer(Layer):
        def set_up(self):
            self.mean, self.generator = torch.zeros(()), torch.Generator().manual_seed(0)

        def forward(self, x):
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
                x = x + self.mean + torch.rand((), generator=self.generator)
            return super().forward(x)

    def forward(self, model, x):
        if not model.layers[0].mean:
            with torch.no_grad():
                model.eval()(x)
        return model.train()(x)


class SharesATable(Script):
    class Table(Net):
        def set_up(self):
            table = torch.randn(WIDTH)
            for layer in self.layers:
                layer.table, layer.half = table, table[: WIDTH // 2]

    class Layer(Layer):
        def forward(self, x):
            y = super().forward(x + self.table.to(x.device))
            self.last = y.detach()
            self.first = self.last[0]
            return y

    def model(self):
        return self.Table(self.Layer)

    def after(self, model, optimizer):
        with torch.no_grad():
            model(torch.ones(20, WIDTH, device=self.device))


class FillsAQueue(Script):
    class Layer(Layer):
        def set_up(self):
            self.register_buffer("queue", torch.zeros(0, WIDTH))

        def forward(self, x):
            y = super().forward(x)
            self.queue = torch.cat([self.queue, y.detach()])[-10:]
            return y - self.queue.mean(0)


class GivesAnObject(Script):
    class Root(Net):
        def forward(self, x, memory):
            for layer in self.layers:
                x = layer(x, memory)
            memory["steps"].append(len(memory["steps"]))
            return self.head(x)

    class Layer(Layer):
        def forward(self, x, memory):
            memory["stats"].calls += 1
            return super().forward(x / memory["stats"].calls)

    def model(self):
        self.memory = {"stats": Stats(), "steps": []}
        return self.Root(self.Layer)

    def forward(self, model, x):
        out = model(x, self.memory)
        assert self.memory["stats"].calls == 6 * len(self.memory["steps"])
        return out


class HooksItsActivations(Script):
    """A hook that a forward puts on an activation sees the gradients of training alone."""

    class Layer(Layer):
        def set_up(self):
            self.seen = []

        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda grad: self.seen.append(grad.abs().sum()))
            return y

    def run(self, pool=None):
        left = super().run(pool)
        return [*left, *(grad for layer in self.layers for grad in layer.seen)]

    def after(self, model, optimizer):
        self.layers = model.layers


class PatchesAForward(Script):
    def model(self):
        model = super().model()
        for layer in (model.layers[1], model.layers[2].up):
            layer.forward = lambda x, layer=layer: 0.5 * type(layer).forward(layer, x)
        return model

    def after(self, model, optimizer):
        self.layers = model.layers

    def run(self, pool=None):
        left = super().run(pool)
        x = self.layers[0].up.weight.new_ones(WIDTH)
        assert torch.equal(self.layers[1](x), 0.5 * Layer.forward(self.layers[1], x)), "the patch is still there"
        return left


class ReturnsAnObject(Script):
    """Of a class of its own, or a function, over what it has computed."""

    class Layer(Layer):
        class Result:
            def __init__(self, y):
                self.y, self.scaled = y, lambda scale: scale * y

        def forward(self, x):
            return self.Result(super().forward(x))

    class Unpacking(Net):
        def forward(self, x):
            for layer in self.layers:
                result = layer(x)
                x = result.y + result.scaled(0.1)
            return self.head(x)

    def model(self):
        return self.Unpacking(self.Layer)


class ReturnsWeightsInAnObject(Script):
    """Views of a weight and of a buffer, used and written when their slot is another block's."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.register_buffer("ticks", torch.zeros(WIDTH))

        def forward(self, x):
            table = Stats()
            table.row, table.ticks = self.rows.weight[0], self.ticks
            return table

    class Looking(Net):
        def set_up(self):
            self.table = ReturnsWeightsInAnObject.Table()

        def forward(self, x):
            table = self.table(x)
            table.ticks += 1
            x = super().forward(x + table.row + table.ticks)
            return x + table.row.sum()

    def model(self):
        return self.Looking(self.Layer)

    def after(self, model, optimizer):
        with torch.no_grad():
            model(torch.ones(2, WIDTH, device=self.device))


# ---- weights that a script or a forward writes -------------------------------------------------------


class SwapsInAnAverage(Script):
    """What everyone copies: backup, shadow, evaluation, backup."""

    def after(self, model, optimizer):
        shadow = [0.5 * p.data for p in model.parameters()]
        backup = [p.data for p in model.parameters()]
        for p, s in zip(model.parameters(), shadow, strict=True):
            p.data = s
        with torch.no_grad():
            model.eval()(torch.ones(2, WIDTH, device=self.device))
        model.train()
        for p, b in zip(model.parameters(), backup, strict=True):
            p.data = b


class LendsToOneOfTwo(Script):
    """Blocks that share a weight, in an evaluation: the other one has its own."""

    class Tied(Net):
        def set_up(self):
            self.register_buffer("evaluated", torch.zeros(8))
            for layer, twin in zip(self.layers[::2], self.layers[1::2], strict=True):
                twin.up.weight = layer.up.weight

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                own = layer.up.weight.data
                if not self.training and i % 2 == 0:
                    layer.up.weight.data = 0.5 * own
                x = layer(x)
                layer.up.weight.data = own
            return self.head(x)

    def model(self):
        return self.Tied(self.Layer)

    def after(self, model, optimizer):
        with torch.no_grad():
            evaluated = model.eval()(torch.ones(2, WIDTH, device=self.device)).mean(0)
        model.train().evaluated.copy_(evaluated)


class OtherStrides(Script):
    def after(self, model, optimizer):
        weight = model.layers[1].up.weight
        weight.data = torch.linalg.qr(weight.data)[0]


class TransposesInPlace(Script):
    """The same memory, seen otherwise."""

    class Layer(Layer):
        def set_up(self):
            self.square = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return super().forward(self.square(x))

    def after(self, model, optimizer):
        for layer in model.layers:
            layer.square.weight.data = layer.square.weight.data.t()


class WritesBetweenBlocks(Script):
    class Clamped(Net):
        def forward(self, x):
            for layer in self.layers:
                with torch.no_grad():
                    layer.up.weight.clamp_(-0.1, 0.1)
                x = layer(x)
            return self.head(x)

    def model(self):
        return self.Clamped()


class WritesData(Script):
    class Layer(Layer):
        def forward(self, x):
            self.up.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)


class TeacherByData(Script):
    class Teaching(Net):
        def set_up(self):
            self.teacher = nn.Linear(WIDTH, 8).requires_grad_(False)

        def forward(self, x):
            for old, new in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                old.data = 0.9 * old.data + 0.1 * new.data
            return super().forward(x) - self.teacher(x)

    def model(self):
        return self.Teaching()


SCRIPTS = [
    CountsInContainers, OwnGenerator, GeneratorsOfOthers, ForkedRandomState, KeptInObjects,
    KeptInOtherObjects, HidesATeacher, NotesOnActivations, KeptInATensor, ReadsWhatItKept, CountsFromALaterStep,
    KeepsFromTraining, SharesATable, FillsAQueue, GivesAnObject, HooksItsActivations, PatchesAForward,
    ReturnsAnObject, ReturnsWeightsInAnObject, SwapsInAnAverage, LendsToOneOfTwo, OtherStrides, TransposesInPlace,
    WritesBetweenBlocks, WritesData, TeacherByData,
]  # fmt: skip


@at_each_budget(SCRIPTS)
def test_it_trains_as_in_plain_pytorch(script, budget):
    assert_trains_as_in_plain_pytorch(script, budget)


def test_an_object_that_an_evaluation_alone_returns_is_none_of_a_slot():
    plain = ReturnsWeightsInAnObject().model()
    model, x = copy.deepcopy(plain), torch.randn(4, WIDTH)
    with hydra_tune.ShardPool(["cpu"], BUDGETS["few blocks"]) as pool, torch.no_grad():
        hydra_tune.prepare(model, pool=pool)
        assert all(torch.equal(model(x), plain(x)) for _ in range(3))
        assert not pool.report()["trials"][0]["resident"]


class Setting:
    rate = 0.0
    use_cache = True


class Configured(Script):
    """Keeps a running state if its setting says so."""

    def __init__(self, rate):
        self.setting = Setting()
        self.setting.rate = rate

    class Layer(Layer):
        def set_up(self):
            self.mean = torch.zeros(())

        def forward(self, x):
            if self.config.rate:
                self.mean = 0.9 * self.mean + self.config.rate * x.detach().mean()
            return super().forward(x + self.mean)

    def model(self):
        model = super().model()
        for layer in model.layers:
            layer.config = self.setting
        return model


def test_trials_of_one_pool_share_a_plan_only_if_they_behave_alike():
    with hydra_tune.ShardPool(["cpu"], BUDGETS["three shards"]) as pool:
        for rate in (0.0, 0.3):
            plain, prepared = Configured(rate).run(), Configured(rate).run(pool)
            assert_same(prepared, plain)
        assert not any(t["resident"] for t in pool.report()["trials"])


def test_models_that_share_a_config_are_switched_off_and_on_apart():
    script = Configured(0.0)
    first, second = script.model(), script.model()
    with hydra_tune.ShardPool(["cpu"], "8MiB") as pool, hydra_tune.ShardPool(["cpu"], "8MiB") as other:
        hydra_tune.prepare(first, pool=pool)
        hydra_tune.prepare(second, pool=other)
        hydra_tune.release(first)
        assert first.layers[0].config.use_cache and not second.layers[0].config.use_cache
        hydra_tune.release(second)
        assert second.layers[0].config.use_cache and script.setting.use_cache


def test_activations_that_hooks_keep_do_not_keep_the_model():
    class Extractor:
        def __init__(self, model):
            self.kept = {}
            for i, layer in enumerate(model.layers):
                layer.register_forward_hook(lambda module, args, out, i=i: self.kept.update({i: out}))

    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = Net()
        extractor = Extractor(model)
        step(model, pool).sum().backward()
        refs = [weakref.ref(p) for p in model.parameters()]
        assert len(extractor.kept) == 6 and not pool.report()["trials"][0]["resident"]
        del model, extractor
        gc.collect()
        assert not any(ref() is not None for ref in refs)


class ReadsAnIterator(Script):
    """The model's own argument: its forward runs once."""

    class Reads(Net):
        def forward(self, xs):
            return super().forward(next(xs))

    def model(self):
        return self.Reads(self.Layer)

    def forward(self, model, x):
        return model(iter([x]))


@pytest.mark.parametrize("budget", ["spilled", "resident"])
def test_an_iterator_is_read_once(budget):
    assert_trains_as_in_plain_pytorch(ReadsAnIterator, budget)


class HandsOnIterators(Script):
    """Each read once: a list's has a copy, a generator has none."""

    class Layer(Layer):
        def forward(self, xs):
            return super().forward(next(xs))

    class Hands(Net):
        def forward(self, x):
            for i, layer in enumerate(self.layers):
                x = layer(iter([x]) if i % 2 else (y for y in [x]))
            return self.head(x)

    def model(self):
        return self.Hands(self.Layer)


@pytest.mark.parametrize("budget", ["spilled", "resident"])
def test_an_iterator_that_a_block_is_given_is_read_once(budget):
    assert_trains_as_in_plain_pytorch(HandsOnIterators, budget)


def test_a_model_that_outgrows_its_budget_trains_on_once_it_fits_again():
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = Net()
        step(model, pool).sum().backward()
        before = model.layers[2].up, model.layers[2].down
        model.layers[2].up, model.layers[2].down = nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, WIDTH)
        with pytest.raises(
            hydra_tune.BudgetError,
            match=r"block layers\.2\.up does not fit: .* for its weights alone, .*larger memory=",
        ):
            model(torch.randn(4, WIDTH))
        model.layers[2].up, model.layers[2].down = before
        model.zero_grad()
        x = torch.randn(4, WIDTH)
        model(x).sum().backward()
        hydra_tune.release(model)
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
