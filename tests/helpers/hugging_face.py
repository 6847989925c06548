"""Small models, data and trainers of Hugging Face's libraries, made from configurations: nothing is downloaded. Their
cache of keys is off, as the Trainer of transformers 5 and the pool have it: it decides the last bit of attention."""

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY = 100
TOKENS = torch.randint(0, VOCABULARY, (24, 8), generator=torch.Generator().manual_seed(1))
DATA = [{"input_ids": tokens, "labels": tokens} for tokens in TOKENS]
SPILLED, RESIDENT = 1_000_000, 100_000_000  # budgets, of which the smaller one holds half of a GPT's weights

transformers.utils.logging.disable_progress_bar()


def gpt(layers=8, width=64):
    """2.0 MB of weights."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_head=2, n_embd=width, vocab_size=VOCABULARY, n_positions=16,
                        bos_token_id=0, eos_token_id=1, use_cache=False)  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(layers=8, **options):
    """13 MB of weights."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
                         eos_token_id=1, bos_token_id=2, use_cache=False, **options)  # fmt: skip
    return LlamaForCausalLM(config)


def arguments(folder, kind=TrainingArguments, **options):
    defaults = {"report_to": [], "use_cpu": True, "per_device_train_batch_size": 2, "max_steps": 4, "logging_steps": 1,
                "save_strategy": "no", "disable_tqdm": True, "seed": 0, "learning_rate": 1e-3}  # fmt: skip
    return kind(str(folder), **{**defaults, **options})


class HalfTrainer(Trainer):
    """fp16 with a GradScaler on the CPU, which accelerate would leave out."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.state._mixed_precision = "fp16"
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def result_of(trainer):
    """Its losses, and all weights."""
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return losses, {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def equal(a, b):
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(a[1][name], b[1][name]) for name in a[1])
