"""peft's adapters over one shared base: eight side by side, spilled, equal plain PyTorch and each one alone."""

import pytest
import torch

import hydra_tune
from adapters import as_it_is, in_pool, side_by_side
from comparison import assert_same

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:::peft", "ignore::FutureWarning")

SIZES = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 4, "use_cache": False,
}  # fmt: skip
TARGETS = ["q_proj", "v_proj"]


def load_base(dtype=torch.float32, tied=False):
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config).to(dtype)


def plain_base(**options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return load_base(**options).requires_grad_(False)


BASE_BYTES = sum(p.nbytes for p in load_base().parameters())


def trained(base, config, seed, prepare, steps=3, adds=()):
    """Losses, and all that was trained. `adds` are further adapters of the model; the last one is active."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, config).train()
    for number, more in enumerate(adds):
        model.add_adapter(f"more{number}", more)
        model.set_adapter(f"more{number}")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = prepare(model, optimizer)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 64, (1, 8))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def lora(rank=4, **options):
    return peft.LoraConfig(r=rank, target_modules=TARGETS, lora_dropout=0.1, task_type="CAUSAL_LM", **options)


def in_pool_of(pool, seed, config, **options):
    def job():
        kinds = {key: options[key] for key in ("dtype", "tied") if key in options}
        rest = {key: value for key, value in options.items() if key not in kinds}
        return trained(hydra_tune.share(load_base, **kinds), config, seed, hydra_tune.prepare, **rest)

    return in_pool(pool, seed, job)


@pytest.mark.proof
def test_eight_ranks_over_a_base_four_times_the_device():
    ranks = range(2, 17, 2)
    with hydra_tune.ShardPool(["cpu"], BASE_BYTES // 4, seed=0) as pool:
        found = side_by_side(*(in_pool_of(pool, n, lora(rank)) for n, rank in enumerate(ranks)))
        assert not any(trial["resident"] for trial in pool.report()["trials"])
        assert all(None not in trial["shared_weights"] for trial in pool.report()["trials"])
    for n, rank in enumerate(ranks):
        assert_same(found[n], trained(plain_base(), lora(rank), n, as_it_is))
        with hydra_tune.ShardPool(["cpu"], BASE_BYTES // 4, seed=0) as pool:
            assert_same(found[n], in_pool_of(pool, n, lora(rank))())


CASES = {
    "DoRA": (lora(use_dora=True), {}),
    "IA3": (
        peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"],
                       task_type="CAUSAL_LM"), {}),
    "prompt tuning": (peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), {}),
    # its first layer is given no tensor that requires a gradient, but a cache with some
    "prefix tuning": (peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), {}),
    "modules to save": (lora(modules_to_save=["lm_head"]), {}),
    "two adapters": (lora(2), {"adds": [lora(4)]}),
    "a tied head": (lora(), {"tied": True}),
    "a base in bf16": (lora(), {"dtype": torch.bfloat16}),
    "all linear layers": (peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"), {}),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("budget", [BASE_BYTES // 3, 8 * BASE_BYTES], ids=["spilled", "resident"])
@pytest.mark.parametrize("name", CASES)
def test_any_adapter_trains_as_in_plain_pytorch(name, budget):
    config, options = CASES[name]
    with hydra_tune.ShardPool(["cpu"], budget, seed=0) as pool:
        found = side_by_side(*(in_pool_of(pool, n, config, **options) for n in range(2)))
    for n in range(2):
        kinds = {key: options[key] for key in ("dtype", "tied") if key in options}
        rest = {key: value for key, value in options.items() if key not in kinds}
        assert_same(found[n], trained(plain_base(**kinds), config, n, as_it_is, **rest))
