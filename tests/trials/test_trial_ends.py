"""Whatever ends a trial, its bytes are given back and nothing of it stays reachable."""

import copy
import ctypes
import gc
import inspect
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import weakref
from collections import defaultdict
from functools import partial

import optuna
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hydra_tune
from hydra_tune.pool import trace
from hydra_tune.pool.event_loop import EventLoop
from hydra_tune.process.interrupts import interrupts
from hydra_tune.schedule.events import TrialEnded
from hydra_tune.trials.context import current_context, trial_context
from models import gpt
from paths import python_path

BUDGET = 400_000
WIDTHS = {"spilled": 128, "resident": 24}
FAILING_STEP = 2
WITHOUT_PLAN = ("prepared", "pilot", "too large")
WAYS = [
    "return", *WITHOUT_PLAN, "forward", "module hook", "between", "backward", "tensor hook", "weight hook", "step",
    "loader", "later pilot", "prune", "stop", "nan",
]  # fmt: skip


class End(Exception):
    pass


def fail(*_):
    raise End


class Batches(Dataset):
    def __init__(self, width, way):
        self.width, self.way = width, way

    def __len__(self):
        return 100

    def __getitem__(self, i):
        if self.way == "loader" and i == 2 * FAILING_STEP + 1:
            raise End
        return torch.randn(self.width), i % 4


class Layer(nn.Module):
    failing = 0  # no switch, which would bring a new pilot

    def __init__(self, width, way):
        super().__init__()
        self.linear, self.way = nn.Linear(width, width), way

    def forward(self, x):
        y = self.linear(x)
        if self.way == "pilot" or (self.failing and self.way in ("forward", "later pilot")):
            raise End
        if self.failing and self.way == "backward" and y.requires_grad:
            y.register_hook(fail)
        return y


class FailingSGD(torch.optim.SGD):
    failing = False

    def step(self, closure=None):
        super().step(closure)
        if self.failing:
            raise End


def note(seen, kind, *tensors):
    seen[kind] += [weakref.ref(tensor.untyped_storage()) for tensor in tensors]


def build(way, width):
    middle = Layer(width, way)
    layers = [nn.Linear(width, width) for _ in range(8)]
    head = nn.Linear(width, 20_000 if way == "too large" else 4)
    model = nn.Sequential(*layers[:4], middle, *layers[4:], head)
    return model, middle, FailingSGD(model.parameters(), lr=0.01, momentum=0.9)


def arm(way, middle, optimizer):
    """What must be set for this step to fail; what undoes it."""
    middle.failing, optimizer.failing = 1, way == "step"
    if way == "later pilot":
        middle.switched = True
    if way == "module hook":
        return middle.register_forward_hook(fail).remove
    if way == "weight hook":
        return middle.linear.weight.register_post_accumulate_grad_hook(fail).remove
    return lambda: None


