"""The first promise on a GPU, over the whole zoo: two accumulated batches beside plain CUDA's, bit for bit.

No optimizer takes part: that of a spilled trial steps on the host, where it rounds otherwise than on a GPU.
Deterministic algorithms are on, where an operator has one."""

import random
import warnings

import numpy
import pytest
import torch
from torch.utils._pytree import tree_map

import hydra_tune
from hydra_tune.blocks.root import use_no_cache
from zoo import ZOO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
DEVICE = "cuda:0"
BATCHES = 2
OTHERWISE = {"weight_penalty": {"loss 0", "loss 1"}}  # its loss sums squares of weights, which are in host memory
SHARES = (1, 1.5, 2.25, 3.4, 5, 0.6)  # of the weights' bytes: the first with a spilled plan


@pytest.fixture(autouse=True)
def quiet(deterministic):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # of libraries
        yield


def train(name, dtype, budget=None):
    """Losses, gradients and buffers of a few batches, by what they are, on the host; and whether it was resident."""
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    architecture, found, resident = ZOO[name], {}, None
    model = architecture.build()
    if budget is None:
        use_no_cache(model.to(DEVICE))
        pool = None
    else:
        pool = hydra_tune.ShardPool([DEVICE], budget)
        hydra_tune.prepare(model, pool=pool)
    try:
        for number in range(BATCHES):
            torch.manual_seed(number)
            inputs = tree_map(lambda x: x.to(DEVICE) if isinstance(x, torch.Tensor) else x, architecture.batch())
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                loss = architecture.loss(model, inputs)
            loss.backward()
            found[f"loss {number}"] = loss.detach().cpu()
        if pool is not None:
            resident = pool.report()["trials"][0]["resident"]
    finally:
        if pool is not None:
            hydra_tune.release(model)
            assert pool.devices[0].used_bytes == 0
            pool.close()
    found |= {f"gradient of {n}": None if p.grad is None else p.grad.cpu() for n, p in model.named_parameters()}
    found |= {f"buffer {n}": b.cpu() for n, b in model.named_buffers()}
    found["random state"] = torch.cuda.get_rng_state().clone()
    return found, resident


def weight_bytes(name):
    return sum(p.numel() * p.element_size() for p in ZOO[name].build().parameters())


def train_spilled(name, dtype):
    for share in SHARES:
        try:
            found, resident = train(name, dtype, int(share * weight_bytes(name)))
        except (hydra_tune.BudgetError, torch.OutOfMemoryError):
            continue
        if not resident:
            return found
    pytest.skip("no budget has a spilled plan")


def differences(expected, found):
    assert expected.keys() == found.keys()
    return [
        what
        for what, value in expected.items()
        if (value is None) != (found[what] is None) or (value is not None and not torch.equal(value, found[what]))
    ]


def plain(name, dtype):
    """What plain CUDA gives, if it gives the same twice."""
    try:
        expected, _ = train(name, dtype)
    except (RuntimeError, AttributeError) as error:
        pytest.skip(f"plain CUDA has no deterministic way, or none at all: {error}")
    again, _ = train(name, dtype)
    if differences(expected, again):
        pytest.skip(f"plain CUDA differs from itself: {differences(expected, again)[:3]}")
    return expected


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ZOO)
def test_spilled_equals_plain_cuda(name, dtype):
    expected = plain(name, dtype)
    try:
        found = train_spilled(name, dtype)
    except hydra_tune.PrepareError as error:
        pytest.skip(f"refused: {error}")
    found_differences = [what for what in differences(expected, found) if what not in OTHERWISE.get(name, ())]
    assert found_differences == []


@pytest.mark.parametrize("name", ZOO)
def test_resident_equals_plain_cuda(name):
    expected = plain(name, None)
    found, resident = train(name, None, 40 * weight_bytes(name) + (1 << 26))
    assert resident
    assert differences(expected, found) == []
