"""What breaks spilled training, one by one: equal with the remedy, and with the remedy switched off wrong or an error.

A test that stays green without its remedy shows nothing. Where the remedy is the design itself and has no switch, the
other tests stand for it: gradients are summed, clipped and stepped by PyTorch's own code after a whole backward
(`test_training`), weights are never swapped within a graph, and schedules and groups are the optimizer's.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune import mode, node, pilot, planner, probe, spill
from hydra_tune.block import Block
from hydra_tune.shard import Edges

WIDTH = 32


class Layer(nn.Module):
    def __init__(self, dropout=0.0, norm=nn.Identity):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.norm = nn.Dropout(dropout), norm()

    def forward(self, x):
        return x + self.dropout(self.second(torch.relu(self.norm(self.first(x)))))


class Model(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Skipping(Model):
    """What goes into a layer, which uses it twice, is used at the end as well."""

    def forward(self, tokens):
        x = first = self.layers[0](self.embedding(tokens))
        for layer in self.layers[1:]:
            x = layer(x)
        return self.head(x + first)


class Recurrent(Model):
    """Calls its layers several times."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for _ in range(3):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


class Drops(Model):
    """Passes layers over, by turns, the larger ones in the first step."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.step = 0

    def forward(self, tokens):
        self.step += 1
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            if (i < 2) == (self.step > 1):
                x = layer(x)
        return self.head(x)


class Wide(Layer):
    def forward(self, x):
        return super().forward(torch.tanh(torch.cat([x] * 12))[: len(x)])


class Twice(Layer):
    def forward(self, x):
        return super().forward(torch.tanh(self.first(x)))


class Cached(Layer):
    def forward(self, x, cache):
        cache.value = cache.value + self.first(x)
        return super().forward(x) + cache.value


class Cache:
    value = None


class Caching(Model):
    def forward(self, tokens):
        x, cache = self.embedding(tokens), Cache()
        cache.value = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x, cache)
        return self.head(x + cache.value)


class Penalised(Layer):
    def forward(self, x):
        self.aside = {"penalty": self.first(x).square().mean()}
        return super().forward(x)


class InPlaceLayer(Layer):
    def forward(self, x):
        return super().forward(x.mul_(2))


class Borrowing(Layer):
    others: tuple

    def forward(self, x):
        return super().forward(x) + self.others[0].bias


def borrowing():
    model = Model(Layer(), Borrowing(), Layer())
    model.layers[1].others = (model.layers[2].first,)
    return model


def train(build, pool=None, autocast=False):
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if pool is not None:
        hydra_tune.prepare(model, optimizer, pool=pool)
    left = []
    try:
        for _ in range(3):
            tokens = torch.randint(0, 16, (6,))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = nn.functional.cross_entropy(model(tokens), tokens)
                for layer in model.layers:
                    loss = loss + getattr(layer, "aside", {}).get("penalty", 0.0)
            loss.backward()
            left += [loss.detach().clone(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
    finally:
        if pool is not None:
            hydra_tune.release(model)
    return [*left, *(t.detach().clone() for t in (*model.parameters(), *model.buffers()))]


def is_equal(build, autocast, budget):
    plain = train(build, autocast=autocast)
    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        spilled = train(build, pool, autocast)
        assert not pool.report()["trials"][0]["resident"]
    return all(
        a is b is None or (None not in (a, b) and torch.equal(a, b)) for a, b in zip(plain, spilled, strict=True)
    )


def nothing(*_, **__):
    """Stands in a remedy's place."""


def one_edge_each(original):
    def edges(graph):
        for block, found, extra in original(graph):
            yield block, Edges(casts=found.casts), extra

    return edges


def uncast(original):
    def edges(graph):
        for block, found, extra in original(graph):
            yield block, Edges(found.tensors, found.parameters), extra

    return edges


def detached_weights(original):
    def edges_in(call):
        return [x.detach() if isinstance(x, nn.Parameter) else x for x in original(call)]

    return edges_in


