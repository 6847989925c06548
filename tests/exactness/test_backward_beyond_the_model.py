"""A backward that a model runs within its forward, and what is around the model: leaves that it is given or keeps,
graphs from before it, hooks, optimizers in hooks. A pilot runs it as well, and leaves no trace there."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import models
from comparison import Script, assert_trains_as_in_plain_pytorch
from models import WIDTH, Guided, TrainsWithin


class TrainsOnItsInput(Guided):
    """That backward goes on into what made the input."""

    def forward(self, x):
        y = self.layers[1](self.layers[0](x))
        if torch.is_grad_enabled():
            y.square().mean().backward(retain_graph=True)
        return self.rest(y)


class GivenAWeight(Script):
    """The model's input is a leaf; the backward within the forward adds to its gradient, once."""

    def model(self):
        return TrainsWithin()

    def forward(self, model, x):
        self.prompt = nn.Parameter(x) if not hasattr(self, "prompt") else self.prompt
        return model(self.prompt)

    def between(self, model):
        self.seen = [*getattr(self, "seen", []), self.prompt.grad.clone()]

    def run(self, pool=None):
        return [*super().run(pool), *self.seen]


class GivenByAnother(Script):
    """A module that is not prepared makes the input; that backward goes on into its graph, once."""

    Kind = TrainsWithin

    def model(self):
        self.first = nn.Linear(WIDTH, WIDTH)
        return self.Kind()

    def forward(self, model, x):
        return model(torch.tanh(self.first(x)))

    def between(self, model):
        self.seen = [*getattr(self, "seen", []), self.first.weight.grad.clone()]

    def run(self, pool=None):
        return [*super().run(pool), *self.seen]


class SlopeBeyondTheModel(GivenByAnother):
    """Of a block's output by what the input was made from."""

    class Kind(Guided):
        def forward(self, x, origin):
            (slope,) = torch.autograd.grad(self.layers[0](x).square().mean(), origin, retain_graph=True)
            return self.rest(x + slope)

    def forward(self, model, x):
        x = x.requires_grad_()
        return model(torch.tanh(self.first(x)), x)

    def between(self, model):
        pass

    def run(self, pool=None):
        self.seen = []
        return super().run(pool)


class GivenTwice(GivenByAnother):
    """The same tensor as two arguments, and again as an output."""

    def model(self):
        super().model()

        class Mixes(models.Layer):
            def forward(self, x, y):
                return super().forward(x * y + x) * x + y

        class Two(Guided):
            def forward(self, x, y):
                self.layers[1](self.layers[0](x, y), y).square().mean().backward(retain_graph=True)
                for layer in self.layers[2:]:
                    x = 0.1 * layer(x, y) + y
                return self.head(x * y) + y[:, :8]

        return Two(Mixes)

    def forward(self, model, x):
        x = torch.tanh(self.first(x))
        return model(x, x)


class WritesItsInput(GivenByAnother):
    """In place, though it has a graph behind it."""

    class Kind(TrainsOnItsInput):
        def forward(self, x):
            return super().forward(x.mul_(0.5).add_(1))

    def forward(self, model, x):
        x = torch.tanh(self.first(x))
        return model(2 * x)


class HookedWeights(Script):
    """Hooks of weights fire in the backward within, too, but in no pilot; some step an optimizer."""

    def model(self):
        model, self.fired = TrainsWithin(), []
        own = torch.optim.SGD([model.layers[0].up.weight], lr=0.1, momentum=0.9)

        def steps(_):
            own.step()
            own.zero_grad()
            self.fired.append("step")

        model.layers[0].up.weight.register_post_accumulate_grad_hook(steps)
        model.layers[1].up.weight.register_hook(lambda grad: self.fired.append("hook") or 2 * grad)
        model.layers[5].up.weight.register_post_accumulate_grad_hook(lambda _: self.fired.append("late"))
        return model

    def run(self, pool=None):
        return [*super().run(pool), torch.tensor([self.fired.count(what) for what in ("step", "hook", "late")])]


