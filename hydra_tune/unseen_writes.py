"""Weights and buffers that something else than their block writes during a forward without raising a version: through
`.data` or NumPy, in a hook or in the model's own forward. A copy on the device that was made before has the old values.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hydra_tune.block import Block
from hydra_tune.host_buffer import digest, version_of
from hydra_tune.meter import TrialMeter

_MOST_KINDS = 64  # of forwards

_State = tuple[int, int, int, Sequence[float | None]]  # which tensor, where, its version, and its values


class UnseenWrites:
    """Looked for by value, once a kind of forward: what a model's own code does may depend on its mode, and a pilot
    sees neither hooks nor, beside a plan for training, evaluation."""

    def __init__(self, meter: TrialMeter) -> None:
        self._meter = meter
        self._known: set[Hashable] = set()  # kinds
        self._before: dict[int, _State] | None = None  # as the forward under way has found them
        self._written: set[str] = set()  # blocks

    @contextmanager
    def looking(self, kind: Hashable, blocks: Sequence[Block]) -> Iterator[None]:
        """Around a forward, which is of a new kind if it comes to its end."""
        if kind in self._known or len(self._known) >= _MOST_KINDS:
            yield
            return
        with self._meter.paused():
            self._before = {id(t): _state_of(t) for block in blocks for t in _tensors_of(block)}
        try:
            yield
            self._known.add(kind)
        finally:
            self._before = None

    @property
    def are_looked_for(self) -> bool:
        return self._before is not None

    def look_at(self, block: Block) -> None:
        """Before a visit."""
        before = self._before or {}
        with self._meter.paused():
            if not block.rewritten and any(_is_rewritten(t, before.get(id(t))) for t in _tensors_of(block)):
                self._written.add(block.name)
                block.rewritten = True

    def tell(self, blocks: Sequence[Block]) -> None:
        """New ones what is known of those that had their names."""
        for block in blocks:
            block.rewritten |= block.name in self._written


def _tensors_of(block: Block) -> list[torch.Tensor]:
    return [*block.slot_parameters, *block.buffers()]


def _state_of(tensor: torch.Tensor) -> _State:
    flat = tensor.detach().flatten() if tensor.layout is torch.strided else tensor
    parts = (flat, flat[::2], flat[: flat.numel() // 2])  # of all of them alone, one would not see them change places
    return id(tensor), tensor.data_ptr(), version_of(tensor), [*map(digest, parts)]


def _is_rewritten(tensor: torch.Tensor, before: _State | None) -> bool:
    """Another one, one that is elsewhere and one with another version are copied anew without this."""
    if before is None or (id(tensor), tensor.data_ptr(), version_of(tensor)) != before[:3]:
        return False
    return list(before[3]) != list(_state_of(tensor)[3])
