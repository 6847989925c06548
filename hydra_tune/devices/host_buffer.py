"""Bytes and bits of tensors, and the truth of a spilled trial: its weights in one host allocation of exact size."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import nn

from hydra_tune.config import align
from hydra_tune.errors import PrepareError

if TYPE_CHECKING:
    from hydra_tune.blocks.block import Block
    from hydra_tune.devices.device import Device

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_VERSION = attrgetter("_version")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
}


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What has memory: the tensor, or the indices and values of a sparse one."""
    if tensor.layout is torch.strided:
        return [tensor]
    return [getattr(tensor, name)() for name in _PARTS.get(tensor.layout, ())]


def tensor_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return sum(part.numel() * part.element_size() for part in parts_of(tensor) or [tensor])


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, aligned as in a host buffer and in a slot."""
    return align(max(1, tensor_bytes(tensor)))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills one stretch of memory, in whatever order of its dimensions."""
    outermost = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.layout is torch.strided and (tensor.is_contiguous() or tensor.permute(outermost).is_contiguous())


def version_of(tensor: torch.Tensor) -> int:
    """How often it was written in place; inference tensors do not count."""
    try:
        return tensor._version
    except RuntimeError:  # asking first would cost more than all else
        return 0


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return list(map(version_of, tensors))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, on whatever devices, are the same, the signs of zeros included; of sparse ones, as far as
    their shapes tell; of nested ones nobody knows."""
    if a.is_nested or b.is_nested or a.shape != b.shape or a.dtype != b.dtype or a.is_quantized:
        return False
    return a.layout is not torch.strided or torch.equal(_bits_of(a), _bits_of(b.to(a.device)))


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.element_size()])


def digest(tensor: torch.Tensor) -> float | None:
    """A number that other values hardly have: of the bits, if they are in host memory; on other devices, whose kernels
    may differ in the last bits, the sum of absolute values. None where there is none."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() == 0 or tensor.is_quantized:
        return None
    if tensor.device.type == "cpu":
        return int(_bits_of(tensor).sum(dtype=torch.int64))
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return float(torch.linalg.vector_norm(tensor, 1, dtype=torch.float32)) if tensor.is_floating_point() else None


class HostWeights:
    """The parameters of all blocks in host memory; the model's own parameters are views.

    Blocks lie one after another in the order in which they run, so that one copy promotes any run of them. The memory
    is a mapping of exact size (PyTorch's pinned allocator would round it up to a power of two), private to its process
    unless it is pinned: a fork leaves one side with copies of private pages, and the GPU reads those that there were.
    Every parameter has a storage of its own over its own bytes, so that saving one does not write the others. Pages
    take memory as they are written: what a parameter had before is free by then.
    """

    def __init__(self, blocks: Sequence[Block], device: Device) -> None:
        parameters = list(dict.fromkeys(p for block in blocks for p in block.slot_parameters))
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
