"""What a model keeps beside its weights, and what a script changes between a forward and its backward.

Plain PyTorch computes a forward once. Here the first one runs in a pilot too, and each block's is repeated in
backward: both must see what the first saw, and leave nothing behind.
"""

import gc
import itertools
import random
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hydra_tune

WIDTH = 32
BUDGETS = {"spilled": 130 << 10, "three shards": 190 << 10, "resident": 8 << 20}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.set_up()

    def set_up(self):
        pass

    def forward(self, x, *_):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, kind=Layer, depth=6):
        super().__init__()
        self.layers = nn.ModuleList([kind() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, 8)
        self.set_up()

    def set_up(self):
        pass

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Script:
    """A training loop; a case says what is different in it."""

    def model(self):
        return Net(self.Layer)

    class Layer(Layer):
        pass

    def forward(self, model, x):
        return model(x)

    def between(self, model):
        """Between forward and backward."""

    def after(self, model, optimizer):
        """After the optimizer's step."""

    def run(self, pool=None):
        torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if pool is not None:
            hydra_tune.prepare(model, optimizer, pool=pool)
        left = []
        try:
            for _ in range(3):
                optimizer.zero_grad()
                x, y = torch.randn(8, WIDTH), torch.randint(0, 8, (8,))
                loss = nn.functional.cross_entropy(self.forward(model, x), y)
                self.between(model)
                loss.backward()
                left += [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
                optimizer.step()
                self.after(model, optimizer)
        finally:
            if pool is not None:
                hydra_tune.release(model)
        return [*left, *(t.clone() for t in model.state_dict().values()), torch.get_rng_state()]


# ---- what a model keeps beside its weights -----------------------------------------------------------


class Stats:
    calls = 0


class OwnGenerator(Script):
    class Layer(Layer):
        def set_up(self):
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x):
            return super().forward(x) * (torch.rand(WIDTH, generator=self.generator) > 0.2)


class GeneratorsOfOthers(Script):
    class Layer(Layer):
        def set_up(self):
            self.random, rng = random.Random(1), numpy.random.default_rng(1)
            self.draw = lambda: float(rng.random())  # kept in a closure

        def forward(self, x):
            return super().forward(x) * (1 + self.random.random() + self.draw())


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
            y = super().forward(x + self.table)
            self.last = y.detach()
            self.first = self.last[0]
            return y

    def model(self):
        return self.Table(self.Layer)

    def after(self, model, optimizer):
        with torch.no_grad():
            model(torch.ones(20, WIDTH))


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
                self.positions = torch.arange(WIDTH) / WIDTH
            return super().forward(x + self.positions)


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
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda grad: seen.append(grad.abs().sum()))
            return y

    def run(self, pool=None):
        global seen
        seen = []
        return [*super().run(pool), *seen]


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
        x = torch.ones(WIDTH)
        assert torch.equal(self.layers[1](x), 0.5 * Layer.forward(self.layers[1], x)), "the patch is still there"
        return left


class NotesOnWeights(Script):
    class Layer(Layer):
        def set_up(self):
            self.up.weight.gain = 3.0

        def forward(self, x):
            return super().forward(x * self.up.weight.gain)


# ---- weights that a script or a forward writes -------------------------------------------------------


class SwapsInAnAverage(Script):
    """What everyone copies: backup, shadow, evaluation, backup."""

    def after(self, model, optimizer):
        shadow = [0.5 * p.data for p in model.parameters()]
        backup = [p.data for p in model.parameters()]
        for p, s in zip(model.parameters(), shadow, strict=True):
            p.data = s
        with torch.no_grad():
            model.eval()(torch.ones(2, WIDTH))
        model.train()
        for p, b in zip(model.parameters(), backup, strict=True):
            p.data = b


class OtherStrides(Script):
    def after(self, model, optimizer):
        weight = model.layers[1].up.weight
        weight.data = torch.linalg.qr(weight.data)[0]


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


# ---- between a forward and its backward --------------------------------------------------------------


class Dropping(Layer):
    def set_up(self):
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return super().forward(self.drop(x))


class EvalBeforeBackward(Script):
    Layer = Dropping

    def between(self, model):
        model.eval()

    def after(self, model, optimizer):
        model.train()


class TwoModesInOneBackward(Script):
    class Layer(Dropping):
        def set_up(self):
            super().set_up()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return super().forward(self.norm(x))

    def forward(self, model, x):
        return model.eval()(x) + model.train()(x)


class AnotherPassBeforeBackward(TwoModesInOneBackward):
    """Without gradients, but it moves the running statistics."""

    def forward(self, model, x):
        return model.eval()(x)

    def between(self, model):
        with torch.no_grad():
            model.train()(torch.ones(4, WIDTH))


