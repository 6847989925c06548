"""What an optimizer's state and one of its steps take is foretold without any memory."""

import random

import optuna
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import hydra_tune
from hydra_tune.devices.counting_mode import ThreadMode
from hydra_tune.devices.device import Device
from hydra_tune.devices.meter import TrialMeter
from hydra_tune.planning.optimizer_memory import load_exactly, stepping_bytes

OPTIMIZERS = {
    "sgd": lambda ps, **o: torch.optim.SGD(ps, lr=0.1, **o),
    "momentum": lambda ps, **o: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, **o),
    "adam": torch.optim.Adam,
    "adamw": lambda ps, **o: torch.optim.AdamW(ps, amsgrad=True, maximize=True, **o),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "rprop": torch.optim.Rprop,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
}


def optimizer_state_bytes(optimizer, parameters):
    return stepping_bytes(optimizer, parameters)[0]


def step_scratch_bytes(optimizer, parameters, *, foreach_by_default):
    return stepping_bytes(optimizer, parameters, foreach_by_default=foreach_by_default)[1]


SCALARS = 64  # bytes, of numbers made tensors


def model():
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)), nn.Linear(64, 4))


class Counting(ThreadMode):
    """What operators make of tensors in real memory."""

    def __init__(self, known):
        self.counter = Device(0, 1 << 30)
        self.trial = TrialMeter(self.counter, 0)
        self.trial.add(known)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        self.trial.add([x for x in torch.utils._pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)])
        return outputs


def stepped(optimizer, parameters):
    """Bytes that two real steps take: in state, and at most in temporaries of the second."""
    torch.manual_seed(0)
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
    known = [*parameters, *(p.grad for p in parameters), *state]
    with Counting(known) as counting:
        before = counting.counter.live_bytes
        optimizer.step()
    return sum(v.numel() * v.element_size() for v in state), counting.counter.most_live_bytes - before


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_takes_what_was_foretold(name, foreach):
    parameters = list(model().parameters())
    optimizer = OPTIMIZERS[name](parameters, foreach=foreach)
    state_bytes = optimizer_state_bytes(optimizer, parameters)
    scratch_bytes = step_scratch_bytes(optimizer, parameters, foreach_by_default=False)
    real_state_bytes, real_scratch_bytes = stepped(optimizer, parameters)
    assert state_bytes == real_state_bytes
    assert real_scratch_bytes <= scratch_bytes <= 2 * real_scratch_bytes + SCALARS
    if name not in ("rprop", "asgd", "adafactor"):  # whose foreach loops in part, or groups by shape
        assert scratch_bytes <= real_scratch_bytes + SCALARS


