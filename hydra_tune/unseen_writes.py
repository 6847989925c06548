"""Weights and buffers that something else than their block writes during a forward without raising a version: through
`.data` or NumPy, in a hook or in the model's own forward. A copy on the device that was made before has the old values.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from hydra_tune.block import Block
from hydra_tune.host_buffer import checksum, version_of
from hydra_tune.meter import TrialMeter

_MOST_KINDS = 1_000  # of forwards, as long as they are remembered

_State = tuple[int, int, int]  # where a tensor is, its version, and what tells of its values


@dataclass
class _Looks:
    """At blocks, by their names, in one kind of forward: those that were looked at, and those that the next one is to
    look at."""

    done: set[str]
    due: set[str]


class UnseenWrites:
    """Looked for by value, once a block and kind of forward: what a model's own code does may depend on its mode, and a
    pilot sees neither hooks nor, beside a plan for training, evaluation."""

    def __init__(self, meter: TrialMeter) -> None:
        self._meter = meter
        self._kinds: dict[Hashable, _Looks] = {}
        self._looks: _Looks | None = None  # of the forward under way
        self._before: dict[int, _State] = {}  # as it has found those that it looks at
        self._met: set[str] = set()  # and visited, none of which was looked at before
        self._written: set[tuple[int, str]] = set()  # modules' ids, and names of weights and buffers there

    @contextmanager
    def looking(self, kind: Hashable, blocks: Sequence[Block]) -> Iterator[None]:
        """Around a forward, which may end early."""
        self._looks = looks = self._kinds.get(kind) or _Looks(set(), {block.name for block in blocks})
        self._met = met = set[str]()
        if looks.due:
            found = [block for block in blocks if block.name in looks.due]
            with self._meter.paused():
                self._before = {id(t): _state_of(t) for block in found for _, _, t in _tensors_of(block)}
        try:
            yield
            if met or looks.due:
                if len(self._kinds) == _MOST_KINDS:
                    self._kinds.clear()
                self._kinds[kind] = _Looks(looks.done | (met & looks.due), met - looks.due)
        finally:
            self._looks, self._before = None, {}

    def look_at(self, block: Block) -> bool:
        """Before a visit; whether it may have been written since the forward began, for all that is known."""
        looks = self._looks
        if looks is None or block.name in looks.done:
            return False
        self._met.add(block.name)
        if block.name not in looks.due:
            return True
        with self._meter.paused():
            for module, name, tensor in _tensors_of(block):
                if _is_rewritten(tensor, self._before.get(id(tensor))):
                    self._written.add((id(module), name))
        self.tell([block])
        return False

    def tell(self, blocks: Sequence[Block]) -> None:
        """Them what is known of their weights and buffers."""
        for block in blocks if self._written else ():
            sites = (*block.parameter_sites, *block.buffer_sites)
            block.rewritten |= any((id(module), name) in self._written for module, name in sites)


def _tensors_of(block: Block) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """With their modules, and their names there."""
    for module, name in (*block.parameter_sites, *block.buffer_sites):
        parameter, buffer = module._parameters.get(name), module._buffers.get(name)
        if parameter is not None and id(parameter) in block.in_slot:
            yield module, name, parameter
        if buffer is not None:
            yield module, name, buffer


def _state_of(tensor: torch.Tensor) -> _State:
    return tensor.data_ptr(), version_of(tensor), checksum(tensor)


def _is_rewritten(tensor: torch.Tensor, before: _State | None) -> bool:
    """One that is new, elsewhere, or of another version, is copied anew without this."""
    if before is None or (tensor.data_ptr(), version_of(tensor)) != before[:2]:
        return False
    return before != _state_of(tensor)