class OtherRateBeforeBackward(Script):
    Layer = Dropping

    def between(self, model):
        for layer in model.layers:
            layer.drop.p = 0.9


class AnAttributeForEachCall(Script):
    class Layer(Layer):
        temperature = 1.0

        def forward(self, x):
            return super().forward(x * self.temperature)

    class Annealed(Net):
        def forward(self, x):
            for temperature, layer in itertools.product((1.0, 2.0), self.layers):
                layer.temperature = temperature
                x = layer(x)
            return self.head(x)

    def model(self):
        return self.Annealed(self.Layer)


class TensorAttributes(Script):
    """The loop assigns one between, the forward another."""

    class Layer(Layer):
        def set_up(self):
            self.temperature, self.mean, self.calls = torch.ones(()), torch.zeros(WIDTH), 0

        def forward(self, x):
            y = super().forward((x + self.mean) * self.temperature)
            if self.calls:
                self.mean = 0.5 * self.mean + 0.5 * y.detach().mean(0)
            return y

    def between(self, model):
        for layer in model.layers:
            layer.temperature = 0.7 * layer.temperature

    def after(self, model, optimizer):
        for layer in model.layers:
            layer.calls += 1


class OtherKernels(Script):
    class Layer(Layer):
        def forward(self, x):
            q, k, v = (x.view(1, 2, -1, WIDTH // 2) * n for n in (1, 2, 3))
            return super().forward(nn.functional.scaled_dot_product_attention(q, k, v).reshape_as(x))

    def forward(self, model, x):
        with sdpa_kernel(SDPBackend.MATH):
            return model(x)


class AutocastWithinABlock(Script):
    class Layer(Layer):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                x = x + self.up(x)[:, :WIDTH] + self.up(2 * x)[:, WIDTH:]
            return super().forward(x.float())


# ---- graphs --------------------------------------------------------------------------------------------


class GatesATransposedBranch(Script):
    """Gradients with other strides than their weights or inputs: operators to come add in another order."""

    class Gated(Net):
        def set_up(self):
            self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x):
            x = x.view(2, 4, WIDTH)
            for layer in self.layers:
                x = layer(x)
            branch = self.a(x).transpose(1, 2).contiguous().transpose(1, 2)
            return self.head(self.c(branch * nn.functional.silu(self.b(x)))).flatten(0, 1)

    def model(self):
        return self.Gated()


class SharesItsMemory(Script):
    class Layer(Layer):
        def forward(self, x):
            y = super().forward(x)
            return y, y[:, :8]

    class Scaled(Net):
        def forward(self, x):
            for layer in self.layers:
                x, part = layer(x + 0)
                part.mul_(0.5)
            return self.head(x)

    def model(self):
        return self.Scaled(self.Layer)


def doubles(parameter):
    parameter.grad.mul_(2)


class UsesOneOfTwo(Script):
    """Hooks of weights that a call does not use do not fire."""

    class Layer(Layer):
        def set_up(self):
            self.other = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x):
            return x + self.down((self.up if x.sum() > 0 else self.other)(x).tanh())

    def model(self):
        model = super().model()
        for p in model.parameters():
            p.register_hook(lambda grad: 0.5 * grad)
            p.register_post_accumulate_grad_hook(doubles)
        return model


class LossOnFeatures(Script):
    """Sums keep their order, whoever hands an activation to the loss."""

    class Layer(Layer):
        def forward(self, x):
            return super().forward(nn.functional.layer_norm(x, (WIDTH,))) + x

    def model(self):
        self.kept = []
        model = super().model()
        model.layers[2].register_forward_hook(self.keep)
        return model

    def keep(self, module, args, output):
        self.kept.append(output)

    def forward(self, model, x):
        self.kept.clear()
        return model(x) + self.kept.pop().square().mean(-1, keepdim=True)


class KeepsFeatures(LossOnFeatures):
    class Keeping(Net):
        def set_up(self):
            self.kept = []

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                x = layer(x)
                if i == 2:
                    self.kept.append(x)
            return self.head(x)

    def model(self):
        model = self.Keeping(self.Layer)
        self.kept = model.kept
        return model


class GivesWhatTheLossUses(LossOnFeatures):
    """An image that was generated, for instance."""

    def model(self):
        self.before = nn.Parameter(torch.randn(WIDTH))
        return Script.model(self)

    def forward(self, model, x):
        x = (x * self.before).tanh()
        return model(x) + x.square().mean(-1, keepdim=True)

    def after(self, model, optimizer):
        with torch.no_grad():
            self.before -= self.before.grad
            self.before.grad = None


