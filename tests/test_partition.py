"""Cutting a model into blocks, and blocks into shards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hydra_tune.errors import BudgetError
from hydra_tune.partition import covers, find_blocks, make_plan, pack_shards, plan_key
from hydra_tune.shard import BlockProfile
from models import gpt, hf_gpt2, hf_vit, mlp

LARGE = 1 << 30


def names(model, limit=LARGE):
    return [name for name, _ in find_blocks(model, limit)]


def test_elements_of_a_stack_are_blocks_and_so_are_their_neighbours():
    assert names(gpt(depth=3)) == ["bytes", "positions", "layers.0", "layers.1", "layers.2", "norm", "head"]
    assert names(mlp()) == [str(i) for i in range(0, 25, 3)], "layers without weights belong to no block"


def test_hugging_face_models_are_cut_at_their_layers():
    layers = [f"transformer.h.{i}" for i in range(6)]
    assert names(hf_gpt2()) == ["transformer.wte", "transformer.wpe", *layers, "transformer.ln_f", "lm_head"]
    found = names(hf_vit())
    assert found[0] == "vit.embeddings"
    assert found[-1] == "classifier"
    assert len(found) == 1 + 6 + 2


def test_a_layer_beyond_the_limit_is_cut_at_its_children():
    layer_bytes = sum(p.numel() * 4 for p in gpt(depth=1).layers[0].parameters())
    assert "layers.0" in names(gpt(depth=1), 2 * layer_bytes)
    assert "layers.0.qkv" in names(gpt(depth=1), 2 * layer_bytes - 1)


def block(size, work=0, saved=0):
    return BlockProfile(f"b{size}", size, work, work, saved)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 100))
def test_shards_are_consecutive_whole_and_as_full_as_they_can_be(sizes, limit):
    profiles = [block(size) for size in sizes]
    shards = list(pack_shards(profiles, limit))
    assert [i for shard in shards for i in shard.blocks] == list(range(len(sizes)))
    for shard, after in zip(shards, [*shards[1:], None], strict=True):
        assert shard.slot_bytes == sum(sizes[i] for i in shard.blocks)
        assert shard.slot_bytes <= limit or len(shard.blocks) == 1
        assert after is None or shard.slot_bytes + sizes[after.blocks[0]] > limit


def plan(profiles, budget, **options):
    figures = {"loose_bytes": 10, "resident_bytes": 500, "step_bytes": 20, **options}
    return make_plan(profiles, budget_bytes=budget, **figures)


def test_a_trial_is_resident_as_soon_as_all_of_it_fits_and_spilled_before():
    profiles = [block(40, work=5, saved=7)] * 4
    need = 500 + 20 + 4 * 7 + 5
    assert plan(profiles, need).resident
    assert plan(profiles, need).need_bytes == need
    assert not plan(profiles, need - 1).resident
    assert not plan(profiles, need, may_be_resident=False).resident


def test_two_shards_fit_beside_the_step_where_the_budget_allows_and_one_always():
    profiles = [block(40, work=5)] * 4
    roomy = plan(profiles, 10 + 20 + 5 + 2 * 80)
    assert [s.blocks for s in roomy.shards] == [(0, 1), (2, 3)]
    tight = plan(profiles, 10 + 20 + 5 + 40)
    assert [s.blocks for s in tight.shards] == [(0,), (1,), (2,), (3,)]
    assert tight.need_bytes == 75
    with pytest.raises(BudgetError, match=r"block b40 needs 75 B: 40 B of weights, 5 B to compute, 30 B held.*74 B"):
        plan(profiles, 74)


def test_a_model_without_blocks_is_resident_or_refused():
    assert plan([], 520).resident
    with pytest.raises(BudgetError, match="no block that could be spilled"):
        plan([], 519)


def test_plans_are_keyed_by_architecture_not_by_hyperparameters():
    import torch

    x = torch.zeros(2, 16, dtype=torch.long)
    base = plan_key(gpt(0.1), torch.optim.SGD(gpt().parameters(), lr=0.1), x)
    assert plan_key(gpt(0.3), torch.optim.SGD(gpt().parameters(), lr=0.5), x) == base
    assert plan_key(gpt(0.0), torch.optim.SGD(gpt().parameters(), lr=0.1), x) != base
    assert plan_key(gpt(0.1), torch.optim.SGD(gpt().parameters(), lr=0.1, momentum=0.9), x) != base
    assert plan_key(gpt(0.1), torch.optim.AdamW(gpt().parameters()), x) != base
    assert plan_key(gpt(0.1).double(), torch.optim.SGD(gpt().parameters(), lr=0.1), x) != base
    assert plan_key(gpt(0.1), torch.optim.SGD(gpt().parameters(), lr=0.1), x[:1]) != base
    frozen = gpt(0.1)
    frozen.bytes.requires_grad_(False)
    assert plan_key(frozen, torch.optim.SGD(gpt().parameters(), lr=0.1), x) != base
    first, second = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.GELU())
    assert plan_key(first, None, x) != plan_key(second, None, x)


def test_a_pilot_on_a_batch_covers_smaller_ones():
    import torch

    measured = (((4, 16), torch.long),)
    assert covers(measured, (((4, 8), torch.long),))
    assert not covers(measured, (((5, 16), torch.long),))
    assert not covers(measured, (((4, 16), torch.int),))
    assert not covers(measured, (((4, 16, 1), torch.long),))
