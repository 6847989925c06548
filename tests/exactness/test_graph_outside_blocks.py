"""Graphs that go on outside of blocks: sums in their order, gradients in their layout, transforms of them all."""

import threading

import pytest
import torch
from torch import nn

import hydra_tune
from comparison import Script, assert_same, assert_trains_as_in_plain_pytorch, at_each_budget, step
from models import BUDGETS, WIDTH, Layer, Net


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


class MarksBatches(Script):
    """What a model does depends on the data: some batches have a mark, and no flag or shape tells them apart."""

    marked = (2,)
    step = 0

    def forward(self, model, x):
        self.step += 1
        if self.step in self.marked:
            x[0, 0] = 10.0
        return model(x)


class LeavesTheMaskOut(MarksBatches):
    """A batch without padding has no mask, as in Hugging Face's decoders: what is behind it has another number then."""

    marked = (1,)

    class Attending(Layer):
        def set_up(self):
            self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x, mask=None, memory=None):
            found = (x @ self.key(memory).T).softmax(-1) @ self.value(memory)
            return super().forward(x if mask is None else x * mask) + found

    class Decoder(Net):
        def forward(self, x):
            padding = x[:, :1] > 9
            mask = 1.0 - padding.float() if padding.any() else None
            memory = self.layers[0](x.tanh(), None, x)
            for layer in self.layers[1:]:
                x = layer(x, mask, memory=memory)
            return self.head(x)

    def model(self):
        return self.Decoder(self.Attending)


class HasAMaskLater(LeavesTheMaskOut):
    marked = (2, 3)


class PassesOn(MarksBatches):
    """All layers but one return the first batch as it is, and something else uses it, too."""

    marked = (1,)

    class Layer(Layer):
        def forward(self, x):
            return x if x.detach().max() > 8 else super().forward(x)

    class Net(Net):
        def forward(self, x):
            x = 2 * self.layers[0](x / 2)
            for layer in self.layers[1:]:
                x = (layer(x) + x.sin() + x) / 2
            return self.head(x)

    def model(self):
        return self.Net(self.Layer)


class SkipsFar(MarksBatches):
    """Who else uses what a block is given, and uses several times, the data say: only some batches have the skip."""

    class Skipping(Net):
        def forward(self, x):
            is_far = x[0, 0] > 9
            for i, layer in enumerate(self.layers):
                if i == 2:
                    kept = x
                x = layer(x)
            return self.head(x + kept if is_far else x)

    def model(self):
        return self.Skipping(self.Layer)


class NamesOtherwise(MarksBatches):
    """The same tensors in the same order, but by other names: the data say which is used once, and which twice."""

    class Crossing(Layer):
        def forward(self, x, once=None, twice=None):
            return super().forward(x) + once + (twice + twice.tanh())

    class Crossed(Net):
        def forward(self, x):
            u, v = self.layers[0](x, x, x), self.layers[1](x, x, x)
            first, second = ("twice", "once") if x[0, 0] > 9 else ("once", "twice")
            for layer in self.layers[2:]:
                x = layer(x, **{first: u, second: v})
            return self.head(x)

    def model(self):
        return self.Crossed(self.Crossing)


class NamesKeysOtherwise(NamesOtherwise):
    class Crossing(NamesOtherwise.Crossing):
        def forward(self, x, both):
            return super().forward(x, **both)

    class Crossed(Net):
        def forward(self, x):
            u, v = (self.layers[i](x, {"once": x, "twice": x}) for i in (0, 1))
            first, second = ("twice", "once") if x[0, 0] > 9 else ("once", "twice")
            for layer in self.layers[2:]:
                x = layer(x, {first: u, second: v})
            return self.head(x)


class LearnsLater(MarksBatches):
    """What several blocks are given, and use twice, requires a gradient in some batches only, which the data say."""

    class Crossing(Layer):
        def forward(self, x, memory=None):
            return super().forward(x) if memory is None else super().forward(x) + memory * memory.tanh()

    class Crossed(Net):
        def forward(self, x):
            memory = self.layers[1](self.layers[0](x))
            if not x[0, 0] > 9:
                memory = memory.detach()
            for layer in self.layers[2:]:
                x = layer(x, memory)
            return self.head(x)

    def model(self):
        return self.Crossed(self.Crossing)