# pitfall: a model that has it, and its remedies: where each is, under which name, what stands there instead
PITFALLS = {
    "1 dropout in recompute": (
        lambda: Model(*(Layer(dropout=0.5) for _ in range(4))),
        [(node, "set_generator_states", nothing)],
    ),
    "2 buffers updated twice": (
        lambda: Model(*(Layer(norm=lambda: nn.BatchNorm1d(WIDTH, momentum=0.5)) for _ in range(4))),
        [(spill.DeviceCopy, "swap_buffers", lambda self, block, values: values)],
    ),
    "3 order of sums": (lambda: Skipping(*(Layer() for _ in range(4))), [(probe.OuterGraph, "edges", one_edge_each)]),
    "4 inputs changed in place": (
        lambda: Model(Layer(), InPlaceLayer(), InPlaceLayer(), Layer()),
        [(node.BlockCall, "refuse_changed_inputs", nothing)],
    ),
    "5 caches": (
        lambda: Caching(*(Cached() for _ in range(4))),
        [
            (node.BlockCall, "refuse_hidden_tensors", nothing),
            (pilot, "refuse_side_channel", nothing),
            (pilot, "borrowed_by", lambda *_: []),
        ],
    ),
    "6 side channels": (
        lambda: Model(Layer(), Penalised(), Layer(), Layer()),
        [(pilot, "refuse_side_channel", nothing)],
    ),
    "7 autocast in recompute": (
        lambda: Model(*(Layer() for _ in range(4))),
        [(node, "_restored_autocast", lambda _: nullcontext())],
    ),
    "7 a weight is cast once": (lambda: Recurrent(Layer(), Layer()), [(probe.OuterGraph, "edges", uncast)]),
    "13 no input requires a gradient": (
        lambda: Model(*(Layer() for _ in range(4))),
        [(node.BlockCall, "edges_in", detached_weights)],
    ),
    "14 blocks called several times": (
        lambda: Recurrent(Twice(), Twice(), Twice(), Twice()),
        [(probe.OuterGraph, "edges", one_edge_each)],
    ),
    "14 blocks not called at first": (
        lambda: Drops(Wide(), Wide(), Layer(), Layer(), Layer()),
        [(planner.Planner, "probe", lambda self, call: self.pilot is None or self.pilot.measure(call))],
    ),
    "15 weights reached from elsewhere": (borrowing, [(pilot, "borrowed_by", lambda *_: [])]),
}


@pytest.mark.parametrize("pitfall", PITFALLS)
def test_it_trains_equally_with_the_remedy_and_not_without(pitfall, monkeypatch):
    build, switches = PITFALLS[pitfall]
    autocast = pitfall.startswith("7")
    budget = BUDGETS.get(pitfall, 48_000)
    assert is_equal(build, autocast, budget)
    for owner, name, instead in switches:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, instead(original) if instead in WRAPPERS else instead)
    try:
        assert not is_equal(build, autocast, budget)
    except (RuntimeError, hydra_tune.HydraTuneError) as error:
        print(f"without its remedy: {error}")


BUDGETS = {"14 blocks called several times": 80_000, "14 blocks not called at first": 64_000}
WRAPPERS = (one_edge_each, uncast, detached_weights)


def test_11_trials_have_random_states_of_their_own(monkeypatch):
    optuna = pytest.importorskip("optuna")

    def losses():
        found = {}

        def objective(trial):
            torch.manual_seed(trial.number)
            found[trial.number] = train_steps(Model(*(Layer(dropout=0.5) for _ in range(4))))
            return found[trial.number][-1]

        with hydra_tune.ShardPool(["cpu"], 200_000) as pool:
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            hydra_tune.HydraTrialRunner(pool, concurrency=3).optimize(optuna.create_study(), objective, n_trials=3)
        return [found[i] for i in range(3)]

    def train_steps(model):
        model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        steps = []
        for _ in range(4):
            tokens = torch.randint(0, 16, (6,))
            loss = nn.functional.cross_entropy(model(tokens), tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(loss.item())
        return steps

    own = losses()
    assert own == losses()
    monkeypatch.setattr(mode, "_draws", lambda func: False)
    assert own != losses()


def test_blocks_refresh_what_recurrent_layers_keep_beside_their_weights(monkeypatch):
    """`nn.LSTM` lists its weights a second time; that list would still name the host's."""

    def build():
        class Last(nn.LSTM):
            def forward(self, x):
                return super().forward(x)[0]

        return Model(*(Last(WIDTH, WIDTH) for _ in range(4)))

    plain = train(build)
    with hydra_tune.ShardPool(["cpu"], 200_000) as pool:
        assert all(torch.equal(a, b) for a, b in zip(plain, train(build, pool), strict=True))
    monkeypatch.setattr(Block, "_refresh_flat_weights", nothing)
    with hydra_tune.ShardPool(["cpu"], 200_000) as pool, pytest.raises(hydra_tune.HydraTuneError):
        train(build, pool)
