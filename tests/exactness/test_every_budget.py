"""The first promise: bit for bit the numbers of plain PyTorch, whatever the budget."""

import pytest
import torch

import hydra_tune
from comparison import assert_same, with_and_without_checks
from hydra_tune.config import checks_enabled
from models import CASES, loss_of

BUDGETS = ("all resident", "half of the weights", "barely one block")


def train(build, batch, *, pool=None, steps=6, clip=None, seed=0, optimizer_options=None):
    """`steps` of AdamW under a schedule; in a pool if one is given. All that it leaves behind which has a number."""
    torch.manual_seed(seed)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, **(optimizer_options or {}))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    if pool is not None:
        model, optimizer = hydra_tune.prepare(model, optimizer, pool=pool)
    losses, grads = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batch())
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        schedule.step()
        losses.append(loss.detach().clone())
    if pool is not None:
        hydra_tune.release(model)
    return {
        "losses": losses,
        "gradients": grads,  # of the last step
        "weights": [p.detach().clone() for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "optimizer state": [v for p in model.parameters() for v in optimizer.state[p].values()],
        "random state": torch.get_rng_state(),
    }


def weight_bytes(build):
    return sum(p.numel() * p.element_size() for p in build().parameters())


def budget_bytes(which, build, batch):
    """`barely one block`: what the largest block needs beside what its trial and step hold, and not a byte more."""
    weights = weight_bytes(build)
    if which == "all resident":
        return 40 * weights
    if which == "half of the weights":
        return weights // 2
    with hydra_tune.ShardPool(["cpu"], weights // 2) as pool:
        train(build, batch, pool=pool, steps=1)
        (plan,) = pool.plans.values()
    largest = max(b.weight_bytes + max(b.forward_work_bytes, b.backward_work_bytes) for b in plan.blocks)
    return plan.held_bytes + plan.step_bytes + largest


@pytest.mark.sample(4)
@with_and_without_checks
@pytest.mark.parametrize(
    "clip", [pytest.param(None, id="plain", marks=pytest.mark.proof), pytest.param(0.5, id="clipped")]
)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("case", CASES)
def test_training_equals_plain_pytorch_bit_for_bit(case, budget, clip, checked, caplog):
    assert checks_enabled() == checked
    build, batch = CASES[case]
    budget_now = budget_bytes(budget, build, batch)
    with hydra_tune.ShardPool(["cpu"], budget_now) as pool:
        prepared = train(build, batch, pool=pool, clip=clip)
        report = pool.report()
    plain = train(build, batch, clip=clip)
    assert_same(prepared, plain)
    assert "last bit" not in caplog.text
    (trial,), (device,) = report["trials"], report["devices"]
    assert trial["resident"] == (budget == "all resident")
    if budget != "all resident":
        assert len(trial["shards"]) > 1
        assert device["promoted_bytes"] > 6 * weight_bytes(build)  # each of 6 steps promotes all of it at least once
    if budget == "barely one block":
        assert max(len(s["blocks"]) for s in trial["shards"][1:-1]) < len(trial["shards"])


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"amsgrad": True}], ids=str)
def test_optimizer_steps_as_the_user_configured_it(options):
    build, batch = CASES["gpt"]
    with hydra_tune.ShardPool(["cpu"], weight_bytes(build) // 2) as pool:
        prepared = train(build, batch, pool=pool, optimizer_options=options)
    assert_same(prepared, train(build, batch, optimizer_options=options))
