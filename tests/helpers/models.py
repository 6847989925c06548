"""Models small enough to train in a test, with weights that outweigh their activations."""

import torch
from torch import nn

from hydra_tune.demo.gpt import GPT


def gpt(dropout=0.1, depth=6):
    return GPT(depth=depth, width=128, heads=4, context=16, dropout=dropout)


def mlp():
    layers = []
    for _ in range(8):
        layers += [nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def hf_gpt2():
    """Tied weights: the head is the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=6, n_embd=128, n_head=4, vocab_size=128, n_positions=32)
    return GPT2LMHeadModel(config)


def hf_vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=512, image_size=16,
        patch_size=8, num_labels=10, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return ViTForImageClassification(config)


def bytes_batch():
    return torch.randint(0, 128, (2, 16)), torch.randint(0, 128, (2, 16))


def vector_batch():
    return torch.randn(4, 128), torch.randint(0, 10, (4,))


def image_batch():
    return torch.randn(2, 3, 16, 16), torch.randint(0, 10, (2,))


def loss_of(model, x, y):
    if hasattr(model, "config"):
        return model(x, labels=y).loss
    logits = model(x)
    return nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())


CASES = {
    "gpt": (gpt, bytes_batch),
    "mlp": (mlp, vector_batch),
    "hf_gpt2": (hf_gpt2, bytes_batch),
    "hf_vit": (hf_vit, image_batch),
}
