"""How fast a machine computes and copies, and what a transformer trial costs on it.

For P weights and n tokens a forward takes 2Pn flop. A backward takes 6Pn with the repeated forward, or 4Pn if the
weights are frozen. AdamW on the host moves 28 bytes for each trained weight: it reads weight, gradient and two moments,
and writes weight and moments, four bytes each. Attention scores are left out: 4nsd flop a layer for a context of s
tokens and width d, a few per cent of a layer if s is much less than 6d.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from operator import add
from os import PathLike
from pathlib import Path
from typing import Any

from hydra_tune.config import format_bytes, parse_bytes
from hydra_tune.errors import ConfigError, does_not_fit
from hydra_tune.simulation.workload import TrialWork

ADAMW_BYTES_PER_WEIGHT = 28
_ADAMW_BYTES_ON_DEVICE = 16  # weight, gradient and two moments in fp32
_BASE_BITS = 20  # for the number of a block among those of its base


@dataclass(frozen=True)
class CostModel:
    """Rates of one machine, per second. What has an infinite rate costs nothing; in JSON infinity is null.

    `flops_per_s`       of a device, as reached in training
    `h2d_bytes_per_s`   of one device's link, host to device
    `d2h_bytes_per_s`   of the same link, device to host, at the same time
    `host_bytes_per_s`  of host memory, where optimizers step
    `task_s`            seconds of a task beside its arithmetic, for each of its blocks
    `measured_on`       hardware and versions, or the source of the figures
    """

    flops_per_s: float = 1e12
    h2d_bytes_per_s: float = inf
    d2h_bytes_per_s: float = inf
    host_bytes_per_s: float = inf
    task_s: float = 0.0
    measured_on: str = ""

    def __post_init__(self) -> None:
        for key in _RATES:
            rate = getattr(self, key)
            if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
                raise ConfigError(
                    f"{key} is a positive rate, got {rate!r}. Write a number such as 2.5e10; leave it out for infinity."
                )
        if self.flops_per_s == inf:
            raise ConfigError("flops_per_s is finite, got inf. Write what a device reaches, such as 1e14.")
        if isinstance(self.task_s, bool) or not isinstance(self.task_s, (int, float)) or not 0 <= self.task_s < inf:
            raise ConfigError(f"task_s is finite seconds of at least 0, got {self.task_s!r}. Leave it out for none.")

    def promote_s(self, num_bytes: float) -> float:
        return num_bytes / self.h2d_bytes_per_s

    def spill_s(self, num_bytes: float) -> float:
        return num_bytes / self.d2h_bytes_per_s

    def to_dict(self) -> dict[str, float | str | None]:
        return {key: None if value == inf else value for key, value in asdict(self).items()}

    @classmethod
    def from_link(cls, text: str) -> CostModel:
        """A model with this rate in both directions of the link, ``"12e9"`` or ``"12GB"``, and defaults elsewhere."""
        try:
            rate = float(text)
        except ValueError:
            rate = parse_bytes(text, "--link")
        return cls(h2d_bytes_per_s=rate, d2h_bytes_per_s=rate)

    @classmethod
    def from_dict(cls, rates: Mapping[str, Any]) -> CostModel:
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(rates) - set(known))
        if unknown:
            raise ConfigError(f"a cost model has the keys {', '.join(known)}, got {unknown[0]!r}. Take it out.")
        arguments: dict[str, Any] = {key: inf if value is None else value for key, value in rates.items()}
        return cls(**arguments)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> CostModel:
        """Read the JSON file that `save` writes.

        Raises:
            ConfigError: the file can't be read, or is not one of these.
        """
        try:
            rates = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"a cost model is a JSON file; {path} cannot be read: {error.strerror}. Check the path."
            ) from None
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}. Write it with CostModel(...).save(path).") from None
        if not isinstance(rates, dict):
            raise ConfigError(f"{path} holds {type(rates).__name__}, not one object. Write it with CostModel.save.")
        return cls.from_dict(rates)

    def save(self, path: str | PathLike[str]) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


_RATES = tuple(field.name for field in fields(CostModel) if field.name.endswith("_per_s"))


@dataclass(frozen=True)
class _Blocks:
    """What consecutive blocks cost together: one block, or the blocks of a shard.

    `multiplied_weights`  weights that are multiplied with each token
    `trained_weights`     weights with gradients and moments
    `blocks`              how many blocks these are
    """

    slot_bytes: int
    multiplied_weights: int
    trained_weights: int
    gradient_bytes: int
    activation_bytes: int
    blocks: int = 1

    def __add__(self, other: _Blocks) -> _Blocks:
        return _Blocks(*map(add, astuple(self), astuple(other)))

    @property
    def work_bytes(self) -> int:
        """Scratch of a backward task: all gradients, and all activations, since the whole forward is repeated."""
        return self.gradient_bytes + self.activation_bytes

    @property
    def need_bytes(self) -> int:
        """What a backward task needs, with room for another shard as large that is promoted meanwhile (the double
        buffer)."""
        return 2 * self.slot_bytes + self.work_bytes


_NO_BLOCKS = _Blocks(0, 0, 0, 0, 0, 0)


def transformer_trial(
    cost: CostModel,
    *,
    layers: int,
    width: int,
    feed_forward: int,
    sequence: int,
    batch: int,
    vocabulary: int,
    steps: int,
    shards: int | None = None,
    memory: int | str | None = None,
    weight_bytes: int = 4,
    gradient_bytes: int | None = None,
    adapter_rank: int | None = None,
    base: int | None = None,
    heads: int = 0,
    name: str = "",
    arrival_s: float = 0.0,
    stops_after: int | None = None,
) -> TrialWork:
    """The work of a spilled transformer whose optimizer steps on the host. `cost` says how fast the machine is.

    **Blocks** are the input table, `layers` of 4d^2 + 2df + 9d + f weights (d is `width`, f is `feed_forward`), and the
    output head, which has its own weights.

    **Cut.** Give one of `shards` and `memory`. By `shards`: into so many, so that the largest need of one is least. By
    `memory` of a device: block by block, each shard as large as fits beside a step's boundary tensors and another
    shard's weights (the double buffer). Under these rules GPT-2-XL at context 512 in fp32 is cut for 11 GB into 13
    shards at batch 16 and 7 at batch 8; Hydra reports 13 and 8.

    **Bytes.** `weight_bytes` are of one weight, and of one activation. `gradient_bytes` are of one weight's gradient,
    as many as `weight_bytes` by default. A step keeps one boundary tensor for each shard. A task's scratch is its
    shard's gradients and activations: 9d + 2f numbers for each token and layer. With `heads` the attention scores are
    added, 2.5 s numbers for each head, token and layer, where s is `sequence` (Korthikanti et al., arXiv 2205.05198,
    section 4.1); without, attention is fused.

    **Adapters.** With `adapter_rank` the base is frozen, and low-rank pairs beside the four projections of attention
    are trained (LoRA, arXiv 2106.09685). Their own arithmetic is left out. With `base` the frozen base is shared by all
    trials with this number: each block is a shard, and the adapters stay on the device with their gradients and moments
    in fp32, where their optimizer steps in no time.

    Raises:
        ConfigError: a size is not a positive whole number; neither or both of `shards` and `memory` are given, and no
            `base`; or a `base` without `adapter_rank`.
        BudgetError: a block does not fit the memory.
    """
    sizes = {"layers": layers, "width": width, "feed_forward": feed_forward, "sequence": sequence, "batch": batch}
    for key, size in {**sizes, "vocabulary": vocabulary, "weight_bytes": weight_bytes}.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"{key} is a whole number of at least 1, got {size!r}. Write the model's size.")
    tokens = batch * sequence
    frozen = adapter_rank is not None
    if base is not None and not frozen:
        raise ConfigError("a base that trials share is frozen, but adapter_rank is None. Write the adapters' rank.")
    held = layers * 8 * width * (adapter_rank or 0) if base is not None else 0  # trained weights on the device
    adapter = 0 if base is not None else 8 * width * (adapter_rank or 0)
    table = vocabulary * width
    layer = 4 * width**2 + 2 * width * feed_forward + 9 * width + feed_forward

    def block(weights: int, multiplied: int, trained: int, activations: int) -> _Blocks:
        gradients = trained * (weight_bytes if gradient_bytes is None else gradient_bytes)
        return _Blocks(weights * weight_bytes, multiplied, trained, gradients, tokens * activations * weight_bytes)

    layer_activations = 9 * width + 2 * feed_forward + 5 * heads * sequence // 2  # for each token
    blocks = [
        block(table, width, 0 if frozen else table, width),  # looked up; only a position is computed with
        *[block(layer + adapter, layer, adapter if frozen else layer, layer_activations)] * layers,
        block(table, table, 0 if frozen else table, 2 * vocabulary),
    ]
    boundary_bytes = tokens * width * weight_bytes
    cut = _cut(blocks, shards, memory, boundary_bytes) if base is None else blocks
    forward_s = [2 * shard.multiplied_weights * tokens / cost.flops_per_s for shard in cut]
    backward_s = [(2 if frozen else 3) * seconds for seconds in forward_s]
    task_s = [cost.task_s * shard.blocks for shard in cut]
    return TrialWork(
        steps=steps,
        forward_s=tuple(map(add, forward_s, task_s)),
        backward_s=tuple(map(add, backward_s, task_s)),
        shard_bytes=tuple(shard.slot_bytes for shard in cut),
        name=name,
        work_bytes=tuple(shard.work_bytes for shard in cut),
        boundary_bytes=boundary_bytes,
        gradient_bytes=tuple(shard.gradient_bytes for shard in cut),
        optimizer_s=ADAMW_BYTES_PER_WEIGHT * sum(b.trained_weights for b in blocks) / cost.host_bytes_per_s,
        arrival_s=arrival_s,
        held_bytes=held * _ADAMW_BYTES_ON_DEVICE,
        step_bytes=(len(cut) + 1) * boundary_bytes,
        stops_after=stops_after,
        shared_weights=() if base is None else tuple((base << _BASE_BITS) + i for i in range(len(cut))),
    )


def _cut(blocks: Sequence[_Blocks], shards: int | None, memory: int | str | None, boundary_bytes: int) -> list[_Blocks]:
    """The shards, by one of `shards` and `memory`.

    A step keeps one boundary tensor for each shard, so what fits depends on the number of shards: it is tried upwards.
    """
    if (shards is None) == (memory is None):
        raise ConfigError(
            f"a trial is cut by one of shards= and memory=, got shards={shards!r}, memory={memory!r}. Write one."
        )
    if shards is not None:
        if isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= len(blocks):
            raise ConfigError(
                f"shards is a whole number from 1 to {len(blocks)}, the blocks, got {shards!r}. Lower it."
            )
        return _balance(blocks, shards)
    assert memory is not None
    memory_bytes = parse_bytes(memory)
    for num_shards in range(1, len(blocks) + 1):
        cut = _pack(blocks, memory_bytes - (num_shards + 1) * boundary_bytes)
        if len(cut) <= num_shards:
            return cut
    raise AssertionError("there are no more shards than blocks")


def _balance(blocks: Sequence[_Blocks], shards: int) -> list[_Blocks]:
    """The cut into so many shards whose largest `need_bytes` is least."""
    needed = list(accumulate((block.need_bytes for block in blocks), initial=0))  # by all blocks before each

    @cache
    def least(start: int, shards: int) -> tuple[int, tuple[int, ...]]:
        """For the blocks from `start` on in so many shards: the largest need of one, and where each shard ends."""
        if shards == 1:
            return needed[-1] - needed[start], (len(blocks),)
        options = []
        for end in range(start + 1, len(blocks) - shards + 2):
            largest, ends = least(end, shards - 1)
            options.append((max(needed[end] - needed[start], largest), (end, *ends)))
        return min(options)

    edges = (0, *least(0, shards)[1])
    return [sum(blocks[start:end], _NO_BLOCKS) for start, end in pairwise(edges)]


def _pack(blocks: Sequence[_Blocks], limit_bytes: int) -> list[_Blocks]:
    """Fill each shard block by block until the next one would not fit: pilot partitioning (arXiv 2110.08633,
    section 4.1)."""
    cut = [_NO_BLOCKS]
    for block in blocks:
        if block.need_bytes > limit_bytes:
            raise does_not_fit(
                "a block",
                f"{format_bytes(block.need_bytes, up=True)}, its weights twice for the double buffer",
                f"memory= leaves {format_bytes(max(0, limit_bytes))} beside a step's boundary tensors",
                ("a larger memory=", "a smaller batch= or sequence=", "a smaller weight_bytes="),
            )
        if (cut[-1] + block).need_bytes > limit_bytes:
            cut.append(_NO_BLOCKS)
        cut[-1] += block
    return cut