class RepeatsUnderAutocast(MarksBatches):
    """A block is called once in the first batch, then three times in one context: its weights are cast once for all."""

    class Deepening(Net):
        def forward(self, x):
            for layer in self.layers:
                for _ in range(3 if x[0, 0] > 9 else 1):
                    x = layer(x)
            return self.head(x)

    def model(self):
        return self.Deepening(self.Layer)

    def forward(self, model, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return super().forward(model, x).float()


class GivesWhatTheLossUses(LossOnFeatures):
    """An image that was generated, for instance."""

    def model(self):
        self.before = nn.Parameter(torch.randn(WIDTH).to(self.device))
        return Script.model(self)

    def forward(self, model, x):
        x = (x * self.before).tanh()
        return model(x) + x.square().mean(-1, keepdim=True)

    def after(self, model, optimizer):
        with torch.no_grad():
            self.before -= self.before.grad
            self.before.grad = None


class FeaturesFromALaterStep(LossOnFeatures):
    """A flag says so."""

    class Keeping(Net):
        keeps = False

        def set_up(self):
            self.kept = []

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                x = layer(x)
                if i == 2 and self.keeps:
                    self.kept.append(x)
            return self.head(x)

    def model(self):
        model = self.Keeping(self.Layer)
        model.keeps = False
        self.kept = model.kept
        return model

    def forward(self, model, x):
        self.kept.clear()
        out = model(x)
        return out + sum(kept.square().mean(-1, keepdim=True) for kept in self.kept)

    def after(self, model, optimizer):
        model.keeps = True


class ContextFromALaterStep(Script):
    """Set on the layers as an attribute, with its gradient."""

    class Layer(Layer):
        def set_up(self):
            self.context = None

        def forward(self, x):
            return super().forward(x if self.context is None else x * self.context)

    class Encoding(Net):
        def set_up(self):
            self.encoder, self.encodes = nn.Linear(WIDTH, WIDTH), False

        def forward(self, x):
            context = self.encoder(x)
            for layer in self.layers:
                layer.context = context if self.encodes else None
                x = layer(x)
            return self.head(x + context)

    def model(self):
        return self.Encoding(self.Layer)

    def after(self, model, optimizer):
        model.encodes = True


class ThroughItself(Script):
    class Square(Net):
        def set_up(self):
            self.head = nn.Linear(WIDTH, WIDTH)

    def model(self):
        return self.Square()

    def forward(self, model, x):
        return model(model(x))[:, :8]


class EndsInACheckpoint(Script):
    """The last operator is in one, and in no block: its backward repeats a block before any has had a gradient."""

    use_reentrant = False

    class Tied(Net):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return torch.utils.checkpoint.checkpoint(self.tied, x, use_reentrant=self.use_reentrant)

        def tied(self, x):
            return nn.functional.linear(self.head(x).tanh(), self.head.weight.T)[:, :8]

    def model(self):
        model = self.Tied()
        model.use_reentrant = self.use_reentrant
        return model


class EndsInAReentrantCheckpoint(EndsInACheckpoint):
    use_reentrant = True


SCRIPTS = [
    GatesATransposedBranch, SharesItsMemory, LossOnFeatures, KeepsFeatures, GivesWhatTheLossUses,
    LeavesTheMaskOut, HasAMaskLater, PassesOn, SkipsFar, NamesOtherwise, NamesKeysOtherwise, LearnsLater,
    FeaturesFromALaterStep, ContextFromALaterStep, ThroughItself, EndsInACheckpoint,
    EndsInAReentrantCheckpoint,
]  # fmt: skip


@at_each_budget(SCRIPTS)
def test_it_trains_as_in_plain_pytorch(script, budget):
    assert_trains_as_in_plain_pytorch(script, budget)


@pytest.mark.parametrize("budget", ["few blocks", "spilled"])
def test_more_calls_under_autocast_than_were_measured_are_refused(budget):
    """Autocast's one copy of a weight would serve uses that nobody has seen."""
    with pytest.raises(hydra_tune.PrepareError, match="another branch"):
        assert_trains_as_in_plain_pytorch(RepeatsUnderAutocast, budget)


def test_checkpoints_around_containers_do_not_add_up_in_a_pilot():
    """It looked at what their nodes had saved, which each of them made anew for that."""

    class Checkpointed(Net):
        def forward(self, x):
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return self.head(x)

    def layer():
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    with hydra_tune.ShardPool(["cpu"], 60_000) as pool:
        step(Checkpointed(layer, depth=16), pool).sum().backward()


def in_func_grad(model, x):
    torch.func.grad(lambda x: model(x).sum())(x)


def in_forward_mode(model, x):
    with torch.autograd.forward_ad.dual_level():
        model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


def of_weights_in_forward_mode(model, x):
    names, weights = zip(*model.named_parameters(), strict=True)
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(w, torch.ones_like(w)) for w in weights]
        torch.func.functional_call(model, dict(zip(names, duals, strict=True)), (x,))


