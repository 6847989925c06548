"""The pilot measures, and leaves everything as it was."""

import random

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hydra_tune
from hydra_tune.journal import Journal
from hydra_tune.leaves import Leaves
from models import bytes_batch, gpt, loss_of
from waiting import wait_until


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


@pytest.mark.parametrize("budget", ["8MiB", "2MiB"])
def test_it_leaves_random_state_buffers_and_gradients(budget):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 256), *(Norm(256) for _ in range(6)), nn.Dropout(0.5), nn.Linear(256, 4))
    gradients = []
    for p in model.parameters():
        p.grad = torch.randn_like(p)
        gradients.append(p.grad.clone())
    python_state, numpy_state = random.getstate(), numpy.random.get_state()[1].copy()
    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        hydra_tune.prepare(model, pool=pool)
        model.eval()  # no buffer changes and nothing is drawn but by the pilot
        before = state_of_everything(model)
        with torch.no_grad():
            model(torch.arange(8))
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


def test_a_larger_batch_brings_a_new_pilot_and_a_smaller_one_none():
    with hydra_tune.ShardPool(["cpu"], "3MiB") as pool:
        torch.manual_seed(0)
        model = hydra_tune.prepare(gpt(), pool=pool)
        for rows, plans in ((2, 1), (1, 1), (3, 2), (2, 2)):
            model(torch.randint(0, 128, (rows, 16))).sum().backward()
            assert len(pool.plans) == plans
        hydra_tune.release(model)


def test_learning_rates_share_a_plan_and_depths_do_not():
    with hydra_tune.ShardPool(["cpu"], "3MiB") as pool:
        for rate, depth, dropout, plans in ((0.1, 6, 0.1, 1), (0.2, 6, 0.1, 1), (0.1, 7, 0.1, 2), (0.1, 6, 0.0, 3)):
            model = gpt(dropout, depth)
            model, optimizer = hydra_tune.prepare(model, torch.optim.AdamW(model.parameters(), lr=rate), pool=pool)
            loss_of(model, *bytes_batch()).backward()
            optimizer.step()
            hydra_tune.release(model)
            assert len(pool.plans) == plans


def test_a_block_that_fits_no_budget_is_named_with_its_need_and_the_ways_out():
    model = hydra_tune.prepare(
        nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), pool=hydra_tune.ShardPool(["cpu"], "512KiB")
    )
    with pytest.raises(hydra_tune.BudgetError, match=r"block \d needs 1.0 MiB of weights.*512.0 KiB.*smaller children"):
        model(torch.randn(1, 512))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.linear(x)


class Skipping(nn.Module):
    """The middle layer's input is read by that layer, twice, and by the sum at the end."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Residual() for _ in range(3)])

    def forward(self, x):
        first = self.layers[0](x)
        return self.layers[2](self.layers[1](first)) + first


def test_a_tensor_that_is_used_elsewhere_too_has_gradients_for_each_use_in_a_block():
    """Else the block would add its two uses before the engine adds the third."""
    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
        model = hydra_tune.prepare(Skipping(), pool=pool)
        model(torch.randn(2, 16))
        (plan,) = pool.plans.values()
        found = [seen for block in plan.blocks for _, *seen in block.edges.tensors]
        assert found == [[(0,), (False,)], [(2,), (True,)], [(2,), (False,)]]
        hydra_tune.release(model)


@pytest.mark.parametrize("budget", ["100MiB", "1200KiB"], ids=["resident", "spilled"])
def test_profiles_hold_what_was_measured(budget):
    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        hydra_tune.prepare(model, torch.optim.SGD(model.parameters()), pool=pool)
        model(torch.randn(4, 256, requires_grad=True)).sum().backward()
        (plan,) = pool.plans.values()
        weight, rows = 256 * 256 * 4, 4 * 256 * 4
        for block in plan.blocks:
            assert block.weight_bytes == weight + 1024
            assert block.forward_work_bytes == rows, "its output"
            assert weight + 1024 < block.backward_work_bytes <= weight + 1024 + 4 * rows, "weight gradients and rows"
            assert block.boundary_bytes == rows
            assert block.forward_s > 0
            assert block.backward_s > 0
        hydra_tune.release(model)


class CalledOnLess(nn.Module):
    """Calls a layer on many rows, then on one while more is kept."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])

    def forward(self, x):
        first = torch.sin(self.layers[0](x))
        kept = [first * n for n in range(8)]
        return self.layers[1](self.layers[0](first[:1]) + sum(k.sum() for k in kept))


def test_a_pilot_notes_the_peak_that_it_had():
    """Not any call's work beside all that the last one finds kept. The plan does not fit: nothing else is noted."""
    with hydra_tune.ShardPool(["cpu"], 120_000) as pool:
        model = hydra_tune.prepare(CalledOnLess(), pool=pool)
        with pytest.raises(hydra_tune.BudgetError, match="held by its trial and step"):
            model(torch.randn(64, 32))
        (device,) = pool.devices
        assert 0 < device.peak_bytes == device.measured_peak_bytes


def test_who_takes_the_memory_of_a_freed_tensor_is_not_taken_for_it():
    """Which plan a model got depended on the allocator's luck: a write into other memory counted as the block's."""
    journal = Journal((), (), (), Leaves(()))
    output = torch.zeros(4)
    address = output.untyped_storage()._cdata
    journal.watch("a block", [output])
    del output
    others = []

    def is_taken():
        others.append(torch.zeros(4))
        return others[-1].untyped_storage()._cdata == address

    wait_until(is_taken)
    journal.note(torch.ops.aten.add_.Tensor, [others[-1], 1.0], {}, [others[-1]], on_device=False)
    assert not journal.changed_shared
    journal.watch("a block", [others[-1]])
    journal.note(torch.ops.aten.add_.Tensor, [others[-1], 1.0], {}, [others[-1]], on_device=False)
    assert journal.changed_shared == {"a block"}


class InPlace(nn.Module):
    """Can't be run apart."""

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


def test_what_follows_a_block_that_cannot_be_cut_is_measured_with_inputs_as_in_plain_pytorch():
    """Some operators have other kernels where their input needs no gradient; that of a GroupNorm of channels-last maps
    crashes."""
    model = nn.Sequential(nn.Linear(32, 32), InPlace(), nn.ReLU(inplace=True), Wanting(), nn.Linear(32, 32))
    with hydra_tune.ShardPool(["cpu"], 24_000) as pool:
        hydra_tune.prepare(model, pool=pool)
        model(torch.randn(4, 32)).sum().backward()
        (trial,) = pool.report()["trials"]
        assert set(trial["cut"]["opened"]) == {"1"} and not trial["cut"]["kept"] and not trial["resident"]
        hydra_tune.release(model)
