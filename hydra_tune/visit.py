"""A visit to a block: its module reaches the device copies of its weights under its own names. Away from the trial's
home, what the block is given comes along, and what it makes is taken home."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from hydra_tune.block import Block, are_trained, attributes_of, give_attributes, leaf_like
from hydra_tune.device import Device
from hydra_tune.meter import TrialMeter
from hydra_tune.process_state import remembers_casts
from hydra_tune.randomness.trial_state import lent
from hydra_tune.spill import ChangedBuffer, DeviceCopy, Leaves, replaced_parameter

_AT_HOME = nullcontext()
OptionalT = TypeVar("OptionalT", torch.Tensor, torch.Tensor | None)


class Visited(Protocol):
    """Who must know that a visit is under way."""

    device: Device
    meter: TrialMeter
    visit: Visit | None

    def received(self, device: Device, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...

    def write_back(self, device: Device, slots: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> None: ...


class Visit:
    """A context manager, once. `leaves` are those of the block's local graph, as in `Block.parameters`."""

    def __init__(self, residency: Visited, block: Block, copy: DeviceCopy) -> None:
        self.block = block
        self.copy = copy
        self.leaves: list[nn.Parameter] = []
        self._residency = residency

    @property
    def device(self) -> Device:
        return self.copy.device

    @property
    def is_away(self) -> bool:
        return self.copy.device is not self._residency.device

    def drawing(self) -> AbstractContextManager[None]:
        """Away, operators draw from another generator than at home, but the same numbers."""
        return lent(self._residency.device.generators(), self.device.generators()) if self.is_away else _AT_HOME

    def brought(self, tensors: Sequence[OptionalT]) -> list[OptionalT]:
        """From home, where the visit is; leaves of a graph of their own, if the given ones are."""
        return self._carried(self._residency.device, self.device, tensors)

    def taken_home(self, tensors: Sequence[OptionalT]) -> list[OptionalT]:
        return self._carried(self.device, self._residency.device, tensors)

    def _carried(self, start: Device, to: Device, tensors: Sequence[OptionalT]) -> list[OptionalT]:
        """What is on the device where it starts; a number on the CPU stays there, and so do others in host memory."""
        if not self.is_away:
            return list(tensors)
        goes = [t is not None and t.device == start.torch_device for t in tensors]
        given: list[Any] = [t for t, is_there in zip(tensors, goes, strict=True) if is_there]
        copies = self._residency.received(to, given)
        for copy, tensor in zip(copies, given, strict=True):
            copy.requires_grad_(tensor.requires_grad)
            copy.__dict__.update(tensor.__dict__)
        arrived: Iterator[Any] = iter(copies)
        return [next(arrived) if is_there else t for t, is_there in zip(tensors, goes, strict=True)]

    def set_buffers(self) -> None:
        """To those of the slot; the forward may set others."""
        for m, n in self.block.buffer_sites:
            m._buffers[n] = self.copy.buffer(m, n)

    def lend_buffers(self, values: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copies of these, by site, to a forward that is repeated: its graph may save them, as the first one saved
        those that the module has no longer."""
        for i, value in values:
            m, n = self.block.buffer_sites[i]
            m._buffers[n] = value.to(self.copy.buffer(m, n).device, copy=True)

    def changed_buffers(self) -> list[ChangedBuffer]:
        """Those that the forward has changed."""
        if not self.block.buffer_sites:
            return []
        with self._residency.meter.paused():
            return self.copy.changed_buffers(self.block)

    def write_back(self, changed: Sequence[ChangedBuffer]) -> None:
        """To the host, during the visit or after it: one that was assigned to a new tensor, as in plain PyTorch."""
        with self._residency.meter.paused():
            masters = [torch.empty_like(b.host) if b.is_assigned else b.host for b in changed]
        self._residency.write_back(self.device, [b.slot for b in changed], masters)
        self.copy.used = self.device.mark()  # a master may be on the device, and its copy not made yet
        for (site, host, _, _), master in zip(changed, masters, strict=True):
            if master is not host:
                module, name = self.block.buffer_sites[site]
                self._buffers[site] = master
                if self._residency.visit is not self:
                    module._buffers[name] = master

    def __enter__(self) -> Visit:
        block, copy = self.block, self.copy
        try:
            self._parameters = [m._parameters[n] for m, n in block.parameter_sites]
        except KeyError:
            raise replaced_parameter() from None
        self._outer = self._residency.visit
        self._buffers = [m._buffers[n] for m, n in block.buffer_sites]
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._there = self.device.current() if self.is_away else _AT_HOME
        self._residency.visit = self
        if remembers_casts():
            torch.set_autocast_cache_enabled(False)  # its casts would outlive the visit; slots do not
        try:
            self._there.__enter__()
            leaves = copy.leaves
            if block.held:
                leaves = Leaves(leaves)
                leaves.update((id(p), leaf_like(p, p.data)) for p in block.held)
            for (m, n), p in zip(block.parameter_sites, self._parameters, strict=True):
                m._parameters[n] = leaves[id(p)]
            self.set_buffers()
            self._refresh_flat_weights()
            self.leaves = [*(leaves[id(p)] for p in block.own_parameters), *block.borrowed]
            self.train(are_trained(block.parameters))
            self.mark(attributes_of(block.parameters))
        except BaseException:
            self.__exit__()
            raise
        return self

    def train(self, flags: Sequence[bool]) -> None:
        """Which leaves require gradients: those whose parameters do so, or did in a forward that is repeated."""
        for leaf, p, flag in zip(self.leaves, self.block.parameters, flags, strict=True):
            if leaf is not p and leaf.requires_grad != flag:
                leaf.requires_grad_(flag)

    def mark(self, attributes: Sequence[dict[str, Any]]) -> None:
        """Leaves have the attributes that their parameters have, or had in a forward that is repeated."""
        give_attributes(self.leaves, self.block.parameters, attributes)

    def __exit__(self, *error: object) -> None:
        if self._residency.visit is not self:
            return  # closed after an interruption, or its turn comes
        torch.set_autocast_cache_enabled(self._caches_casts)
        for (m, n), p in zip(self.block.parameter_sites, self._parameters, strict=True):
            m._parameters[n] = p
        for (m, n), b in zip(self.block.buffer_sites, self._buffers, strict=True):
            m._buffers[n] = b
        self._refresh_flat_weights()
        self._there.__exit__(None, None, None)
        self._residency.visit = self._outer

    def _refresh_flat_weights(self) -> None:
        for rnn in self.block.recurrent:  # these keep a list of their own beside `_parameters`
            rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]
