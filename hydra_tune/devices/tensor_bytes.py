"""Questions about a tensor's memory: how many bytes, whether dense, whether written, whether two have equal bits.

A *wrapper* is a tensor subclass that has no memory itself but *parts*, plain tensors in its attributes, of which
`__tensor_flatten__` tells: quantized weights of torchao are such.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

import torch
from torch import nn

from hydra_tune.config import align

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# types of quantized weights' codes; other libraries pack them into int32
_CODES = frozenset(
    [torch.int8, torch.uint8, torch.int32, *(getattr(torch, n) for n in dir(torch) if n.startswith("float8_"))]
)  # fmt: skip
_TINY_BYTES = 1024
_VERSION = attrgetter("_version")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
}


def is_wrapper(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    return kind is not torch.Tensor and kind is not nn.Parameter and hasattr(kind, "__tensor_flatten__")


def sites_of_parts(wrapper: torch.Tensor) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    """For each plain part: the wrapper that has it (it may be within another), the attribute, and the part."""
    for name in wrapper.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        part = getattr(wrapper, name)
        if is_wrapper(part):
            yield from sites_of_parts(part)
        else:
            yield wrapper, name, part


def with_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, with its parts in place of each wrapper."""
    return [part for t in tensors for part in ([p for *_, p in sites_of_parts(t)] if is_wrapper(t) else [t])]


def is_quantized_buffer(buffer: torch.Tensor) -> bool:
    """Whether a buffer has quantized weights, by its type and size. It is promoted as a frozen weight is."""
    return buffer.dtype in _CODES and buffer.nbytes > _TINY_BYTES


def weights_of(module: nn.Module) -> list[torch.Tensor]:
    """The module's Parameters, with its parts in place of a wrapper, and its buffers with quantized weights."""
    return with_parts(module.parameters()) + list(filter(is_quantized_buffer, module.buffers()))


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that have memory: the tensor itself, a wrapper's parts, or a sparse tensor's indices and values."""
    if is_wrapper(tensor):
        return with_parts([tensor])
    if tensor.layout is torch.strided:
        return [tensor]
    return [getattr(tensor, name)() for name in _PARTS.get(tensor.layout, ())]


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; of a wrapper those of its parts, of a sparse tensor of its indices and values."""
    if tensor.layout is torch.strided and not is_wrapper(tensor):
        return tensor.nbytes
    return sum(part.numel() * part.element_size() for part in parts_of(tensor) or [tensor])


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes in a host buffer and in a slot: its own, rounded up to the alignment there."""
    return align(max(1, tensor_bytes(tensor)))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills one range of memory without gaps, in any order of its dimensions."""
    outermost = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.layout is torch.strided and (tensor.is_contiguous() or tensor.permute(outermost).is_contiguous())


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was written in place; 0 for inference tensors, which do not count that."""
    try:
        return tensor._version
    except RuntimeError:  # `is_inference()` would cost more than all the rest
        return 0


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return list(map(version_of, tensors))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have equal bits, on whatever devices; 0.0 and -0.0 differ. Of sparse tensors only shape and
    dtype are compared. Nested and quantized tensors are never the same."""
    if is_wrapper(a) or is_wrapper(b):
        return type(a) is type(b) and all(map(same_bits, with_parts([a]), with_parts([b])))
    if a.is_nested or b.is_nested or a.shape != b.shape or a.dtype != b.dtype or a.is_quantized:
        return False
    return a.layout is not torch.strided or torch.equal(_bits_of(a), _bits_of(b.to(a.device)))


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.element_size()])


def digest(tensor: torch.Tensor) -> float | None:
    """A number that tells tensors with other values apart, with high probability.

    In host memory it is the sum of the bits. On other devices, where two runs of a kernel may differ in the last bits,
    it is the sum of absolute values. None for tensors without elements, and for sparse, nested and quantized ones; on
    other devices also for integers.
    """
    if is_wrapper(tensor):
        return sum(digest(part) or 0 for part in with_parts([tensor]))
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() == 0 or tensor.is_quantized:
        return None
    if tensor.device.type == "cpu":
        return int(_bits_of(tensor).sum(dtype=torch.int64))
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return float(torch.linalg.vector_norm(tensor, 1, dtype=torch.float32)) if tensor.is_floating_point() else None
