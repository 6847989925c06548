"""Tasks that run away from their trial's home, and trials that change it: nothing but the place is different."""

import itertools
import threading
from collections import defaultdict

import numpy
import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional

import hydra_tune
from hydra_tune.blocks.block import Block
from hydra_tune.events import Move
from hydra_tune.transfer import ALIGNMENT, copied_bytes, copies_on
from test_exactness import EXPECTED_DIFFERENCES, TRAININGS, budget_bytes, largest_difference, plain, train
from turns import TurnsPool, run_in_turns
from zoo import ZOO

CPU = torch.device("cpu")

# ---- copies ------------------------------------------------------------------------------------------


def from_numpy(offset):
    return torch.from_numpy(numpy.arange(offset + 40, dtype=numpy.uint8)[offset:].view(numpy.float32))


BASE = torch.arange(240.0).view(4, 5, 12)
TENSORS = {
    "contiguous": BASE,
    "a transposed view": BASE.transpose(0, 2),
    "a slice with gaps": BASE[1:, ::2, 3:7],
    "expanded": BASE[0, 0].expand(3, 12),
    "a number": BASE[2, 3, 4],
    "no elements": BASE[:0],
    "channels last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "not aligned to a vector": from_numpy(4),
    "not aligned at all": from_numpy(1),
    "bool": BASE > 100,
    "complex conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "sparse": torch.eye(3).to_sparse(),
    "a parameter": nn.Parameter(torch.randn(3, 2)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_copy_is_laid_out_and_aligned_as_the_original(name):
    tensor = TENSORS[name]
    copy = copies_on(CPU, [tensor])[0]
    assert torch.equal(copy.to_dense(), tensor.to_dense())
    assert (copy.dtype, copy.layout, copy.requires_grad) == (tensor.dtype, tensor.layout, False)
    assert copied_bytes([tensor]) >= 0
    if tensor.layout is torch.strided:
        assert copy.stride() == tensor.stride()
    if tensor.layout is torch.strided and tensor.numel():
        assert copy.untyped_storage()._cdata != tensor.untyped_storage()._cdata
    if tensor.layout is torch.strided and not tensor.is_conj() and tensor.data_ptr() % 4 == 0:
        assert (copy.data_ptr() - tensor.data_ptr()) % ALIGNMENT == 0


def test_copies_of_views_of_one_memory_are_views_of_one_memory():
    base = torch.arange(300.0)
    views = [base[64:128], base[96:160].view(8, 8).t(), base[70:71]]
    copies = copies_on(CPU, views)
    copies[0].zero_()
    assert torch.equal(copies[1], torch.where(views[1] < 128, 0.0, views[1]))
    assert copies[2] == 0
    assert views[0].all()
    assert copied_bytes(views) == sum(c.untyped_storage().nbytes() for c in copies[:1]) == 96 * 4


# ---- trials ------------------------------------------------------------------------------------------

WIDTH = 24


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x, skip=None):
        x = x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))
        return x if skip is None else (x, skip.flip(0))


class Normed(Layer):
    """Has buffers, and stays at home."""

    def __init__(self, width):
        super().__init__(width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(self.batch_norm(x))


class Net(nn.Module):
    """A tuple between blocks, views of one memory, a transposed one, a tied weight, one outside of all blocks."""

    def __init__(self, depth, width):
        super().__init__()
        self.embedding = nn.Embedding(30, width)
        self.layers = nn.ModuleList([*(Layer(width) for _ in range(depth - 1)), Normed(width)])
        self.head = nn.Linear(width, 30)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, ids):
        x = self.embedding(ids) * self.scale
        for i, layer in enumerate(self.layers):
            if i == 1:
                x, skip = layer(x, skip=x.t().contiguous().t())
                x = x + skip
            else:
                x = layer(x)
        return self.head(x)


SHAPES = [(4, 24, 5), (6, 24, 3), (3, 32, 4), (5, 16, 6), (4, 24, 2), (7, 16, 4)]  # depth, width, steps
BUDGET = 90 << 10