class GivenAHookedWeight(GivenAWeight):
    """A hook steps its optimizer: once a step."""

    def forward(self, model, x):
        if not hasattr(self, "prompt"):
            self.prompt, self.fired = nn.Parameter(x), []
            own = torch.optim.SGD([self.prompt], lr=0.1, momentum=0.9)

            def steps(_):
                own.step()
                own.zero_grad()
                self.fired.append("step")

            self.prompt.register_post_accumulate_grad_hook(steps)
        return model(self.prompt)

    def between(self, model):
        self.seen = [*getattr(self, "seen", []), self.prompt.detach().clone(), torch.tensor(len(self.fired))]


class KeptByTheModel(GivenByAnother):
    """An activation that another module has made, which is no argument; hooks, and a gradient that it adds to."""

    def model(self):
        model, self.fired = super().model(), []
        self.first.weight.grad = torch.ones_like(self.first.weight)
        self.first.weight.register_hook(lambda _: self.fired.append(1))
        return model

    def between(self, model):
        super().between(model)
        self.seen.append(torch.tensor(len(self.fired)))

    class Kind(TrainsOnItsInput):
        def forward(self, x):
            return super().forward(x + self.memory)

    def forward(self, model, x):
        model.memory = torch.tanh(self.first(x))
        return model(x)


class InAnObject(GivenByAnother):
    """Given in one."""

    class Kind(TrainsOnItsInput):
        def forward(self, given):
            return super().forward(given.x)

    def forward(self, model, x):
        class Given:
            pass

        given = Given()
        given.x = torch.tanh(self.first(x))
        return model(given)


class Critic(GivenByAnother):
    """A module that the model hides in a list, trained by the backward within."""

    def model(self):
        super().model()

        class Criticised(Guided):
            def forward(self, x):
                y = self.layers[1](self.layers[0](x))
                if torch.is_grad_enabled():
                    self.hidden[0](y).square().mean().backward(retain_graph=True)
                return self.rest(y)

        model = Criticised()
        model.hidden = [self.first]
        return model

    def forward(self, model, x):
        return model(x)


class LeafOfTheModel(GivenByAnother):
    """Neither a weight nor a buffer."""

    def model(self):
        self.leaf = torch.randn(WIDTH, requires_grad=True)

        class Scales(TrainsOnItsInput):
            def forward(self, x):
                return super().forward(x * self.leaf)

        model = Scales()
        model.leaf = self.leaf
        return model

    def forward(self, model, x):
        return model(x)

    def between(self, model):
        self.seen = [*getattr(self, "seen", []), self.leaf.grad.clone()]


class SlopeAndBackwardBeyondTheModel(SlopeBeyondTheModel):
    """The backward goes on, too, where the pilot had to let it."""

    class Kind(Guided):
        def forward(self, x, origin):
            y = self.layers[0](x)
            (slope,) = torch.autograd.grad(y.square().mean(), origin, retain_graph=True)
            y.mean().backward(retain_graph=True)
            return self.rest(x + slope)

    between, run = GivenByAnother.between, GivenByAnother.run


class CheckpointAround(Script):
    """Of the part that runs a backward: repeated within the outer one."""

    def model(self):
        class Checkpointed(Guided):
            def part(self, x):
                return self.layers[2](x - self.slope(x))

            def forward(self, x):
                x = checkpoint(self.part, self.layers[5](x), use_reentrant=False)
                return self.head(self.layers[4](self.layers[3](x)))

        return Checkpointed()


@pytest.mark.parametrize("budget", ["spilled", "resident"])
@pytest.mark.parametrize(
    "script",
    [
        GivenAWeight,
        GivenAHookedWeight,
        GivenByAnother,
        GivenTwice,
        KeptByTheModel,
        InAnObject,
        Critic,
        LeafOfTheModel,
        WritesItsInput,
        SlopeBeyondTheModel,
        SlopeAndBackwardBeyondTheModel,
        HookedWeights,
        CheckpointAround,
    ],
)
def test_what_is_around_the_model_is_as_in_plain_pytorch(script, budget):
    assert_trains_as_in_plain_pytorch(script, budget)