def train(way, width, seen):
    """Two whole steps, then the end; `seen` gets weak references by kind: weights, gradients, activations."""
    model, middle, optimizer = build(way, width)
    seen["weights"] += map(weakref.ref, model.parameters())
    middle.register_forward_hook(lambda module, args, output: note(seen, "activations", output))
    loader = DataLoader(Batches(width, way), batch_size=2)
    model, optimizer, loader = hydra_tune.prepare(model, optimizer, loader)
    if way == "prepared":
        return 0.0
    for step, (x, y) in enumerate(loader):
        if step == FAILING_STEP:
            arm(way, middle, optimizer)
        output = model(x)
        note(seen, "activations", output)
        loss = nn.functional.cross_entropy(output, y)
        if step == FAILING_STEP:
            leave_between(way, output)
        loss.backward()
        note(seen, "gradients", *(p.grad for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        if step == FAILING_STEP:
            break
    return float("nan") if way == "nan" else loss.item()


def leave_between(way, output):
    """What ends a trial between a forward and its backward."""
    errors = {"between": End, "prune": optuna.TrialPruned, "stop": hydra_tune.TrialStopped}
    if way in errors:
        raise errors[way]
    if way == "close":
        current_context().pool.close()
    if way == "tensor hook":
        output.register_hook(fail)


def expected_state(way):
    completes, prunes = ("return", "prepared"), ("prune", "nan", "too large")
    return "COMPLETE" if way in completes else "PRUNED" if way in prunes else "FAIL"


def bytes_of(pool):
    """Reserved and real."""
    return [(d.used_bytes, d.live_bytes) for d in pool.devices]


def alive(references):
    return [r() for r in references if r() is not None]


def reachable(seen):
    gc.collect()
    return {kind: found for kind, references in seen.items() if (found := alive(references))}


@pytest.mark.sample(2)
@pytest.mark.parametrize("where", WIDTHS)
@pytest.mark.parametrize("way", WAYS)
def test_a_trial_leaves_nothing_behind(way, where):
    seen, study = defaultdict(list), optuna.create_study()
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        before = bytes_of(pool)
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(
            study, lambda _: train(way, WIDTHS[where], seen), n_trials=2, catch=(Exception,)
        )
        assert [t.state.name for t in study.trials] == [expected_state(way)] * 2
        if way not in (*WITHOUT_PLAN, "later pilot"):
            assert [t["resident"] for t in pool.report()["trials"]] == [where == "resident"] * 2
        assert bytes_of(pool) == before
        assert len(seen["weights"]) == 2 * 20
        assert reachable(seen) == {}
        assert bytes_of(pool) == before


@pytest.mark.sample(2)
@pytest.mark.parametrize("where", WIDTHS)
@pytest.mark.parametrize("way", [way for way in WAYS if way not in (*WITHOUT_PLAN, "module hook")])
def test_others_get_a_trials_room_only_once_it_is_empty(way, where, monkeypatch):
    """The ledger gave an ended trial's bytes to the next one while its tensors were still there, on the device
    or in the frames of its exception: of 4,000 trials, four together, 22 ran out of memory that others held.

    Where a module's hook raises, PyTorch keeps the module's output in a closure for as long as the exception lives.
    """
    left, original = [], EventLoop._handle

    def handle(events, event, at_s=None):
        if isinstance(event, TrialEnded):
            left.append((events.devices[0].live_bytes, len(alive(seen["activations"]))))
        original(events, event, at_s)

    monkeypatch.setattr(EventLoop, "_handle", handle)
    seen = defaultdict(list)
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(
            optuna.create_study(), lambda _: train(way, WIDTHS[where], seen), n_trials=1, catch=(Exception,)
        )
    assert left == [(0, 0)]


@pytest.mark.parametrize("where", WIDTHS)
def test_a_pool_that_is_closed_and_a_user_who_interrupts_leave_nothing_either(where, monkeypatch):
    seen = defaultdict(list)
    pool = hydra_tune.ShardPool(["cpu"], BUDGET)
    runner = hydra_tune.HydraTrialRunner(pool, concurrency=1)
    monkeypatch.setattr(f"{__name__}.End", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.optimize(optuna.create_study(), lambda _: train("forward", WIDTHS[where], seen), n_trials=1)
    assert bytes_of(pool) == [(0, 0)]
    assert reachable(seen) == {}
    with pytest.raises(hydra_tune.PoolClosedError, match="stopped"):
        runner.optimize(optuna.create_study(), lambda _: train("close", WIDTHS[where], seen), n_trials=1)
    assert bytes_of(pool) == [(0, 0)]
    assert reachable(seen) == {}


def test_a_scripts_pool_goes_with_its_last_name(pools):
    """A thread's context once knew every pool in which it had prepared a model."""

    def run():
        pool = hydra_tune.ShardPool(["cpu"], BUDGET)
        model = hydra_tune.prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), pool=pool)
        model(torch.ones(2, 8)).sum().backward()
        hydra_tune.release(model)
        return weakref.ref(pool)

    pool = run()
    pools.clear()
    gc.collect()
    assert pool() is None


def test_a_closed_pool_stops_its_trials_at_their_next_task():
    steps = []

    def objective(trial):
        model = gpt(depth=4)
        model = hydra_tune.prepare(model)
        for step in range(100):
            model(torch.randint(0, 128, (2, 16)))
            steps.append(step)
            if step == 2:
                pool.close()
        return 0.0

    pool = hydra_tune.ShardPool(["cpu"], "2MiB")
    with pytest.raises(hydra_tune.PoolClosedError, match="stopped"):
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(optuna.create_study(), objective, n_trials=3)
    assert steps == [0, 1, 2]
    with pytest.raises(hydra_tune.PoolClosedError, match="Make a new ShardPool"):
        hydra_tune.HydraTrialRunner(pool).optimize(optuna.create_study(), objective, n_trials=1)


@pytest.mark.parametrize("budget", [200_000, "2MiB"])
def test_a_model_that_is_dropped_before_its_first_backward_trains_as_in_plain_pytorch(budget):
    """A collection in between, perhaps in another trial's thread, was an AssertionError at the backward's end."""

    def gradient(prepare):
        torch.manual_seed(0)
        inputs = torch.randn(4, 64, requires_grad=True)
        loss = prepare(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))))(inputs).sum()
        gc.collect()
        loss.backward()
        return inputs.grad

    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        assert torch.equal(gradient(partial(hydra_tune.prepare, pool=pool)), gradient(lambda model: model))


