"""Blocks that set their buffers anew, or return what is theirs: weights, buffers, lists, dicts and objects, into which
the model or the script writes."""

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hydra_tune
import models
from comparison import Script, assert_trains_as_in_plain_pytorch
from models import BUDGETS, WIDTH, Net


class Assigns(models.Layer):
    """Its forward sets a buffer, where another one would write into it."""

    def set_up(self):
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, x, *_):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.count = self.count + 1
        return super().forward(x - self.mean) / (1 + 0.01 * self.count)


class AssignsBuffers(Script):
    Layer = Assigns


class CalledTwice(AssignsBuffers):
    def model(self):
        class Twice(Net):
            def forward(self, x):
                for layer in (*self.layers, *self.layers):
                    x = layer(x)
                return self.head(x)

        return Twice(Assigns)


class TwoForwards(AssignsBuffers):
    def forward(self, model, x):
        return model(x) + model(-x)


class AForwardBeforeBackward(AssignsBuffers):
    def between(self, model):
        with torch.no_grad():
            model(torch.randn(4, WIDTH))


class AssignedBeforeBackward(AssignsBuffers):
    def between(self, model):
        for layer in model.layers:
            layer.count = layer.count + 10


class Bank(models.Layer):
    """Returns a buffer, of which the model makes a queue."""

    def set_up(self):
        self.register_buffer("queue", torch.randn(16, WIDTH))

    def forward(self, x, *_):
        return super().forward(x), self.queue


class Codes(Bank):
    """The same of a weight."""

    def set_up(self):
        self.queue = nn.Parameter(torch.randn(16, WIDTH), requires_grad=False)


class Rows(Bank):
    """The same by a view."""

    def forward(self, x, *_):
        return models.Layer.forward(self, x), self.queue[:8]


def writes_into(kind):
    class Writes(Script):
        def model(self):
            class Queues(Net):
                def forward(self, x):
                    for layer in self.layers:
                        x, queue = layer(x)
                        found = x @ queue.clone().t()
                        with torch.no_grad():
                            queue[: len(x)] = x
                        x = x + found.tanh().mean()
                    return self.head(x)

            return Queues(kind)

        def after(self, model, optimizer):
            model.eval()
            with torch.no_grad():
                model(torch.randn(4, WIDTH))
            model.train()

    return Writes


class Remembers(models.Layer):
    """Returns a list that it keeps."""

    def set_up(self):
        self.memory = []

    def forward(self, x, *_):
        past = torch.stack(self.memory).mean(0) if self.memory else 0
        return super().forward(x) + past, self.memory


class AppendsToWhatABlockReturns(Script):
    def model(self):
        class Appends(Net):
            def forward(self, x):
                for layer in self.layers:
                    x, memory = layer(x)
                    memory.append(x.detach().mean(0))
                return self.head(x)

        return Appends(Remembers)


class RemembersTheLast(Remembers):
    """In a deque."""

    def set_up(self):
        self.memory = deque(maxlen=4)

    def forward(self, x, *_):
        return super(Remembers, self).forward(x) + sum(self.memory), self.memory


class RemembersWithin(Remembers):
    """In an object that it keeps."""

    def set_up(self):
        self.state = SimpleNamespace(memory=[])

    @property
    def memory(self):
        return self.state.memory


def appends_to(kind):
    class Appends(AppendsToWhatABlockReturns):
        def model(self):
            model = super().model()
            model.layers = nn.ModuleList(kind() for _ in model.layers)
            return model

    return Appends


@dataclass
class State:
    x: torch.Tensor


class Holds(models.Layer):
    """Returns a dataclass that it keeps."""

    def set_up(self):
        self.state = State(torch.zeros(WIDTH))

    def forward(self, x, *_):
        return super().forward(x) + self.state.x, self.state


class WritesIntoWhatABlockHolds(Script):
    def model(self):
        class Writes(Net):
            def forward(self, x):
                for layer in self.layers:
                    x, state = layer(x)
                    state.x = x.detach().mean(0)
                return self.head(x)

        return Writes(Holds)


class HandsOnAnObject(models.Layer):
    """Returns the dataclass that it was given."""

    def forward(self, state, *_):
        return super().forward(state.x), state


class WritesIntoAnObjectThatABlockHandsOn(Script):
    def model(self):
        class Writes(Net):
            def forward(self, x):
                state = State(x)
                for layer in self.layers:
                    x, same = layer(state)
                    same.x = x
                return self.head(state.x)

        return Writes(HandsOnAnObject)


class HandsOnADeque(models.Layer):
    """Returns the deque that it was given."""

    def forward(self, states, *_):
        return super().forward(states[-1]), states


