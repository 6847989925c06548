"""A tensor's bytes and bits: how many, whether they are dense, whether they were written, whether they are the same."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from hydra_tune.config import align

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
