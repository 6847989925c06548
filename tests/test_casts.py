"""Autocast casts a weight once a context; another thread that leaves its own context clears the casts of all."""

import gc
import threading
import weakref
from contextlib import nullcontext

import optuna
import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune.casts import CastsOfForward, watch_clearings

WIDTH = 32


class Repeats(nn.Module):
    """Uses one layer three times; `between` is called after the first."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x, between=lambda: None):
        x = torch.relu(self.layer(x))
        between()
        half = torch.relu(self.layer(x))
        return self.head(torch.relu(self.layer(half))), half


def gradients(model, outputs, **options):
    loss = sum(output.float().square().mean() for output in outputs)
    return torch.autograd.grad(loss, [*model.parameters()], allow_unused=True, **options)


@pytest.fixture(autouse=True)
def watched():
    watch_clearings()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Repeats()


def forward(model, x, *, clears):
    with torch.autocast("cpu", torch.bfloat16):
        casts = CastsOfForward()
        outputs = model(x, elsewhere_cleared if clears else lambda: None)
        return outputs, casts.join(outputs)


def elsewhere_cleared():
    thread = threading.Thread(target=torch.clear_autocast_cache)
    thread.start(), thread.join()


def same(a, b):
    return len(a) == len(b) and all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_where_the_model_switches_the_cache_off_each_use_has_a_cast_of_its_own(model):
    with torch.autocast("cpu", torch.bfloat16):
        casts = CastsOfForward()
        outputs = model(torch.randn(16, WIDTH), lambda: (elsewhere_cleared(), torch.set_autocast_cache_enabled(False)))
        assert casts.join(outputs) == []
    assert torch.is_autocast_cache_enabled(), "as the context had found it"


def test_a_weight_that_is_cast_again_gets_the_gradient_of_one_that_is_not(model):
    x = torch.randn(16, WIDTH)
    (plain, none), (cleared, joined) = forward(model, x, clears=False), forward(model, x, clears=True)
    assert len(none) == 0 and len(joined) == 2, "weight and bias of the layer"
    expected = gradients(model, plain, retain_graph=True)
    assert same(gradients(model, cleared, retain_graph=True), expected)
    assert same(gradients(model, cleared, retain_graph=True), expected), "again"
    assert same(gradients(model, cleared[1:], retain_graph=True), gradients(model, plain[1:], retain_graph=True))
    assert same(gradients(model, cleared), gradients(model, plain)), "the whole after a part"


def test_gradients_would_differ(model):
    x = torch.randn(16, WIDTH)
    (plain, _), (cleared, joined) = forward(model, x, clears=False), forward(model, x, clears=True)
    joined.clear()
    assert not same(gradients(model, cleared), gradients(model, plain))


def test_casts_of_an_earlier_forward_are_left_apart(model):
    """In a context of its own, whose state this one was given."""
    x, gathered = torch.randn(16, WIDTH), []
    for clears in (False, True):
        (_, state), _ = forward(model, x, clears=False)
        outputs, joined = forward(model, state.float(), clears=clears)
        assert [len(casts) for casts in joined] == ([2, 2] if clears else [])
        gathered.append(gradients(model, outputs))
    assert same(*gathered)


def test_casts_to_other_dtypes_are_left_apart():
    class Mixed(Repeats):
        def forward(self, x, between=lambda: None):
            y, half = super().forward(x, between)
            with torch.autocast("cpu", enabled=False):
                return y, half.double() @ self.layer.weight.double()

    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(16, WIDTH)
    (plain, _), (cleared, joined) = forward(model, x, clears=False), forward(model, x, clears=True)
    assert len(joined) == 2
    assert same(gradients(model, cleared), gradients(model, plain))


def test_the_graph_does_not_keep_itself(model):
    (outputs, joined), gone = forward(model, torch.randn(16, WIDTH), clears=True), weakref.ref(model.layer.weight)
    gradients(model, outputs)
    del outputs, joined, model.layer
    gc.collect()
    assert gone() is None


def test_what_the_thread_clears_itself_parts_the_casts_of_two_contexts(model):
    """Where another one clears them too, those of each context are joined."""
    x, gathered, found = torch.randn(16, WIDTH), [], []
    for between in (torch.clear_autocast_cache, lambda: (torch.clear_autocast_cache(), elsewhere_cleared())):
        with torch.autocast("cpu", torch.bfloat16):
            casts = CastsOfForward()
            outputs = model(x, between)
            found.append(casts.join(outputs))
        gathered.append(gradients(model, outputs))
    assert found[0] == [] and same(*gathered)


def test_a_model_that_enters_autocast_itself(model):
    class Enters(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, between):
            with torch.autocast("cpu", torch.bfloat16):
                outputs = self.inner(x, between)
            with torch.autocast("cpu", torch.bfloat16):
                return *outputs, *self.inner(x, between)

    gathered, x, enters = [], torch.randn(16, WIDTH), Enters()
    for between in (lambda: None, elsewhere_cleared):
        casts = CastsOfForward()
        outputs = enters(x, between)
        joined = casts.join(outputs)
        gathered.append(gradients(model, outputs))
        assert [len(casts) for casts in joined] == ([] if len(gathered) == 1 else [2] * 4)
    assert same(*gathered)


def train(number, prepared, between):
    torch.manual_seed(number)
    model = Repeats()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if prepared:
        model, optimizer = hydra_tune.prepare(model, optimizer)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(torch.randn(16, WIDTH), between=between)
        loss = sum(output.float().square().mean() for output in outputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), [p.detach().clone() for p in model.parameters()]


def test_a_resident_trial_has_the_numbers_of_plain_pytorch_whoever_leaves_autocast_beside_it():
    asked, left, results = threading.Semaphore(0), threading.Semaphore(0), {}

    def between():
        asked.release()
        assert left.acquire(timeout=60)

    def objective(trial):
        if trial.number == 0:
            results.update(enumerate(train(0, True, between)))
            asked.release(1000)
            return 0.0
        while len(results) < 3:
            assert asked.acquire(timeout=60)
            with torch.autocast("cpu", torch.bfloat16):
                pass
            left.release()
        return 0.0

    with hydra_tune.ShardPool(["cpu"], "8MiB") as pool:
        hydra_tune.HydraTrialRunner(pool, 2).optimize(optuna.create_study(), objective, n_trials=2)
        (report,) = pool.report()["trials"]
    assert report["resident"]
    for step, (loss, weights) in enumerate(train(0, False, lambda: None)):
        assert results[step][0] == loss and same(results[step][1], weights)


class Twice(nn.Module):
    """Enters autocast itself, and uses its blocks, and one that stays on the device, once more after a while."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.kept = Kept(WIDTH, WIDTH)

    def forward(self, x, between):
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                x = self.kept(x)
                for layer in self.layers:
                    x = torch.tanh(layer(x))
                between()
        return x.float()


