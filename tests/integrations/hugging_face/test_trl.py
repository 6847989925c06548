"""TRL's trainers over a pool, by `HydraTrainerCallback` alone: two side by side, each equal to itself without it."""

import optuna
import pytest
import torch

import hydra_tune
from hydra_tune.blocks.root import trial_of

pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast, TrainerCallback  # noqa: E402

from hugging_face import arguments, equal, llama, result_of  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:::transformers"),
    pytest.mark.filterwarnings("ignore:::trl"),
    pytest.mark.filterwarnings("ignore:::peft"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*script.* is deprecated:DeprecationWarning"),
]
TEXTS = [" ".join(f"w{(i * 7 + j * (i + 3)) % 90}" for j in range(6 + i % 5)) for i in range(16)]
LAYERS = 4  # 6.6 MB of weights
SPILLED, RESIDENT = 6_000_000, 400_000_000  # budgets; TRL's loss takes up to 4.5 MB a call


@pytest.fixture(autouse=True)
def _quiet():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    yield
    torch.set_num_threads(before)


def tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(90))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def pairs():
    rows = [(text[:8], text[8:], TEXTS[-1 - i][8:]) for i, text in enumerate(TEXTS)]
    return datasets.Dataset.from_dict(dict(zip(("prompt", "chosen", "rejected"), zip(*rows, strict=True), strict=True)))


def lora():
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)


def sft(folder, callbacks, peft_config=None, **options):
    args = arguments(folder, trl.SFTConfig, max_length=32, **options)
    data = datasets.Dataset.from_dict({"text": TEXTS})
    return trl.SFTTrainer(llama(LAYERS), args, train_dataset=data, processing_class=tokenizer(),
                          peft_config=peft_config, callbacks=callbacks)  # fmt: skip


def dpo(folder, callbacks, peft_config=None, **options):
    args = arguments(folder, trl.DPOConfig, max_length=32, **options)
    reference = None if peft_config else llama(LAYERS)
    return trl.DPOTrainer(llama(LAYERS), ref_model=reference, args=args, train_dataset=pairs(),
                          processing_class=tokenizer(), peft_config=peft_config, callbacks=callbacks)  # fmt: skip


def reward(folder, callbacks):
    config = llama(LAYERS).config
    config.num_labels = 1
    torch.manual_seed(0)
    args = arguments(folder, trl.RewardConfig, max_length=32)
    return trl.RewardTrainer(LlamaForSequenceClassification(config), args, train_dataset=pairs(),
                             processing_class=tokenizer(), callbacks=callbacks)  # fmt: skip


def grpo(folder, callbacks):
    """With a reference model, which TRL loads by its name."""
    model = llama(LAYERS)
    model.save_pretrained(folder / "base")
    model.config._name_or_path = str(folder / "base")
    args = arguments(folder, trl.GRPOConfig, max_completion_length=8, num_generations=2, beta=0.04, max_steps=2)
    return trl.GRPOTrainer(model, reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
                           args=args, train_dataset=pairs().select_columns(["prompt"]), processing_class=tokenizer(),
                           callbacks=callbacks)  # fmt: skip


MAKES = {
    "SFT": sft,
    "SFT with LoRA": lambda folder, callbacks: sft(folder, callbacks, lora()),
    "SFT with LoRA, bf16 and accumulation": lambda folder, callbacks: sft(
        folder, callbacks, lora(), bf16=True, gradient_accumulation_steps=2
    ),
    "DPO with a reference model": dpo,
    "DPO with LoRA": lambda folder, callbacks: dpo(folder, callbacks, lora()),
    "reward": reward,
    "GRPO": grpo,
}
MAIN_ROAD = ("SFT with LoRA", "DPO with a reference model")


class Looks(TrainerCallback):
    """Whether the trainer's models are prepared, while it trains."""

    def __init__(self, trainer):
        self.models = [trainer.model, getattr(trainer, "ref_model", None)]
        self.prepared = set()

    def on_step_end(self, *_, **__):
        self.prepared |= {trial_of(model) is not None for model in self.models if model is not None}


CASES = [
    pytest.param(kind, budget, id=f"{kind}, {'spilled' if budget == SPILLED else 'resident'}",
                 marks=[] if budget == SPILLED and kind in MAIN_ROAD else pytest.mark.proof)
    for kind in MAKES for budget in (SPILLED, RESIDENT)
]  # fmt: skip


@pytest.mark.parametrize(("kind", "budget"), CASES)
def test_two_side_by_side(tmp_path, kind, budget):
    def trained(folder, callbacks):
        folder.mkdir(exist_ok=True)
        torch.manual_seed(0)
        trainer = MAKES[kind](folder, callbacks)
        looks = Looks(trainer)
        trainer.add_callback(looks)
        trainer.train()
        assert looks.prepared == ({True} if callbacks else {False}), "a reference model, too"
        assert trial_of(trainer.model) is None
        return result_of(trainer)

    alone, together = trained(tmp_path / "alone", []), {}

    def objective(trial):
        together[trial.number] = trained(tmp_path / str(trial.number), [hydra_tune.HydraTrainerCallback()])
        return 0.0

    study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        hydra_tune.HydraTrialRunner(pool, 2).optimize(study, objective, n_trials=2)
        assert pool.devices[0].peak_bytes <= budget
    assert [equal(together[number], alone) for number in range(2)] == [True, True]
    assert len(alone[0]) >= 2
