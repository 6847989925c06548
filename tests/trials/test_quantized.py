"""Frozen weights that torchao has quantized: their parts are promoted, shared and held as other frozen weights are."""

import pytest
import torch
from torch import nn

import hydra_tune
from adapters import Base, adapted, as_it_is, in_pool, side_by_side, trained
from comparison import assert_same
from hydra_tune.devices.tensor_bytes import tensor_bytes

with pytest.MonkeyPatch.context() as patch:
    patch.setattr("warnings.warn", lambda *_, **__: None)  # of torchao, as it is imported
    quantization = pytest.importorskip("torchao.quantization")
pytestmark = pytest.mark.filterwarnings("ignore:::torchao", "ignore:.*register_constant")


def nf4(weight):
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    return nn.Parameter(to_nf4(weight.detach(), 32, 4), requires_grad=False)


def build(kind):
    model = Base()
    if kind == "nf4":
        for layer in model.layers:
            layer.one.weight, layer.two.weight = nf4(layer.one.weight), nf4(layer.two.weight)
        return model
    config = {
        "int8": lambda: quantization.Int8WeightOnlyConfig(),
        "int4": lambda: quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=quantization.granularity.PerGroup(32)
        ),
        "fp8": lambda: quantization.Float8WeightOnlyConfig(),
    }[kind]
    quantization.quantize_(model, config())
    return model


def plain_base(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build(kind).requires_grad_(False)


@pytest.mark.parametrize("budget", [120_000, 5_000_000], ids=["spilled", "resident"])
@pytest.mark.parametrize("kind", ["int8", "int4", "nf4", "fp8"])
def test_adapters_over_a_quantized_base_train_as_in_plain_pytorch(kind, budget):
    with hydra_tune.ShardPool(["cpu"], budget, seed=0) as pool:

        def job(number):
            model = adapted(hydra_tune.share(build, kind), number + 1, number)
            return trained(model, hydra_tune.prepare)

        found = side_by_side(*(in_pool(pool, n, lambda n=n: job(n)) for n in range(3)))
        trials = pool.report()["trials"]
        assert [trial["resident"] for trial in trials] == [budget > 1_000_000] * 3
        assert pool.devices[0].used_bytes == 0
    for n in range(3):
        assert_same(found[n], trained(adapted(plain_base(kind), n + 1, n), as_it_is))


def test_its_parts_take_the_bytes_of_its_codes():
    whole = sum(map(tensor_bytes, Base().parameters()))
    assert sum(map(tensor_bytes, plain_base("int8").parameters())) < whole / 3


def test_one_without_parts_is_refused_with_the_way_out():
    class Packed(nn.Parameter):
        pass

    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = Packed(torch.zeros(4, 4), requires_grad=False)
    with pytest.raises(hydra_tune.PrepareError, match=r"0\.weight is a Packed.*quantize it with torchao"):
        hydra_tune.prepare(model, pool=hydra_tune.ShardPool(["cpu"], 1 << 20))


def test_one_that_is_trained_is_refused():
    model = nn.Sequential(nn.Linear(64, 64))
    model[0].weight = nn.Parameter(nf4(model[0].weight).data, requires_grad=True)
    with pytest.raises(hydra_tune.PrepareError, match=r"0\.weight is a NF4Tensor, and trained"):
        hydra_tune.prepare(model, pool=hydra_tune.ShardPool(["cpu"], 1 << 20))


class Codes(nn.Module):
    """A linear layer whose weights are codes in a buffer, as those of GPTQ and bitsandbytes' 8-bit layers are."""

    def __init__(self, layer):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach()
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("codes", (weight / self.scale).round().to(torch.int8))

    def forward(self, x):
        return nn.functional.linear(x, self.codes * self.scale)


def with_codes():
    model = Base()
    for layer in model.layers:
        layer.one, layer.two = Codes(layer.one), Codes(layer.two)
    return model


@pytest.mark.parametrize("budget", [120_000, 5_000_000], ids=["spilled", "resident"])
def test_codes_in_buffers_are_promoted_and_shared_too(budget):
    with hydra_tune.ShardPool(["cpu"], budget, seed=0) as pool:
        places = set()

        def job(number):
            model = adapted(hydra_tune.share(with_codes), number + 1, number)
            places.add(model.layers[0].two.codes.data_ptr())
            found = trained(model, hydra_tune.prepare)
            slots.extend(pool.events.machine.devices[0].ledger.slots.values())
            return found

        slots = []
        found = side_by_side(*(in_pool(pool, n, lambda n=n: job(n)) for n in range(3)))
        assert len(places) == 1
        if budget == 120_000:
            assert max(size for _, size in slots) > 2 * 64 * 64, "codes are in the slots"
    for n in range(3):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            plain = with_codes().requires_grad_(False)
        assert_same(found[n], trained(adapted(plain, n + 1, n), as_it_is))
