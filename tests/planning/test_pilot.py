"""A first step measures each kind of block on copies, and is a step like any other."""

import copy
import random
from typing import ClassVar

import numpy
import optuna
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hydra_tune
from hydra_tune.planning.measurement import Measurement
from models import bytes_batch, gpt, hf_gpt2, loss_of


class Norm(nn.Module):
    """A block with running statistics."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(self.linear(x))


def state_of_everything(model):
    return [torch.get_rng_state(), *(b.clone() for b in model.buffers()), *(p.clone() for p in model.parameters())]


@pytest.fixture
def measured(monkeypatch):
    """The names of the blocks that were measured."""
    names, run = [], Measurement.run

    def noting(measurement, *args, **kwargs):
        names.append(measurement._block.name)
        return run(measurement, *args, **kwargs)

    monkeypatch.setattr(Measurement, "run", noting)
    return names


@pytest.mark.parametrize("budget", ["8MiB", "2MiB"])
def test_it_leaves_random_state_buffers_and_gradients(budget, measured):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 256), *(Norm(256) for _ in range(6)), nn.Dropout(0.5), nn.Linear(256, 4))
    gradients = []
    for p in model.parameters():
        p.grad = torch.randn_like(p)
        gradients.append(p.grad.clone())
    python_state, numpy_state = random.getstate(), numpy.random.get_state()[1].copy()
    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        hydra_tune.prepare(model, pool=pool)
        model.eval()  # no buffer changes and nothing is drawn but by measuring
        before = state_of_everything(model)
        model(torch.arange(8))
        assert measured
        assert all(torch.equal(a, b) for a, b in zip(before, state_of_everything(model), strict=True))
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
        assert random.getstate() == python_state
        assert (numpy.random.get_state()[1] == numpy_state).all()
        hydra_tune.release(model)


def test_it_leaves_the_loader_where_it_was():
    data = TensorDataset(torch.arange(8).view(8, 1))
    with hydra_tune.ShardPool(["cpu"], "4MiB") as pool:
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
        model, _, loader = hydra_tune.prepare(model, None, DataLoader(data, batch_size=2), pool=pool)
        seen = []
        for (x,) in loader:
            seen += x.flatten().tolist()
            model(x)
        assert seen == list(range(8))
        assert len(loader) == 4
        assert loader.batch_size == 2


def test_buffers_are_updated_once_a_step_also_by_recompute():
    def run(pool):
        torch.manual_seed(0)
        model = nn.Sequential(*(Norm(64) for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if pool is not None:
            model, optimizer = hydra_tune.prepare(model, optimizer, pool=pool)
        for _ in range(4):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if pool is not None:
            hydra_tune.release(model)
        return list(model.state_dict().values())

    with hydra_tune.ShardPool(["cpu"], "100KiB") as pool:
        spilled = run(pool)
        assert not pool.report()["trials"][0]["resident"]
    plain = run(None)
    assert all(torch.equal(a, b) for a, b in zip(plain, spilled, strict=True))
    assert plain[6].item() == 4, "num_batches_tracked"


def train_once(model, pool, batch, rate=0.1):
    """One step, of a model that is prepared for it."""
    model, optimizer = hydra_tune.prepare(model, torch.optim.AdamW(model.parameters(), lr=rate), pool=pool)
    loss_of(model, *batch).backward()
    optimizer.step()
    hydra_tune.release(model)


def test_equal_blocks_are_measured_once(measured):
    model = nn.Sequential(nn.Linear(64, 32), *(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 32, bias=False))
    with hydra_tune.ShardPool(["cpu"], "40KiB") as pool:
        hydra_tune.prepare(model, pool=pool)
        model(torch.randn(2, 64)).sum().backward()
        assert measured == ["0", "1", "5"]
        model(torch.randn(2, 64)).sum().backward()
        assert len(measured) == 3
        hydra_tune.release(model)


def test_layers_of_transformers_are_alike_wherever_they_are(measured):
    """Each keeps its `layer_idx`."""
    tokens = torch.randint(0, 128, (2, 16))
    with hydra_tune.ShardPool(["cpu"], "3MiB") as pool:
        model = hydra_tune.prepare(hf_gpt2(), pool=pool)
        model(tokens, labels=tokens).loss.backward()
        assert [name for name in measured if ".h." in name] == ["transformer.h.0"]
        hydra_tune.release(model)


def test_only_a_larger_batch_is_measured_anew(measured):
    with hydra_tune.ShardPool(["cpu"], "3MiB") as pool:
        torch.manual_seed(0)
        model = hydra_tune.prepare(gpt(), pool=pool)
        for rows, is_new in ((2, True), (1, False), (3, True), (2, False)):
            measured.clear()
            model(torch.randint(0, 128, (rows, 16))).sum().backward()
            assert bool(measured) == is_new
        hydra_tune.release(model)


def test_trials_of_other_learning_rates_share_what_was_measured_and_those_of_other_depths_do_not(measured):
    with hydra_tune.ShardPool(["cpu"], "3MiB") as pool:
        for rate, depth, dropout, is_new in (
            (0.1, 6, 0.1, True), (0.2, 6, 0.1, False), (0.1, 7, 0.1, True), (0.1, 6, 0.0, True),
        ):  # fmt: skip
            measured.clear()
            train_once(gpt(dropout, depth), pool, bytes_batch(), rate)
            assert bool(measured) == is_new


class Noting(nn.Linear):
    """Notes each call where nobody looks."""

    notes: ClassVar = []

    def forward(self, x):
        self.notes.append(self)
        return super().forward(x)


@pytest.mark.parametrize("budget", ["1MiB", "24KiB"], ids=["resident", "spilled"])
def test_one_block_of_each_kind_is_called_once_more_in_the_first_step(budget):
    Noting.notes = notes = []
    model = nn.Sequential(*(Noting(32, 32) for _ in range(6)))
    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        hydra_tune.prepare(model, pool=pool)
        for times in (2, 1):  # the first one's input requires no gradient
            loss = model(torch.randn(2, 32)).sum()
            assert notes == [*[model[0]] * times, *[model[1]] * times, *model[2:]]
            loss.backward()
            notes.clear()
        hydra_tune.release(model)


def test_a_first_step_is_that_of_plain_pytorch(measured):
    def step(model, pool=None):
        torch.manual_seed(1)
        if pool is not None:
            hydra_tune.prepare(model, pool=pool)
        loss = loss_of(model, *bytes_batch())
        loss.backward()
        drawn = torch.rand(1)
        if pool is not None:
            hydra_tune.release(model)
        return [loss.detach(), drawn, *(p.grad for p in model.parameters())]

    model = gpt()
    plain = step(copy.deepcopy(model))
    with hydra_tune.ShardPool(["cpu"], "3MiB") as pool:
        spilled = step(model, pool)
        assert not pool.report()["trials"][0]["resident"]
    assert measured
    assert all(torch.equal(a, b) for a, b in zip(plain, spilled, strict=True))


def test_a_block_that_fits_no_budget_is_named_with_its_need_and_the_ways_out():
    model = hydra_tune.prepare(
        nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), pool=hydra_tune.ShardPool(["cpu"], "512KiB")
    )
    with pytest.raises(
        hydra_tune.BudgetError,
        match=r"block \d does not fit: it needs 1.1 MiB for its weights alone, .*smaller children",
    ):
        model(torch.randn(1, 512))


def test_what_a_block_takes_is_what_was_measured(monkeypatch):
    found, run = [], Measurement.run

    def noting(measurement, *args, **kwargs):
        found.append(run(measurement, *args, **kwargs))
        return found[-1]

    monkeypatch.setattr(Measurement, "run", noting)

    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = nn.Sequential(*(Doubled(256, 256) for _ in range(4)))
    with hydra_tune.ShardPool(["cpu"], "1200KiB") as pool:
        hydra_tune.prepare(model, torch.optim.SGD(model.parameters()), pool=pool)
        model(torch.randn(4, 256, requires_grad=True)).sum().backward()
        hydra_tune.release(model)
    ((profile, _),) = found
    weights, rows = 256 * 256 * 4 + 1024, 4 * 256 * 4
    assert profile.boundary_bytes == rows, "its output, which is the step's from then on"
    assert profile.forward_work_bytes == rows, "what it makes beside that"
    assert weights < profile.backward_work_bytes <= weights + 4 * rows, "weight gradients and rows"
    assert profile.forward_s > 0 and profile.backward_s > 0
    assert not profile.keeps and not profile.clones


class InPlace(nn.Module):
    """Changes its input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(x.mul_(2))