class AppendsToWhatABlockHandsOn(Script):
    def model(self):
        class Writes(Net):
            def forward(self, x):
                states = deque([x])
                for layer in self.layers:
                    x, same = layer(states)
                    same.append(x)
                return self.head(states[-1])

        return Writes(HandsOnADeque)


class HandsOn(models.Layer):
    """Returns the dict that it was given."""

    def forward(self, state, *_):
        return super().forward(state["x"]), state


class WritesIntoWhatABlockHandsOn(Script):
    def model(self):
        class Writes(Net):
            def forward(self, x):
                state = {"x": x}
                for layer in self.layers:
                    x, same = layer(state)
                    same["x"] = x
                return self.head(state["x"])

        return Writes(HandsOn)


class Averages(Assigns):
    """Reads the buffer that it sets, and draws."""

    def forward(self, x, *_):
        return nn.functional.dropout(super().forward(x), 0.2, self.training)


def checkpoints(**options):
    class CheckpointsAround(AssignsBuffers):
        """Its backward sees what the second forward saw: other averages, and other random numbers if told so."""

        def model(self):
            class Checkpointed(Net):
                def forward(self, x):
                    for layer in self.layers:
                        x = checkpoint(layer, x, use_reentrant=False, **options)
                    return self.head(x)

            return Checkpointed(Averages)

    return CheckpointsAround


class Counts(models.Layer):
    """Writes buffers after the last operator that saves something, up to which PyTorch's checkpoint repeats it."""

    def set_up(self):
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, x, *_):
        out = super().forward(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * out.mean(0))
            self.count = self.count + 1
        return out


class CountsAlone(Counts):
    """Saves nothing at all."""

    def forward(self, x):
        self.count = self.count + 1
        return x + self.down.bias


def checkpoints_counted(kind, layers):
    class CheckpointsAroundCounts(Script):
        def model(self):
            class Checkpointed(Net):
                def forward(self, x):
                    for i in range(0, 6, layers):
                        x = checkpoint(nn.Sequential(*self.layers[i : i + layers]), x, use_reentrant=False)
                    return self.head(x)

            return Checkpointed(kind)

    return CheckpointsAroundCounts


class AssignsInBackward(Script):
    """A buffer, by a Function's backward within a block."""

    class Layer(Assigns):
        def forward(self, x, *_):
            layer = self

            class Notes(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return x.clone()

                @staticmethod
                def backward(ctx, grad):
                    layer.mean = layer.mean + grad.mean(0)
                    return grad

            return Notes.apply(super().forward(x))


class KeepsWhatWasThere(Script):
    """The tensor that a buffer was before it was assigned, and a view of it, in graphs too."""

    def model(self):
        class Keeps(Net):
            def forward(self, x):
                for layer in self.layers:
                    before, view = layer.mean, layer.mean[::2]
                    x = layer(x * (1 + before)) + x * before
                    x = x + (layer.mean - before) * view.sum()
                return self.head(x)

        return Keeps(Assigns)


class SharesABuffer(Script):
    """Two blocks have the same at first; the one that assigns it has another then."""

    def model(self):
        model = Net(Assigns)
        model.layers[3].mean = model.layers[1].mean
        return model

    def after(self, model, optimizer):
        assert model.layers[3].mean is not model.layers[1].mean


class ReachesAnother(Script):
    """A block uses another one's weight, and is evaluated while that has its gradient."""

    def model(self):
        class Reaches(models.Layer):
            def forward(self, x, *_):
                return super().forward(x) + nn.functional.linear(x, self.other[0].up.weight[:WIDTH])

        model = Net()
        model.layers[4] = Reaches()
        model.layers[4].other = [model.layers[1]]
        return model

    def after(self, model, optimizer):
        with torch.no_grad():
            model(torch.randn(4, WIDTH))


@pytest.mark.sample(3)
@pytest.mark.parametrize("budget", ["spilled", "three shards", "resident"])
@pytest.mark.parametrize(
    "script",
    [
        AssignsBuffers, CalledTwice, TwoForwards, AForwardBeforeBackward, AssignedBeforeBackward, writes_into(Bank),
        writes_into(Codes), writes_into(Rows), AppendsToWhatABlockReturns, WritesIntoWhatABlockHandsOn,
        appends_to(RemembersTheLast), appends_to(RemembersWithin), WritesIntoWhatABlockHolds,
        WritesIntoAnObjectThatABlockHandsOn, AppendsToWhatABlockHandsOn,
        AssignsInBackward, KeepsWhatWasThere, SharesABuffer,
        checkpoints(), checkpoints(preserve_rng_state=False), ReachesAnother,
    ],
    ids=lambda script: script().model().layers[0].__class__.__name__ + " " + script.__name__,
)  # fmt: skip
def test_it_trains_as_in_plain_pytorch(script, budget):
    assert_trains_as_in_plain_pytorch(script, budget)


@pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="nobody can see the checkpoint"
)
@pytest.mark.parametrize("kind", [Counts, CountsAlone])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("budget", ["spilled", "resident"])
def test_a_checkpoint_repeats_no_more_than_in_plain_pytorch(layers, budget, kind):
    assert_trains_as_in_plain_pytorch(checkpoints_counted(kind, layers), budget)


