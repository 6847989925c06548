"""A Trainer on a GPU whose model is larger than the budget: never there as a whole, with plain CUDA's losses."""

import pytest
import torch

import hydra_tune

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer

from hugging_face import DATA, arguments, gpt, result_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:::transformers"),
]
MIB = 2**20
BUDGET = 64 * MIB


def large():
    """158 MiB of weights, blocks of 12 MiB."""
    return gpt(layers=13, width=512)


def trained(folder, callbacks, **options):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(large(), arguments(folder, use_cpu=False, **options), train_dataset=DATA, eval_dataset=DATA[:4],
                      callbacks=callbacks)  # fmt: skip
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    return result_of(trainer)[0], loss, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"fp16": True}], ids=["fp32", "bf16", "fp16"])
def test_a_trainer_larger_than_the_budget(tmp_path, options):
    before = torch.cuda.memory_allocated()
    with hydra_tune.ShardPool(["cuda:0"], BUDGET) as pool:
        losses, loss, peak = trained(tmp_path / "pool", [hydra_tune.HydraTrainerCallback(pool)], **options)
        assert peak - before <= BUDGET + 16 * MIB  # cuBLAS's workspaces are beside it
        assert pool.devices[0].peak_bytes <= BUDGET and pool.devices[0].used_bytes == 0
    plain_losses, _, plain_peak = trained(tmp_path / "plain", [], **options)
    assert plain_peak > 158 * MIB
    assert losses[0] == plain_losses[0], "before the optimizer's first step, which is on the host"
    assert losses == pytest.approx(plain_losses, rel=1e-3) and loss > 0