def in_a_checkpoint(model, x):
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()


def batched_gradients(model, x):
    out = model(x)
    torch.autograd.grad(out, list(model.parameters()), torch.ones(2, *out.shape), is_grads_batched=True)


TRANSFORMS = {
    in_func_grad: r"torch\.func", in_forward_mode: "forward-mode", of_weights_in_forward_mode: "forward-mode",
    in_a_checkpoint: "checkpoint",
    batched_gradients: "one by one",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own
@pytest.mark.parametrize("forward", TRANSFORMS, ids=lambda forward: forward.__name__)
def test_transforms_of_the_whole_model_are_refused_and_it_trains_on(forward):
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = Net()
        with pytest.raises(hydra_tune.PrepareError, match=TRANSFORMS[forward]):
            step(model, pool, forward)
        model(torch.randn(4, WIDTH)).sum().backward()


def test_another_thread_may_differentiate_forward():
    """PyTorch counts its levels for all threads."""
    entered, leave = threading.Event(), threading.Event()

    def elsewhere():
        with torch.autograd.forward_ad.dual_level():
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert entered.wait(60)
    try:
        with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
            model = Net()
            step(model, pool).sum().backward()
            model(torch.randn(4, WIDTH)).sum().backward()
    finally:
        leave.set()
        thread.join()


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
    assert not trial["resident"]
    assert_same(prepared, plain)


class Forces(Net):
    """Trained on gradients by its input."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return force[:, :8]


@pytest.mark.parametrize("num_bytes", [BUDGETS["resident"], 2 * BUDGETS["spilled"]], ids=["resident", "spilled"])
def test_a_model_that_is_trained_on_its_gradients(num_bytes):
    script = Script()
    script.model = Forces
    plain = script.run()
    with hydra_tune.ShardPool(["cpu"], num_bytes) as pool:
        found = script.run(pool)
        (trial,) = pool.report()["trials"]
    assert trial["resident"] == (num_bytes == BUDGETS["resident"])
    assert_same(found, plain)


@pytest.mark.parametrize("budget", ["spilled", "resident"])
def test_weights_that_an_earlier_forward_has_used_in_its_own_way_are_not_held(budget):
    """Where that was resident, its graph behind the inputs of the next one has operators on them."""
    with hydra_tune.ShardPool(["cpu"], BUDGETS[budget]) as pool:
        model = Net()
        model.head = nn.Linear(WIDTH, WIDTH)
        x = step(model, pool)
        model(x).sum().backward()
        (trial,) = pool.report()["trials"]
    assert trial["cut"]["held"] == {} and trial["resident"] == (budget == "resident")


@pytest.mark.parametrize("budget", ["spilled", "resident"])
def test_a_leaf_that_a_block_makes_stays_one(budget):
    """Spilled, it came out of the block as an activation, without a `.grad`."""

    class Cuts(Layer):
        def forward(self, x):
            return super().forward(x).detach().requires_grad_()

    class Latent(Net):
        def set_up(self):
            self.layers[2] = Cuts()

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                x = layer(x)
                if i == 2:
                    self.latent = x
            return self.head(x)

    def trained(pool=None):
        torch.manual_seed(0)
        model, left = Latent(), []
        if pool is not None:
            hydra_tune.prepare(model, pool=pool)
        for _ in range(2):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            left += [model.latent.grad, model.head.weight.grad.clone()]
        assert model.latent.is_leaf and model.layers[0].up.weight.grad is None
        return left

    with hydra_tune.ShardPool(["cpu"], BUDGETS[budget]) as pool:
        found = trained(pool)
        (trial,) = pool.report()["trials"]
        assert trial["resident"] == (budget == "resident")
    assert all(map(torch.equal, trained(), found))