def objective_of(results, *, prepared=True):
    def objective(number):
        depth, width, steps = SHAPES[number]
        torch.manual_seed(number)
        model = Net(depth, width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if prepared:
            model, optimizer = hydra_tune.prepare(model, optimizer, total_steps=steps)
        losses = []
        for step in range(steps):
            for _ in range(1 + step % 2):
                x, y = torch.randint(0, 30, (2, 8))
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses.append(model(torch.arange(8)).sum().item())
        state = {key: value.clone() for key, value in model.state_dict().items()}
        results[number] = losses, state, optimizer.state_dict()["state"], torch.rand(3)
        return losses[-1]

    return objective


def results_alone():
    results = {}
    for number in range(len(SHAPES)):
        objective_of(results, prepared=False)(number)
    return results


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for number, (losses, state, moments, drawn) in expected.items():
        assert found[number][0] == losses, number
        assert all(torch.equal(found[number][1][key], value) for key, value in state.items()), number
        for key, values in moments.items():
            for name, value in values.items():
                assert torch.equal(found[number][2][key][name], value), (number, name)
        assert torch.equal(found[number][3], drawn), number


def in_turns(monkeypatch, seed, policy="sharded-lrtf"):
    results = {}
    with TurnsPool(["cpu", "cpu"], BUDGET, policy=policy, turns_seed=seed) as pool:
        run_in_turns(monkeypatch, pool, [objective_of(results)] * len(SHAPES))
        return results, pool


OFTEN_OR_NOT = {True: (), False: pytest.mark.proof}


@pytest.mark.parametrize(
    "policy",
    [pytest.param(p, marks=OFTEN_OR_NOT[p == "shuffled"]) for p in ("sharded-lrtf", "shuffled", "rung-synchronous")],
)
def test_six_unequal_trials_on_two_devices_equal_each_alone_in_turns(monkeypatch, policy):
    found, pool = in_turns(monkeypatch, 1, policy)
    assert pool.away > 20
    assert_same(found, results_alone())
    again, other = in_turns(monkeypatch, 1, policy)
    assert_same(again, found)
    assert other.story == pool.story, "same seed, same story"


@pytest.mark.proof
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_six_unequal_trials_equal_each_alone_in_threads(devices):
    results = {}
    objective = objective_of(results)
    with hydra_tune.ShardPool(["cpu"] * devices, BUDGET) as pool:
        runner = hydra_tune.HydraTrialRunner(pool, concurrency=6)
        runner.optimize(optuna.create_study(), lambda trial: objective(trial.number), n_trials=len(SHAPES))
        assert all(device.used_bytes == 0 for device in pool.devices)
    assert_same(results, results_alone())


# ---- random numbers --------------------------------------------------------------------------------------


def with_noise(pool, *, fails=False, steps=4):
    """Losses and gradients of a script."""
    torch.manual_seed(0)
    model = Stack(Noisy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if pool is not None:
        hydra_tune.prepare(model, optimizer, pool=pool)
    batches, losses = torch.randn(steps, 8, WIDTH), []
    for step, x in enumerate(batches):
        Noisy.fails = fails and step == 2
        if Noisy.fails:
            with pytest.raises(RuntimeError, match="as told"):
                model(x)
            continue
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if pool is not None:
        hydra_tune.release(model)
    return losses, [p.grad for p in model.parameters() if p.grad is not None], torch.rand(2)


class Noisy(Layer):
    """Draws in its backward, too, and before it fails."""

    fails = False

    def forward(self, x):
        x = Noise.apply(super().forward(x))
        if self.fails:
            raise RuntimeError("as told")
        return x


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad + 0.1 * torch.randn(grad.shape)


@pytest.mark.parametrize("fails", [False, True])
def test_a_script_draws_the_same_numbers_abroad(restless, fails):
    losses, grads, after = with_noise(None, fails=fails)
    with hydra_tune.ShardPool(["cpu", "cpu"], STACK_BUDGET) as pool:
        found_losses, found_grads, found_after = with_noise(pool, fails=fails)
    assert restless
    assert found_losses == losses
    assert all(map(torch.equal, found_grads, grads))
    assert torch.equal(found_after, after)


def test_trials_of_a_runner_that_lack_room_abroad_draw_the_same_numbers(monkeypatch, restless):
    """Blocks run out of memory once they have drawn, now and then, and are repeated."""

    def run(devices, concurrency):
        results = {}
        calls = defaultdict(itertools.count)  # by thread: what is repeated shall not lack room again

        def forward(layer, x, *args, **kwargs):
            out = original(layer, x, *args, **kwargs)
            if restless and next(calls[threading.get_ident()]) % 7 == 3:
                raise torch.OutOfMemoryError("as told")
            return out

        monkeypatch.setattr(Layer, "forward", forward)
        objective = objective_of(results)
        with hydra_tune.ShardPool(["cpu"] * devices, BUDGET, seed=3) as pool:
            runner = hydra_tune.HydraTrialRunner(pool, concurrency=concurrency)
            runner.optimize(optuna.create_study(), lambda trial: objective(trial.number), n_trials=4)
        return results

    original = Layer.forward
    expected = run(1, 1)
    assert not restless
    found = run(2, 4)
    assert len(restless) > 10
    assert_same(found, expected)


class NamesItsDevice(Layer):
    def __init__(self, width):
        super().__init__(width)
        self.where = torch.device("cuda", 0)


def test_a_block_that_names_its_device_stays_at_home():
    assert Block("0", NamesItsDevice(WIDTH)).names_device
    assert not Block("0", Layer(WIDTH)).names_device


# ---- every architecture, as far from home as it goes ----------------------------------------------------


CUT = [name for name in ZOO if (name, "adamw", "half") not in EXPECTED_DIFFERENCES]
FEW = [name for name in CUT[::64] if name != "marian"]  # the slowest of these


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of Switch's router
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.proof) for n in CUT])
def test_an_architecture_trains_away_from_home_as_in_plain_pytorch(name, restless):
    num_bytes = budget_bytes(name, "adamw")["half"] * 5 // 4
    expected = plain(name, "adamw")
    with hydra_tune.ShardPool(["cpu", "cpu"], num_bytes) as pool:
        found = train(name, TRAININGS["adamw"], pool=pool)
        shards = [shard for plan in pool.plans.values() for shard in plan.shards]
    assert restless or all(shard.at_home for shard in shards), "none of its tasks has travelled"
    assert largest_difference(expected, found) is None


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList([kind(WIDTH), *(Layer(WIDTH) for _ in range(4))])

    def forward(self, x):
        self.layers[0].mask = (x.detach() > 0).float()
        for layer in self.layers:
            x = layer(x)
        return x


