"""What cannot be repeated keeps its activations, or holds weights on the device: with equal numbers."""

import pytest
import torch
from torch import nn

import hydra_tune

WIDTH = 32


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


class Model(nn.Module):
    """Four layers, the second of a given kind."""

    def __init__(self, kind=Layer, **options):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), kind(**options), Layer(), Layer()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def penalty(self):
        return 0.0


# ---- kinds of layers ----


class InPlace(Layer):
    """Changes its input by an operator of its own."""

    def forward(self, x):
        return super().forward(x.relu_())


class InPlaceInAChild(Layer):
    def __init__(self):
        super().__init__()
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x):
        return super().forward(self.activation(x))


class InPlaceLeaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x):
        return x.relu_() @ self.weight


class Counts(Layer):
    """Alternates with its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + self.calls % 2)


class KeepsPenalty(Layer):
    def forward(self, x):
        hidden = self.first(x)
        self.kept = {"penalty": hidden.square().mean()}
        return x + self.second(hidden)


class Penalised(Model):
    def penalty(self):
        return self.layers[1].kept["penalty"]


class FillsList(Layer):
    def forward(self, x, seen):
        seen.append(self.first(x))
        return super().forward(x)


class Collects(Model):
    def forward(self, x):
        seen = []
        for layer in self.layers:
            x = layer(x, seen) if isinstance(layer, FillsList) else layer(x)
        return self.head(x) + seen[0]


class Cache:
    def __init__(self, x):
        self.key = x


class UsesCache(Layer):
    def forward(self, x, cache):
        cache.key = cache.key + self.first(x)
        return super().forward(x) + cache.key


class Caching(Model):
    def forward(self, x):
        cache = Cache(torch.zeros_like(x))
        for layer in self.layers:
            x = layer(x, cache) if isinstance(layer, UsesCache) else layer(x)
        return self.head(x) + cache.key


class UsesMade(Layer):
    """Reaches an activation that another module has made."""

    def __init__(self):
        super().__init__()
        self.source = []

    def forward(self, x):
        return super().forward(x) + self.source[-1]


class HandsAround(Model):
    def forward(self, x):
        self.layers[1].source[:] = [torch.tanh(self.head(x))]
        y = super().forward(x)
        self.layers[1].source.clear()
        return y


class Borrows(Layer):
    """Uses a weight of another block without calling it."""

    def __init__(self):
        super().__init__()
        self.others = []

    def forward(self, x):
        return nn.functional.linear(super().forward(x), self.others[0].weight)


def borrowing():
    model = Model(Borrows)
    model.layers[1].others.append(model.layers[3].first)
    return model


class TiedByFunction(Model):
    def forward(self, x):
        return super().forward(nn.functional.linear(x, self.head.weight))


class Renormalises(Layer):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, WIDTH, max_norm=0.5)

    def forward(self, x):
        return super().forward(x + self.table(x[:, 0].long().abs() % 8))


class Teacher(Model):
    """Uses a frozen weight, and one without its gradient, beside the modules that own them; updates others on the
    host, where they may stay."""

    def __init__(self):
        super().__init__()
        self.layers[2].first.weight.requires_grad_(False)
        self.average = nn.ModuleList([Layer()]).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for old, new in zip(self.average[0].parameters(), self.layers[0].parameters(), strict=True):
                old.lerp_(new, 0.1)
        frozen = nn.functional.linear(x, self.layers[2].first.weight)
        return super().forward(x) + frozen.sum() + (x @ self.layers[3].first.weight.detach().t()).sum()


def hooked():
    model = Model()
    model.layers[1].first.register_forward_hook(lambda module, args, output: output * 2)
    return model


def tied_outside():
    """A weight that is registered in a block and outside of all."""
    model = Model()
    model.extra = model.layers[1].first.weight
    model.register_forward_hook(lambda module, args, output: output + module.extra.mean())
    return model


class CallsTheParts(Model):
    """Never a layer as a whole."""

    def forward(self, x):
        for layer in self.layers:
            x = x + layer.second(torch.relu(layer.first(x)))
        return self.head(x)


class Resizes(Layer):
    """In the forward, a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(0))

    def forward(self, x):
        if self.scale.numel() == 0:
            self.scale.resize_(WIDTH).fill_(0.5)
        return super().forward(x) * self.scale


