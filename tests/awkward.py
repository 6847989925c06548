"""Models written by hand, each for one thing that user code does and a cut by module may get wrong."""

import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

WIDTH = 64
CLASSES = 10


class Residual(nn.Module):
    """A pre-norm residual layer; 66 KB of weights."""

    def __init__(self, width=WIDTH, dropout=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.net = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.net(self.norm(x)))


class Attention(nn.Module):
    """A pre-norm layer of attention and a residual MLP; 132 KB of weights."""

    def __init__(self, width=WIDTH, heads=4, dropout=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        self.mlp = Residual(width, dropout)

    def forward(self, x, mask=None):
        h = self.norm(x)
        return self.mlp(x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0])


class Classifier(nn.Module):
    """A stem, a stack of layers, a head: the shape most models below vary."""

    def __init__(self, layers=()):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# ---- weights and parameters in unusual places --------------------------------------------------------


class ClassToken(nn.Module):
    """A class token and positions on the root; in each layer a scale that belongs to none of its children."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))
            self.inner = Attention()

        def forward(self, x):
            return x + self.scale * self.inner(x)

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.position = nn.Parameter(torch.randn(1, 9, WIDTH) * 0.02)
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.layers = nn.ModuleList([self.Scaled() for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position[:, : x.shape[1] + 1]
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


class TiedByFunction(nn.Module):
    """The head is the embedding's weight, read without calling the module that owns it."""

    def __init__(self, vocabulary=128):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList([Attention() for _ in range(4)])

    def forward(self, x):
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h)
        return F.linear(h, self.embedding.weight)


class TiedParameter(TiedByFunction):
    """The same, by the usual assignment."""

    def __init__(self, vocabulary=128):
        super().__init__(vocabulary)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


class FrozenPrefix(Classifier):
    def __init__(self):
        super().__init__([Residual() for _ in range(6)])
        for module in (self.stem, *self.layers[:3]):
            module.requires_grad_(False)


class LowRank(Classifier):
    """Adapters beside frozen weights, as LoRA trains them."""

    class Adapted(nn.Module):
        def __init__(self, rank=4):
            super().__init__()
            self.base = Residual().requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)

        def forward(self, x):
            return self.base(x) + 0.5 * self.up(self.down(x))

    def __init__(self):
        super().__init__([self.Adapted() for _ in range(6)])


class WeightNorm(Classifier):
    def __init__(self):
        super().__init__([nn.Sequential(weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(8)])


class SpectralNorm(Classifier):
    """Each forward takes one more step of the power iteration, in buffers."""

    def __init__(self):
        super().__init__([nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(8)])


class Pruned(Classifier):
    """The weight is an attribute that a hook makes anew before each call, from a parameter and a mask."""

    def __init__(self):
        super().__init__([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)])
        for layer in self.layers:
            prune.random_unstructured(layer[0], "weight", 0.5)


class MomentumContrast(nn.Module):
    """A teacher that follows the student in each forward, in place, and a queue of its outputs in a buffer."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = (Classifier([Residual() for _ in range(3)]) for _ in range(2))
        self.teacher.requires_grad_(False)
        self.register_buffer("queue", torch.randn(8, CLASSES))

    def forward(self, x):
        with torch.no_grad():
            for p, q in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                q.lerp_(p, 0.1)
            key = self.teacher(x)
        logits = self.student(x) @ torch.cat([key, self.queue]).T
        self.queue.copy_(torch.cat([key, self.queue])[: len(self.queue)])
        return logits


class Generated(nn.Module):
    """A hypernetwork: one block makes the weights of the next."""

    def __init__(self):
        super().__init__()
        self.code = nn.Parameter(torch.randn(4, 8))
        self.makers = nn.ModuleList([nn.Linear(8, WIDTH * WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for maker, code in zip(self.makers, self.code, strict=True):
            x = x + torch.tanh(F.linear(x, maker(code).view(WIDTH, WIDTH)))
        return self.head(x)


class RootBuffer(nn.Module):
    """A buffer of the root, a running mean, that its own forward updates and its blocks read as an argument."""

    class Conditioned(Residual):
        def forward(self, x, shift):
            return super().forward(x + shift)

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.layers = nn.ModuleList([self.Conditioned() for _ in range(6)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        for layer in self.layers:
            x = layer(x, self.mean)
        return self.head(x)


# ---- the order and number of calls -------------------------------------------------------------------


class Repeated(nn.Module):
    """Each of four layers runs twice, as in a universal transformer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention() for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return self.head(x.mean(1))


