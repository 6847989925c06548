"""A frozen base and adapters over it, as LoRA makes them, without a library; trainings of several at a time."""

import threading

import torch
from torch import nn

from hydra_tune.trials.context import trial_context

WIDTH, DEPTH = 64, 6


class Lora(nn.Module):
    """A frozen linear layer, and a trained product of two small matrices beside it."""

    def __init__(self, base, rank, dropout):
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(dropout)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 8)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + self.dropout(x) @ self.a.t() @ self.b.t()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.two(torch.relu(self.one(self.norm(x))))


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build():
    return Base()


def plain_base(seed=0):
    """What `share(build)` gives in a pool of this seed, built anew."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().requires_grad_(False)


def adapted(base, rank, seed, dropout=0.1):
    torch.manual_seed(seed)
    for layer in base.layers:
        layer.one = Lora(layer.one, rank, dropout)
    return base


BASE_BYTES = sum(p.nbytes for p in build().parameters())
RANKS = (1, 2, 3, 4)


def trained(model, prepare, steps=3):
    """Losses, and what was trained."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model, optimizer = prepare(model, optimizer)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(torch.randn(2, WIDTH)), torch.randint(0, 8, (2,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def as_it_is(model, *others):
    return (model, *others) if others else model


def side_by_side(*jobs):
    """What each of these functions returns, each in a thread of its own. An error of one is raised in the end."""
    results, errors = [None] * len(jobs), []

    def work(number, job):
        try:
            results[number] = job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=each) for each in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def in_pool(pool, number, job):
    """A job of a pool's trial with its own random state, as a runner makes it."""

    def run():
        with trial_context(pool, number):
            return job()

    return run
