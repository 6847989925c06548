"""State beside weights and buffers that a forward changes in ways that no version of a tensor tells of, and marks that
a block leaves on what it is given."""

import threading
from argparse import Namespace
from collections import OrderedDict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm
from torch.quasirandom import SobolEngine

import hydra_tune
import models
from comparison import Script, assert_trains_as_in_plain_pytorch
from models import WIDTH, Net


class Draws:
    """From NumPy's older generator, also from the half of a pair that it keeps."""

    def keep(self):
        self.generator = np.random.RandomState(0)

    def use(self, x):
        return x * (1 + float(self.generator.rand())) + float(self.generator.randn())


class Walks:
    """Through a quasi-random sequence."""

    def keep(self):
        self.engine = SobolEngine(WIDTH)

    def use(self, x):
        return x + self.engine.draw(len(x))


class CountsALot:
    def keep(self):
        self.seen = np.zeros(20_000)

    def use(self, x):
        self.seen += 1
        return x / float(self.seen[-1])


class CountsInArguments:
    """Of a command line."""

    def keep(self):
        self.arguments = Namespace(calls=0)

    def use(self, x):
        self.arguments.calls += 1
        return x / self.arguments.calls


class CountsInASet:
    def keep(self):
        self.counters = {Tally(calls=0)}

    def use(self, x):
        (counter,) = self.counters
        counter.calls += 1
        return x / counter.calls


class Tally(SimpleNamespace):
    __hash__ = object.__hash__


class CountsInKeys(CountsInASet):
    def keep(self):
        self.counters = dict.fromkeys([Tally(calls=0)])


class TakesTurns:
    def keep(self):
        self.factors = OrderedDict(a=1.0, b=0.9, c=1.1)

    def use(self, x):
        first = next(iter(self.factors))
        self.factors.move_to_end(first)
        return x * self.factors[first]


class Adapts:
    """By an optimizer of its own."""

    def keep(self):
        self.shift = torch.zeros(WIDTH)
        self.optimizer = torch.optim.Adam([self.shift], lr=0.1)

    def use(self, x):
        self.shift.grad = x.detach().mean(0)
        self.optimizer.step()
        return x + self.shift.clone()


class KeepsAMean:
    """In a tensor that is no buffer."""

    def keep(self):
        self.mean = torch.zeros(WIDTH)

    def use(self, x):
        with torch.no_grad():
            self.update(torch.tanh(self.mean + x.mean(0)))
        return x + self.mean.clone()


class SetsData(KeepsAMean):
    def update(self, mean):
        self.mean.data = mean


class WritesThroughNumPy(KeepsAMean):
    def update(self, mean):
        self.mean.numpy()[:] = mean.numpy()


class SetsTheTensor(KeepsAMean):
    def update(self, mean):
        self.mean.set_(mean)


class Resizes(KeepsAMean):
    def update(self, mean):
        self.mean.resize_(2 * WIDTH)[WIDTH:] = mean
        self.mean.data = self.mean[WIDTH:]


class Normalises:
    """With running statistics that are no buffers."""

    def keep(self):
        self.statistics = [torch.zeros(WIDTH), torch.ones(WIDTH)]

    def use(self, x):
        mean, var = self.statistics
        x = batch_norm(x, mean, var, training=True)
        return x + batch_norm(x.detach(), mean, var, training=False)


class NormalisesByWeights(Normalises):
    def keep(self):
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.var = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    @property
    def statistics(self):
        return self.mean, self.var


def keeps(kind, where):
    """`kind` as a part of each layer, or of the model."""

    def with_kind(parent):
        class Keeping(kind, parent):
            def set_up(self):
                self.keep()

            def forward(self, x, *_):
                return parent.forward(self, self.use(x))

        return Keeping

    class Keeps(Script):
        def model(self):
            return Net(with_kind(models.Layer)) if where == "in blocks" else with_kind(Net)()

    return Keeps