class LayerDrop(Classifier):
    """Stochastic depth: in some steps some layers are not called at all."""

    def __init__(self):
        super().__init__([Residual() for _ in range(8)])

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            if not self.training or torch.rand(()) > 0.4:
                x = layer(x)
        return self.head(x)


class Shuffled(Classifier):
    """The layers run in another order in each step."""

    def __init__(self):
        super().__init__([Residual() for _ in range(6)])

    def forward(self, x):
        x = self.stem(x)
        for i in torch.randperm(len(self.layers)).tolist():
            x = self.layers[i](x)
        return self.head(x)


class Experts(nn.Module):
    """Hard routing: an expert that no token chose is not called, and the others see batches of any size."""

    def __init__(self):
        super().__init__()
        self.routers = nn.ModuleList([nn.Linear(WIDTH, 4) for _ in range(2)])
        self.experts = nn.ModuleList([nn.ModuleList([Residual() for _ in range(4)]) for _ in range(2)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for router, experts in zip(self.routers, self.experts, strict=True):
            share, choice = router(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for i, expert in enumerate(experts):
                rows = (choice == i).nonzero().squeeze(-1)
                if len(rows):
                    out = out.index_add(0, rows, expert(x[rows]) * share[rows, None])
            x = out
        return self.head(x)


class Siamese(Classifier):
    """Called twice before one backward, as contrastive losses do."""

    def __init__(self):
        super().__init__([Residual() for _ in range(6)])


# ---- what passes between blocks ----------------------------------------------------------------------


@dataclass
class State:
    hidden: torch.Tensor
    mask: torch.Tensor | None
    depth: int


class Structured(nn.Module):
    """Blocks take and return an object that holds tensors."""

    class Layer(Attention):
        def forward(self, state):
            return State(super().forward(state.hidden, state.mask), state.mask, state.depth + 1)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer() for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        state = State(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1), 0)
        for layer in self.layers:
            state = layer(state)
        return self.head(state.hidden.mean(1))


class Nested(nn.Module):
    """Nested dicts, tuples and None, in and out; some tensors pass through a block untouched."""

    class Layer(Attention):
        def forward(self, inputs, scale=None, *, extra):
            h = super().forward(inputs["h"], extra["masks"][0])
            h = h if scale is None else h * scale
            return {"h": h, "seen": [inputs["h"], None]}, None, {"masks": extra["masks"], "more": {"mean": h.mean(1)}}

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer() for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        inputs, scale, extra = {"h": x}, None, {"masks": (mask, None)}
        for layer in self.layers:
            inputs, scale, extra = layer(inputs, scale, extra=extra)
        return self.head(inputs["h"].mean(1) + extra["more"]["mean"] + inputs["seen"][0].mean(1))


class Halting(nn.Module):
    """Integer and bool tensors between blocks: positions that have halted keep their value."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Residual()
            self.halt = nn.Linear(WIDTH, 1)

        def forward(self, x, running, steps):
            x = torch.where(running[..., None], self.inner(x), x)
            return x, running & (self.halt(x).squeeze(-1) < 0.3), steps + running.long()

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer() for _ in range(6)])
        self.count = nn.Embedding(8, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        running, steps = torch.ones_like(x[..., 0], dtype=torch.bool), torch.zeros_like(x[..., 0], dtype=torch.long)
        for layer in self.layers:
            x, running, steps = layer(x, running, steps)
        return self.head((x + self.count(steps)).mean(1))


class Reversible(nn.Module):
    """Blocks return views of what they computed, and the next take them apart again."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = (
                nn.Sequential(nn.Linear(half, 96), nn.GELU(), nn.Linear(96, half)) for half in [WIDTH // 2] * 2
            )

        def forward(self, a, b):
            a = a + self.f(b)
            b = b + self.g(a)
            return torch.cat([a, b], -1).chunk(2, -1)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer() for _ in range(6)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        a, b = x.chunk(2, -1)
        for layer in self.layers:
            a, b = layer(a, b)
        return self.head(torch.cat([a, b], -1))


class HiddenLosses(nn.Module):
    """Deep supervision: every hidden state goes to the loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Residual() for _ in range(6)])
        self.heads = nn.ModuleList([nn.Linear(WIDTH, CLASSES) for _ in range(6)])

    def forward(self, x):
        outputs, hidden = [], []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x)
            hidden.append(x)
            outputs.append(head(x))
        return outputs, hidden


class Dense(nn.Module):
    """Every layer reads all layers before it (DenseNet)."""

    def __init__(self, depth=6, width=32):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH + i * width, 96), nn.ReLU(), nn.Linear(96, width)) for i in range(depth)]
        )
        self.head = nn.Linear(WIDTH + depth * width, CLASSES)

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, -1)))
        return self.head(torch.cat(features, -1))


class Packed(nn.Module):
    """Sequences of several lengths go from GRU to GRU packed."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList([nn.GRU(WIDTH, WIDTH // 2, bidirectional=True) for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.embedding(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            packed, _ = layer(packed)
        h, _ = pad_packed_sequence(packed, batch_first=True)
        return self.head(h.mean(1))


# ---- operators in place, and side effects ------------------------------------------------------------


def convolution(channels_in, channels_out, stride=1):
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class Convolutions(nn.Sequential):
    """Batch normalisation, and an in-place ReLU within each block."""

    def __init__(self):
        super().__init__(
            convolution(3, 32),
            convolution(32, 64, 2),
            *(convolution(64, 64) for _ in range(4)),
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, CLASSES)),
        )