@pytest.mark.parametrize("kind", [Bank, Codes, Rows])
def test_an_evaluation_writes_into_what_a_block_returns(kind):
    def values(pool):
        torch.manual_seed(0)
        model = writes_into(kind)().model()
        if pool is not None:
            hydra_tune.prepare(model, pool=pool)
        with torch.no_grad():
            return [model(torch.randn(4, WIDTH)) for _ in range(3)] + [model.layers[2].queue.clone()]

    with hydra_tune.ShardPool(["cpu"], BUDGETS["few blocks"]) as pool:
        found = values(pool)
        assert not pool.report()["trials"][0]["resident"]
    assert all(map(torch.equal, found, values(None)))


@pytest.mark.parametrize(
    ("script", "word"), [(writes_into(Bank), "returns a buffer"), (AppendsToWhatABlockReturns, "list, dict or")]
)
def test_the_report_says_why_such_a_block_keeps_its_activations(script, word):
    with hydra_tune.ShardPool(["cpu"], BUDGETS["three shards"]) as pool:
        script().run(pool)
        (trial,) = pool.report()["trials"]
    assert len(trial["keeps"]) == 6 and all(word in reason for reason in trial["keeps"].values())


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("make", [Frozen, lambda x: Pair(x, x)], ids=["dataclass", "named tuple"])
def test_a_block_may_hand_on_what_nobody_can_write_into(make):
    class HandsOnWhatItWasGiven(Script):
        def model(self):
            class Reads(Net):
                def forward(self, x):
                    state = make(x)
                    for layer in self.layers:
                        x, state = layer(state)
                        state = make(x + state.x)
                    return self.head(state.x)

            return Reads(HandsOnAnObject)

    assert_trains_as_in_plain_pytorch(HandsOnWhatItWasGiven, "three shards")
    with hydra_tune.ShardPool(["cpu"], BUDGETS["three shards"]) as pool:
        HandsOnWhatItWasGiven().run(pool)
        assert pool.report()["trials"][0]["keeps"] == {}


class Reveals(Bank):
    """Returns its buffer in evaluations only."""

    def forward(self, x, *_):
        out = models.Layer.forward(self, x)
        return out if self.training else (out, self.queue)


class Evaluates(Net):
    def __init__(self, *, writes):
        super().__init__(Reveals)
        self.writes, self.last = writes, []

    def forward(self, x):
        for layer in self.layers:
            out = layer(x)
            x, queue = out if isinstance(out, tuple) else (out, None)
            if queue is not None and self.writes == "within":
                queue[: len(x)] = x
            self.last[:] = [queue]
        return self.head(x)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("writes", ["within", "after", "never"])
def test_what_is_written_into_a_buffer_that_an_evaluation_returns_stays(writes, without):
    class WritesInEvaluations(Script):
        def model(self):
            return Evaluates(writes=writes)

        def after(self, model, optimizer):
            model.eval()
            with without():
                model(torch.randn(4, WIDTH))
                if writes == "after":
                    model.last[0][:4] = 1
                model(torch.randn(4, WIDTH))
            model.train()

    assert_trains_as_in_plain_pytorch(WritesInEvaluations, "three shards")


def test_an_evaluation_that_comes_first_writes_into_what_a_block_returns():
    """Its measure has seen that, and leaves no trace."""

    def values(pool):
        torch.manual_seed(0)
        model = Evaluates(writes="within")
        if pool is not None:
            hydra_tune.prepare(model, pool=pool)
        model.eval()
        with torch.no_grad():
            return [model(torch.randn(4, WIDTH)) for _ in range(3)] + [model.layers[2].queue.clone()]

    with hydra_tune.ShardPool(["cpu"], BUDGETS["few blocks"]) as pool:
        found = values(pool)
        assert not pool.report()["trials"][0]["resident"]
    assert all(map(torch.equal, found, values(None)))


def test_a_checkpointed_block_that_leaves_its_buffers_alone_is_one():
    class Adds(CountsAlone):
        def forward(self, x):
            return x + self.mean

    with hydra_tune.ShardPool(["cpu"], BUDGETS["three shards"]) as pool:
        checkpoints_counted(Adds, 1)().run(pool)
        (trial,) = pool.report()["trials"]
        assert trial["cut"]["opened"] == trial["keeps"] == {}
