"""Lightning's Trainer over a pool of GPUs. Deterministic mode; SGD by powers of two, which rounds alike everywhere."""

import pytest
import torch

import hydra_tune

pytest.importorskip("lightning")

from lightning_modules import SPILLED, Classifier, Gan, Measured, equal, left_by, loaders, trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),  # Lightning's advice on speed
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
]


def trained(callbacks, make, **options):
    torch.manual_seed(0)
    module = make()
    module.configure_optimizers = lambda: [torch.optim.SGD(p, lr=0.125) for p in parts_of(module)]
    module.lr_schedulers = list  # a Gan's has none
    used = trainer(callbacks, accelerator="gpu", devices=1, **options)
    used.fit(module, *loaders())
    losses, metrics, tensors = left_by(module, used)
    return losses, metrics, [t.cpu() for t in tensors]


def parts_of(module):
    return [part.parameters() for part in ((module.generator, module.judge) if isinstance(module, Gan) else (module,))]


@pytest.mark.parametrize("budget", [SPILLED, "64MiB"], ids=["spilled", "resident"])
@pytest.mark.parametrize("make", [Classifier, Gan, Measured])
def test_a_module_trains_as_in_plain_cuda(make, budget):
    alone = trained([], make)
    with hydra_tune.ShardPool("cuda:0", budget) as pool:
        found = trained([hydra_tune.HydraLightningCallback(pool)], make)
        assert pool.devices[0].peak_bytes <= pool.devices[0].budget_bytes and pool.devices[0].used_bytes == 0
    assert equal(found, alone)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_trains_as_in_plain_cuda(precision):
    alone = trained([], Classifier, precision=precision)
    with hydra_tune.ShardPool("cuda:0", SPILLED * 2) as pool:
        found = trained([hydra_tune.HydraLightningCallback(pool)], Classifier, precision=precision)
    assert equal(found, alone)


def test_a_module_larger_than_the_budget_is_never_on_the_gpu_as_a_whole():
    class Large(Classifier):
        def __init__(self):
            super().__init__()
            self.layers.extend(
                torch.nn.Sequential(torch.nn.Linear(32, 2**17), torch.nn.Linear(2**17, 32)) for _ in range(8)
            )  # 32 MiB each

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with hydra_tune.ShardPool("cuda:0", "160MiB") as pool:
        trained([hydra_tune.HydraLightningCallback(pool)], Large, max_epochs=1)
        assert pool.devices[0].peak_bytes <= 160 << 20
    assert torch.cuda.max_memory_allocated() - before < 200 << 20 < 8 * (32 << 20)