class FlatConvolutions(nn.Sequential):
    """The same in one flat Sequential: each in-place ReLU is a module of its own, without weights."""

    def __init__(self):
        super().__init__(*(m for layer in Convolutions() for m in layer))


class InPlaceFirst(Classifier):
    """A layer's first operator changes its input, which is the output of the layer before."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU(inplace=True)
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.relu(x)
            return x + self.second(self.relu(self.first(x)))

    def __init__(self):
        super().__init__([self.Layer() for _ in range(6)])


class InPlaceBetween(Classifier):
    """The root changes outputs of its blocks in place: `x += y`, and slices of `x`."""

    def __init__(self):
        super().__init__([nn.Linear(WIDTH, WIDTH) for _ in range(8)])
        self.position = nn.Parameter(torch.randn(WIDTH) * 0.02)

    def forward(self, x):
        x = self.stem(x)
        x += self.position
        for layer in self.layers:
            skip = x
            x = layer(x)
            x.mul_(0.5)
            x += skip
            x = F.relu(x)
        out = self.head(x)
        out[:, 0] = 0
        return out


class Checkpointed(Classifier):
    """Layers that recompute themselves, with `torch.utils.checkpoint`."""

    class Layer(nn.Module):
        def __init__(self, *, use_reentrant):
            super().__init__()
            self.inner = Residual()
            self.use_reentrant = use_reentrant

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)

    def __init__(self, *, use_reentrant):
        super().__init__([self.Layer(use_reentrant=use_reentrant) for _ in range(6)])


class CheckpointedOutside(Classifier):
    """Checkpoints around the blocks, as `gradient_checkpointing_enable` makes them."""

    def __init__(self):
        super().__init__([Residual() for _ in range(6)])

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class AuxiliaryLoss(Classifier):
    """Each layer keeps a part of the loss in an attribute, which the loss function reads."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Residual()
            self.gate = nn.Linear(WIDTH, 4)
            self.aux_loss = None

        def forward(self, x):
            share = self.gate(x).softmax(-1)
            self.aux_loss = share.mean(0).square().sum()
            return self.inner(x) * share.max(-1, keepdim=True).values

    def __init__(self):
        super().__init__([self.Layer() for _ in range(5)])


