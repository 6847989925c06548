"""Copies of tensors on another device. Operators must not tell them from the originals: strides decide in which order
a kernel adds, addresses how it is vectorised, and views of one memory stay views of one memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

ALIGNMENT = 64  # bytes; of every vector register there is


def copies_on(device: torch.device, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Laid out, aligned and aliased as the given ones; without their graph."""
    spans = _spans(tensors)
    raw = {key: _Raw(device, *span) for key, span in spans.items()}
    return [raw[_key(t)].like(t) if _has_span(t) else t.detach().to(device, copy=True) for t in tensors]


def copied_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """What `copies_on` would allocate for them."""
    given = list(tensors)
    others = sum(t.numel() * t.element_size() for t in given if not _has_span(t))
    return others + sum(_Raw.num_bytes(start, end) for _, start, end in _spans(given).values())


class _Raw:
    """Bytes `start` to `end` of a storage, copied to where addresses have the same remainder."""

    def __init__(self, device: torch.device, storage: torch.UntypedStorage, start: int, end: int) -> None:
        self._start = _aligned(start)
        given = torch.empty(0, dtype=torch.uint8, device=storage.device)
        given.set_(storage, self._start, (end - self._start,))  # type: ignore[call-overload]
        address = storage.data_ptr() + self._start
        self._bytes = torch.empty(self.num_bytes(start, end), dtype=torch.uint8, device=device)
        self._pad = (address - self._bytes.data_ptr()) % ALIGNMENT
        if self._pad:  # the user's own memory, from numpy or a file
            self._bytes = torch.empty(self._bytes.numel() + ALIGNMENT, dtype=torch.uint8, device=device)
            self._pad = (address - self._bytes.data_ptr()) % ALIGNMENT
        self._bytes[self._pad : self._pad + given.numel()].copy_(given)

    @staticmethod
    def num_bytes(start: int, end: int) -> int:
        return end - _aligned(start)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        place = self._pad + tensor.storage_offset() * tensor.element_size() - self._start
        like = torch.empty(0, dtype=tensor.dtype, device=self._bytes.device)
        storage = self._bytes.untyped_storage()
        return like.set_(storage, place // tensor.element_size(), tensor.size(), tensor.stride())


def _spans(tensors: Iterable[torch.Tensor]) -> dict[int, tuple[torch.UntypedStorage, int, int]]:
    """Of each storage, from the first byte that any of these uses to the last."""
    spans: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
    for tensor in filter(_has_span, tensors):
        storage, start, end = _span(tensor)
        _, first, last = spans.get(_key(tensor), (storage, start, end))
        spans[_key(tensor)] = storage, min(start, first), max(end, last)
    return spans


def _span(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int, int]:
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    last = sum((int(n) - 1) * int(stride) for n, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.untyped_storage(), start, start + (last + 1) * size


def _has_span(tensor: torch.Tensor) -> bool:
    """Whether it is described by its strides alone, and has elements."""
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.numel() > 0 and tensor.data_ptr() % tensor.element_size() == 0


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _aligned(place: int) -> int:
    return place - place % ALIGNMENT
