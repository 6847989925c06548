"""Random module trees, of rows or of maps: each part maps a tensor to one of the same shape."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 24  # of a row; a map has as many numbers
CHANNELS, SIDE = 6, 2


# ---- around a part ----


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Twice(nn.Module):
    """Calls its part two times."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(self.inner(x))


class Scaled(nn.Module):
    """Has a weight of its own beside its part."""

    def __init__(self, shape, inner):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * self.scale


class Doubling(nn.Module):
    """Changes its input in place."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.mul_(2))


class Counted(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) / self.calls


class Casts(nn.Module):
    """To a dtype of its own."""

    def __init__(self, dtype, inner):
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x):
        with torch.autocast("cpu", dtype=self.dtype):
            return self.inner(x).float()


class Checkpointed(nn.Module):
    def __init__(self, reentrant, inner):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


# ---- leaves ----


class Reached(nn.Module):
    """Uses the weight of its part twice, once without calling it."""

    def __init__(self, inner, function):
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, x):
        return self.function(self.inner(x), self.inner.weight)


def linear(width):
    return nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH))


class ChannelsLast(nn.Module):
    """Normalises channels, as they lie in memory then."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS)

    def forward(self, x):
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Gated(nn.Module):
    """By numbers that each channel has one of."""

    def __init__(self, width):
        super().__init__()
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(CHANNELS, width, 1), nn.SiLU())
        self.excite = nn.Conv2d(width, CHANNELS, 1)

    def forward(self, x):
        return x * self.excite(self.squeeze(x)).sigmoid()


def convolutions(between, width):
    return nn.Sequential(
        nn.Conv2d(CHANNELS, between, 3, padding=1), nn.BatchNorm2d(between), nn.Conv2d(between, CHANNELS, 1)
    )


@dataclass(frozen=True)
class Kind:
    """Of tensors, `shape` of one item of a batch; and which parts take them."""

    name: str
    shape: tuple[int, ...]
    scales: tuple[int, ...]  # the shape of what can be multiplied with them
    mixing: Callable[[], nn.Module]
    leaves: dict[str, Callable[[int], nn.Module]]

    def _repr_pretty_(self, printer, cycle):
        """To hypothesis, when it prints a case."""
        printer.text(self.name)


ROWS = Kind(
    "ROWS",
    (WIDTH,),
    (WIDTH,),
    lambda: nn.Linear(WIDTH, WIDTH),
    {
        "linear": linear,
        "norm": lambda width: nn.LayerNorm(WIDTH),
        "batch norm": lambda width: nn.BatchNorm1d(WIDTH),
        "dropout": lambda width: nn.Dropout(0.3),
        "in place": lambda width: nn.ReLU(inplace=True),
        "gelu": lambda width: nn.GELU(),
        "reached": lambda width: Reached(nn.Linear(WIDTH, WIDTH), functional.linear),
    },
)
MAPS = Kind(
    "MAPS",
    (CHANNELS, SIDE, SIDE),
    (CHANNELS, 1, 1),
    lambda: nn.Conv2d(CHANNELS, CHANNELS, 1),
    {
        "convolution": lambda width: convolutions(width, width),
        "one channel": partial(convolutions, 1),
        "depthwise": lambda width: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS),
        "transposed": lambda width: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1),
        "group norm": lambda width: nn.GroupNorm(3, CHANNELS),
        "instance norm": lambda width: nn.InstanceNorm2d(CHANNELS, affine=True),
        "batch norm": lambda width: nn.BatchNorm2d(CHANNELS),
        "channels last": lambda width: ChannelsLast(),
        "gated": Gated,
        "resized": lambda width: nn.Sequential(nn.AvgPool2d(SIDE), nn.Upsample(scale_factor=SIDE)),
        "dropout": lambda width: nn.Dropout2d(0.3),
        "in place": lambda width: nn.ReLU(inplace=True),
        "reached": lambda width: Reached(nn.Conv2d(CHANNELS, CHANNELS, 1), functional.conv2d),
    },
)
WRAPPERS = {
    "residual": lambda kind, inner: Residual(inner),
    "twice": lambda kind, inner: Twice(inner),
    "scaled": lambda kind, inner: Scaled(kind.scales, inner),
    "sequence": lambda kind, inner: nn.Sequential(inner, kind.mixing()),
    "doubling": lambda kind, inner: Doubling(inner),
    "counted": lambda kind, inner: Counted(inner),
    "bf16": lambda kind, inner: Casts(torch.bfloat16, inner),
    "fp16": lambda kind, inner: Casts(torch.float16, inner),
    "checkpoint": lambda kind, inner: Checkpointed(False, inner),
    "reentrant": lambda kind, inner: Checkpointed(True, inner),
}
REPEAT = "checkpoint", "reentrant"
NOT_TO_BE_REPEATED = "doubling", "counted"  # by a checkpoint, in plain PyTorch, too


def is_repeatable(tree):
    return tree[0] not in NOT_TO_BE_REPEATED and all(is_repeatable(part) for part in tree if isinstance(part, tuple))


def trees(kind):
    wrapping, repeating = sorted(WRAPPERS.keys() - set(REPEAT)), sorted(REPEAT)
    return st.recursive(
        st.tuples(st.sampled_from(sorted(kind.leaves)), st.sampled_from([8, 24, 64])),
        lambda inner: st.one_of(
            st.tuples(st.sampled_from(wrapping), inner),
            st.tuples(st.sampled_from(repeating), inner.filter(is_repeatable)),
            st.lists(inner, min_size=2, max_size=4).map(tuple),
        ),
        max_leaves=5,
    )


def grown(kind, tree):
    """The module of a tree: (leaf, width), (wrapper, tree), or trees in a row."""
    if isinstance(tree[0], str):
        name, rest = tree
        return kind.leaves[name](rest) if name in kind.leaves else WRAPPERS[name](kind, grown(kind, rest))
    return nn.Sequential(*(grown(kind, part) for part in tree))
