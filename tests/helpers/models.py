"""Models small enough to train in a test, with weights that outweigh their activations; their batches, and budgets."""

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


# ---- six layers and a head ----

WIDTH = 32
BUDGETS = {"few blocks": 60 << 10, "spilled": 130 << 10, "three shards": 190 << 10, "resident": 8 << 20}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.set_up()

    def set_up(self):
        pass

    def forward(self, x, *_):
        return x + self.down(torch.tanh(self.up(x)))


class Dropping(Layer):
    def set_up(self):
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return super().forward(self.drop(x))


class Net(nn.Module):
    def __init__(self, kind=Layer, depth=6):
        super().__init__()
        self.layers = nn.ModuleList([kind() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, 8)
        self.set_up()

    def set_up(self):
        pass

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Guided(Net):
    """Six blocks, of which the first two are an energy."""

    def slope(self, x, **options):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.layers[1](self.layers[0](x)).square().mean()
            return torch.autograd.grad(energy, x, **options)[0]

    def rest(self, x):
        for layer in self.layers[2:]:
            x = layer(x)
        return self.head(x)


class TrainsWithin(Guided):
    """Some weights get their gradients in the forward."""

    def forward(self, x):
        y = self.layers[1](self.layers[0](x))
        if torch.is_grad_enabled():
            y.square().mean().backward()
        return self.rest(y.detach())


# ---- a head tied to the embedding ----

VOCABULARY, POSITIONS = 32, 6
TIED_BUDGETS = {"spilled": 200 << 10, "resident": 8 << 20}


class Shift(nn.Module):
    """Its operator keeps no tensor for the backward."""

    def __init__(self, width):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x + self.bias


class TiedLayer(nn.Module):
    def __init__(self, width, residual):
        super().__init__()
        self.residual = residual
        self.shift = Shift(width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.batch_norm = nn.BatchNorm1d(2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        h = nn.functional.gelu(self.up(self.norm(self.shift(x))))
        h = self.batch_norm(h.flatten(0, 1)).view_as(h)
        y = self.drop(self.down(h))
        return x + y if self.residual else y


class TiedNet(nn.Module):
    """Six blocks: an embedding, four layers, a head tied to the embedding; and a weight outside of them all."""

    def __init__(self, depth=4, width=WIDTH, sparse=False, residual=True):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, sparse=sparse)
        self.layers = nn.ModuleList([TiedLayer(width, residual) for _ in range(depth)])
        self.head = nn.Linear(width, VOCABULARY)
        if not sparse:
            self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x):
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h) * self.scale


def batch():
    return torch.randint(0, VOCABULARY, (4, POSITIONS)), torch.randint(0, VOCABULARY, (4 * POSITIONS,))


def loss_on(model, x, y):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y)
