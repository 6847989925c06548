"""What breaks spilled training, one by one: equal with the remedy, and with the remedy switched off wrong or an error.

A test that stays green without its remedy shows nothing. Where the remedy is the design itself and has no switch (8,
9, 10, 16), what is put in its place does as systems do that have the pitfall. Those that PyTorch's own graph leaves
without a remedy of ours are tested elsewhere:

    3 order of sums, 14 blocks called several times     test_gradient_sums.py, test_graph_outside_blocks.py
    6 side channels, 15 weights reached from elsewhere  test_repeat_or_keep.py
    13 no input requires a gradient                     test_prepared_model.py
    14 blocks not called at first                       test_changed_modules.py
    29 grad mode in backward                            whatever is repeated
"""

import gc
import weakref
from contextlib import nullcontext
from operator import is_

import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune.blocks import ambient_settings, call, repeated_call
from hydra_tune.blocks.block import Block
from hydra_tune.blocks.shared_casts import SharedCasts
from hydra_tune.planning import measurement as measure
from hydra_tune.planning.pilot import Pilot
from hydra_tune.planning.repeat_or_keep import SideEffects
from hydra_tune.trials import context, sent_gradients, trial
from hydra_tune.trials.context import trial_context

pytestmark = pytest.mark.checks  # without a remedy, what has gone from the device is read as long as it is not poisoned

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


class Recurrent(Model):
    """Calls its layers several times."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for _ in range(3):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


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


class InPlaceLayer(Layer):
    def forward(self, x):
        with torch.no_grad():
            x.mul_(2)
        return super().forward(x)


class Scaled(Layer):
    """Saves nothing of its input for the backward."""

    def forward(self, x):
        return super().forward(x * 2)


class Overwriting(Model):
    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            y = layer(x)
            with torch.no_grad():
                x.zero_()
            x = y
        return self.head(x)


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


def gradients_made_into(change):
    """Each block's gradients are changed as soon as they are there."""

    def wrapper(original):
        def send(this, call, gradients):
            return [change(call, grad) for grad in original(this, call, gradients)]

        return send

    return wrapper


def without_a_second_run(call, effects, meter, profile, outputs):
    call.drop()
    return profile


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


def plain_layers():
    return Model(*(Layer() for _ in range(4)))


# pitfall: a model that has it, and its remedies: where each is, under which name, what stands there instead
PITFALLS = {
    "1 dropout in recompute": (
        lambda: Model(*(Layer(dropout=0.5) for _ in range(4))),
        [
            (repeated_call, "drawing_again", always(lambda *_: nullcontext())),
            (
                measure,
                "try_repetition",
                always(lambda call, effects, meter, profile, outputs: (call.drop(), profile)[1]),
            ),
        ],
    ),
    "2 buffers updated twice": (
        lambda: Model(*(Layer(norm=lambda: nn.BatchNorm1d(WIDTH, momentum=0.5)) for _ in range(4))),
        [(Block, "lend_buffers", always(lambda self, values: []))],
    ),
    "4 inputs changed in place": (
        lambda: Model(Layer(), InPlaceLayer(), InPlaceLayer(), Layer()),
        [(SideEffects, "reason_to_keep", always(lambda *_: ""))],
    ),
    "4 inputs changed in place afterwards": (
        lambda: Overwriting(*(Scaled() for _ in range(4))),
        [(Pilot, "before_writing", always(nothing))],
    ),
    "5 caches": (
        lambda: Caching(*(Cached() for _ in range(4))),
        [(SideEffects, "reason_to_keep", always(lambda *_: ""))],
    ),
    "7 autocast in recompute": (
        lambda: Model(*(Layer() for _ in range(4))),
        [(ambient_settings.AmbientSettings, "restored", always(lambda *_, **__: nullcontext()))],
    ),
    "7 a weight is cast once": (
        lambda: Recurrent(Layer(), Layer()),
        [(SharedCasts, "get", always(nothing))],
    ),
    "8 clipping before all gradients are there": (
        plain_layers,
        [(sent_gradients.SentGradients, "send", gradients_made_into(clipped_by_block))],
    ),
    "9 scaling shard by shard": (
        plain_layers,
        [(sent_gradients.SentGradients, "send", gradients_made_into(unscaled_by_block))],
    ),
    "10 accumulation": (plain_layers, [(sent_gradients.SentGradients, "send", gradients_made_into(overwriting))]),
    "12 a graph outlives its weights": (
        lambda: Caching(*(Cached() for _ in range(4))),
        [(call.Call, "_weight_view", always(nothing))],
    ),
    "16 groups and schedules": (plain_layers, [(trial.Trial, "bind", one_group)]),
    "29 default device in backward": (
        lambda: OnDefaultDevice(*(Makes() for _ in range(4))),
        [(ambient_settings.AmbientSettings, "restored", always(lambda *_, **__: nullcontext()))],
    ),
}


@pytest.mark.parametrize("pitfall", PITFALLS)
def test_it_trains_equally_with_the_remedy_and_not_without(pitfall, monkeypatch):
    build, switches = PITFALLS[pitfall]
    autocast = pitfall.startswith("7")
    budget = 48_000
    assert is_equal(build, autocast, budget)
    for owner, name, instead in switches:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, instead(original))
    try:
        equal = is_equal(build, autocast, budget)
    except (RuntimeError, AssertionError, UserWarning, hydra_tune.HydraTuneError) as error:
        # GradScaler asserts that there are gradients, and steps no optimizer where they are nan; its schedule warns
        print(f"without its remedy: {error}")
        equal = False
    assert not equal


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
    monkeypatch.setattr(context, "drawing_from", lambda state: nullcontext())
    assert own != losses()


def test_blocks_refresh_what_recurrent_layers_keep_beside_their_weights(monkeypatch):
    """`nn.LSTM` lists its weights a second time; that list would still name the host's."""
    lists = []

    class Last(nn.LSTM):
        def forward(self, x):
            lists.append(all(map(is_, self._flat_weights, self._parameters.values())))
            return super().forward(x)[0]

    def build():
        return Model(*(Last(WIDTH, WIDTH) for _ in range(4)))

    assert is_equal(build, False, 150_000)
    assert all(lists)
    monkeypatch.setattr(Block, "_refresh_flat_weights", nothing)
    is_equal(build, False, 150_000)
    assert not all(lists)


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
            return pool.events.machine.devices[0].running is not None, model is None
        with trial_context(pool, 0):
            fail(pool)
        return pool.events.machine.devices[0].running is not None, pool.devices[0].used_bytes

    with hydra_tune.ShardPool(["cpu"], 48_000) as pool:
        assert not any(left(pool))
    monkeypatch.setattr(trial.Trial, "leave_after_error" if where == "script" else "end", nothing)
    with hydra_tune.ShardPool(["cpu"], 48_000) as pool:
        assert any(left(pool))
        monkeypatch.undo()