KEPT = {"keeps": "layers.1"}
# how a case is said in the report: as what, of which name, why
CASES = {
    "calls the parts": (CallsTheParts, 200_000, {}, ""),
    "in place": (lambda: Model(InPlace), 58_000, KEPT, "changes an input in place"),
    "in place, in a child": (lambda: Model(InPlaceInAChild), 58_000, KEPT, "changes an input in place"),
    "in place, without children": (lambda: Model(InPlaceLeaf), 58_000, KEPT, "changes an input in place"),
    "counts": (lambda: Model(Counts), 58_000, {}, ""),
    "keeps a penalty": (lambda: Penalised(KeepsPenalty), 58_000, {}, ""),
    "fills a list": (lambda: Collects(FillsList), 58_000, {}, ""),
    "uses a cache": (lambda: Caching(UsesCache), 58_000, KEPT, "layers.1 changes an argument"),
    "uses what another made": (
        lambda: HandsAround(UsesMade),
        58_000,
        KEPT,
        "has an activation in an attribute",
    ),
    "borrows": (borrowing, 70_000, {}, ""),
    "tied by a function": (TiedByFunction, 64_000, {}, ""),
    "frozen": (Teacher, 58_000, {}, ""),
    "renormalises": (
        lambda: Model(Renormalises),
        58_000,
        {"held": "layers.1.table.weight", "keeps": "layers.1"},
        "layers.1 changes",
    ),
    "hook inside": (hooked, 58_000, KEPT, "hook"),
    "tied outside": (tied_outside, 58_000, {}, ""),
}


def trained(model, pool=None, steps=3):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if pool is not None:
        hydra_tune.prepare(model, optimizer, pool=pool)
    left = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, WIDTH)
        before = x.clone()
        loss = model(x).square().mean() + model.penalty()
        loss.backward()
        left += [before, x.clone(), loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    if pool is not None:
        hydra_tune.release(model)
    return [*left, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("case", CASES)
def test_it_runs_otherwise_says_so_and_trains_equally(case):
    build, budget, found, reason = CASES[case]
    torch.manual_seed(0)
    plain = trained(build())
    torch.manual_seed(0)
    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        spilled = trained(build(), pool)
        (trial,) = pool.report()["trials"]
        assert pool.devices[0].used_bytes == 0
    assert not trial["resident"]
    told = {**trial["cut"], "keeps": trial["keeps"]}
    assert {kind: [*names] for kind, names in told.items() if names} == {k: [name] for k, name in found.items()}
    assert all(reason in told[kind][name] for kind, name in found.items()), told
    assert len(plain) == len(spilled)
    assert all(torch.equal(a, b) for a, b in zip(plain, spilled, strict=True))


def test_a_buffer_that_the_first_forward_resizes():
    torch.manual_seed(0)
    plain = trained(Model(Resizes))
    torch.manual_seed(0)
    with hydra_tune.ShardPool(["cpu"], 58_000) as pool:
        spilled = trained(Model(Resizes), pool)
        assert not pool.report()["trials"][0]["resident"]
    assert all(torch.equal(a, b) for a, b in zip(plain, spilled, strict=True))


def test_a_weight_that_autocast_casts_without_its_block_is_held_from_there_on():
    def step(pool=None):
        torch.manual_seed(0)
        model = TiedByFunction()
        if pool is not None:
            hydra_tune.prepare(model, pool=pool)
        x = torch.randn(4, WIDTH)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    plain = step()
    with hydra_tune.ShardPool(["cpu"], 80_000) as pool:
        spilled = step(pool)
        (trial,) = pool.report()["trials"]
    assert not trial["resident"] and [*trial["cut"]["held"]] == ["head.weight"]
    assert all(torch.equal(a, b) for a, b in zip(plain, spilled, strict=True))
