"""Knows which memory belongs to a base that `hydra_tune.share` gives to several trials."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from hydra_tune.devices.tensor_bytes import parts_of

# For the storage of each of a base's tensors: that tensor, which lives as long as the base does.
_bases: weakref.WeakKeyDictionary[torch.UntypedStorage, weakref.ref[torch.Tensor]] = weakref.WeakKeyDictionary()


def note_base(tensors: Iterable[torch.Tensor]) -> None:
    """From here on these tensors belong to a base."""
    for tensor in tensors:
        for part in parts_of(tensor):
            _bases[part.untyped_storage()] = weakref.ref(tensor)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The base's tensor that lies in the same memory; None if this memory belongs to no base."""
    parts = parts_of(tensor)
    reference = _bases.get(parts[0].untyped_storage()) if parts and _bases else None
    return None if reference is None else reference()