class ThroughItself(Script):
    class Square(Net):
        def set_up(self):
            self.head = nn.Linear(WIDTH, WIDTH)

    def model(self):
        return self.Square()

    def forward(self, model, x):
        return model(model(x))[:, :8]


SCRIPTS = [
    OwnGenerator, GeneratorsOfOthers, ForkedRandomState, KeptInObjects, KeptInATensor, ReadsWhatItKept,
    CountsFromALaterStep, KeepsFromTraining, SharesATable,
    RebindsABuffer, FillsABufferLater, SharesABuffer, GivesAnObject, HooksItsActivations,
    PatchesAForward, NotesOnWeights, SwapsInAnAverage, OtherStrides, WritesBetweenBlocks, WritesData, TeacherByData,
    EvalBeforeBackward, AnotherPassBeforeBackward,
    TwoModesInOneBackward, OtherRateBeforeBackward, AnAttributeForEachCall, OtherKernels,
    TensorAttributes, AutocastWithinABlock, GatesATransposedBranch, SharesItsMemory, UsesOneOfTwo, LossOnFeatures,
    KeepsFeatures, GivesWhatTheLossUses, ThroughItself,
]  # fmt: skip


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_it_trains_as_in_plain_pytorch(script, budget):
    plain, num_bytes = script().run(), BUDGETS[budget]
    while True:
        with hydra_tune.ShardPool(["cpu"], num_bytes) as pool:
            try:
                prepared = script().run(pool)
            except (hydra_tune.BudgetError, torch.OutOfMemoryError):  # two forwards are more than a pilot's one
                num_bytes = num_bytes * 5 // 4
                continue
            assert pool.devices[0].used_bytes == 0
            (trial,) = pool.report()["trials"]
            break
    assert trial["resident"] == (budget == "resident")
    assert len(plain) == len(prepared)
    for i, (a, b) in enumerate(zip(plain, prepared, strict=True)):
        assert a is b is None or (None not in (a, b) and torch.equal(a, b)), i


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
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(plain, prepared, strict=True)), rate
        assert [bool(t["cut"]["opened"]) for t in pool.report()["trials"]] == [False, True]


def test_a_config_that_models_share_says_no_cache_until_the_last_is_released():
    script = Configured(0.0)
    first, second = script.model(), script.model()
    with hydra_tune.ShardPool(["cpu"], "8MiB") as pool, hydra_tune.ShardPool(["cpu"], "8MiB") as other:
        hydra_tune.prepare(first, pool=pool)
        hydra_tune.prepare(second, pool=other)
        hydra_tune.release(first)
        assert not script.setting.use_cache
        hydra_tune.release(second)
        assert script.setting.use_cache


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


# ---- what is refused -----------------------------------------------------------------------------------


def step(model, pool, forward=lambda model, x: model(x)):
    hydra_tune.prepare(model, pool=pool)
    return forward(model, torch.randn(4, WIDTH))


def test_a_buffer_that_changes_between_forward_and_backward_is_refused():
    class Stepped(Layer):
        def set_up(self):
            self.register_buffer("step", torch.zeros(()))

        def forward(self, x):
            return super().forward(x + self.step)

    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = Net(Stepped)
        out = step(model, pool)
        model.layers[2].step += 1
        with pytest.raises(RuntimeError, match=r"buffer 'step' of block layers\.2 was changed"):
            out.sum().backward()


def test_an_input_that_changes_between_forward_and_backward_is_refused():
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model, x = Net(), torch.randn(4, WIDTH)
        hydra_tune.prepare(model, pool=pool)
        out = model(x)
        x.zero_()
        with pytest.raises(RuntimeError, match=r"one of block layers\.0 was changed in place"):
            out.sum().backward()


def test_a_tensor_attribute_that_changes_between_forward_and_backward_is_refused():
    class Tempered(Layer):
        def set_up(self):
            self.temperature = torch.ones(())

        def forward(self, x):
            return super().forward(x * self.temperature)

    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = Net(Tempered)
        out = step(model, pool)
        model.layers[2].temperature.mul_(0.5)
        with pytest.raises(RuntimeError, match=r"'temperature' of block layers\.2 was changed in place"):
            out.sum().backward()


def test_weights_that_data_changes_and_changes_back_are_refused():
    class Noisy(Net):
        def forward(self, x):
            for layer in self.layers:
                noise = torch.randn_like(layer.up.weight)
                layer.up.weight.data += noise
                x = layer(x)
                layer.up.weight.data -= 2 * noise
            return self.head(x)

    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        out = step(Noisy(), pool)
        with pytest.raises(RuntimeError, match=r"a weight of block layers\.5 was changed"):
            out.sum().backward()