def test_a_plain_script_that_drops_its_model_gives_its_bytes_back():
    with hydra_tune.ShardPool(["cpu"], "4MiB") as pool:
        model = hydra_tune.prepare(gpt(depth=4), pool=pool)
        model(torch.randint(0, 128, (2, 16)))
        assert pool.devices[0].used_bytes > 0
        del model
        gc.collect()
        assert pool.devices[0].used_bytes == 0
        assert pool.report()["trials"][0]["steps"] == 1


class WithWeightsOfItsOwn(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.token = nn.Parameter(torch.zeros(16))
        self.register_buffer("positions", torch.ones(16))

    def forward(self, x):
        return self.layers(x + self.token * self.positions)

    def look(self, module, args, output):
        self.seen = output.detach().norm()


@pytest.mark.parametrize("is_hooked", [False, True])
@pytest.mark.parametrize("budget", ["10KiB", "1MiB"])
def test_a_plain_script_prepares_one_model_after_another(budget, is_hooked):
    """A trial kept its model, by what it held on the device or by its blocks' hooks: the next one was refused."""

    def objective(trial):
        model = WithWeightsOfItsOwn()
        if is_hooked:
            model.layers[1].register_forward_hook(model.look)
        model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), pool=pool)
        loss = model(torch.ones(2, 16)).square().mean()
        loss.backward()
        optimizer.step()
        if not is_hooked:
            kept.append((loss, model.token))  # a loss keeps its trial
        return loss.item()

    kept = []
    study = optuna.create_study()
    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        study.optimize(objective, n_trials=3)
        assert [t["resident"] for t in pool.report()["trials"]] == [budget == "1MiB"] * 3
        kept.clear()


# ---- exceptions that the user catches ----


def go_on(way, width, pool):
    """Losses and weights of a loop that skips the step that fails."""
    torch.manual_seed(0)
    model, middle, optimizer = build(way, width)
    batches, losses = list(DataLoader(Batches(width, way=""), batch_size=2))[:5], []
    if pool is not None:
        model, optimizer = hydra_tune.prepare(model, optimizer, pool=pool)
    for step, (x, y) in enumerate(batches):
        disarm = arm(way, middle, optimizer) if step == FAILING_STEP else lambda: None
        try:
            output = model(x)
            if step == FAILING_STEP:
                leave_between(way, output)
            loss = nn.functional.cross_entropy(output, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        except End:
            middle.failing, optimizer.failing = 0, False
            disarm()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.sample(2)
@pytest.mark.parametrize("where", WIDTHS)
@pytest.mark.parametrize(
    "way", ["forward", "later pilot", "module hook", "between", "backward", "tensor hook", "weight hook", "step"]
)
@pytest.mark.parametrize("script", [True, False], ids=["script", "objective"])
def test_a_loop_that_catches_its_exception_goes_on_as_in_plain_pytorch(way, where, script):
    plain = go_on(way, WIDTHS[where], None)
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        if script:
            losses, weights = go_on(way, WIDTHS[where], pool)
            gc.collect(), gc.collect()  # autograd's nodes hide what they refer to until they are gone
        else:
            with trial_context(pool, 0):
                losses, weights = go_on(way, WIDTHS[where], pool)
        assert bytes_of(pool) == [(0, 0)]
    assert len(losses) == 4
    assert losses == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(weights, plain[1], strict=True))


