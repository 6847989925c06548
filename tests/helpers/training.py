"""One training loop for plain and prepared models, and everything it leaves behind that has a number."""

from dataclasses import dataclass

import torch

import hydra_tune
from models import loss_of


@dataclass
class Result:
    losses: list
    grads: list  # of the last step
    weights: list
    buffers: list
    optimizer_state: list
    random_state: torch.Tensor


def train(build, batch, *, pool=None, steps=6, clip=None, seed=0, optimizer_options=None):
    """`steps` of AdamW under a schedule; in a pool if one is given."""
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
    return Result(
        losses,
        grads,
        [p.detach().clone() for p in model.parameters()],
        [b.clone() for b in model.buffers()],
        [v for p in model.parameters() for v in optimizer.state[p].values()],
        torch.get_rng_state(),
    )


def assert_bitwise_equal(a, b):
    for name, left in vars(a).items():
        right = getattr(b, name)
        left, right = (left, right) if isinstance(left, list) else ([left], [right])
        assert len(left) == len(right), name
        for i, (x, y) in enumerate(zip(left, right, strict=True)):
            same = x is y is None or (x is not None and y is not None and torch.equal(x, y))
            assert same, f"{name}[{i}] differs"