@pytest.mark.sample(2)
@pytest.mark.parametrize("budget", ["spilled", pytest.param("resident", marks=pytest.mark.proof)])
@pytest.mark.parametrize("where", ["in blocks", "between them"])
@pytest.mark.parametrize(
    "kind",
    [
        Draws, Walks, CountsALot, CountsInArguments, CountsInASet, CountsInKeys, TakesTurns, Adapts,
        SetsData, WritesThroughNumPy, SetsTheTensor, Resizes, Normalises, NormalisesByWeights,
    ],
)  # fmt: skip
def test_a_pilot_and_a_repetition_leave_no_trace(kind, where, budget):
    assert_trains_as_in_plain_pytorch(keeps(kind, where), budget)


# ---- what no module has ----

GENERATOR, LOSSES, SEEN, STEP = torch.Generator(), [], [], 0


class DrawsFromAGlobal(models.Layer):
    def forward(self, x, *_):
        return super().forward(x) + torch.rand(WIDTH, generator=GENERATOR)


class AppendsToAGlobal(models.Layer):
    def forward(self, x, *_):
        LOSSES.append(x.square().mean())
        return super().forward(x)


class CountsInAGlobal(models.Layer):
    def forward(self, x, *_):
        global STEP
        STEP += 1
        return super().forward(x)


class HooksForAGlobal(models.Layer):
    def forward(self, x, *_):
        y = super().forward(x)
        y.register_hook(lambda gradient: SEEN.append(gradient.abs().sum()))
        return y


class DrawsInAClosure(models.Layer):
    def set_up(self):
        generator = np.random.default_rng(1)
        self.draw = lambda: float(generator.random())

    def forward(self, x, *_):
        return super().forward(x) * self.draw()


class CountsInAFunction(models.Layer):
    def set_up(self):
        def count():
            count.calls += 1
            return count.calls

        count.calls, self.count = 0, count

    def forward(self, x, *_):
        return super().forward(x / self.count())


class CountsUnderALock(models.Layer):
    class Counter:
        def __init__(self):
            self.lock, self.calls = threading.Lock(), 0

    def set_up(self):
        self.counter = self.Counter()

    def forward(self, x, *_):
        with self.counter.lock:
            self.counter.calls += 1
        return super().forward(x / self.counter.calls)


@pytest.mark.parametrize("budget", ["spilled", "resident"])
@pytest.mark.parametrize(
    "kind",
    [
        DrawsFromAGlobal, AppendsToAGlobal, CountsInAGlobal, HooksForAGlobal, DrawsInAClosure, CountsInAFunction,
        CountsUnderALock,
    ],
)  # fmt: skip
def test_what_a_block_draws_counts_or_appends_elsewhere_it_does_once(kind, budget):
    class Elsewhere(Script):
        Layer = kind

        def model(self):
            global STEP
            GENERATOR.manual_seed(3)
            LOSSES.clear(), SEEN.clear()
            STEP = 0
            return super().model()

        def run(self, pool=None):
            left = super().run(pool)
            return [*left, torch.rand(1, generator=GENERATOR), *LOSSES, *SEEN, torch.tensor(STEP)]

    assert_trains_as_in_plain_pytorch(Elsewhere, budget)


TABLES = {}


class LooksUp(models.Layer):
    """In a table of all models, which the first call fills."""

    def forward(self, x, *_):
        if len(x) not in TABLES:
            TABLES[len(x)] = torch.linspace(0, 1, len(x))[:, None]
        return super().forward(x + TABLES[len(x)])


class FillsATable(Script):
    Layer = LooksUp

    def model(self):
        TABLES.clear()
        return super().model()


class DrawsATable(LooksUp):
    def forward(self, x, *_):
        if not TABLES:
            TABLES[0] = torch.rand(WIDTH)
        return super(LooksUp, self).forward(x + TABLES[0])


class DrawsIntoATable(FillsATable):
    Layer = DrawsATable


@pytest.mark.parametrize("budget", ["spilled", "resident"])
@pytest.mark.parametrize("script", [FillsATable, DrawsIntoATable])
def test_a_global_table_that_a_first_call_fills_is_found_filled(script, budget):
    assert_trains_as_in_plain_pytorch(script, budget)


