"""What cannot be run apart is opened, kept on the device or held there: said in the report, with equal numbers."""

import copy

import pytest
import torch
from torch import nn

import hydra_tune

from hydra_tune.meter import is_counted

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


CASES = {
    "calls the parts": (CallsTheParts, {"opened": "layers.1"}, "layers.1 itself is not called"),
    "in place": (lambda: Model(InPlace), {"opened": "layers.1"}, "changed one in place"),
    "in place, in a child": (lambda: Model(InPlaceInAChild), {"opened": "layers.1"}, "changed one in place"),
    "in place, without children": (lambda: Model(InPlaceLeaf), {"kept": "layers.1"}, "changed one in place"),
    "counts": (lambda: Model(Counts), {"opened": "layers.1"}, "changes calls each time"),
    "keeps a penalty": (lambda: Penalised(KeepsPenalty), {"opened": "layers.1"}, "is kept beside them"),
    "fills a list": (lambda: Collects(FillsList), {"opened": "layers.1"}, "changed one. Return what"),
    "uses a cache": (lambda: Caching(UsesCache), {"opened": "layers.1"}, "a Cache that holds tensors"),
    "uses what another made": (lambda: HandsAround(UsesMade), {"opened": "layers.1"}, "another module has made"),
    "borrows": (borrowing, {"held": "layers.3.first.weight"}, "used by layers.1 without being given"),
    "tied by a function": (TiedByFunction, {"held": "head.weight"}, "without calling the module that owns it"),
    "frozen": (Teacher, {"held": "layers.2.first.weight"}, "without calling the module that owns it"),
    "detached": (Teacher, {"held": "layers.3.first.weight"}, "without calling the module that owns it"),
    "renormalises": (lambda: Model(Renormalises), {"kept": "layers.1.table"}, "changed one in place"),
    "hook inside": (hooked, {"opened": "layers.1"}, "layers.1.first in it has a hook"),
    "tied outside": (tied_outside, {}, ""),
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


BUDGET = 58_000  # not resident


@pytest.mark.parametrize("case", CASES)
def test_it_is_cut_otherwise_says_so_and_trains_equally(case):
    build, found, reason = CASES[case]
    torch.manual_seed(0)
    model = build()
    plain = trained(copy.deepcopy(model) if case not in ("borrows",) else model)
    torch.manual_seed(0)
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        spilled = trained(build(), pool)
        (trial,) = pool.report()["trials"]
        assert pool.devices[0].used_bytes == 0
    assert not trial["resident"]
    for kind, name in found.items():
        assert reason in trial["cut"][kind][name], trial["cut"]
    assert len(plain) == len(spilled)
    assert all(torch.equal(a, b) for a, b in zip(plain, spilled, strict=True))


def test_a_buffer_that_the_first_forward_resizes_is_the_reason_of_that_step():
    torch.manual_seed(0)
    plain = trained(Model(Resizes))
    torch.manual_seed(0)
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        model = Model(Resizes)
        one_step = trained(copy.deepcopy(model), pool, steps=1)
        assert "replaced its buffer 'scale'" in pool.report()["trials"][0]["cut"]["opened"]["layers.1"]
        spilled = trained(model, pool)
    assert all(torch.equal(a, b) for a, b in zip(plain, spilled, strict=True))
    assert torch.equal(one_step[2], plain[2])


@pytest.mark.parametrize("case", ["borrows", "tied by a function", "frozen"])
def test_a_pilot_on_a_gpu_finds_weights_in_host_memory_by_the_error(case, monkeypatch):
    """There an operator on tensors of two devices raises before any graph could tell."""

    def note(self, func, args, kwargs, inputs, *, on_device, original=Journal.note):
        original(self, func, args, kwargs, inputs, on_device=on_device)
        if on_device and any(w.data_ptr() == t.data_ptr() and not is_counted(t) for t in inputs for w in weights):
            raise RuntimeError("Expected all tensors to be on the same device")

    monkeypatch.setattr(Journal, "note", note)
    build, found, _ = CASES[case]
    model = build()
    weights = list(model.parameters())
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        trained(model, pool)
        (trial,) = pool.report()["trials"]
    assert not trial["resident"]
    assert not any(name.startswith("average") for name in trial["cut"]["held"])
    assert found["held"] in trial["cut"]["held"]


class Functional(nn.Module):
    """Uses a layer's weight and bias without calling it; the weight in an operator of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.direct = nn.Linear(64, 64)
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])

    def forward(self, x):
        x = nn.functional.linear(x * self.scale, self.direct.weight * 1.0, self.direct.bias)
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_a_pilot_on_a_gpu_finds_a_weight_that_the_failing_operator_had_beside_another(monkeypatch):
    """What fails before the dispatcher, as a convolution of mixed types does, is seen with none of its inputs."""

    def linear(x, weight, bias, original=nn.functional.linear):
        if not is_counted(bias):
            raise RuntimeError("Input type (c10::BFloat16) and bias type (float) should be the same")
        return original(x, weight, bias)

    torch.manual_seed(0)
    model = Functional()
    with hydra_tune.ShardPool(["cpu"], 200_000) as pool:
        hydra_tune.prepare(model, pool=pool)
        with monkeypatch.context() as patch:
            patch.setattr(nn.functional, "linear", linear)
            model(torch.randn(2, 64)).sum().backward()
        (trial,) = pool.report()["trials"]
        hydra_tune.release(model)
    assert not trial["resident"]
    assert trial["cut"]["held"].keys() == {"direct.weight", "direct.bias"}