# ---- interruptions ----


class Interrupts:
    """Sends SIGINT, as Ctrl-C does, at the n-th place within hydra_tune where CPython looks for signals: where a
    function starts, or a C function has returned."""

    def __init__(self, n):
        self.left = n

    def __call__(self, frame, event, _):
        starts = event == "call" and not frame.f_code.co_flags & inspect.CO_GENERATOR  # which may be told to close
        if not (starts or event == "c_return") or not frame.f_globals["__name__"].startswith("hydra_tune."):
            return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGINT)

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


def small_model():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


X, Y = torch.linspace(-1, 1, 32).view(4, 8), torch.arange(4)


def small_step(model, optimizer):
    loss = nn.functional.cross_entropy(model(X), Y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def state_of(model, optimizer):
    """A checkpoint, with the gradients that are there."""
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state())), gradients


def load(state, model, optimizer):
    (weights, moments, random_state), gradients = copy.deepcopy(state)
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    torch.set_rng_state(random_state)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


def two_steps(state, model, optimizer):
    if state is not None:
        load(state, model, optimizer)
    losses = [small_step(model, optimizer) for _ in range(2)]
    return losses, [value.clone() for value in model.state_dict().values()]


def same(a, b):
    return a[0] == b[0] and all(map(torch.equal, a[1], b[1]))