class Counting(Classifier):
    """Layers count their calls in a plain attribute and act upon it: every second call is scaled."""

    class Layer(Residual):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (1 + 0.1 * (self.calls % 2))

    def __init__(self):
        super().__init__([self.Layer() for _ in range(6)])


class PythonRandom(Classifier):
    """Layers that draw from Python's random state, and not from PyTorch's."""

    class Layer(Residual):
        def forward(self, x):
            return super().forward(x) * (0.5 + random.random())

    def __init__(self):
        super().__init__([self.Layer() for _ in range(6)])


class Recorded(Classifier):
    """Hooks within the layers record activations, which the root adds up, as Hugging Face's router losses do."""

    def __init__(self):
        super().__init__([Residual() for _ in range(6)])
        self.recorded = []
        for layer in self.layers:
            layer.net[1].register_forward_hook(lambda module, args, output: self.recorded.append(output))

    def forward(self, x):
        self.recorded.clear()
        logits = super().forward(x)
        recorded = [h.mean() for h in self.recorded]
        self.recorded.clear()
        return logits + torch.stack(recorded).sum()


class Hooked(Classifier):
    """Forward hooks on the layers change what they return; a hook on the output changes a gradient."""

    def __init__(self):
        super().__init__([Residual() for _ in range(6)])
        for layer in self.layers:
            layer.register_forward_hook(lambda module, args, output: output * 0.9)
            layer.register_full_backward_hook(lambda module, grads_in, grads_out: tuple(g * 1.1 for g in grads_in))


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Adversarial(nn.Module):
    """An autograd function of one's own: the domain head trains the features against itself."""

    def __init__(self):
        super().__init__()
        self.features = nn.ModuleList([Residual() for _ in range(5)])
        self.label = nn.Sequential(Residual(), nn.Linear(WIDTH, CLASSES))
        self.domain = nn.Sequential(Residual(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x):
        for layer in self.features:
            x = layer(x)
        return self.label(x), self.domain(Reversal.apply(x))


# ---- other shapes ------------------------------------------------------------------------------------


class ResidualConvolution(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first, self.second = convolution(channels, channels), nn.Conv2d(channels, channels, 3, 1, 1)

    def forward(self, x):
        return F.relu(x + self.second(self.first(x)))


class UNet(nn.Module):
    """Skip connections over residual blocks: what is skipped is used twice by the block below, too."""

    def __init__(self, channels=24, depth=3):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, 1, 1)
        self.down = nn.ModuleList([ResidualConvolution(channels) for _ in range(depth)])
        self.middle = ResidualConvolution(channels)
        self.join = nn.ModuleList([nn.Conv2d(2 * channels, channels, 1) for _ in range(depth)])
        self.up = nn.ModuleList([ResidualConvolution(channels) for _ in range(depth)])
        self.head = nn.Conv2d(channels, 3, 1)

    def forward(self, x):
        x, skips = self.stem(x), []
        for block in self.down:
            skips.append(x)
            x = F.avg_pool2d(block(x), 2)
        x = self.middle(x)
        for join, block in zip(self.join, self.up, strict=True):
            x = join(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
            x = block(x)
        return self.head(x)


class Variational(nn.Module):
    """An autoencoder that draws between its blocks."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([Residual() for _ in range(3)])
        self.mean, self.log_variance = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)
        self.decoder = nn.ModuleList([nn.Linear(32, WIDTH), *(Residual() for _ in range(3))])

    def forward(self, x):
        for layer in self.encoder:
            x = layer(x)
        mean, log_variance = self.mean(x), self.log_variance(x)
        x = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        for layer in self.decoder:
            x = layer(x)
        return x, mean, log_variance


class Fourier(Classifier):
    """Complex numbers within and between blocks (a Fourier neural operator)."""

    class Layer(nn.Module):
        def __init__(self, modes=5, width=32):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(modes, width, width, 2) / width)
            self.linear = nn.Linear(width, width)

        def forward(self, spectrum):
            spectrum = torch.einsum("bmi,mio->bmo", spectrum, torch.view_as_complex(self.weight))
            x = torch.fft.irfft(spectrum, dim=1)
            return torch.fft.rfft(F.gelu(x + self.linear(x)).float(), dim=1)

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, 32)
        self.layers = nn.ModuleList([self.Layer() for _ in range(4)])
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x):
        x = torch.fft.rfft(self.stem(x).float(), dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.fft.irfft(x, dim=1).mean(1))


class Graph(nn.Module):
    """Message passing: every layer is given the edges, and adds up by index."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x, edges):
            messages = F.relu(self.message(torch.cat([x[edges[0]], x[edges[1]]], -1)))
            gathered = torch.zeros_like(messages[:1]).expand(len(x), -1).index_add(0, edges[1], messages)
            return F.relu(self.update(torch.cat([x, gathered], -1)))

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList([self.Layer() for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, kinds, edges):
        x = self.embedding(kinds)
        for layer in self.layers:
            x = layer(x, edges)
        return self.head(x)


class Recommender(nn.Module):
    """Bags of embeddings, their products, and a deep part (DLRM)."""

    def __init__(self, tables=6):
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(100, 32, mode="sum") for _ in range(tables)])
        self.dense = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 32))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(32 + pairs, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, dense, bags):
        dense = self.dense(dense)
        features = torch.stack([dense, *(table(bag) for table, bag in zip(self.tables, bags, strict=True))], 1)
        rows, columns = torch.tril_indices(features.shape[1], features.shape[1], -1)
        products = torch.bmm(features, features.mT)[:, rows, columns]
        return self.top(torch.cat([dense, products], -1)).squeeze(-1)


