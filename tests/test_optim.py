"""What an optimizer's state and one of its steps take is foretold without any memory."""

import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune.meter import Meter
from hydra_tune.mode import TrialMode
from hydra_tune.optim import optimizer_state_bytes, step_scratch_bytes

OPTIMIZERS = {
    "sgd": lambda ps, **o: torch.optim.SGD(ps, lr=0.1, **o),
    "momentum": lambda ps, **o: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, **o),
    "adam": torch.optim.Adam,
    "adamw": lambda ps, **o: torch.optim.AdamW(ps, amsgrad=True, maximize=True, **o),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "rprop": torch.optim.Rprop,
}
SCALARS = 64  # bytes, of numbers made tensors


def model():
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)), nn.Linear(64, 4))


class Counting(TrialMode):
    """What operators make of tensors in real memory."""

    def __init__(self, known):
        super().__init__()
        self.counter = Meter("test", 1 << 30, enforce=False)
        self.counter.add(0, known)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        self.counter.add(0, [x for x in torch.utils._pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)])
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
    return sum(v.numel() * v.element_size() for v in state), counting.counter.peak_bytes - before


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
    if name != "rprop":  # whose foreach loops, too
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