class RoundsLinear(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.bfloat16().float() if func is nn.functional.linear else out


class RoundsTanh(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.bfloat16().float() if func is torch.ops.aten.tanh.default else out


MODES = {
    "RoundsLinear": RoundsLinear,
    "RoundsTanh": RoundsTanh,
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(torch.Tensor.half, torch.Tensor.float),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_around_a_spilled_forward_are_refused(mode):
    class Within(Script):
        def forward(self, model, x):
            with MODES[mode]():
                return model(x)

    plain = Within().run()
    with hydra_tune.ShardPool(["cpu"], BUDGETS["resident"]) as pool:
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(plain, Within().run(pool), strict=True))
    refused = pytest.raises(hydra_tune.PrepareError, match=f"{mode} around the forward would miss it")
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool, refused:
        Within().run(pool)


def test_activations_saved_on_the_host_and_a_default_device_are_no_modes_to_refuse():
    class Within(Script):
        def forward(self, model, x):
            with torch.autograd.graph.save_on_cpu(), torch.device("cpu"):
                return model(x)

    plain = Within().run()
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(plain, Within().run(pool), strict=True))


def test_a_block_that_makes_something_else_when_repeated_is_refused():
    drops = []

    class Drops(Layer):
        def forward(self, x):
            return x if drops and drops.pop() else super().forward(x)

    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = Net(Drops)
        step(model, pool).sum().backward()
        drops += [True] * 6 + [False] * 6  # from the end: layers are passed over when their forwards are repeated
        out = model(torch.randn(4, WIDTH)).sum()
        with pytest.raises(RuntimeError, match="at first and"):
            out.backward()


class Marked(torch.Tensor):
    pass


def shared(model):
    model.layers[1].up.weight = nn.Parameter(model.layers[0].up.weight.data)


def attribute(model):
    model.alias = model.layers[0].up.weight.detach()


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


WRONG = {
    shared: "share theirs", attribute: "share theirs", subclass: "is a Marked", lazy: "is lazy",
    scripted: r"was made by torch\.jit", sparse: r"to_dense", expanded: r"\.contiguous",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_weights_that_have_no_place_of_their_own_are_refused(change):
    model = Net()
    change(model)
    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
        with pytest.raises(hydra_tune.PrepareError, match=WRONG[change]):
            hydra_tune.prepare(model, pool=pool)
        assert pool.devices[0].used_bytes == 0


def in_func_grad(model, x):
    torch.func.grad(lambda x: model(x).sum())(x)


def in_forward_mode(model, x):
    with torch.autograd.forward_ad.dual_level():
        model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


def in_a_checkpoint(model, x):
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()


def batched_gradients(model, x):
    out = model(x)
    torch.autograd.grad(out, list(model.parameters()), torch.ones(2, *out.shape), is_grads_batched=True)


TRANSFORMS = {
    in_func_grad: r"torch\.func", in_forward_mode: "forward-mode", in_a_checkpoint: "checkpoint",
    batched_gradients: "one by one",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("forward", TRANSFORMS, ids=lambda forward: forward.__name__)
def test_transforms_of_the_whole_model_are_refused_and_it_trains_on(forward):
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = Net()
        with pytest.raises(hydra_tune.PrepareError, match=TRANSFORMS[forward]):
            step(model, pool, forward)
        model(torch.randn(4, WIDTH)).sum().backward()


def test_an_iterator_is_refused():
    class Reads(Net):
        def forward(self, xs):
            return super().forward(next(xs))

    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = hydra_tune.prepare(Reads(), pool=pool)
        with pytest.raises(hydra_tune.PrepareError, match="read only once"):
            model(iter([torch.randn(4, WIDTH)]))


def test_a_block_that_takes_gradients_in_its_forward_is_kept_whole():
    class Forces(Layer):
        def forward(self, x):
            with torch.enable_grad():
                energy = super().forward(x.requires_grad_() if x.is_leaf else x).square().sum()
                (force,) = torch.autograd.grad(energy, self.up.weight, create_graph=True)
            return x + force.sum()

    class Mixed(Net):
        def set_up(self):
            self.layers[2] = Forces()

    script = Script()
    script.model = Mixed
    plain = script.run()
    with hydra_tune.ShardPool(["cpu"], BUDGETS["three shards"]) as pool:
        prepared = script.run(pool)
        (trial,) = pool.report()["trials"]
    assert "runs one within its forward" in trial["cut"]["kept"]["layers.2"] and not trial["resident"]
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(plain, prepared, strict=True))
