"""What a model's own forward does with blocks: catches their exceptions, calls them in transforms, lends weights."""

import gc

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp, vmap

import hydra_tune
import models
from comparison import Script, assert_trains_as_in_plain_pytorch, at_each_budget, step
from models import BUDGETS, WIDTH, Net


class Caught(Script):
    """A block fails on the first batch and on others, and the model goes on without it."""

    class Layer(models.Layer):
        def forward(self, x):
            y = super().forward(nn.functional.dropout(x, 0.1))
            if len(x) % 2:
                raise ValueError("odd")
            return y

    def model(self):
        return CatchesErrors(self.Layer)

    def forward(self, model, x):
        return torch.cat([model(x[:3]), model(x[3:7]), model(x[7:])])


class CatchesErrors(Net):
    def forward(self, x):
        for layer in self.layers:
            try:
                x = layer(x)
            except ValueError:
                x = x.abs()
        return self.head(x)


class CatchesEverything(Net):
    def forward(self, x):
        for layer in self.layers:
            try:
                x = layer(x)
            except Exception:
                x = 2 * x
        return self.head(x)


def with_layers_of_their_own_widths(model):
    """None is like another, so that a pilot knows only those that it has seen called."""
    for i, layer in enumerate(model.layers):
        layer.up, layer.down = nn.Linear(WIDTH, 64 + i), nn.Linear(64 + i, WIDTH)
    return model


class PassesOverAndCatches(Script):
    """The first call of a block that no pilot has met ends a forward by an exception of ours."""

    def model(self):
        return with_layers_of_their_own_widths(OtherLayersEachTime(self.Layer))


class OtherLayersEachTime(CatchesEverything):
    calls = 0

    def forward(self, x):
        self.calls += 1
        layers = self.layers
        self.layers = layers[: 1 + self.calls]
        try:
            return super().forward(x)
        finally:
            self.layers = layers


class GrowsAndTeaches(Script):
    """Such a call comes after the forward has written into weights, of blocks and others, and put marks on them."""

    def model(self):
        return with_layers_of_their_own_widths(Growing(self.Layer))


class Growing(Net):
    def set_up(self):
        self.average = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.calls = self.average.calls = 0

    def forward(self, x):
        self.calls += 1
        self.average.calls += 1
        self.write()
        x = x * self.average / self.average.calls
        for layer in self.layers[: 1 + self.calls]:
            x = layer(x)
        return self.head(x)

    def write(self):
        with torch.no_grad():
            self.average.mul_(0.9)
            self.layers[0].up.weight.mul_(0.9)


class GrowsAndReplaces(Script):
    """What was written is replaced, too."""

    def model(self):
        class Replacing(Growing):
            def write(self):
                super().write()
                self.average.data = self.average.data * 0.9

        return with_layers_of_their_own_widths(Replacing(self.Layer))


class FailsAtFirst(Script):
    """What a forward has drawn and counted before its exception stays drawn and counted."""

    def model(self):
        return CountsAndFails(self.Layer)

    def forward(self, model, x):
        try:
            return model(x)
        except ValueError:
            return model(-x)


class CountsAndFails(Net):
    def set_up(self):
        self.norm = nn.BatchNorm1d(WIDTH)
        self.failed = False

    def forward(self, x):
        x = nn.functional.dropout(self.norm(x), 0.3)
        for layer in self.layers:
            x = layer(x)
        if not self.failed:
            self.failed = True
            raise ValueError("at first")
        return self.head(x)


class HooksAWeight(Script):
    class Layer(models.Layer):
        def set_up(self):
            self.handle = None

        def hook(self):
            return self.up.weight.register_hook(lambda grad: grad * 0.5)

        def forward(self, x):
            if self.handle is None:
                self.handle = self.hook()
            return super().forward(x)


class HooksAModule(Script):
    class Layer(HooksAWeight.Layer):
        def hook(self):
            return self.up.register_forward_hook(lambda module, args, output: output * 0.5)


class MarksAWeight(Script):
    class Layer(models.Layer):
        def forward(self, x):
            weight = self.up.weight
            weight.calls = getattr(weight, "calls", 0) + 1
            if not hasattr(self.down.weight, "norm_at_first"):
                self.down.weight.norm_at_first = self.down.weight.detach().norm()
            return super().forward(x) / (weight.calls + self.down.weight.norm_at_first)


class InTransforms(Script):
    """Within a block that is not one of the smallest, and around one of these."""

    class Layer(models.Layer):
        def forward(self, x):
            x = x + vmap(self.up)(x)[:, :WIDTH] + jvp(self.up, (x,), (x,))[1][:, :WIDTH]
            return x + self.down(torch.tanh(self.up(x)))


class FastWeights(Script):
    """A part is called with other weights than its own, which follow from them."""

    def model(self):
        return HalvesItsHead(self.Layer)


class HalvesItsHead(Net):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return functional_call(self.head, {name: p * 0.5 for name, p in self.head.named_parameters()}, (x,))


class RetainsAGradient(Script):
    """As Grad-CAM does."""

    class Layer(models.Layer):
        def forward(self, x):
            self.activation = torch.tanh(self.up(x))
            self.activation.retain_grad()
            return x + self.down(self.activation)

    def after(self, model, optimizer):
        with torch.no_grad():
            model.head.bias += model.layers[0].activation.grad.sum()


