"""The weights of some blocks, a shard or one block of a pilot, in one slot on the device.

host buffer   | block 0 | block 1 | block 2 | ...       parameters, in the order in which blocks run
                        \\_________/
slot                    | block 1 | tied |              one copy for neighbours in the buffer, one for each other

**Riders** are small trained weights beside frozen ones, as adapters that are not held on the device. The slot has the
frozen ones, which other trials may use, too. Riders are promoted beside it, for one visit.
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
from hydra_tune.devices.shared_slot import SharedSlot
from hydra_tune.devices.tensor_bytes import storage_bytes, tensor_bytes, versions_of


class DeviceCopy:
    """Copies of weights in a slot. `fill` copies the values that the host has at that time.

    A resident trial has no slots. It gets a copy of no blocks, whose weights are the parameters themselves.

    counted    whether the device's meter counts the slot
    is_new     filled in the trial's own thread, and not visited since
    used       the mark of the last computation that needs the slot (`Device.mark`); None if it was not used
    shared     the slot, if other trials use it, too
    """

    def __init__(
        self,
        device: Device,
        slot: torch.Tensor,
        blocks: Sequence[Block],
        host: HostWeights | None,
    ) -> None:
        self.device = device
        self.shared: SharedSlot | None = None
        self.slot = slot
        self.start = slot.data_ptr()
        self.num_bytes = 0
        self.counted = False
        self.is_new = False
        self.used: Any = None
        riders = frozenset[int]().union(*(block.riders for block in blocks))
        every = {id(p): p for block in blocks for p in block.slot_parameters}
        self._parameters = [p for key, p in every.items() if key not in riders]
        self._numbers = {id(p): i for i, p in enumerate(self._parameters)}
        # the numbers of each block's weights, by the id of its `slot_parameters`; not of blocks with riders
        self._numbers_of = {
            id(b.slot_parameters): [self._numbers[id(p)] for p in b.slot_parameters] for b in blocks if not b.riders
        }
        self.riders: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}  # by id, with the values of now
        self.rider_memory: torch.Tensor | None = None
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

    def take_filled(self, shared: SharedSlot) -> None:
        """Another trial has filled the slot with the same weights."""
        self.shared = shared
        self._versions = versions_of(self._parameters)

    def note_use(self, trial: int) -> None:
        """The trial's computations so far may need the slot."""
        self.used = self.device.mark()
        if self.shared is not None and self.used is not None:
            self.shared.used[trial] = self.used

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

    # ---- riders ----

    def bring_riders(self, block: Block) -> None:
        """Promote the block's riders, unless they are there."""
        if self.riders.keys() == block.riders:
            return
        self.drop_riders()
        riders = [p for p in block.slot_parameters if id(p) in block.riders]
        memory = self.device.scratch(sum(map(storage_bytes, riders)))
        first, views = 0, []
        for p in riders:
            views.append(memory.view(p.dtype).as_strided(p.size(), p.stride(), first // p.element_size()).data)
            first += storage_bytes(p)
        if self.counted:
            self.device.slot_meter.add([memory])
        self.device.promote_riders(list(zip(views, [p.data for p in riders], strict=True)))
        self.rider_memory = memory
        self.riders = {id(p): (p, view) for p, view in zip(riders, views, strict=True)}

    def drop_riders(self) -> None:
        """The visit is over."""
        if self.rider_memory is not None:
            self.device.retire(self.rider_memory, self.device.mark())
            if self.counted:
                self.device.slot_meter.disown(self.rider_memory)
            self.rider_memory, self.riders = None, {}

    def rider_at(self, place: int) -> tuple[nn.Parameter, int] | None:
        """The rider whose values are at an address, and the address where they begin."""
        for p, view in self.riders.values():
            if 0 <= place - view.data_ptr() < max(1, tensor_bytes(view)):
                return p, view.data_ptr()
        return None

    # ---- for a visit ----

    def weight(self, parameter: nn.Parameter) -> torch.Tensor:
        """The parameter's values on the device: in the slot, or a rider's; if it is held there, its own data."""
        i = self._numbers.get(id(parameter))
        if i is None:
            return self.riders.get(id(parameter), (parameter, parameter.data))[1]
        return self._views[i]

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
                    leaf = nn.Parameter(self.weight(p).data, flag)
                if id(p) not in self.riders:
                    self._leaves[id(p)] = leaf
            if leaf.requires_grad != flag:
                leaf.requires_grad_(flag)
            leaf.__dict__ = p.__dict__  # an attribute that is set on the leaf is the parameter's
            found.append(leaf)
        return found

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in the slot, and must be cloned to outlive the visit."""
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            return False
        place = tensor.data_ptr()
        return self.start <= place < self.start + self.num_bytes or self.rider_at(place) is not None

    def parameter_at(self, place: int) -> tuple[nn.Parameter, int]:
        """The parameter whose values are at an address in the slot, or of a rider, and where they begin."""
        if not self.start <= place < self.start + self.num_bytes and (rider := self.rider_at(place)) is not None:
            return rider
        i = bisect_right(self._starts, place) - 1
        return self._parameters[i], self._starts[i]


def _layout(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Addresses, sizes and strides of the tensors. Called at each promotion, so that the loops are in C."""
    return [list(map(ask, tensors)) for ask in (torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride)]