class Observed(models.Layer):
    """A hook on it writes buffers that are its own, as quantization's observers do; one it writes itself."""

    def set_up(self):
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x, *_):
        self.calls += 1
        return super().forward(x)

    def observe(self, x):
        return batch_norm(x, self.mean, self.var, training=True)


class Observes(Script):
    def model(self):
        model = Net(Observed)
        for layer in model.layers:
            layer.register_forward_hook(lambda layer, _, output: layer.observe(output))
        return model


@pytest.mark.parametrize("budget", ["few blocks", "three shards"])
def test_what_a_hook_writes_into_a_blocks_buffers_stays(budget):
    assert_trains_as_in_plain_pytorch(Observes, budget)


# ---- tensors in objects that blocks are given, which the model changes between them ----


class InSlots:
    __slots__ = ("mean",)

    def __init__(self, mean):
        self.mean = mean


PUT = {  # where a tensor is put, and how it is added from there
    "slots": (InSlots, lambda x, state: x + state.mean),
    "an object": (lambda mean: SimpleNamespace(inner=SimpleNamespace(mean=mean)), lambda x, s: x + s.inner.mean),
    "dicts": (lambda mean: SimpleNamespace(inner={"a": {"b": mean}}), lambda x, s: x + s.inner["a"]["b"]),
    "a closure": (lambda mean: lambda x: x + mean, lambda x, add: add(x)),
    "a partial": (lambda mean: partial(torch.add, mean), lambda x, add: add(x)),
    "a set": (lambda mean: {mean}, lambda x, state: x + next(iter(state))),
}


def shares(put, add):
    class Adds(models.Layer):
        def forward(self, x, state):
            return super().forward(add(x, state))

    class Updates(Net):
        """From the second batch on."""

        def set_up(self):
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            mean = torch.zeros(WIDTH)
            self.calls += 1
            for layer in self.layers:
                x = layer(x, put(mean))
                mean += (self.calls > 1) * x.detach().mean(0)
            return self.head(x)

    class Shares(Script):
        def model(self):
            return Updates(Adds)

    return Shares


@pytest.mark.parametrize("where", PUT)
def test_a_block_that_is_given_hidden_tensors_is_opened(where):
    assert_trains_as_in_plain_pytorch(shares(*PUT[where]), "spilled")


# ---- what is known by its identity ----

MISSING = object()


class Setting:
    def __init__(self):
        self.factor = 0.5


class ToldByIdentity(Script):
    def model(self):
        setting = Setting()

        class Tells(models.Layer):
            def set_up(self):
                self.factor = MISSING

            def forward(self, x, given, factor):
                x = super().forward(x) if given is setting else super().forward(-x)
                return x if factor is self.factor is MISSING else x * factor

        class Hands(Net):
            def forward(self, x):
                for layer in self.layers:
                    x = layer(x, setting, MISSING)
                return self.head(x)

        return Hands(Tells)


@pytest.mark.parametrize("budget", ["spilled", "resident"])
def test_an_object_that_has_not_changed_is_itself_where_a_block_is_repeated(budget):
    assert_trains_as_in_plain_pytorch(ToldByIdentity, budget)


# ---- other modules of the model, which a block reaches ----


class Tells(models.Layer):
    """Its parent, at each call."""

    def forward(self, x, *_):
        return super().forward(x) + self.tell[0](x)


def tells(how):
    class Told(Net):
        def set_up(self):
            self.calls, self.norm = 0, nn.BatchNorm1d(WIDTH)
            self.register_buffer("mean", torch.zeros(WIDTH))
            for layer in self.layers:
                layer.tell = [getattr(self, how)]

        def count(self, x):
            self.calls += 1
            return float(self.calls > 12)

        def average(self, x):
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return 0

    class TellsParts(Script):
        def model(self):
            return Told(Tells)

    return TellsParts


@pytest.mark.parametrize("budget", ["spilled", "resident"])
@pytest.mark.parametrize("how", ["count", "average", "norm"])
def test_a_block_that_changes_another_module_is_opened(how, budget):
    assert_trains_as_in_plain_pytorch(tells(how), budget)


