"""Moves a shard's weights between the trial's host memory and a slot on the device.

host buffer   | block 0 | block 1 | block 2 | ...       parameters, in the order in which blocks run
                        \\_________/
slot                    | block 1 | tied | buffers |     one copy for the run, one for each of the rest
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from hydra_tune.block import Block, grad_dtype_of, leaf_like
from hydra_tune.device import Device
from hydra_tune.errors import PrepareError, UncuttableError
from hydra_tune.host_buffer import (
    HostBuffer,
    is_dense,
    places_of,
    same_bits,
    same_values,
    storage_bytes,
    tensor_bytes,
    version_of,
    versions_of,
)
from hydra_tune.tree import tensors_in

_DTYPE = attrgetter("dtype")
_OF_BACKWARDS = tuple(map(attrgetter, ("grad", "_backward_hooks", "_post_accumulate_grad_hooks")))


class HostWeights:
    """The parameters of all blocks in one host buffer; the model's own parameters are views of it."""

    def __init__(self, blocks: Sequence[Block], device: Device) -> None:
        self.parameters = list(dict.fromkeys(p for block in blocks for p in block.slot_parameters))
        self._pieces: dict[tuple[int, int], torch.Tensor] = {}
        self.buffer = HostBuffer([p.data for p in self.parameters], shared=device.pins)
        self._place = {
            id(p): (offset, view)
            for p, offset, view in zip(self.parameters, self.buffer.offsets, self.buffer.views, strict=True)
        }
        for parameter, view in zip(self.parameters, self.buffer.views, strict=True):
            parameter.data = view
        device.pin(self.buffer.bytes)
        self._unpin = partial(device.unpin, self.buffer.bytes)
        if device.pins:  # also if the model is collected
            weakref.finalize(self, self._unpin).atexit = False

    def has(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._place

    def holds(self, blocks: Sequence[Block]) -> bool:
        return all(self.has(p) for block in blocks for p in block.slot_parameters)

    def offset(self, parameter: nn.Parameter, data: torch.Tensor) -> int | None:
        """Where the parameter's `data` lie; None if the user has given it other storage since (`p.data = ...`,
        `share_memory()`), in which it stays: what was here may still be someone's."""
        offset, view = self._place[id(parameter)]
        here = data.data_ptr() == self.buffer.bytes.data_ptr() + offset or data.numel() == 0
        if here and data.stride() == view.stride():
            return offset
        same = data.shape == view.shape and data.dtype == view.dtype and not data.is_meta
        if not same or not is_dense(data):
            raise PrepareError(
                f"a prepared parameter keeps its shape and dtype, {tuple(view.shape)} {view.dtype}, and is dense; "
                f"found {tuple(data.shape)} {data.dtype} on {data.device}. "
                "Call hydra_tune.release(model) before changing it."
            )
        return None

    def piece(self, offset: int, num_bytes: int) -> torch.Tensor:
        """These bytes of the buffer."""
        key = offset, num_bytes
        if key not in self._pieces:
            self._pieces[key] = self.buffer.bytes[offset : offset + num_bytes]
        return self._pieces[key]

    def close(self) -> None:
        """Parameters stay views of the buffer, which lives as long as any of them."""
        self._unpin()


class ChangedBuffer(NamedTuple):
    """By a forward of its block, at one of the block's `buffer_sites`: in the slot, and to be on the host. Where it
    `is_assigned`, the module has another tensor since, and who has kept the one from before finds it as it was."""

    site: int
    host: torch.Tensor
    slot: torch.Tensor
    is_assigned: bool


class Leaves(dict[int, nn.Parameter]):
    """By the id of the parameter that each stands for."""

    def __missing__(self, _: int) -> nn.Parameter:
        raise replaced_parameter()


def replaced_parameter() -> UncuttableError:
    return UncuttableError(
        "a prepared model keeps its Parameter objects, but one was replaced since, perhaps by "
        "torch.func.functional_call. Call hydra_tune.release(model), replace it, and prepare the model again."
    )


class DeviceCopy:
    """The weights of some blocks in one slot: leaves of the local graph, and buffers. `fill` copies the values."""

    def __init__(self, device: Device, slot: torch.Tensor, blocks: Sequence[Block], host: HostWeights | None) -> None:
        self.device = device
        self.slot = slot
        self.blocks = blocks
        self.counted = False  # by the device's meter
        self.used: Any = None  # the last moment of computing that needs the slot, as `Device.mark` tells it
        self._parameters: list[nn.Parameter] = []  # each once
        self.leaves = Leaves()  # in this order
        self._buffers: dict[tuple[nn.Module, str], tuple[torch.Tensor, torch.Tensor]] = {}  # (device, host)
        self._unvisited: set[Block] = set()  # since it was filled
        # what was copied of each parameter: several blocks may share one
        self._versions: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._copied_buffers: dict[tuple[nn.Module, str], tuple[int, int, int]] = {}
        self._typed: dict[torch.dtype, torch.Tensor] = {}  # the slot, seen with a dtype
        self._runs: list[tuple[int, int, int]] = []  # place in the host buffer, place in the slot, bytes
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # to, from
        self._end = 0
        # asked once: in a thread that promotes ahead, a forward may lend them others' meanwhile
        data = {id(p): p.data for block in blocks for p in block.slot_parameters}
        for block in blocks:
            for parameter in block.slot_parameters:
                if id(parameter) not in self.leaves:
                    self._add_parameter(parameter, data[id(parameter)], host)
        for block in blocks:
            for site, buffer in zip(block.buffer_sites, block.buffers(), strict=True):
                self._buffers[site] = (self._add(buffer), buffer)
        if host is not None:
            self._copies += [(slot[to : to + size], host.piece(place, size)) for place, to, size in self._runs]
        self._hosts = [t for block in blocks for t in _tensors_of(block)]
        self._made_of = _layouts_of([data.get(id(t), t) for t in self._hosts])
        self._sources = {i: data[i].data_ptr() for i in self.leaves}
        self.num_bytes = sum(map(tensor_bytes, (host for _, host in self._copies)))

    def _add_parameter(self, parameter: nn.Parameter, data: torch.Tensor, host: HostWeights | None) -> None:
        place = host.offset(parameter, data) if host is not None and host.has(parameter) else None
        if place is None:
            view = self._add(data)
        else:
            size = storage_bytes(data)
            view = self._view(data)
            self._add_run(place, size)
            self._end += size
        self._parameters.append(parameter)
        self.leaves[id(parameter)] = leaf_like(parameter, view)

    def fill(self) -> None:
        """Copy what the host has now; what is written there meanwhile will prove stale."""
        self._versions.update(zip(self.leaves, versions_of(self._parameters), strict=True))
        self._places.update(self._sources)
        for site, (_, host) in self._buffers.items():
            self._copied_buffers[site] = _state_of(host)
        self._unvisited.update(self.blocks)
        self.device.promote(self._copies)

    def retire(self) -> None:
        """The slot's memory will be another copy's."""
        self.device.retire(self.slot, self.used)

    def is_of(self, blocks: Sequence[Block]) -> bool:
        """Whether it may be filled again for these blocks: the host's tensors are where and what they were, and the
        leaves as they were made."""
        if self.blocks != blocks:
            return False
        tensors = [t for block in blocks for t in _tensors_of(block)]
        if not all(map(is_, self._hosts, tensors)) or self._made_of != _layouts_of(tensors):
            return False
        return _are_new([*self.leaves.values()], self._parameters)

    def stale(self, block: Block, *, again: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(device, host) of what has changed on the host since it was copied, and is to be copied anew: a forward
        may write weights between two blocks, a script may lend them others' (`p.data = ...`) for an evaluation,
        and a buffer may be another block's too, or an observer's, whose operator raises no version."""
        is_new = block in self._unvisited
        self._unvisited.discard(block)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        versions, places = versions_of(block.slot_parameters), places_of(block.slot_parameters)
        if (
            again
            or versions != list(map(self._versions.get, block.in_slot))
            or places != list(map(self._places.get, block.in_slot))
        ):
            for (i, p), version, place in zip(block.in_slot.items(), versions, places, strict=True):
                if again or (version, place) != (self._versions.get(i), self._places.get(i)):
                    pairs.append((self.leaves[i].data, p.data))
                self._versions[i], self._places[i] = version, place
        for site, now in zip(block.buffer_sites, block.buffers(), strict=True):
            slot, host = self._buffers[site]
            if now is not host:
                self._refuse_other_layout(block, site[1], now, slot)
                self._buffers[site] = slot, now
            before, self._copied_buffers[site] = self._copied_buffers.get(site), _state_of(now)
            has_copy_of_now = is_new and not again
            if before != self._copied_buffers[site] or not (has_copy_of_now or same_bits(slot.to(now.device), now)):
                pairs.append((slot, now))
        return pairs

    def note_buffers(self, block: Block) -> None:
        """What is written on the host from here on is found by `changed_buffers`."""
        for site in block.buffer_sites:
            self._copied_buffers[site] = _state_of(self._buffers[site][1])

    def _refuse_other_layout(self, block: Block, name: str, now: torch.Tensor, then: torch.Tensor) -> None:
        if (now.shape, now.dtype) != (then.shape, then.dtype):
            raise UncuttableError(
                f"a block's buffers keep shape and dtype within a step, but buffer {name!r} of {block.name} was "
                f"{tuple(then.shape)} {then.dtype} and is {tuple(now.shape)} {now.dtype} now. Register it with its "
                "final shape, or set it before the model is called."
            )

    def refuse_changed_values(self, block: Block) -> None:
        """As `Block.refuse_changed_weights`, for what is written without raising a version (`.data`)."""
        for parameter in block.slot_parameters:
            if not same_values(self.leaves[id(parameter)], parameter):
                block.refuse_changed_weights([], [0])

    def _add_run(self, place: int, size: int) -> None:
        """Copy `size` bytes to the slot's end, as part of the copy before where both ends meet."""
        if self._runs:
            before, to, length = self._runs[-1]
            if before + length == place and to + length == self._end:
                self._runs[-1] = (before, to, length + size)
                return
        self._runs.append((place, self._end, size))

    def _add(self, tensor: torch.Tensor) -> torch.Tensor:
        view = self._view(tensor)
        self._copies.append((view, tensor))
        self._end += storage_bytes(tensor)
        return view

    def _view(self, like: torch.Tensor) -> torch.Tensor:
        """The slot's end with the dtype, shape and strides of `like`.

        With a version counter of its own (`.data`): writing one tensor of a slot, a running mean, must not look
        to autograd like writing the others.
        """
        typed = self._typed.get(like.dtype)
        if typed is None:
            typed = self._typed[like.dtype] = self.slot.view(like.dtype)
        return typed.as_strided(like.size(), like.stride(), self._end // like.element_size()).data

    def renew_leaves(self) -> None:
        """Graphs of visits to come start at new leaves; who keeps an old graph does not keep the slot with it."""
        for key, leaf in self.leaves.items():
            self.leaves[key] = leaf_like(leaf, leaf.data)
            leaf.data = leaf.data.new_empty(0)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in the slot, which will be another shard's."""
        start = self.slot.data_ptr()
        strided = tensor.layout is torch.strided and tensor.numel() > 0
        return strided and start <= tensor.data_ptr() < start + self.slot.numel()

    def refuse_returned_weights(self, block: Block, made: Sequence[torch.Tensor]) -> None:
        """Among the outputs: outside they are copies, into which the model may write in vain.

        Raises:
            UncuttableError: one is a weight or buffer of the block, or a view of one.
        """
        if any(map(self.has, made)):
            raise UncuttableError(
                f"a block's weights and buffers move, but {block.name} returns one, or a view of one. Return a copy "
                "(.clone())."
            )

    def refuse_kept_weights(self, block: Block) -> None:
        """In attributes, beyond the visit: the slot will be another shard's.

        Raises:
            UncuttableError: the block keeps a view of its weights or buffers so.
        """
        for module in block.modules:
            for name, value in vars(module).items():
                if name not in ("_parameters", "_buffers", "_modules", "_flat_weights") and any(
                    map(self.has, tensors_in(value))
                ):
                    raise UncuttableError(
                        f"a block's weights move, but {block.name} keeps a view of one in its attribute {name!r}. "
                        "Keep a copy (.clone())."
                    )

    def buffer(self, module: nn.Module, name: str) -> torch.Tensor:
        return self._buffers[module, name][0]

    def changed_buffers(self, block: Block) -> list[ChangedBuffer]:
        """Those that the forward has changed. Within a visit.

        By value: operators such as batch_norm change running statistics without raising `_version`.
        """
        changed = []
        for i, (module, name) in enumerate(block.buffer_sites):
            current, (slot, host) = module._buffers[name], self._buffers[module, name]
            if current is None or current.shape != host.shape or current.dtype != host.dtype:
                raise UncuttableError(
                    f"a block's buffers keep shape and dtype, but {block.name} replaced its buffer {name!r}. "
                    "Register it with its final shape, or keep it out of the block's forward."
                )
            if version_of(host) != self._copied_buffers[module, name][0]:
                raise UncuttableError(
                    f"a block writes its buffers where its modules have them, but {block.name} wrote {name!r} by "
                    "another reference, perhaps from a list or an attribute. Write it as the module's own."
                )
            if current is not slot:
                slot.copy_(current)
            if not same_bits(slot.to(host.device), host):
                changed.append(ChangedBuffer(i, host, slot, is_assigned=current is not slot))
        return changed

    def swap_buffers(self, block: Block, values: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
        """Give the buffers at these sites these values; the ones they had. A graph that has saved one goes on."""
        before = []
        for i, value in values:
            slot = self.buffer(*block.buffer_sites[i])
            before.append((i, slot.clone()))
            with _unsafe_preserve_version_counter(slot), torch.no_grad():
                slot.copy_(value)
        return before


def _tensors_of(block: Block) -> list[torch.Tensor]:
    """Those that its slot has a copy of."""
    return [*block.slot_parameters, *block.buffers()]


def _state_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    return version_of(tensor), tensor.data_ptr(), id(tensor)


# What follows is asked of every weight in every task: whole lists at once, in PyTorch's own functions.


def _layouts_of(tensors: Sequence[torch.Tensor]) -> Sequence[list[Any]]:
    layouts = (torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride, _DTYPE)
    return [list(map(layout, tensors)) for layout in layouts]


def _are_new(leaves: Sequence[nn.Parameter], parameters: Sequence[nn.Parameter]) -> bool:
    """Whether they have what `leaf_like` would give them, and nothing else, but for attributes, which each visit gives
    them anew."""
    if not all(all(map(is_, map(get, leaves), repeat(None))) for get in _OF_BACKWARDS):
        return False
    return list(map(grad_dtype_of, leaves)) == list(map(grad_dtype_of, parameters))
