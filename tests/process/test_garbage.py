"""Garbage in cycles, while other threads collect, or have made it old."""

import functools
import gc
import threading
import weakref

import optuna
import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune.devices.meter import is_counted
from hydra_tune.process.garbage import collect

WAIT_S = 10.0


class Cycle:
    def __init__(self):
        self.itself = self


class CollectsAtLength(threading.Thread):
    """Within a collection, which a finalizer keeps from its end until it is told to go on."""

    def __init__(self):
        super().__init__()
        self.begun, self.told = threading.Event(), threading.Event()

    def run(self):
        thread = self

        class Slow(Cycle):
            def __del__(self):
                thread.begun.set()
                assert thread.told.wait(WAIT_S)

        Slow()
        gc.collect()

    def __enter__(self):
        self.start()
        assert self.begun.wait(WAIT_S)
        return self

    def __exit__(self, *_):
        self.told.set()
        self.join()


def test_garbage_is_collected_though_another_thread_collects():
    """CPython's collector returns at once then, and has done nothing."""
    cycle = Cycle()
    gone = weakref.ref(cycle)
    with CollectsAtLength() as other:
        del cycle
        gc.collect()
        assert gone() is not None, "so this is what a caller meets"
        threading.Timer(0.05, other.told.set).start()
        collect()
    assert gone() is None


def fold():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.ones(2, 16)).square().mean()
    loss.backward()
    optimizer.step()
    return model


def test_one_model_after_another_is_prepared_though_another_thread_collects():
    """As in the folds of a trial: a prepared model that is dropped is garbage in a cycle."""

    def objective(trial):
        model = fold()
        with CollectsAtLength() as other:
            del model
            threading.Timer(0.05, other.told.set).start()
            fold()
        return 0.0

    study = optuna.create_study()
    hydra_tune.HydraTrialRunner(hydra_tune.ShardPool(["cpu"], "1MiB"), 1).optimize(study, objective, n_trials=1)
    assert study.trials[0].state.name == "COMPLETE"


def train(pool, width, ends, kept=None):
    """The loader and an iteration of it are `kept`, if asked."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = hydra_tune.prepare(model, optimizer, [torch.ones(4, width)] * 3, pool=pool)
    batches = iter(loader)
    if kept is not None:
        kept += loader, batches
    for step, x in enumerate(batches):
        loss = model(x).square().mean()
        if step == 2:
            ends()
        loss.backward()
        optimizer.step()


def raise_it():
    raise ValueError("the objective's own")


def objective(pool, raises):
    kept = None
    try:
        train(pool, 96, raise_it if raises else int)
    except ValueError as error:
        kept = error  # whose traceback has this frame
    return kept is None


def run_apart(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.fixture
def nobody_else_collects():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.sample(2)
@pytest.mark.usefixtures("nobody_else_collects")
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(
    "limits", [{"memory": "8MiB", "host_memory": "900KiB"}, {"memory": "900KiB"}], ids=["host memory", "device"]
)
def test_who_waits_for_the_bytes_of_a_model_that_is_garbage_gets_them(limits, raises):
    """A plain script's, as in stock Optuna with several jobs: it is in a cycle, and so is an exception that is kept;
    which the second collection finds, for the graph hides it from the first."""
    pool = hydra_tune.ShardPool(["cpu"], **limits)
    run_apart(lambda: objective(pool, raises))
    assert pool.report()["trials"][0]["state"] == "live"
    run_apart(lambda: train(pool, 100, int))
    assert pool.report()["trials"][0]["state"] == "ended"


@pytest.mark.usefixtures("nobody_else_collects")
def test_a_loader_that_is_kept_keeps_no_trial():
    pool, kept = hydra_tune.ShardPool(["cpu"], "8MiB", host_memory="900KiB"), []
    run_apart(lambda: train(pool, 96, int, kept))
    run_apart(lambda: train(pool, 100, int))
    loader, batches = kept
    assert pool.report()["trials"][0]["state"] == "ended"
    assert [x.shape for x in loader] == [(4, 96)] * 3
    assert list(batches) == []


@pytest.mark.usefixtures("nobody_else_collects")
@pytest.mark.parametrize("raises", [False, True])
def test_a_model_that_is_garbage_does_not_keep_its_thread_from_the_next(raises):
    pool = hydra_tune.ShardPool(["cpu"], "8MiB")
    objective(pool, raises)
    train(pool, 100, int)


@functools.lru_cache
def table(num_columns):
    return torch.arange(num_columns)


class LooksUp(nn.Linear):
    """In a table that is made once for all models, as libraries do."""

    def forward(self, x):
        return super().forward(x) + x[:, table(x.shape[-1])]


@pytest.mark.usefixtures("nobody_else_collects")
def test_a_tensor_that_outlives_a_model_that_is_garbage_is_on_no_device():
    table.cache_clear()

    def trained():
        torch.manual_seed(0)
        with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
            model = hydra_tune.prepare(nn.Sequential(LooksUp(16, 16), LooksUp(16, 16)), pool=pool)
            model(torch.ones(2, 16)).sum().backward()
        return [p.grad for p in model.parameters()]

    first = trained()
    assert is_counted(table(16))  # the first model is garbage, but there
    assert all(map(torch.equal, trained(), first))
    assert not is_counted(table(16))


class GrowsOld(nn.Linear):
    """Its activation is in a cycle that two collections have met, as while another thread imports much, and that is
    garbage then."""

    def forward(self, x):
        y = super().forward(x)
        cycle = [y]
        cycle.append(cycle)
        gc.collect(0)
        gc.collect(1)
        return y


@pytest.mark.parametrize("budget", ["10KiB", "1MiB"])
def test_an_activation_in_old_garbage_is_not_kept_by_its_block(budget):
    model = nn.Sequential(*(GrowsOld(16, 16) for _ in range(3)))
    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        hydra_tune.prepare(model, pool=pool)(torch.ones(2, 16, requires_grad=True)).sum().backward()
        (trial,) = pool.report()["trials"]
        assert not any(trial["cut"].values()), trial["cut"]
