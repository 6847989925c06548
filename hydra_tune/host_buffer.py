"""Owns the truth of a spilled trial: one host allocation of exact size, parameters are views of it.

Blocks lie one after another in the order in which they run, so that any run of consecutive blocks, in
particular a shard, is promoted by one copy. Every tensor has a storage of its own over its own bytes
(`torch.frombuffer`), so that saving one does not write the others.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from hydra_tune.config import align

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_VERSION = attrgetter("_version")
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What has memory: the tensor, or the indices and values of a sparse one."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def tensor_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return sum(part.numel() * part.element_size() for part in parts_of(tensor) or [tensor])


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, aligned as in a host buffer and in a slot."""
    return align(max(1, tensor_bytes(tensor)))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills one stretch of memory, in whatever order of its dimensions."""
    outermost_first = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.layout is torch.strided and tensor.permute(outermost_first).is_contiguous()


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


def places_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where their data begins."""
    return list(map(torch.Tensor.data_ptr, tensors))


@contextmanager
def versions_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """To autograd, what is written into `tensors` inside is as if it had not been."""
    with ExitStack() as stack:
        for tensor in tensors:  # one by one: torch 2.6 takes no tuple
            stack.enter_context(_unsafe_preserve_version_counter(tensor))
        yield


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, on whatever devices, have the same values; nan is the same as nan."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.layout is not torch.strided:
        return True
    a, b = a.detach().cpu(), b.detach().cpu()
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors of one dtype, on one device, are the same, the signs of zeros included."""
    if a.dtype in _COMPLEX:
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    bits = _BITS[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


def digest(tensor: torch.Tensor) -> float | None:
    """A number that other values hardly have: of the bits, if they are in host memory; on other devices, whose kernels
    may differ in the last bits, the sum of absolute values. None where there is none."""
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_quantized:
        return None
    if tensor.dtype in _COMPLEX:
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.device.type == "cpu":
        return int(tensor.resolve_neg().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64))
    return float(torch.linalg.vector_norm(tensor, 1, dtype=torch.float32)) if tensor.is_floating_point() else None


class HostBuffer:
    """An exact-size mapping with room for `tensors` in order: private to its process, or `shared` with those that are
    forked. One that is pinned has to be: a fork leaves one side with copies of private pages, and the GPU reads those
    that there were.

    `offsets[i]` is the place of `tensors[i]`; `view` copies a tensor there. Its pages take memory as they are written,
    so who lets go of each tensor once it is copied never has all of them twice. Pinning is the device's business:
    PyTorch's pinned allocator would round the size up to a power of two.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, shared: bool = False) -> None:
        self.offsets: list[int] = []
        end = 0
        for tensor in tensors:
            self.offsets.append(end)
            end += storage_bytes(tensor)
        self.num_bytes = max(end, 1)
        self._mapping = mmap.mmap(-1, self.num_bytes, access=mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY)
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def view(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """A copy at this place, with the tensor's shape, strides and dtype."""
        if tensor.numel() == 0:
            return tensor.detach()
        flat = torch.frombuffer(self._mapping, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        return flat.as_strided(tensor.size(), tensor.stride()).copy_(tensor.detach())


def once(tensor: torch.Tensor) -> torch.Tensor:
    """Each element once, where the tensor is expanded."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
