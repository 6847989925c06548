"""The same training twice, plain and prepared: all that both leave is compared bit for bit.

Either a scenario, a function of `prepare` that returns what is to be compared; or a `Script`, a loop of which a case
says what is different in it.
"""

import random
from contextlib import nullcontext

import numpy
import pytest
import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

import hydra_tune
from models import BUDGETS, TIED_BUDGETS, WIDTH, Layer, Net, TiedNet, batch, loss_on

CHECKED = pytest.param(True, marks=pytest.mark.checks)
with_and_without_checks = pytest.mark.parametrize("checked", [False, CHECKED], ids=["as users run it", "checked"])
both_budgets = pytest.mark.parametrize("budget", TIED_BUDGETS)


def assert_same(got, plain, tolerance=0.0, *, equal_nan=False):
    """Tensors, numbers, and whatever lists, tuples and dicts hold of them; exact, but for a tolerance."""
    got_leaves, got_spec = tree_flatten_with_path(got)
    plain_leaves, plain_spec = tree_flatten_with_path(plain)
    assert got_spec == plain_spec
    for (path, a), (_, b) in zip(got_leaves, plain_leaves, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(
                a, b, rtol=0, atol=tolerance, equal_nan=equal_nan, check_device=False,
                msg=lambda message, path=path: f"{keystr(path)}: {message}",
            )  # fmt: skip
        elif tolerance:
            assert abs(a - b) <= tolerance, keystr(path)
        else:
            assert repr(a) == repr(b), keystr(path)  # exact for floats, and nan equals nan


# ---- scenarios ----


def made(prepare, model=None):
    """A model and its optimizer, after `prepare`; one made from the current random state if none is given."""
    model = model or TiedNet()
    return prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))


def left_by(model, *optimizers):
    """Copies of the weights, gradients, buffers and optimizer states."""
    parameters = list(model.parameters())
    state = [v for o in optimizers for p in parameters for v in o.state[p].values() if isinstance(v, torch.Tensor)]
    return [
        None if t is None else t.detach().clone()
        for t in (*parameters, *(p.grad for p in parameters), *model.buffers(), *state)
    ]


def train(model, optimizer, steps=3):
    """The plainest loop; its losses."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_on(model, *batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_as_in_plain_pytorch(scenario, budget="spilled", num_bytes=None, tolerance=0.0):
    """`scenario(prepare)` returns the same, to the bit or within `tolerance`, if `prepare` is ours or does nothing."""
    plain = scenario(lambda model, *rest: (model, *rest) if rest else model)
    prepared = []
    with hydra_tune.ShardPool(["cpu"], num_bytes or TIED_BUDGETS[budget]) as pool:

        def prepare(model, *rest):
            prepared.append(model)
            return hydra_tune.prepare(model, *rest, pool=pool)

        try:
            got = scenario(prepare)
        finally:
            for model in prepared:
                hydra_tune.release(model)
        assert pool.devices[0].used_bytes == 0
        (trial,) = pool.report()["trials"]
        assert trial["steps"] > 0 and trial["resident"] == (budget == "resident")
        assert trial["resident"] or len(trial["shards"]) > 1
    assert_same(got, plain, tolerance, equal_nan=True)


def refused(words):
    """Around what is refused with these words; around what is not, if there are none."""
    return pytest.raises((hydra_tune.PrepareError, hydra_tune.BudgetError), match=words) if words else nullcontext()


# ---- scripts ----


class Script:
    """A training loop; a case says what is different in it."""

    device = "cpu"

    def model(self):
        return Net(self.Layer)

    class Layer(Layer):
        pass

    def forward(self, model, x):
        return model(x)

    def between(self, model):
        """Between forward and backward."""

    def after(self, model, optimizer):
        """After the optimizer's step."""

    def run(self, pool=None):
        torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
        model = self.model()
        if pool is None:
            model.to(self.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)  # a power of two: rounds alike on host and GPU
        if pool is not None:
            hydra_tune.prepare(model, optimizer, pool=pool)
        left = []
        try:
            for _ in range(3):
                optimizer.zero_grad()
                x, y = torch.randn(8, WIDTH).to(self.device), torch.randint(0, 8, (8,)).to(self.device)
                loss = nn.functional.cross_entropy(self.forward(model, x), y)
                self.between(model)
                loss.backward()
                left += [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
                optimizer.step()
                self.after(model, optimizer)
        finally:
            if pool is not None:
                hydra_tune.release(model)
        random_state = torch.get_rng_state() if self.device == "cpu" else torch.cuda.get_rng_state(self.device)
        return [*left, *(t.clone() for t in model.state_dict().values()), random_state]


def at_each_budget(scripts):
    """Of a test of one script: it runs with each of these, of whose cases `make test` takes a sample. Half of the
    budgets have checks, which poison what has left the device; the others are as users run them."""
    checked = ("few blocks", "three shards")
    budgets = [pytest.param(name, marks=pytest.mark.checks) if name in checked else name for name in BUDGETS]

    def of(test):
        test = pytest.mark.parametrize("script", scripts, ids=lambda script: script.__name__)(test)
        return pytest.mark.sample(len(budgets))(pytest.mark.parametrize("budget", budgets)(test))

    return of


def assert_trains_as_in_plain_pytorch(script, budget, device="cpu"):
    """Run it plain and prepared, and compare all that it leaves."""
    case = script()
    case.device = device
    plain, num_bytes = case.run(), BUDGETS[budget]
    while True:
        with hydra_tune.ShardPool([device], num_bytes) as pool:
            try:
                case = script()
                case.device = device
                prepared = case.run(pool)
            except (hydra_tune.BudgetError, torch.OutOfMemoryError):  # two forwards are more than a pilot's one
                num_bytes = num_bytes * 5 // 4
                continue
            assert pool.devices[0].used_bytes == 0
            (trial,) = pool.report()["trials"]
            break
    assert trial["resident"] == (budget == "resident")
    assert_same(prepared, plain)


def step(model, pool, forward=lambda model, x: model(x)):
    hydra_tune.prepare(model, pool=pool)
    return forward(model, torch.randn(4, WIDTH))