class ResizesABuffer(Script):
    class Layer(models.Layer):
        def set_up(self):
            self.register_buffer("mean", torch.empty(0))
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x):
            if self.mean.numel() == 0:
                self.mean.resize_(WIDTH).copy_(x.detach().mean(0))
            self.steps.resize_(self.steps.numel() + 1).fill_(1.0)
            return super().forward(x - self.mean) * self.steps.mean()


class Membranes(Script):
    """Buffers that are taken away before a forward, and filled by each call."""

    class Layer(models.Layer):
        def set_up(self):
            self.register_buffer("potential", None, persistent=False)

        def forward(self, x):
            x = super().forward(x)
            self.potential = x if self.potential is None else 0.9 * self.potential + x
            return torch.tanh(self.potential)

    def model(self):
        return Spiking(self.Layer, depth=4)


class Spiking(Net):
    def forward(self, x):
        for layer in self.layers:
            layer.potential = None
        total = 0
        for _ in range(3):
            y = x
            for layer in self.layers:
                y = layer(y)
            total = total + y
        return self.head(total)


class EvaluatesLargerBeforeBackward(Script):
    def between(self, model):
        model.eval()
        with torch.inference_mode():
            assert model(torch.randn(16, WIDTH, device=self.device)).is_inference()
        model.train()


SCRIPTS = (
    Caught, PassesOverAndCatches, GrowsAndTeaches, GrowsAndReplaces, FailsAtFirst, HooksAWeight,
    HooksAModule, MarksAWeight, FastWeights, RetainsAGradient, ResizesABuffer, Membranes,
    EvaluatesLargerBeforeBackward,
)  # fmt: skip


@at_each_budget(SCRIPTS)
def test_it_trains_as_in_plain_pytorch(script, budget):
    assert_trains_as_in_plain_pytorch(script, budget)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, in jvp
@pytest.mark.parametrize("budget", ["spilled", "three shards", "resident"])  # with fewer bytes its layers are opened
def test_transforms_within_a_block_train_as_in_plain_pytorch(budget):
    assert_trains_as_in_plain_pytorch(InTransforms, budget)


def test_a_model_that_catches_everything_does_not_train_without_a_block_that_fits_no_budget():
    with (
        hydra_tune.ShardPool(["cpu"], 16_000) as pool,
        pytest.raises(hydra_tune.BudgetError, match=r"block layers\.0\.\w+ does not fit: it needs "),
    ):
        step(CatchesEverything(), pool)


def test_a_model_that_catches_everything_does_not_train_over_an_input_that_a_block_has_begun_to_change():
    class Doubles(models.Layer):
        def set_up(self):
            self.doubling = 0  # no truth value: those bring a first step

        def forward(self, x):
            return super().forward(x.mul_(2) if self.doubling else x)

    model = CatchesEverything(Doubles)
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        step(model, pool)
        model.layers[2].doubling = 1
        with pytest.raises(RuntimeError, match=r"inputs stay as they are .* but one of block layers\.2"):
            model(torch.randn(4, WIDTH)).sum().backward()


class MakesAWeight(models.Layer):
    def set_up(self):
        self.scale = None

    def forward(self, x):
        if self.scale is None:
            self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        return super().forward(x) * self.scale


class ReplacesAWeight(models.Layer):
    def forward(self, x):
        self.up.bias = nn.Parameter(self.up.bias.detach().clone())
        return super().forward(x)


class MakesAModule(models.Layer):
    def set_up(self):
        self.extra = None

    def forward(self, x):
        if self.extra is None:
            self.extra = nn.Linear(WIDTH, WIDTH)
        return super().forward(self.extra(x))


@pytest.mark.sample(len(BUDGETS))
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", [MakesAWeight, MakesAModule])
def test_what_a_forward_makes_trains_with_the_rest(kind, budget):
    class Makes(Script):
        def model(self):
            return Net(kind)

    assert_trains_as_in_plain_pytorch(Makes, budget)


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_weight_that_a_forward_replaces_is_refused(budget):
    model = Net(ReplacesAWeight)
    with hydra_tune.ShardPool(["cpu"], BUDGETS[budget]) as pool:
        with pytest.raises(hydra_tune.PrepareError, match="keeps its Parameter objects, but one of layers"):
            step(model, pool).sum().backward()
        hydra_tune.release(model)
        assert pool.devices[0].used_bytes == 0


def test_a_buffer_that_requires_a_gradient_is_refused():
    model = Net()
    model.register_buffer("prompt", torch.ones(WIDTH, requires_grad=True))
    with hydra_tune.ShardPool(["cpu"], 1 << 20) as pool, pytest.raises(hydra_tune.PrepareError, match="buffer prompt"):
        hydra_tune.prepare(model, pool=pool)


@pytest.mark.parametrize("then", ["called", "released", "prepared"])
def test_a_part_that_outlives_its_model_is_plain_again(then):
    torch.manual_seed(0)
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = Net()
        part = nn.Sequential(*model.layers)
        step(model, pool).sum().backward()
        del model
        gc.collect()
        if then == "called":
            part(torch.randn(4, WIDTH)).sum().backward()
        elif then == "released":
            hydra_tune.release(part)
        else:
            step(part, pool).sum().backward()
            hydra_tune.release(part)
        assert all("forward" not in vars(module) for module in part.modules()) and pool.devices[0].used_bytes == 0