def test_momentum_on_a_gpu_needs_nothing_beside_its_state():
    parameters = list(model().parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    assert step_scratch_bytes(optimizer, parameters, foreach_by_default=True) == 0


def test_the_devices_own_choice_counts_where_the_user_made_none():
    parameters = list(model().parameters())
    optimizer = torch.optim.AdamW(parameters)
    every = sum(p.numel() * p.element_size() for p in parameters)
    loop, foreach = (step_scratch_bytes(optimizer, parameters, foreach_by_default=chosen) for chosen in (False, True))
    assert 0 < loop < foreach <= every + 1000
    assert step_scratch_bytes(torch.optim.AdamW(parameters, fused=True), parameters, foreach_by_default=True) == 0


def test_only_some_of_its_parameters_count():
    parameters = list(model().parameters())
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    some = step_scratch_bytes(optimizer, parameters[-1:], foreach_by_default=True)
    assert some < step_scratch_bytes(optimizer, parameters, foreach_by_default=True) / 10
    stranger = [nn.Parameter(torch.zeros(5000))]
    assert step_scratch_bytes(optimizer, stranger, foreach_by_default=True) == 0
    assert optimizer_state_bytes(optimizer, stranger) == 0


class Noisy(torch.optim.SGD):
    """Draws on the host, and notes its steps in an option of its own."""

    def __init__(self, parameters, lr=0.1, steps=None):
        super().__init__(parameters, lr)
        self.defaults["steps"] = []
        for group in self.param_groups:
            group.setdefault("steps", [] if steps is None else steps)

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["steps"].append(random.random())
            for p in group["params"]:
                p.data.add_(1e-3 * torch.randn(p.shape).to(p.device))


class Noisier(Noisy):
    """Another class, for what is known of one is not asked again."""


def test_nobody_notices_that_copies_are_stepped():
    parameters = list(model().parameters())
    optimizer = Noisy(parameters, 0.1)
    torch.manual_seed(0), random.seed(0)
    drawn = torch.rand(3), random.random()
    torch.manual_seed(0), random.seed(0)
    assert optimizer_state_bytes(optimizer, parameters) == 0
    assert step_scratch_bytes(optimizer, parameters, foreach_by_default=True) > 0
    assert torch.equal(torch.rand(3), drawn[0]) and random.random() == drawn[1]
    assert optimizer.param_groups[0]["steps"] == []


@pytest.mark.parametrize("make", [torch.optim.RMSprop, Noisier], ids=["torch's", "another"])
def test_hooks_of_all_optimizers_are_not_called_for_copies(make):
    """Which another class may do that calls its base's step: then two values are assumed."""
    parameters = list(model().parameters())
    optimizer, called = make(parameters, lr=0.1), []
    hook = register_optimizer_step_pre_hook(lambda *_: called.append(1))
    state_bytes = optimizer_state_bytes(optimizer, parameters)
    hook.remove()
    every = sum(p.nbytes for p in parameters)
    assert not called
    assert state_bytes == 2 * every if make is Noisier else every <= state_bytes < every + SCALARS


class ForeachLion(torch.optim.Optimizer):
    """Steps all of its weights at once without having been asked."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            weights = group["params"]
            gradients = [p.grad for p in weights]
            momenta = [self.state[p].setdefault("of", {"m": torch.zeros_like(p)})["m"] for p in weights]
            updates = torch._foreach_sign(torch._foreach_lerp(gradients, momenta, 0.9))
            torch._foreach_lerp_(momenta, gradients, 0.01)
            torch._foreach_add_(weights, updates, alpha=-group["lr"])


def test_what_steps_all_at_once_is_known_by_its_steps_and_nested_state_counts():
    parameters = list(model().parameters())
    every = sum(p.nbytes for p in parameters)
    optimizer = ForeachLion(parameters)
    assert optimizer_state_bytes(optimizer, parameters) == every
    assert step_scratch_bytes(optimizer, parameters, foreach_by_default=False) >= 2 * every


def test_each_group_is_stepped_as_it_says():
    parameters = list(model().parameters())
    fused, loop = parameters[:2], parameters[2:]
    optimizer = torch.optim.AdamW([{"params": fused, "fused": True}, {"params": loop, "foreach": True}])
    assert step_scratch_bytes(optimizer, fused, foreach_by_default=True) == 0
    at_once = step_scratch_bytes(optimizer, parameters, foreach_by_default=False)
    assert at_once >= sum(p.nbytes for p in loop)


class NotToBeCopied(torch.optim.SGD):
    def __init__(self, parameters, lr, secret):
        super().__init__(parameters, lr)


@pytest.mark.parametrize("optimizer", [None, "not to be copied"])
def test_where_nothing_can_be_foretold_two_values_are_assumed(optimizer):
    parameters = list(model().parameters())
    sizes = [p.numel() * p.element_size() for p in parameters]
    if optimizer is not None:
        optimizer = NotToBeCopied(parameters, 0.1, "secret")
    assert optimizer_state_bytes(optimizer, parameters) == 2 * sum(sizes)
    assert step_scratch_bytes(optimizer, parameters, foreach_by_default=False) == 2 * max(sizes)
    assert step_scratch_bytes(optimizer, parameters, foreach_by_default=True) == 2 * sum(sizes)


def held_bytes(**options):
    torch.manual_seed(0)
    net = model()
    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
        hydra_tune.prepare(net, torch.optim.AdamW(net.parameters(), **options), pool=pool)
        net(torch.randn(2, 64)).sum().backward()
        (trial,) = pool.report()["trials"]
        hydra_tune.release(net)
    assert trial["resident"]
    return trial["held_bytes"]


def test_a_resident_trial_asks_for_what_its_optimizers_step_takes():
    parameters = list(model().parameters())
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    scratch_bytes = step_scratch_bytes(optimizer, parameters, foreach_by_default=False)
    assert held_bytes(foreach=True) - held_bytes(fused=True) == scratch_bytes > 0


def closed(loss):
    def closure():
        value = loss()
        value.backward()
        return value

    return closure


EVERY = OPTIMIZERS | {
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, history_size=3, max_iter=4, line_search_fn="strong_wolfe"),
    "groups": lambda ps: torch.optim.SGD([{"params": ps[:1], "momentum": 0.9}, {"params": ps[1:]}], lr=0.1),
    "few": lambda ps: torch.optim.AdamW(ps[-2:]),
    "fused": lambda ps: torch.optim.AdamW(ps, fused=True),
}


@pytest.mark.parametrize("name", EVERY)
def test_each_optimizer_has_room_in_the_budget_that_its_resident_plan_needs(name):
    """And not a byte more. What runs out of memory is pruned."""

    def objective(trial):
        torch.manual_seed(0)
        net = model()
        net, optimizer = hydra_tune.prepare(net, EVERY[name](list(net.parameters())))
        x = torch.randn(2, 64, requires_grad=True)
        for _ in range(4):
            optimizer.step(closed(lambda: net(x).square().mean()))
            optimizer.zero_grad()
        return 0.0

    budget = 1 << 22
    for _ in range(2):
        study = optuna.create_study()
        with hydra_tune.ShardPool(["cpu"], budget) as pool:
            hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(study, objective, n_trials=1)
            (plan,) = pool.plans.values()
        assert study.trials[0].state.name == "COMPLETE", study.trials[0].user_attrs
        assert plan.resident
        budget = plan.need_bytes


def test_trials_share_a_plan_only_where_their_optimizers_take_as_much():
    def plans_of(*make):
        with hydra_tune.ShardPool(["cpu"], "4MiB") as pool:
            for each in make:
                net = model()
                hydra_tune.prepare(net, each(list(net.parameters())), pool=pool)
                net(torch.randn(2, 64)).sum().backward()
                hydra_tune.release(net)
            return len(pool.plans)

    def adamw(**options):
        return lambda ps: torch.optim.AdamW(ps, **options)

    assert plans_of(adamw(lr=0.1), adamw(betas=(0.8, 0.99)), adamw(lr=torch.tensor(0.2), foreach=False)) == 2
    assert plans_of(EVERY["few"], adamw()) == 2
    assert plans_of(EVERY["groups"], lambda ps: torch.optim.SGD(ps, lr=0.1)) == 2


def test_state_keeps_its_dtype_wherever_it_goes():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.full((3,), 1 / 3)
    load_exactly(optimizer, optimizer.state_dict())
    kept = optimizer.state[weight]["momentum_buffer"]
    assert kept.dtype is torch.float32 and kept[0] == torch.tensor(1 / 3)