class Recurrent(nn.Module):
    """An LSTM of several layers with dropout between them, then one a block."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 48)
        self.first = nn.LSTM(48, 48, num_layers=2, dropout=0.2, batch_first=True)
        self.layers = nn.ModuleList([nn.LSTM(48, 48, batch_first=True) for _ in range(4)])
        self.head = nn.Linear(48, 64)

    def forward(self, x):
        h, state = self.first(self.embedding(x))
        state = tuple(s[-1:].contiguous() for s in state)
        for lstm in self.layers:
            h, state = lstm(h, state)
        return self.head(h)


class Cells(nn.Module):
    """Recurrent cells in a loop over time: each block runs once a position."""

    def __init__(self, depth=3):
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.cells = nn.ModuleList([nn.GRUCell(WIDTH, WIDTH) for _ in range(depth)])
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, x):
        states = [torch.zeros(len(x), WIDTH, device=x.device) for _ in self.cells]
        outputs = []
        for h in self.embedding(x).unbind(1):
            for i, cell in enumerate(self.cells):
                states[i] = h = cell(h, states[i])
            outputs.append(h)
        return self.head(torch.stack(outputs, 1))


class Translator(nn.Module):
    """`nn.Transformer`, whose decoder layers all read the encoder's output."""

    def __init__(self, vocabulary=96):
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, 48), nn.Embedding(vocabulary, 48)
        self.transformer = nn.Transformer(48, 4, 3, 3, 128, batch_first=True)
        self.head = nn.Linear(48, vocabulary)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True))


class Encoder(nn.Module):
    """`nn.TransformerEncoder` as it comes, with a padding mask."""

    def __init__(self, vocabulary=128):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x), src_key_padding_mask=x == 0).mean(1))
