"""The weights of some blocks, a shard or one block of a pilot, in one slot on the device.

host buffer   | block 0 | block 1 | block 2 | ...       parameters, in the order in which blocks run
                        \\_________/
slot                    | block 1 | tied |              one copy for neighbours in the buffer, one for each other
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hydra_tune.blocks.block import Block, are_trained
from hydra_tune.devices.device import Device
from hydra_tune.devices.host_weights import HostWeights
from hydra_tune.devices.tensor_bytes import storage_bytes, tensor_bytes, versions_of


class DeviceCopy:
    """Copies of weights in a slot. `fill` copies the values that the host has at that time.

    A resident trial has no slots. It gets a copy of no blocks, whose weights are the parameters themselves.

    counted    whether the device's meter counts the slot
    is_new     filled in the trial's own thread, and not visited since
    used       the mark of the last computation that needs the slot (`Device.mark`); None if it was not used
    """

    def __init__(self, device: Device, slot: torch.Tensor, blocks: Sequence[Block], host: HostWeights | None) -> None:
        self.device = device
        self.slot = slot
        self.start = slot.data_ptr()
        self.num_bytes = 0
        self.counted = False
        self.is_new = False
        self.used: Any = None
        self._parameters = list({id(p): p for block in blocks for p in block.slot_parameters}.values())
        self._numbers = {id(p): i for i, p in enumerate(self._parameters)}
        # the numbers of each block's weights, by the id of its `slot_parameters`
        self._numbers_of = {id(b.slot_parameters): [self._numbers[id(p)] for p in b.slot_parameters] for b in blocks}
        self._data = [p.data for p in self._parameters]  # read once, so that all of the loop sees the same tensors
        self._views: list[torch.Tensor] = []
        self._starts: list[int] = []  # addresses of the weights in the slot
        self._leaves: dict[int, nn.Parameter] = {}
        self._versions: list[int] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # (device, host)
        runs: list[tuple[int, int, int]] = []  # neighbours: offset in the host buffer, offset in the slot, bytes
        for p, data in zip(self._parameters, self._data, strict=True):
            place = host.offset(p, data) if host is not None and host.has(p) else None
            first = self.num_bytes // data.element_size()
            # `.data` gives the view a version counter of its own
            view = slot.view(data.dtype).as_strided(data.size(), data.stride(), first).data
            if place is None:
                self._copies.append((view, data))
            elif runs and runs[-1][0] + runs[-1][2] == place and runs[-1][1] + runs[-1][2] == self.num_bytes:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + storage_bytes(data))
            else:
                runs.append((place, self.num_bytes, storage_bytes(data)))
            self._starts.append(self.start + self.num_bytes)
            self._views.append(view)
            self.num_bytes += storage_bytes(data)
        if host is not None:
            self._copies += [(slot[to : to + size], host.bytes[place : place + size]) for place, to, size in runs]
        self._layout = _layout(self._data)
        self._host_addresses = self._layout[0]  # the host addresses that `_copies` copies from
        self.weight_starting_at = dict(zip(self._starts, self._parameters, strict=True))
        self.copied_bytes = sum(tensor_bytes(to) for to, _ in self._copies)

    # ---- host to device ----

    def fill(self) -> None:
        """Copy the weights to the slot. A weight that is written on the host meanwhile will be `stale`."""
        # versions are read before the copy, so that a write during the copy raises them
        self._versions = versions_of(self._parameters)
        self.device.promote(self._copies)

    def stale(self, parameters: Sequence[nn.Parameter]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(device, host) tensors of those parameters that were written on the host since the copy. The caller copies
        them anew."""
        numbers = self._numbers_of.get(id(parameters))
        if numbers is None:
            parameters = [p for p in parameters if id(p) in self._numbers]  # the others are held on the device
            numbers = [self._numbers[id(p)] for p in parameters]
        versions, places = versions_of(parameters), list(map(torch.Tensor.data_ptr, parameters))
        if versions == [self._versions[i] for i in numbers] and places == [self._host_addresses[i] for i in numbers]:
            return []
        pairs = []
        for i, p, version, place in zip(numbers, parameters, versions, places, strict=True):
            if (version, place) != (self._versions[i], self._host_addresses[i]):
                pairs.append((self._views[i], p.data))
                # at another address: stale once more, if the parameter gets its old memory back
                self._versions[i] = version if place == self._host_addresses[i] else -1
        return pairs

    @property
    def can_refill(self) -> bool:
        """Whether `fill` may be called again: the weights have the same addresses and layouts as before."""
        return _layout(self._parameters) == self._layout

    # ---- for a visit ----

    def weight(self, parameter: nn.Parameter) -> torch.Tensor:
        """The parameter's values in the slot; of a parameter that is held on the device, its own data."""
        i = self._numbers.get(id(parameter))
        return parameter.data if i is None else self._views[i]

    def aliases(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """New tensors that share memory with the weights here, without a graph."""
        numbers = self._numbers_of.get(id(parameters))
        if numbers is None:
            return [self.weight(p).data for p in parameters]
        views = self._views
        return [views[i].data for i in numbers]

    def leaves(self, parameters: Sequence[nn.Parameter], trained: Sequence[bool] = ()) -> list[nn.Parameter]:
        """Parameters that share memory with the weights here, for a forward whose graph is dropped.

        `trained` says which of them require a gradient; by default those that do now.
        """
        found = []
        for p, flag in zip(parameters, trained or are_trained(parameters), strict=True):
            leaf = self._leaves.get(id(p))
            if leaf is None:
                with torch.inference_mode(False):
                    leaf = self._leaves[id(p)] = nn.Parameter(self.weight(p).data, flag)
            if leaf.requires_grad != flag:
                leaf.requires_grad_(flag)
            leaf.__dict__ = p.__dict__  # an attribute that is set on the leaf is the parameter's
            found.append(leaf)
        return found

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in the slot, and must be cloned to outlive the visit."""
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            return False
        return self.start <= tensor.data_ptr() < self.start + self.num_bytes

    def parameter_at(self, place: int) -> tuple[nn.Parameter, int]:
        """The parameter whose values are at an address in the slot, and the address where they begin."""
        i = bisect_right(self._starts, place) - 1
        return self._parameters[i], self._starts[i]


def _layout(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Addresses, sizes and strides of the tensors. Called at each promotion, so that the loops are in C."""
    return [list(map(ask, tensors)) for ask in (torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride)]