@pytest.fixture
def handler():
    """Python's own, which ours stands in for, as in a script that runs in the foreground."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("where", "budget", "num_places"), [("spilled", 14_000, 100), ("resident", 400_000, 75)])
def test_a_script_that_is_interrupted_anywhere_goes_on(where, budget, num_places, monkeypatch, handler):
    """Ctrl-C between the pool's answer and the line that noted it left the two in disagreement: every later call
    of the model raised `impossible Invalidated`, for ever. Plain PyTorch goes on."""
    monkeypatch.setenv("HYDRA_TUNE_CHECKS", "0")  # as in a user's script
    plain = small_model()
    small_step(*plain)
    start = state_of(*plain)
    ways = [copy.deepcopy(plain[0].state_dict())]  # of each weight through two steps
    for _ in range(2):
        small_step(*plain)
        ways.append(copy.deepcopy(plain[0].state_dict()))
    expected = two_steps(start, *plain)
    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        model, optimizer = hydra_tune.prepare(*small_model(), pool=pool)
        small_step(model, optimizer)
        assert pool.report()["trials"][0]["resident"] == (where == "resident")
        assert same(two_steps(start, model, optimizer), expected)
        with Interrupts(0) as counter:
            assert same(two_steps(start, model, optimizer), expected)
        interrupted = 0
        places = list(range(1, -counter.left))
        random.Random(0).shuffle(places)
        while interrupted < num_places:  # steps that wait less than the counted ones end before the last places
            place = places.pop()
            load(start, model, optimizer)
            was_raised = False
            try:
                with Interrupts(place) as interruption:
                    two_steps(None, model, optimizer)
                interrupts.check()  # as the script's next call would
            except KeyboardInterrupt:
                was_raised = True
            assert was_raised == (interruption.left <= 0), place  # a few calls more or less each time
            interrupted += was_raised
            for name, value in model.state_dict().items():
                assert any(torch.equal(value, way[name]) for way in ways), "plain PyTorch has it so before or after"
            if place % 2:
                left = state_of(model, optimizer)
                assert same(two_steps(left, model, optimizer), two_steps(left, *plain))
            assert same(two_steps(start, model, optimizer), expected)
            pool.events.machine.validate()
        hydra_tune.release(model)
        assert bytes_of(pool) == [(0, 0)]


@pytest.mark.parametrize(
    ("where", "budget"), [("spilled", 14_000), pytest.param("resident", 400_000, marks=pytest.mark.proof)]
)
def test_a_release_that_is_interrupted_ends_before_it_says_so(where, budget, monkeypatch, handler):
    monkeypatch.setenv("HYDRA_TUNE_CHECKS", "0")
    plain = small_model()
    small_step(*plain)
    for place in itertools.count(1, 29):
        with hydra_tune.ShardPool(["cpu"], budget) as pool:
            model, optimizer = hydra_tune.prepare(*small_model(), pool=pool)
            torch.manual_seed(0)
            small_model()
            small_step(model, optimizer)
            try:
                with Interrupts(place) as interruption:
                    hydra_tune.release(model)
                interrupts.check()  # as the script's next call would
            except KeyboardInterrupt:
                if "forward" in vars(model):
                    hydra_tune.release(model)  # which had not begun
            assert pool.events.machine.devices[0].ledger.used_bytes == 0
            assert all(map(torch.equal, model.state_dict().values(), plain[0].state_dict().values()))
        if interruption.left > 0:
            break


# ---- many trials ----


def run_trials(pool, study, n_trials, concurrency, seen):
    """Every way to end, spilled and resident in turn."""
    cases, ways = list(itertools.product(WAYS, WIDTHS.values())), {}

    def objective(trial):
        ways[trial.number], width = cases[trial.number % len(cases)]
        return train(ways[trial.number], width, seen)

    hydra_tune.HydraTrialRunner(pool, concurrency).optimize(study, objective, n_trials=n_trials, catch=(Exception,))
    ended = {t.number: t.state.name for t in study.trials if t.number in ways}
    assert ended == {number: expected_state(way) for number, way in ways.items()}


@pytest.mark.parametrize(
    "concurrency",
    [pytest.param(1, id="one after another", marks=pytest.mark.proof), pytest.param(4, id="four together")],
)
def test_sixty_trials_that_end_in_every_way(concurrency):
    seen = defaultdict(list)
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        before = bytes_of(pool)
        run_trials(pool, optuna.create_study(), 60, concurrency, seen)
        assert bytes_of(pool) == before
        assert reachable(seen) == {}


def leave_flat(concurrency):
    """MiB of the process and live tensors after 200 trials and after 1,000; prints them."""
    study = optuna.create_study()
    trace.MAX_SPANS = trace.MAX_SAMPLES = 1_000  # by trial 200 the timeline is as long as it gets
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        for total in range(100, 1001, 100):
            seen = defaultdict(list)
            run_trials(pool, study, 100, concurrency, seen)
            assert bytes_of(pool) == [(0, 0)]
            assert reachable(seen) == {}
            tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
            if total in (200, 1000):
                trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
                trim(0)  # what the allocator keeps for later is nobody's: 5 to 30 MiB, by chance
                print(json.dumps([psutil.Process().memory_info().rss / 2**20, tensors]))


@pytest.mark.proof
@pytest.mark.parametrize("concurrency", [1, 4], ids=["one after another", "four together"])
def test_a_thousand_trials_leave_host_and_device_bytes_flat(concurrency):
    """Between trial 200 and trial 1,000 the host keeps 4 KiB a trial, 3 MiB in all, of the report and the study, and
    what the allocators leave. The timeline's length is bounded. A trial's weights alone would be 227 MiB.

    A process of its own, with one arena: one a thread would take 50 MiB before they settle.
    """
    bound_mib, weight_bytes = 8, 4 * (9 * 128 * 129 + 4 * 129)
    assert 800 / 2 * weight_bytes / 2**20 > 18 * bound_mib, "every other trial is a spilled one"
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "PYTHONPATH": python_path()}
    command = [sys.executable, __file__, str(concurrency)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3_600)
    assert output.returncode == 0, output.stderr[-4000:]
    (start_mib, start_tensors), (end_mib, end_tensors) = map(json.loads, output.stdout.splitlines())
    print(f"{start_mib:.1f} -> {end_mib:.1f} MiB, {start_tensors} -> {end_tensors} tensors")
    assert end_mib - start_mib < bound_mib
    assert end_tensors == start_tensors


if __name__ == "__main__":
    torch.set_num_threads(2)
    logging.getLogger("hydra_tune").setLevel(logging.WARNING)
    leave_flat(int(sys.argv[1]))
