"""Models whose forward is set on the instance, before `prepare` as trl does, or after it as accelerate may."""

import copy
import pickle
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType

import pytest
import torch
from torch import nn

import hydra_tune
from models import BUDGETS, WIDTH, Layer, Net

both_budgets = pytest.mark.parametrize("budget", [145 << 10, "8MiB"], ids=["spilled", "resident"])


def doubled(self, x):
    return type(self).forward(self, x) * 2


def bound(module):
    module.forward = MethodType(doubled, module)


def by_closure(module):
    inner = module.forward
    module.forward = lambda x: inner(x) * 2


def by_partial(module):
    module.forward = partial(doubled, module)


def wrapped_by_accelerate(model):
    """As `Accelerator.prepare_model` does under mixed precision."""
    model._original_forward = model.forward
    inner = model.forward.__func__ if hasattr(model.forward, "__func__") else model.forward

    @wraps(inner)
    def in_autocast(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return inner(*args, **kwargs)

    @wraps(in_autocast)
    def in_float(*args, **kwargs):
        return in_autocast(*args, **kwargs).float()

    model.forward = MethodType(in_float, model) if hasattr(model.forward, "__func__") else in_float


def unwrapped_by_accelerate(model):
    """As `Accelerator.unwrap_model(model, keep_fp32_wrapper=False)` does."""
    forward, original = model.forward, vars(model).pop("_original_forward")
    while hasattr(forward, "__wrapped__") and forward != original:
        forward = forward.__wrapped__
    model.forward = MethodType(getattr(forward, "__func__", forward), model)


def trained(budget, change, steps=3, part=lambda model: model, release=True):
    """(losses, weights) of a model that `change` is made to, or to a part of it: in plain PyTorch, if without a
    budget."""
    torch.manual_seed(0)
    model = Net(Layer)
    change(part(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = dict(vars(part(model)))
    if budget is not None:
        pool = hydra_tune.ShardPool(["cpu"], budget)
        hydra_tune.prepare(model, optimizer, pool=pool)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if budget is not None:
        assert pool.report()["trials"][0]["resident"] == (budget == "8MiB")
        hydra_tune.release(model)
        assert vars(part(model)) == before, "given back"
    return losses, [p.detach().clone() for p in model.parameters()]


def assert_equal(one, other):
    assert one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


@both_budgets
@pytest.mark.parametrize(
    "part", [lambda m: m, lambda m: m.layers[1], lambda m: m.layers[1].up], ids=["model", "block", "within"]
)
@pytest.mark.parametrize("change", [bound, by_closure, by_partial, wrapped_by_accelerate])
def test_a_forward_that_is_set_on_the_instance_is_what_runs(change, part, budget):
    """It was refused, and taken away."""
    plain = trained(None, change, part=part)
    assert plain[0] != trained(None, lambda module: None)[0]
    assert_equal(plain, trained(budget, change, part=part))


def test_trials_that_differ_in_a_forward_of_their_own_share_no_plan():
    """One keeps more than the other, though all else of both is the same."""
    x, peaks = torch.randn(64, WIDTH), []
    with hydra_tune.ShardPool(["cpu"], "8MiB") as pool:
        for factors in ([2.0], [2.0], [2.0] * 9):
            model = Net(Layer)

            def forward(self, x, factors=factors):
                for factor in factors:
                    x = torch.sin(x * factor)
                return type(self).forward(self, x)

            model.forward = MethodType(forward, model)
            hydra_tune.prepare(model, pool=pool)
            model(x).sum().backward()
            peaks.append(len(pool.plans))
            hydra_tune.release(model)
    assert peaks == [1, 1, 2]


class Patched(Net):
    def doubled(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
@pytest.mark.parametrize("part", [lambda m: m, lambda m: m.layers[1]], ids=["model", "block"])
def test_a_copy_of_a_prepared_model_has_the_forward_too(part, duplicate):
    model, x = Patched(PatchedLayer), torch.randn(4, WIDTH)
    part(model).forward = part(model).doubled
    expected = model(x)
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        hydra_tune.prepare(model, pool=pool)
        model(x).sum().backward()
        twin = duplicate(model)
        assert vars(part(twin))["forward"].__self__ is part(twin) and torch.equal(twin(x), expected)
        hydra_tune.release(model)
        hydra_tune.prepare(twin, pool=pool)
        assert torch.equal(twin(x), expected)
        hydra_tune.release(twin)
        assert torch.equal(twin(x), expected) and torch.equal(model(x), expected)


class PatchedLayer(Layer):
    def doubled(self, x):
        return super().forward(x) * 2


# ---- a forward that is wrapped once the model is prepared ----


@both_budgets
@pytest.mark.parametrize("unwrapped", [False, True], ids=["wrapped", "unwrapped again"])
def test_a_model_whose_forward_was_wrapped_since_is_released(budget, unwrapped):
    """It was called not prepared, and the next one refused, for it still was."""
    torch.manual_seed(0)
    model = Net(Layer)
    plain, x = copy.deepcopy(model), torch.randn(4, WIDTH)
    wrapped_by_accelerate(plain)
    if unwrapped:
        unwrapped_by_accelerate(plain)
    expected = plain(x)
    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        for _ in range(2):
            hydra_tune.prepare(model, torch.optim.SGD(model.parameters()), pool=pool)
            if "_original_forward" not in vars(model):
                wrapped_by_accelerate(model)
                if unwrapped:
                    unwrapped_by_accelerate(model)
            with pytest.raises(hydra_tune.PrepareError, match="prepared already"):
                hydra_tune.prepare(model, pool=pool)
            assert torch.equal(model(x), expected)
            model(x).sum().backward()
            hydra_tune.release(model)
            assert pool.devices[0].used_bytes == 0 and "_apply" not in vars(model)
            assert torch.equal(model(x), expected), "what wraps it goes on"
            with pytest.raises(hydra_tune.PrepareError, match="not prepared"):
                hydra_tune.release(model)
    assert ("forward" in vars(model)) is not unwrapped


class OptimizedModule(nn.Module):
    """As `torch.compile` and `DataParallel` wrap one: its attributes are the model's."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model

    def __getattr__(self, name):
        return self._modules["_orig_mod"] if name == "_orig_mod" else getattr(self._modules["_orig_mod"], name)

    def forward(self, *args):
        return self._orig_mod(*args)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # as torch.compile is imported
@pytest.mark.parametrize("wrap", [nn.Sequential, nn.DataParallel, OptimizedModule, torch.compile])
def test_a_model_within_another_module_is_released(wrap):
    model, x = Net(Layer), torch.randn(4, WIDTH)
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        hydra_tune.prepare(model, pool=pool)
        model(x).sum().backward()
        hydra_tune.release(wrap(model))
        assert not any("forward" in vars(m) or "_apply" in vars(m) for m in model.modules())
        assert pool.devices[0].used_bytes == 0
        hydra_tune.release(hydra_tune.prepare(model, pool=pool))


# ---- a refusal changes nothing ----


def compiled(model, optimizer, pool):
    model.layers[1].compile()


def second(model, optimizer, pool):
    """One of its weights is in another prepared model."""
    pool.other = hydra_tune.prepare(nn.Sequential(model.layers[1].up), pool=pool)


def closed(model, optimizer, pool):
    pool.close()


def unhookable(model, optimizer, pool):
    """Fails last of all."""
    optimizer.register_step_post_hook = None


def bad_extra(model, optimizer, pool):
    return {"extra_state": [3]}


def bad_loader(model, optimizer, pool):
    return {"loaders": [None]}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, where its compiler is imported
@pytest.mark.parametrize("spoil", [compiled, second, closed, unhookable, bad_extra, bad_loader])
def test_a_refused_prepare_changes_nothing(spoil):
    """It took the model's own forward away, so that who went on in plain PyTorch trained another model."""
    model, pool = Net(Layer), hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"])
    bound(model), bound(model.layers[0]), bound(model.layers[1].up)
    model.config = Config()
    optimizer = torch.optim.Adam(model.parameters())
    options = spoil(model, optimizer, pool) or {}

    def state():
        modules = [(list(vars(m)), [value for key, value in vars(m).items() if key[0] != "_"]) for m in model.modules()]
        weights = [(id(p), p.data_ptr(), p._version) for p in model.parameters()]
        hooks = [list(each) for each in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)]
        process = torch.is_grad_enabled(), torch.autograd.is_multithreading_enabled(), torch.get_rng_state().tolist()
        return modules, weights, hooks, vars(model.config).copy(), process, len(pool.events.table.live)

    before = state()
    with pytest.raises((hydra_tune.HydraTuneError, TypeError)):
        hydra_tune.prepare(model, optimizer, *options.pop("loaders", ()), pool=pool, **options)
    assert state() == before
    with suppress(AttributeError):
        hydra_tune.release(pool.other)


@dataclass
class Config:
    use_cache: bool = True
