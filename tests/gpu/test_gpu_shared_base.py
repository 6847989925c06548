"""Trials over one shared base on a GPU: alone as in company, and as plain CUDA where the optimizer steps on the GPU."""

import pytest
import torch

import hydra_tune
from adapters import BASE_BYTES, RANKS, adapted, build, in_pool, plain_base, side_by_side, trained
from comparison import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def over_the_base(pool, number):
    model = adapted(hydra_tune.share(build), RANKS[number], number)
    return trained_on_gpu(model, hydra_tune.prepare)


def trained_on_gpu(model, prepare):
    with torch.device("cuda"):
        return trained(model, prepare)


@pytest.mark.parametrize("budget", ["64MiB", 2 * BASE_BYTES], ids=["resident", "spilled"])
def test_company_changes_no_bit(budget):
    with hydra_tune.ShardPool("cuda:0", budget, seed=0) as pool:
        together = side_by_side(*(in_pool(pool, n, lambda n=n: over_the_base(pool, n)) for n in range(len(RANKS))))
        assert pool.devices[0].used_bytes == 0
    for number in range(len(RANKS)):
        with hydra_tune.ShardPool("cuda:0", budget, seed=0) as pool:
            assert_same(together[number], in_pool(pool, number, lambda n=number: over_the_base(pool, n))())


def test_a_resident_base_gives_the_numbers_of_plain_cuda():
    with hydra_tune.ShardPool("cuda:0", "64MiB", seed=0) as pool:
        found = in_pool(pool, 0, lambda: over_the_base(pool, 0))()

    def to_gpu(model, optimizer):
        model.cuda()
        return model, optimizer

    assert_same(found, trained_on_gpu(adapted(plain_base(), RANKS[0], 0), to_gpu))
