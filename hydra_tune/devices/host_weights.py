"""The truth of a spilled trial: its weights in one host allocation of exact size."""

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
    """The parameters of all blocks in host memory; the model's own parameters are views.

    They lie one after another in the order in which their blocks run, so that one copy promotes any run of them. The
    memory is a mapping of exact size: PyTorch's pinned allocator would round it up to a power of two. It is private to
    its process unless it is pinned: a fork leaves one side with copies of private pages, and the GPU reads those that
    there were. Every parameter has a storage of its own over its own bytes, so that saving one does not write the
    others. Pages take memory as they are written: what a parameter had before is free by then.
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
        # the parameters stay views; also if the model is collected
        self.close = weakref.finalize(self, device.unpin, self.bytes)
        self.close.atexit = False

    def has(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._place

    def offset(self, parameter: nn.Parameter, data: torch.Tensor) -> int | None:
        """Where the parameter's `data` lie; None if the user has given it other storage since (`p.data = ...`,
        `share_memory()`), in which it stays: what was here may still be someone's."""
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
