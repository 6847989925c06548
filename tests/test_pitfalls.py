"""What breaks spilled training, one by one: equal with the remedy, and with the remedy switched off wrong or an error.

A test that stays green without its remedy shows nothing. Where the remedy is the design itself and has no switch (8,
9, 10, 12, 16), what is put in its place does as systems do that have the pitfall.
"""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune import arguments, call, context, node, pilot, planner, probe, spill, surroundings, trial
from hydra_tune.context import TrialContext
from hydra_tune.edges import Edges, WeightEdges
from hydra_tune.shard import Direction
from hydra_tune.visit import Visit

WIDTH = 32
CLIP, SCALE = 0.1, 1024.0


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
        with torch.no_grad():
            x.mul_(2)
        return super().forward(x)


class Borrowing(Layer):
    others: tuple

    def forward(self, x):
        return super().forward(x) + self.others[0].bias


def borrowing():
    model = Model(Layer(), Borrowing(), Layer())
    model.layers[1].others = (model.layers[2].first,)
    return model


def train(build, pool=None, autocast=False):
    """Two batches a step, clipped together, under loss scaling; two groups of weights, a schedule."""
    torch.manual_seed(0)
    model = build()
    embedding, *others = model.parameters()
    groups = [{"params": [embedding], "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    if pool is not None:
        hydra_tune.prepare(model, optimizer, pool=pool)
    left = []
    try:
        for _ in range(3):
            for _ in range(2):
                tokens = torch.randint(0, 16, (6,))
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    loss = nn.functional.cross_entropy(model(tokens), tokens)
                    for layer in model.layers:
                        loss = loss + getattr(layer, "aside", {}).get("penalty", 0.0)
                scaler.scale(loss).backward()
                left.append(loss.detach().clone())
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            left += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
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


def always(instead):
    return lambda original: instead


def one_edge_each(original):
    def edges(graph, **options):
        for block, found, *rest in original(graph, **options):
            tensors = tuple(given._replace(counts=(1,) * len(given.counts)) for given in found.tensors)
            weights = tuple(WeightEdges(1, weight.by_cast, weight.casts_to) for weight in found.weights)
            yield block, Edges(tensors, weights), *rest

    return edges


def uncast(original):
    def edges(graph, **options):
        for block, found, *rest in original(graph, **options):
            yield block, Edges(found.tensors, tuple(WeightEdges(weight.direct) for weight in found.weights)), *rest

    return edges


def detached_weights(original):
    def edges_in(call):
        given = set(map(id, call.tensors))
        return [x if id(x) in given else x.detach() for x in original(call)]

    return edges_in


def gradients_made_into(change):
    """Each block's gradients are changed as soon as they are there."""

    def wrapper(original):
        def run_backward(this, *args):
            return [change(this, grad) for grad in original(this, *args)]

        return run_backward

    return wrapper


def clipped_by_block(call, grad):
    return None if grad is None else grad * min(1.0, CLIP / grad.norm().item())


def unscaled_by_block(call, grad):
    return None if grad is None else grad / SCALE


def overwriting(call, grad):
    for parameter in call.block.parameters:
        parameter.grad = None
    return grad


def one_group(original):
    def bind(trial, model, optimizer):
        original(trial, model, optimizer)
        for group in optimizer.param_groups:
            group.update({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})

    return bind


class Makes(Layer):
    """Makes a tensor on the default device."""

    def forward(self, x):
        return super().forward(x) * (2 if torch.empty(1).is_meta else 1)


class OnDefaultDevice(Model):
    """Its forward has a default device, its backward has none."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        with torch.device("meta"):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


def run_on_the_slot(forward, *args, **kwargs):
    """The graph is recorded on device copies that are gone when the backward comes."""
    with forward.trial.visit(forward.block, Direction.FORWARD):
        return forward.block.forward(args, kwargs)


def plain_layers():
    return Model(*(Layer() for _ in range(4)))


# pitfall: a model that has it, and its remedies: where each is, under which name, what stands there instead
PITFALLS = {
    "1 dropout in recompute": (
        lambda: Model(*(Layer(dropout=0.5) for _ in range(4))),
        [(call, "set_generator_states", always(nothing))],
    ),
    "2 buffers updated twice": (
        lambda: Model(*(Layer(norm=lambda: nn.BatchNorm1d(WIDTH, momentum=0.5)) for _ in range(4))),
        [(spill.DeviceCopy, "swap_buffers", always(lambda self, block, values: values))],
    ),
    "3 order of sums": (lambda: Skipping(*(Layer() for _ in range(4))), [(probe.OuterGraph, "edges", one_edge_each)]),
    "4 inputs changed in place": (
        lambda: Model(Layer(), InPlaceLayer(), InPlaceLayer(), Layer()),
        [
            (call.BlockCall, "refuse_changed_inputs", always(nothing)),
            (pilot, "refuse_changes", always(nothing)),
            (pilot, "uncached", always(lambda leaf: leaf)),  # PyTorch refuses to change such a view
        ],
    ),
    "5 caches": (
        lambda: Caching(*(Cached() for _ in range(4))),
        [
            (arguments.Arguments, "refuse_hidden_tensors", always(nothing)),
            (pilot, "refuse_side_channel", always(nothing)),
            (pilot, "borrowed_by", always(lambda *_: [])),
            (pilot, "refuse_changes", always(nothing)),
        ],
    ),
    "6 side channels": (
        lambda: Model(Layer(), Penalised(), Layer(), Layer()),
        [(pilot, "refuse_side_channel", always(nothing))],
    ),
    "7 autocast in recompute": (
        lambda: Model(*(Layer() for _ in range(4))),
        [(surroundings.Surroundings, "restored", always(lambda *_, **__: nullcontext()))],
    ),
    "7 a weight is cast once": (lambda: Recurrent(Layer(), Layer()), [(probe.OuterGraph, "edges", uncast)]),
    "8 clipping before all gradients are there": (
        plain_layers,
        [(call.BlockCall, "run_backward", gradients_made_into(clipped_by_block))],
    ),
    "9 scaling shard by shard": (
        plain_layers,
        [(call.BlockCall, "run_backward", gradients_made_into(unscaled_by_block))],
    ),
    "10 accumulation": (plain_layers, [(call.BlockCall, "run_backward", gradients_made_into(overwriting))]),
    "12 a graph outlives its weights": (plain_layers, [(node.BlockForward, "__call__", always(run_on_the_slot))]),
    "13 no input requires a gradient": (
        lambda: Model(*(Layer() for _ in range(4))),
        [(call.BlockCall, "edges_in", detached_weights)],
    ),
    "14 blocks called several times": (
        lambda: Recurrent(Twice(), Twice(), Twice(), Twice()),
        [(probe.OuterGraph, "edges", one_edge_each)],
    ),
    "14 blocks not called at first": (
        lambda: Drops(Wide(), Wide(), Layer(), Layer(), Layer()),
        [
            (planner.Planner, "probe", always(lambda self, call: self.pilot is None or self.pilot.measure(call))),
            (trial.Trial, "with_room", always(lambda self, block, run, rewound: run())),
        ],
    ),
    "15 weights reached from elsewhere": (borrowing, [(pilot, "borrowed_by", always(lambda *_: []))]),
    "16 groups and schedules": (plain_layers, [(trial.Trial, "bind", one_group)]),
    "29 default device in backward": (
        lambda: OnDefaultDevice(*(Makes() for _ in range(4))),
        [(surroundings.Surroundings, "restored", always(lambda *_, **__: nullcontext()))],
    ),
    "29 grad mode in backward": (plain_layers, [(torch, "enable_grad", always(torch.no_grad))]),
}


@pytest.mark.parametrize("pitfall", PITFALLS)
def test_it_trains_equally_with_the_remedy_and_not_without(pitfall, monkeypatch):
    build, switches = PITFALLS[pitfall]
    autocast = pitfall.startswith("7")
    budget = BUDGETS.get(pitfall, 48_000)
    assert is_equal(build, autocast, budget)
    for owner, name, instead in switches:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, instead(original))
    try:
        equal = is_equal(build, autocast, budget)
    except (RuntimeError, AssertionError, hydra_tune.HydraTuneError) as error:  # GradScaler asserts that there are some
        print(f"without its remedy: {error}")
        equal = False
    assert not equal


BUDGETS = {"14 blocks called several times": 80_000, "14 blocks not called at first": 64_000}


def test_11_trials_have_random_states_of_their_own(monkeypatch):
    optuna = pytest.importorskip("optuna")

    def losses():
        found = {}

        def objective(this):
            torch.manual_seed(this.number)
            found[this.number] = train_steps(Model(*(Layer(dropout=0.5) for _ in range(4))))
            return found[this.number][-1]

        with hydra_tune.ShardPool(["cpu"], 200_000) as pool:
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
    monkeypatch.setattr(context, "make_current", lambda state: None)
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
    monkeypatch.setattr(Visit, "_refresh_flat_weights", nothing)
    with hydra_tune.ShardPool(["cpu"], 200_000) as pool, pytest.raises(hydra_tune.HydraTuneError):
        train(build, pool)


def test_21_an_error_that_is_kept_keeps_no_tensor(monkeypatch):
    optuna = pytest.importorskip("optuna")
    kept = []

    def residue():
        seen = []

        def objective(_):
            model = hydra_tune.prepare(plain_layers())
            seen.extend(map(weakref.ref, model.parameters()))
            logits = model(torch.randint(0, 16, (6,)))
            seen.append(weakref.ref(logits))
            kept.append(ValueError("the user keeps it"))
            raise kept[-1]

        with hydra_tune.ShardPool(["cpu"], 48_000) as pool:
            hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(
                optuna.create_study(), objective, n_trials=1, catch=(ValueError,)
            )
        gc.collect()
        return [ref for ref in seen if ref() is not None]

    assert not residue()
    monkeypatch.setattr(context, "clear_frames", nothing)
    assert residue()


class Failure(Exception):
    pass


class Failing(Layer):
    fails = 0

    def forward(self, x):
        if self.fails:
            raise Failure
        return super().forward(x)


@pytest.mark.parametrize("where", ["script", "runner"])
def test_27_a_task_that_fails_gives_up_its_lease_and_its_bytes(where, monkeypatch):
    def fail(pool):
        model = hydra_tune.prepare(Model(Layer(), Failing(), Layer()), pool=pool)
        model(torch.randint(0, 16, (6,))).sum().backward()
        model.layers[1].fails = 1  # no switch, which would bring a new pilot
        with pytest.raises(Failure):
            model(torch.randint(0, 16, (6,)))
        return model

    def left(pool):
        """Whether the lease is taken; bytes."""
        if where == "script":
            model = fail(pool)
            return pool._machine.devices[0].running is not None, model is None
        with TrialContext(pool, 0):
            fail(pool)
        return pool._machine.devices[0].running is not None, pool.devices[0].used_bytes

    with hydra_tune.ShardPool(["cpu"], 48_000) as pool:
        assert not any(left(pool))
    monkeypatch.setattr(trial.Trial, "leave_after_error" if where == "script" else "end", nothing)
    with hydra_tune.ShardPool(["cpu"], 48_000) as pool:
        assert any(left(pool))
        monkeypatch.undo()