# ---- a block of which nothing requires a gradient ----


class Patches(models.Layer):
    """Returns a view; counts where gradients are on."""

    def set_up(self):
        self.register_buffer("calls", torch.zeros(()))
        self.requires_grad_(False)

    def forward(self, x, *_):
        if torch.is_grad_enabled():
            self.calls += 1
        return super().forward(x).view(-1, 2, WIDTH // 2)


class FrozenPatches(Script):
    def model(self):
        class Embeds(Net):
            def set_up(self):
                self.patches, self.position = Patches(), nn.Parameter(torch.zeros(WIDTH // 2))

            def forward(self, x):
                h = self.patches(x)
                h += self.position
                return super().forward(h.view(-1, WIDTH))

        return Embeds()

    def after(self, model, optimizer):
        with torch.no_grad():
            model(torch.randn(4, WIDTH))


@pytest.mark.parametrize("budget", ["spilled", "resident"])
def test_a_frozen_block_runs_with_gradients_on(budget):
    assert_trains_as_in_plain_pytorch(FrozenPatches, budget)


# ---- marks on what a block is given ----


class Halves(models.Layer):
    """Part of the gradient of its input, which others use, too."""

    def forward(self, x, *_):
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / 2)
        return super().forward(x)


class HooksInputs(Script):
    def model(self):
        class Skips(Net):
            def forward(self, x):
                for layer in self.layers:
                    x = x + layer(x)
                return self.head(x)

        return Skips(Halves)


class Retains(models.Layer):
    def forward(self, x, *_):
        if x.requires_grad:
            x.retain_grad()
        return super().forward(x)


class RetainsInputs(Script):
    def model(self):
        class Keeps(Net):
            def forward(self, x):
                self.__dict__["met"] = met = []
                for layer in self.layers:
                    met.append(x)
                    x = layer(x)
                return self.head(x)

        self.made = Keeps(Retains)
        return self.made

    def after(self, model, optimizer):
        for x in self.made.met[1:]:
            model.head.bias.data[0] += x.grad.sum()


class Tags(models.Layer):
    """Its input, for whoever has it."""

    def forward(self, x, *_):
        x.factor = 0.9
        return super().forward(x)


class ReadsTags(Script):
    def model(self):
        class Reads(Net):
            def forward(self, x):
                for layer in self.layers:
                    y = layer(x)
                    x = y * getattr(x, "factor", 1.0)
                return self.head(x)

        return Reads(Tags)


class Wants(models.Layer):
    """The gradient of what it is given, perhaps the batch."""

    def forward(self, x, *_):
        return super().forward(x.requires_grad_())


class WantsGradientsOfTheBatch(Script):
    Layer = Wants

    def forward(self, model, x):
        self.batch = x
        return model(x)

    def after(self, model, optimizer):
        model.head.bias.data += self.batch.grad.sum()


class Thaws(models.Layer):
    """Its own weight, some day."""

    def set_up(self):
        self.thaws = False
        self.up.weight.requires_grad_(False)

    def forward(self, x, *_):
        self.up.weight.requires_grad = self.thaws
        return super().forward(x)


class ThawsLayersOneByOne(Script):
    Layer = Thaws

    def after(self, model, optimizer):
        next(layer for layer in model.layers if not layer.thaws).thaws = True


@pytest.mark.sample(2)
@pytest.mark.parametrize("budget", ["spilled", "resident"])
@pytest.mark.parametrize("script", [HooksInputs, RetainsInputs, ReadsTags, WantsGradientsOfTheBatch])
def test_marks_are_on_the_tensor_that_the_model_has(script, budget):
    assert_trains_as_in_plain_pytorch(script, budget)


def test_a_weight_that_its_own_block_thaws_is_refused():
    """It is a tensor of the visit's that the block thaws."""
    words = r"layers\.0 changes requires_grad of a weight in its forward"
    with pytest.raises(hydra_tune.PrepareError, match=words):
        assert_trains_as_in_plain_pytorch(ThawsLayersOneByOne, "spilled")