class ReadsAnother(Layer):
    """A tensor that it is not given."""

    def forward(self, x):
        return super().forward(x) * self.mask


class GivesAView(Layer):
    """Of what it is given."""

    def forward(self, x):
        super().forward(x)
        return x.view(-1, WIDTH)


class KeepsAnAlias(Layer):
    """Of what it gives, without its graph."""

    def forward(self, x):
        y = super().forward(x)
        self.kept = y.detach()[:, :4]
        return y


@pytest.mark.parametrize("kind", [ReadsAnother, GivesAView, KeepsAnAlias])
def test_a_block_that_needs_what_is_at_home_stays_there(kind, restless):
    def run(pool=None):
        torch.manual_seed(0)
        model = Stack(kind)
        if pool is not None:
            hydra_tune.prepare(model, pool=pool)
        for _ in range(3):
            model(torch.randn(8, WIDTH)).square().mean().backward()
        if pool is not None:
            hydra_tune.release(model)
        return [p.grad for p in model.parameters() if p.grad is not None]

    with hydra_tune.ShardPool(["cpu", "cpu"], STACK_BUDGET) as pool:
        found = run(pool)
        plans = list(pool.plans.values())
    others = len(plans[0].shards) - 1
    assert [[shard.at_home for shard in plan.shards] for plan in plans] == [[True, *[False] * others]] * len(plans)
    assert {task.shard for task in restless} == set(range(1, 1 + others))
    assert all(map(torch.equal, found, run()))


STACK_BUDGET = 70 << 10


def test_evaluation_stays_at_home(restless):
    """It may give a block a cache to fill, and what is filled abroad would stay there."""
    with hydra_tune.ShardPool(["cpu", "cpu"], STACK_BUDGET) as pool:
        model = hydra_tune.prepare(Stack(Layer), pool=pool)
        for _ in range(3):
            model(torch.randn(8, WIDTH)).mean().backward()
        assert restless
        restless.clear()
        model.eval()
        with torch.no_grad():
            model(torch.randn(8, WIDTH))
        assert not restless


def test_what_fails_abroad_leaves_nothing(restless):
    class Fails(Layer):
        def forward(self, x):
            x = super().forward(x)
            if armed:
                raise RuntimeError("as told")
            return x

    armed = []
    with hydra_tune.ShardPool(["cpu", "cpu"], STACK_BUDGET) as pool:
        model = Stack(Fails)
        hydra_tune.prepare(model, pool=pool)
        for _ in range(3):
            model(torch.randn(8, WIDTH)).mean().backward()
        armed.append(True)
        with pytest.raises(RuntimeError, match="as told"):
            model(torch.randn(8, WIDTH))
        assert restless
        hydra_tune.release(model)
        assert [device.used_bytes for device in pool.devices] == [0, 0]
        assert [device.meter.live_bytes for device in pool._devices] == [0, 0]


def test_a_trial_moves_home_with_all_it_has(monkeypatch):
    """The first device has two trials, the second none: one of them goes, with a weight outside of its blocks. The
    meters, which count each tensor where it is, would refuse to let tensors of two homes meet."""
    results = {}
    with TurnsPool(["cpu", "cpu"], BUDGET, turns_seed=2) as pool:
        run_in_turns(monkeypatch, pool, [objective_of(results)] * 3)
    said = [i for _, instructions in pool.story for i in instructions if isinstance(i, Move)]
    assert said
    assert_same(results, {n: r for n, r in results_alone().items() if n in results})
