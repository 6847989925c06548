"""What a script changes between a forward and its backward, or has around its forward.

Plain PyTorch computes a forward once. Here each block's is repeated in backward, and must see what the first saw.
"""

import enum
import itertools

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hydra_tune
from comparison import Script, assert_same, assert_trains_as_in_plain_pytorch, at_each_budget, step
from models import BUDGETS, WIDTH, Dropping, Layer, Net


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
            model.train()(torch.ones(4, WIDTH, device=self.device))


class OtherRateBeforeBackward(Script):
    Layer = Dropping

    def between(self, model):
        for layer in model.layers:
            layer.drop.p = 0.9


class SetsABuffer(Script):
    class Layer(Layer):
        def set_up(self):
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, x):
            return super().forward(x * self.scale) * self.scale

    def between(self, model):
        for layer in model.layers:
            layer.scale = torch.full((WIDTH,), 0.5, device=self.device)

    def after(self, model, optimizer):
        for layer in model.layers:
            layer.scale = torch.ones(WIDTH, device=self.device)


class SetsABufferForEachCall(SetsABuffer):
    class Net(Net):
        def forward(self, x):
            for i in range(6):
                self.layers[i // 2].scale = torch.full((WIDTH,), 1 + i / 10, device=x.device)
                x = self.layers[i // 2](x)
            return self.head(x)

    def model(self):
        return self.Net(self.Layer)


class ReplacesItsBuffer(SetsABuffer):
    class Layer(SetsABuffer.Layer):
        def forward(self, x):
            y = super().forward(x)
            self.scale = 0.5 * self.scale + y.detach().square().mean(0)
            return y

    def between(self, model):
        pass


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


class AddsAnAttribute(Script):
    class Layer(Layer):
        def forward(self, x):
            return super().forward(x) * getattr(self, "scale", 1)

    def between(self, model):
        for layer in model.layers:
            layer.scale = 2

    def after(self, model, optimizer):
        for layer in model.layers:
            del layer.scale


class TakesAnAttributeAway(AddsAnAttribute):
    def model(self):
        model = super().model()
        super().between(model)
        return model

    def between(self, model):
        super().after(model, None)

    def after(self, model, optimizer):
        super().between(model)


class TensorAttributes(Script):
    """The loop assigns one between, the forward another."""

    class Layer(Layer):
        def set_up(self):
            self.temperature, self.mean, self.calls = torch.ones(()), torch.zeros(WIDTH), 0

        def forward(self, x):
            y = super().forward((x + self.mean.to(x.device)) * self.temperature.to(x.device))
            if self.calls:
                self.mean = 0.5 * self.mean.to(x.device) + 0.5 * y.detach().mean(0)
            return y

    def between(self, model):
        for layer in model.layers:
            layer.temperature = 0.7 * layer.temperature

    def after(self, model, optimizer):
        for layer in model.layers:
            layer.calls += 1


class LendsAnAverage(Script):
    """For an evaluation while the backward is still to come."""

    def between(self, model):
        own = [p.data for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.data = 0.5 * p.data
            model(torch.ones(8, WIDTH, device=self.device))
            for p, data in zip(model.parameters(), own, strict=True):
                p.data = data


class Kind(enum.Enum):
    ONE, TWO = 1, 2


class Rate:
    def __init__(self, value):
        self.value = value


class AssignsBeforeBackward(Script):
    class Layer(Layer):
        def set_up(self):
            self.kind, self.shifts, self.rate, self.activation = Kind.ONE, [0.1, 0.2], Rate(0.5), self.sigmoid

        def sigmoid(self, x):
            return x.sigmoid()

        def tanh(self, x):
            return x.tanh()

        def forward(self, x):
            x = x * (2 if self.kind is Kind.ONE else 3) + sum(self.shifts) + self.rate.value
            return super().forward(self.activation(x))

    def between(self, model):
        for layer in model.layers:
            layer.kind, layer.shifts, layer.rate, layer.activation = Kind.TWO, [0.3], Rate(0.7), layer.tanh


class FreezesBeforeBackward(Script):
    def between(self, model):
        model.layers[1].requires_grad_(False)  # its copy has made room for others

    def after(self, model, optimizer):
        model.layers[1].requires_grad_(True)


class FreezesForAnotherForward(Script):
    """As a generator's step does with its discriminator: the first forward's weights get their gradients."""

    def between(self, model):
        model.requires_grad_(False)
        model(torch.randn(8, WIDTH, device=self.device, requires_grad=True)).sum().backward()
        model.requires_grad_(True)


class FreezesSomeToEvaluate(FreezesForAnotherForward):
    def between(self, model):
        model.layers[-2:].requires_grad_(False)
        model.head.bias.requires_grad_(False)
        with torch.no_grad():
            model(torch.randn(8, WIDTH, device=self.device))
        model.requires_grad_(True)


class UnfreezesBeforeBackward(Script):
    """A layer that asks whether its weights train goes the way of its forward again."""

    class Layer(Layer):
        def forward(self, x):
            return super().forward(x * (2 if self.up.weight.requires_grad else 3))

    def forward(self, model, x):
        model.layers[-1].requires_grad_(False)
        return model(x)

    def between(self, model):
        model.requires_grad_(True)


class OtherKernels(Script):
    """Around forwards alone, so that repetitions would have others: activations are kept."""

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
            with torch.autocast(x.device.type, torch.bfloat16):
                x = x + self.up(x)[:, :WIDTH] + self.up(2 * x)[:, WIDTH:]
            return super().forward(x.float())


SCRIPTS = [
    LendsAnAverage, EvalBeforeBackward, TwoModesInOneBackward, AnotherPassBeforeBackward, OtherRateBeforeBackward,
    SetsABuffer, SetsABufferForEachCall, ReplacesItsBuffer, AnAttributeForEachCall, AddsAnAttribute,
    TakesAnAttributeAway, TensorAttributes, AssignsBeforeBackward, FreezesBeforeBackward, FreezesForAnotherForward,
    FreezesSomeToEvaluate, UnfreezesBeforeBackward, OtherKernels, AutocastWithinABlock,
]  # fmt: skip


@at_each_budget(SCRIPTS)
def test_it_trains_as_in_plain_pytorch(script, budget):
    assert_trains_as_in_plain_pytorch(script, budget)


SETTINGS = [1.0]


@pytest.mark.parametrize("shared", [False, True], ids=["each once", "one six times"])
@pytest.mark.parametrize("where", ["in an object", "in a global"])
def test_what_a_model_sets_for_each_layer_where_nobody_can_see_it_is_refused(where, shared):
    """The repetition would meet what was set for the last one."""

    class Scaled(Layer):
        def set_up(self):
            self.settings = [1.0]

        def forward(self, x):
            return super().forward(x * (self.settings if where == "in an object" else SETTINGS)[0])

    class Setting(Net):
        def set_up(self):
            for layer in self.layers:
                layer.settings = self.layers[0].settings

        def forward(self, x):
            for i in range(6):
                self.layers[0].settings[0] = SETTINGS[0] = 1 + i / 10
                x = self.layers[0 if shared else i](x)
            return self.head(x)

    class Model(Script):
        def model(self):
            return Setting(Scaled)

    with hydra_tune.ShardPool(["cpu"], BUDGETS["few blocks"]) as pool:
        with pytest.raises(RuntimeError, match=r"block layers\.\d made other values when .* as an argument"):
            Model().run(pool)
        assert pool.devices[0].used_bytes == 0


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes of exceptions")
def test_an_error_of_a_repetition_says_that_it_is_one():
    sizes = []

    class Viewing(Layer):
        def forward(self, x):
            return super().forward(x.view(sizes[-1]))

    class Setting(Net):
        def forward(self, x):
            for layer in self.layers:
                sizes.append(x.shape)
                x = layer(x)
            sizes.append((1, 1))
            return self.head(x)

    class Model(Script):
        def model(self):
            return Setting(Viewing)

    with hydra_tune.ShardPool(["cpu"], BUDGETS["few blocks"]) as pool:
        with pytest.raises(RuntimeError, match="is invalid for input of size") as raised:
            Model().run(pool)
        assert pool.devices[0].used_bytes == 0
    (note,) = raised.value.__notes__
    assert note.startswith("Block layers.5 raised this where its forward is repeated, in backward")


@pytest.mark.parametrize("works", [True, False], ids=["added", "multiplied"])
def test_a_buffer_that_changes_between_forward_and_backward(works):
    """PyTorch refuses it where the backward needs the buffer."""

    class Stepped(Layer):
        def set_up(self):
            self.register_buffer("step", torch.ones(()))

        def forward(self, x):
            return super().forward(x + self.step if works else x * self.step)

    def gradients(pool=None):
        torch.manual_seed(0)
        model = Net(Stepped)
        if pool is not None:
            hydra_tune.prepare(model, pool=pool)
        out = model(torch.randn(4, WIDTH))
        model.layers[2].step += 1
        out.sum().backward()
        return [p.grad for p in model.parameters()]

    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        if works:
            assert all(map(torch.equal, gradients(), gradients(pool)))
            return
        for where in (None, pool):
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
                gradients(where)


def test_an_input_that_changes_between_forward_and_backward_is_refused():
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model, x = Net(), torch.randn(4, WIDTH)
        hydra_tune.prepare(model, pool=pool)
        out = model(x)
        x.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
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
        with pytest.raises(RuntimeError, match=r"block layers\.5 made other values"):
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
    "cached": parametrize.cached,
}


@pytest.mark.parametrize("budget", ["few blocks", "spilled", "resident"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_around_a_forward(mode, budget):
    class Within(Script):
        class Layer(Layer):
            def set_up(self):
                weight_norm(self.up)

        def forward(self, model, x):
            with MODES[mode]():
                return model(x)

    assert_trains_as_in_plain_pytorch(Within, budget)


def test_what_is_cached_of_parametrizations_is_the_models_own():
    """A copy of a module has its key; what this one makes of its weight saves nothing that could tell."""

    class Doubles(nn.Module):
        def forward(self, weight):
            return weight + weight

    class Within(Script):
        class Layer(Layer):
            def set_up(self):
                parametrize.register_parametrization(self.up, "weight", Doubles())

        def forward(self, model, x):
            with parametrize.cached():
                return model(x) + model(x)

    assert_trains_as_in_plain_pytorch(Within, "spilled")


def test_saved_tensors_hooks_around_a_forward_are_refused():
    model, x = Net(), torch.randn(4, WIDTH)
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        hydra_tune.prepare(model, pool=pool)
        hooks = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.half, torch.Tensor.float)
        with hooks, pytest.raises(hydra_tune.PrepareError, match="the model was called within saved_tensors_hooks"):
            model(x)
        model(x).sum().backward()
        hydra_tune.release(model)


def test_activations_saved_on_the_host_and_a_default_device_are_no_modes_to_refuse():
    class Within(Script):
        def forward(self, model, x):
            with torch.autograd.graph.save_on_cpu(), torch.device("cpu"):
                return model(x)

    plain = Within().run()
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        assert_same(Within().run(pool), plain)


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
        with pytest.raises(RuntimeError, match="made fewer tensors"):
            out.backward()


def test_a_weight_that_is_replaced_between_forward_and_backward_is_refused():
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = Net()
        out = step(model, pool)
        prune.l1_unstructured(model.layers[2].up, "weight", 0.3)
        with pytest.raises(hydra_tune.PrepareError, match="keeps its Parameter objects"):
            out.sum().backward()


def test_a_hidden_state_carried_into_the_second_forward():
    """Of one time step: of several, a cell uses its weights as often, and their gradients are added call by call."""

    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.ModuleList(nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(3))

        def forward(self, x, hidden=None):
            last = []
            for i, cell in enumerate(self.cells):
                x, state = cell(x, None if hidden is None else hidden[i])
                last.append(state)
            return x, last

    def gradients(prepare):
        torch.manual_seed(0)
        model = Windows()
        prepare(model)
        for _ in range(2):
            first, hidden = model(torch.randn(4, 1, WIDTH))
            second, _ = model(torch.randn(4, 1, WIDTH), hidden)
            (first.sum() + second.square().sum()).backward()
        return [p.grad for p in model.parameters()]

    with hydra_tune.ShardPool(["cpu"], 200 << 10) as pool:
        spilled = gradients(lambda model: hydra_tune.prepare(model, pool=pool))
        assert not pool.report()["trials"][0]["resident"]
    assert all(map(torch.equal, spilled, gradients(lambda model: None)))


class AddsAMemory(Layer):
    def forward(self, x, memory=None):
        x = super().forward(x)
        return x if memory is None else x + memory.tanh() * memory


class RemembersLastTime(Net):
    """An activation, with its graph, in an attribute."""

    def set_up(self):
        self.last = None

    def forward(self, x):
        memory = self.last
        for i, layer in enumerate(self.layers):
            x = layer(x, memory if i == 2 else None)
            if i == 1:
                self.last = x
        return self.head(x)


@pytest.mark.sample(2)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_an_activation_of_an_earlier_forward_makes_no_weights_stay_on_the_device(autocast):
    def gradients(prepare):
        torch.manual_seed(0)
        model = RemembersLastTime(AddsAMemory)
        prepare(model)
        for _ in range(2):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = sum(model(torch.randn(8, WIDTH)).float().square().mean() for _ in range(2))
            loss.backward()
            model.last = None
        return [p.grad for p in model.parameters()]

    plain = gradients(lambda model: None)
    with hydra_tune.ShardPool(["cpu"], 108 << 10) as pool:
        spilled = gradients(lambda model: hydra_tune.prepare(model, pool=pool))
        (trial,) = pool.report()["trials"]
    assert len(trial["shards"]) > 1 and not trial["cut"]["held"]
    assert all(map(torch.equal, spilled, plain))
