"""A settled trial: nothing of ours runs once an operator, and a block costs a bounded number of calls."""

import collections
import sys

import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune.trials.context import trial_context

WIDTH, BATCH = 16, 2
MOST_CALLS_A_BLOCK = 300  # of Python functions, forward and backward; PyTorch's own checkpoint makes 185


@pytest.fixture(autouse=True)
def as_users_run(monkeypatch):
    """Without the checks that all other tests run with."""
    monkeypatch.setenv("HYDRA_TUNE_CHECKS", "0")


class Stack(nn.Module):
    def __init__(self, depth, seen):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
        self.seen = seen

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
            self.seen.append(torch._C._len_torch_dispatch_stack())
        return x


def prepared(depth, pool, seen=None):
    torch.manual_seed(0)
    model = Stack(depth, [] if seen is None else seen)
    return hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), pool=pool)


def step(model, optimizer):
    model(torch.randn(BATCH, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def spilling_budget(depth):
    """Bytes for a third of the weights, and what a step of so small blocks takes beside them."""
    return depth * 4 * WIDTH * (WIDTH + 1) // 3 + 12_000


@pytest.mark.parametrize("memory", ["spilled", "resident"])
def test_no_dispatch_mode_is_active_in_a_settled_trial(memory):
    depth, seen = 24, []
    budget = spilling_budget(depth) if memory == "spilled" else "64MiB"
    with hydra_tune.ShardPool(["cpu"], budget) as pool, trial_context(pool, 0):
        model, optimizer = prepared(depth, pool, seen)
        step(model, optimizer)
        assert max(seen) == 1  # a first step counts
        step(model, optimizer)
        seen.clear()
        loss = model(torch.randn(BATCH, WIDTH)).sum()
        loss.register_hook(lambda _: seen.append(torch._C._len_torch_dispatch_stack()))
        model.layers[0].weight.register_hook(lambda _: seen.append(torch._C._len_torch_dispatch_stack()))
        seen.append(torch._C._len_torch_dispatch_stack())
        loss.backward()
        optimizer.step()
        seen.append(torch._C._len_torch_dispatch_stack())
        (trial,) = pool.report()["trials"]
        assert trial["resident"] == (memory == "resident")
    assert len(seen) == depth + 4 and set(seen) == {0}


def test_an_operator_of_a_trial_calls_nothing_of_ours():
    called = []
    with hydra_tune.ShardPool(["cpu"], "64MiB") as pool, trial_context(pool, 0):
        x = torch.randn(4)
        sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_qualname) if event == "call" else None)
        y = x + x
        y = y.mul_(2).exp()
        sys.setprofile(None)
    assert called == []


def calls_of_a_step(depth):
    """Python functions that one forward and backward of a settled, spilled trial calls."""
    count = collections.Counter()
    with hydra_tune.ShardPool(["cpu"], spilling_budget(depth)) as pool:
        model, optimizer = prepared(depth, pool)
        for _ in range(3):
            step(model, optimizer)
        assert not pool.report()["trials"][0]["resident"]
        x = torch.randn(BATCH, WIDTH)
        sys.setprofile(lambda frame, event, _: count.update([frame.f_code.co_qualname]) if event == "call" else None)
        try:
            model(x).sum().backward()
        finally:
            sys.setprofile(None)
        hydra_tune.release(model)
    return count.total()


def test_a_block_costs_a_bounded_number_of_calls():
    few, many = 24, 48
    a_block = (calls_of_a_step(many) - calls_of_a_step(few)) / (many - few)
    assert a_block <= MOST_CALLS_A_BLOCK, a_block