class Wanting(nn.Module):
    """A block behind an embedding gets inputs that require gradients, always."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        assert x.requires_grad
        return self.linear(x)


def test_what_follows_a_block_that_changes_its_input_is_measured_with_inputs_as_in_plain_pytorch():
    """Some operators have other kernels where their input needs no gradient; that of a GroupNorm of channels-last maps
    crashes."""
    model = nn.Sequential(nn.Linear(32, 32), InPlace(), nn.ReLU(inplace=True), Wanting(), nn.Linear(32, 32))
    with hydra_tune.ShardPool(["cpu"], 24_000) as pool:
        hydra_tune.prepare(model, pool=pool)
        model(torch.randn(4, 32)).sum().backward()
        (trial,) = pool.report()["trials"]
        assert not trial["resident"]
        hydra_tune.release(model)


def test_a_batch_too_large_for_the_budget_is_refused_and_the_larger_model_lacks_more():
    """It was an end for lack of memory, after which the runner tried the trial once more."""
    lacks = []
    for width in (4, 48):
        model = nn.Sequential(nn.Flatten(), nn.Softmax(-1), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))
        with hydra_tune.ShardPool("cpu", "200KiB") as pool:
            hydra_tune.prepare(model, torch.optim.Adam(model.parameters()), pool=pool)
            with pytest.raises(hydra_tune.BudgetError, match=r"a step, .* needs 392.0 KiB as it is cut, ") as refused:
                model(torch.randn(128, 784))
            assert not torch._C._len_torch_dispatch_stack(), "the next trial's operators are not its own"
            hydra_tune.release(model)
            assert pool.devices[0].used_bytes == 0
        lacks.append(refused.value.lack)
    assert 1 < lacks[0] < lacks[1]


def test_a_batch_that_is_refused_refuses_no_smaller_one():
    """Neither of its own trial nor of later ones of the architecture: these were pruned by its words."""

    def steps(pool, *batches):
        torch.manual_seed(0)
        layers = (layer for width in (48, 48, 48) for layer in (nn.LazyLinear(width), nn.ReLU()))
        model = nn.Sequential(*layers, nn.LazyLinear(10))
        model(torch.zeros(1, 32))
        optimizer = torch.optim.Adam(model.parameters())
        hydra_tune.prepare(model, optimizer, pool=pool)
        refused = []
        for size in batches:
            try:
                model(torch.randn(size, 32)).sum().backward()
            except hydra_tune.BudgetError:
                refused.append(size)
            else:
                optimizer.step()
            optimizer.zero_grad()
        hydra_tune.release(model)
        return refused

    with hydra_tune.ShardPool(["cpu"], "60KiB") as pool:
        assert steps(pool, 8, 32, 32, 8) == [32]  # the first of them was measured
        assert steps(pool, 8, 16, 4) == []
        assert steps(pool, 32, 4, 8) == [32]
        assert steps(pool, 16, 8) == []


class Experts(nn.Module):
    """Each row goes to two of four, so that a step's bytes depend on its values."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == i)
            if len(rows):
                out.index_add_(0, rows, (expert(x[rows]) * weights[rows, places, None]).to(out.dtype))
        return x + out


