"""The weights of a spilled trial in host memory: one allocation of exact size, and their only current values."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable

import torch
from torch import nn

from hydra_tune.devices.device import Device
from hydra_tune.devices.tensor_bytes import is_dense, storage_bytes
from hydra_tune.errors import PrepareError


class HostWeights:
    """The parameters of all blocks in one buffer in host memory. The model's own parameters are views of it.

    - Parameters lie in the order in which their blocks run, so that one copy promotes several in a row.
    - The buffer is a memory mapping. PyTorch's pinned allocator would round its size up to a power of two.
    - The mapping is private to the process, unless it is pinned for a GPU. A fork gives one of the two processes new
      copies of private pages, but the GPU would go on reading the old ones.
    - Each parameter has a storage of its own over its own bytes, so that `torch.save` of one does not write all.
    - A page takes memory once it is written. By then the parameter's former memory is free.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: Device) -> None:
        parameters = list(dict.fromkeys(parameters))
        num_bytes = max(1, sum(map(storage_bytes, parameters)))
        access = mmap.ACCESS_COPY if device.is_virtual else mmap.ACCESS_WRITE
        self._mapping = mmap.mmap(-1, num_bytes, access=access)
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._place: dict[int, tuple[int, torch.Tensor]] = {}
        offset = 0
        for parameter in parameters:
            data = parameter.detach()
            if data.numel():
                flat = torch.frombuffer(self._mapping, dtype=data.dtype, count=data.numel(), offset=offset)
                parameter.data = data = flat.as_strided(data.size(), data.stride()).copy_(data)
            self._place[id(parameter)] = offset, data
            offset += storage_bytes(data)
        device.pin(self.bytes)
        # also called when the model is garbage collected; the parameters stay views of the mapping
        self.close = weakref.finalize(self, device.unpin, self.bytes)
        self.close.atexit = False

    def has(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._place

    def offset(self, parameter: nn.Parameter, data: torch.Tensor) -> int | None:
        """The offset of the parameter's `data` in `bytes`; None if the user has given it other storage since, by
        `p.data = ...` or `share_memory()`. Such a parameter stays where it is, and its bytes here stay unused: other
        tensors may still view them."""
        offset, view = self._place[id(parameter)]
        here = data.data_ptr() == self.bytes.data_ptr() + offset or data.numel() == 0
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
