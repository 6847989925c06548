"""Where frozen weights of several trials are: pinned for a GPU, which a virtual device shows as well."""

import gc
import weakref

import pytest
import torch

import hydra_tune
from adapters import build
from hydra_tune.devices.meter import TrialMeter
from hydra_tune.sharing.shared_copies import SharedCopies


@pytest.fixture
def pool():
    with hydra_tune.ShardPool(["cpu"], 1 << 20) as pool:
        yield pool


def copies_of(pool, trial):
    device = pool.devices[0]
    return SharedCopies(TrialMeter(device, trial), pool.shared_weights, pool.events.report)


def entered(pool, trial, key):
    model = hydra_tune.share(build, key=key)
    pool.shared_weights.enter(trial, model.parameters())
    return model, list(model.parameters())


def test_the_first_trial_pins_a_base_and_others_follow(pool):
    weights = pool.shared_weights
    one, first = entered(pool, 0, "pinned")
    _, second = entered(pool, 1, "pinned")
    values = [p.clone() for p in first]
    former = weakref.ref(first[0].untyped_storage())
    a, b, c = (copies_of(pool, n) for n in range(3))
    a.pin(first, pool.devices[0])
    b.pin(second, pool.devices[0])
    assert [p.data_ptr() for p in first] == [p.data_ptr() for p in second]
    assert all(map(torch.equal, values, second))
    gc.collect()
    assert former() is None, "the former memory is free"
    _, third = entered(pool, 2, "pinned")
    assert [p.data_ptr() for p in third] == [p.data_ptr() for p in first], "modules to come lie there"
    c.pin(third, pool.devices[0])
    assert weights.number_of_shard(first) == weights.number_of_shard(third) is not None
    for copies in (a, b, c):
        copies.close()
    del one
    assert all(map(torch.equal, values, third)), "it outlives what has pinned it"


def test_a_lone_frozen_weight_is_pinned_for_itself(pool):
    model = build().requires_grad_(False)
    pool.shared_weights.enter(0, model.parameters())
    before = [p.clone() for p in model.parameters()]
    copies_of(pool, 0).pin(list(model.parameters()), pool.devices[0])
    assert all(map(torch.equal, before, model.parameters()))
    assert pool.shared_weights.number_of_shard(list(model.parameters())) is None


def test_a_second_trial_shares_a_weight_only_if_the_first_has_not_changed_it(pool):
    """The first one was alone with it, has moved it to the device, and averages into it there."""
    weights, device = pool.shared_weights, pool.devices[0]
    values = torch.randn(4)
    one, two, three = (torch.nn.Parameter(values, requires_grad=False) for _ in range(3))
    weights.enter(0, [one])
    one.data = one.data.clone()
    weights.has_moved(one, device.number)
    weights.enter(1, [two])
    assert weights.shared(one) is weights.shared(two) is not None
    weights.leave(1)
    one.data.add_(1)
    weights.enter(2, [three])
    assert weights.shared(one) is None
    assert weights.shared(three) is None
