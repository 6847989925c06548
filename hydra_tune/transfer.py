"""Copies of tensors on another device. Operators must not tell them from the originals: strides decide in which order
a kernel adds, addresses how it is vectorised, and views of one memory stay views of one memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hydra_tune.host_buffer import tensor_bytes

ALIGNMENT = 64  # bytes; of every vector register there is


def copies_on(device: torch.device, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Laid out, aligned and aliased as the given ones; without their graph."""
    copied = {key: _copied(device, *span) for key, span in _spans(tensors).items()}
    copies = []
    for t in tensors:
        if not _has_span(t):
            copies.append(t.detach().to(device, copy=True))
            continue
        storage, start = copied[t.untyped_storage()._cdata]
        place = int(t.storage_offset()) * t.element_size() - start
        like = torch.empty(0, dtype=t.dtype, device=device)
        copies.append(like.set_(storage, place // t.element_size(), t.size(), t.stride()))
    return copies


def copied_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """What `copies_on` would allocate for them."""
    others = sum(tensor_bytes(t) for t in tensors if not _has_span(t))
    return others + sum(end - start for _, start, end in _spans(tensors).values())


def _copied(
    device: torch.device, storage: torch.UntypedStorage, start: int, end: int
) -> tuple[torch.UntypedStorage, int]:
    """Bytes `start` to `end` where addresses have the same remainder, and where in `storage` the new one begins."""
    given = torch.empty(0, dtype=torch.uint8, device=storage.device)
    given.set_(storage, start, (end - start,))  # type: ignore[call-overload]
    own = torch.empty(end - start, dtype=torch.uint8, device=device)
    shift = (given.data_ptr() - own.data_ptr()) % ALIGNMENT
    if shift:  # the user's own memory, from numpy or a file
        own = torch.empty(end - start + ALIGNMENT, dtype=torch.uint8, device=device)
        shift = (given.data_ptr() - own.data_ptr()) % ALIGNMENT
    own[shift : shift + end - start].copy_(given)
    return own.untyped_storage(), start - shift


def _spans(tensors: Iterable[torch.Tensor]) -> dict[int, tuple[torch.UntypedStorage, int, int]]:
    """Of each storage, by its id, from the first byte that any of these uses, aligned, to the last."""
    spans: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
    for t in filter(_has_span, tensors):
        start = int(t.storage_offset()) * t.element_size()
        last = sum((int(n) - 1) * int(stride) for n, stride in zip(t.size(), t.stride(), strict=True))
        end = start + (last + 1) * t.element_size()
        storage, first, after = spans.get(t.untyped_storage()._cdata, (t.untyped_storage(), start, end))
        spans[storage._cdata] = storage, min(start - start % ALIGNMENT, first), max(end, after)
    return spans


def _has_span(tensor: torch.Tensor) -> bool:
    """Whether it is described by its strides alone, and has elements."""
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.numel() > 0 and tensor.data_ptr() % tensor.element_size() == 0
