"""Training loops, each with something particular, that run plain and prepared and leave the same to the bit."""

import random

import numpy
import pytest
import torch
from torch import nn

import hydra_tune

WIDTH = 32
BUDGETS = {"few blocks": 60 << 10, "spilled": 130 << 10, "three shards": 190 << 10, "resident": 8 << 20}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.set_up()

    def set_up(self):
        pass

    def forward(self, x, *_):
        return x + self.down(torch.tanh(self.up(x)))


class Dropping(Layer):
    def set_up(self):
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return super().forward(self.drop(x))


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


class Guided(Net):
    """Six blocks, of which the first two are an energy."""

    def slope(self, x, **options):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.layers[1](self.layers[0](x)).square().mean()
            return torch.autograd.grad(energy, x, **options)[0]

    def rest(self, x):
        for layer in self.layers[2:]:
            x = layer(x)
        return self.head(x)


class TrainsWithin(Guided):
    """Some weights get their gradients in the forward."""

    def forward(self, x):
        y = self.layers[1](self.layers[0](x))
        if torch.is_grad_enabled():
            y.square().mean().backward()
        return self.rest(y.detach())


class Script:
    """A training loop; a case says what is different in it."""

    device = "cpu"

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
        if pool is None:
            model.to(self.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)  # a power of two: rounds alike on host and GPU
        if pool is not None:
            hydra_tune.prepare(model, optimizer, pool=pool)
        left = []
        try:
            for _ in range(3):
                optimizer.zero_grad()
                x, y = torch.randn(8, WIDTH).to(self.device), torch.randint(0, 8, (8,)).to(self.device)
                loss = nn.functional.cross_entropy(self.forward(model, x), y)
                self.between(model)
                loss.backward()
                left += [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
                optimizer.step()
                self.after(model, optimizer)
        finally:
            if pool is not None:
                hydra_tune.release(model)
        random_state = torch.get_rng_state() if self.device == "cpu" else torch.cuda.get_rng_state(self.device)
        return [*left, *(t.clone() for t in model.state_dict().values()), random_state]


def at_each_budget(scripts):
    """Of a test of one script: it runs with each of these, of whose cases `make test` takes a sample. Half of the
    budgets have checks, which poison what has left the device; the others are as users run them."""
    checked = ("few blocks", "three shards")
    budgets = [pytest.param(name, marks=pytest.mark.checks) if name in checked else name for name in BUDGETS]

    def of(test):
        test = pytest.mark.parametrize("script", scripts, ids=lambda script: script.__name__)(test)
        return pytest.mark.sample(len(budgets))(pytest.mark.parametrize("budget", budgets)(test))

    return of


def assert_trains_as_in_plain_pytorch(script, budget, device="cpu"):
    """Run it plain and prepared, and compare all that it leaves."""
    case = script()
    case.device = device
    plain, num_bytes = case.run(), BUDGETS[budget]
    while True:
        with hydra_tune.ShardPool([device], num_bytes) as pool:
            try:
                case = script()
                case.device = device
                prepared = case.run(pool)
            except (hydra_tune.BudgetError, torch.OutOfMemoryError):  # two forwards are more than a pilot's one
                num_bytes = num_bytes * 5 // 4
                continue
            assert pool.devices[0].used_bytes == 0
            (trial,) = pool.report()["trials"]
            break
    assert trial["resident"] == (budget == "resident")
    assert len(plain) == len(prepared)
    for i, (a, b) in enumerate(zip(plain, prepared, strict=True)):
        assert a is b is None or (None not in (a, b) and torch.equal(a.cpu(), b.cpu())), i


def step(model, pool, forward=lambda model, x: model(x)):
    hydra_tune.prepare(model, pool=pool)
    return forward(model, torch.randn(4, WIDTH))