class Kept(nn.Linear):
    def forward(self, x):
        self.seen = super().forward(x)
        return self.seen


@pytest.mark.sample(4)
@pytest.mark.parametrize("forwards", [{0}, {1}, {2}, set(range(9))], ids=["pilot", "another", "first", "all"])
@pytest.mark.parametrize("num_bytes", [100_000, 1 << 20], ids=["spilled", "resident"])
@pytest.mark.parametrize("by_script", [False, True])
def test_whoever_leaves_autocast_beside_a_forward_or_its_pilot(forwards, num_bytes, by_script):
    """A pilot took uses in one context for those in two, and all trials after it shared its plan."""

    def gradients(pool):
        torch.manual_seed(0)
        model, number, left = Twice(), 0 if pool is not None else 1, []
        if pool is not None:
            hydra_tune.prepare(model, pool=pool)

        def between():
            nonlocal number
            if pool is not None and number // 2 in forwards:
                elsewhere_cleared()
            number += 1

        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16) if by_script else nullcontext():
                loss = model(torch.randn(16, WIDTH), between).square().mean()
            loss.backward()
            left += [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
        return left

    with hydra_tune.ShardPool(["cpu"], num_bytes) as pool:
        found = gradients(pool)
        (trial,) = pool.report()["trials"]
    assert trial["resident"] == (num_bytes == 1 << 20)
    assert trial["cut"]["kept"].keys() == {"kept"}
    assert same(found, gradients(None))