def test_more_memory_never_refuses_what_less_has_trained():
    """A block that fitted where it was measured, but not beside all that its step holds, was the end; it is opened."""

    def trains(kib):
        torch.manual_seed(100)
        model = nn.Sequential(nn.Linear(32, 32), *(Experts() for _ in range(3)), nn.Linear(32, 64))
        with hydra_tune.ShardPool(["cpu"], kib << 10) as pool:
            hydra_tune.prepare(model, torch.optim.AdamW(model.parameters()), pool=pool)
            try:
                for _ in range(3):
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = model(torch.randn(10, 32)).float().square().mean()
                    loss.backward()
            except hydra_tune.BudgetError:
                return False
            finally:
                hydra_tune.release(model)
            return True

    found = [trains(kib) for kib in range(60, 240, 10)]
    assert found == sorted(found) and {*found} == {False, True}


def test_a_first_step_that_is_refused_in_its_backward_leaves_no_mode(monkeypatch):
    """It was on the thread's stack until the next forward, and counted what other pools' models made."""
    monkeypatch.setenv("HYDRA_TUNE_CHECKS", "0")
    refused = []  # in a backward, or before
    for kib in range(92, 112, 4):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(5)), nn.Linear(64, 10))
        with hydra_tune.ShardPool(["cpu"], f"{kib}KiB") as pool:
            hydra_tune.prepare(model, torch.optim.AdamW(model.parameters()), pool=pool)
            losses = []
            with pytest.raises(hydra_tune.BudgetError):  # noqa: PT012
                losses.append(model(torch.randn(16, 64)).sum() + model(torch.randn(16, 64)).sum())
                losses[0].backward()
            assert torch._C._len_torch_dispatch_stack() == 0
            refused += losses
            hydra_tune.release(model)
    assert refused


def test_what_refuses_a_step_of_many_forwards_refuses_none_of_one():
    """Its words were remembered for all trials of the same model and batch, so that a search's order decided."""

    def objective(trial):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(5)), nn.Linear(64, 10))
        model, optimizer = hydra_tune.prepare(model, torch.optim.AdamW(model.parameters()))
        for _ in range(2):
            sum(model(torch.randn(16, 64)).sum() for _ in range(1 if trial.number else 40)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return 0.0

    with hydra_tune.ShardPool(["cpu"], "260KiB") as pool:
        study = optuna.create_study()
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(study, objective, n_trials=3)
    assert [trial.state.name for trial in study.trials] == ["PRUNED", "COMPLETE", "COMPLETE"]


def test_a_loss_that_has_no_room_leaves_nothing_that_counts(monkeypatch):
    monkeypatch.setenv("HYDRA_TUNE_CHECKS", "0")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(5)))
    hydra_tune.prepare(model, pool=hydra_tune.ShardPool(["cpu"], "130KiB"))
    with pytest.raises(hydra_tune.BudgetError):
        model(torch.randn(16, 64)).repeat(1, 60)
    trial = model.forward.trial
    before = trial.meter.trial_bytes
    kept = torch.randn(64, 64).to(torch.float64)
    assert trial.meter.trial_bytes <= before and not trial.meter.counting
    del kept
    hydra_tune.release(model)
    assert torch._C._len_torch_dispatch_stack() == 0
