"""The weights of a spilled trial in host memory, which owns their truth."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from hydra_tune.blocks.block import Block
from hydra_tune.device import Device
from hydra_tune.errors import PrepareError
from hydra_tune.host_buffer import HostBuffer, is_dense


class HostWeights:
    """The parameters of all blocks in one host buffer; the model's own parameters are views of it."""

    def __init__(self, blocks: Sequence[Block], device: Device) -> None:
        self.parameters = list(dict.fromkeys(p for block in blocks for p in block.slot_parameters))
        self._pieces: dict[tuple[int, int], torch.Tensor] = {}
        self.buffer = HostBuffer(self.parameters, shared=not device.is_virtual)
        self._place: dict[int, tuple[int, torch.Tensor]] = {}
        for parameter, offset in zip(self.parameters, self.buffer.offsets, strict=True):
            view = self.buffer.view(parameter, offset)
            self._place[id(parameter)] = offset, view
            parameter.data = view  # what it had before is free now
        device.pin(self.buffer.bytes)
        self._unpin = partial(device.unpin, self.buffer.bytes)
        if not device.is_virtual:  # also if the model is collected
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
