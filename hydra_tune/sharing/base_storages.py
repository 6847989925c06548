"""Knows which memory belongs to a base that `hydra_tune.share` gives to several trials."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from hydra_tune.devices.tensor_bytes import parts_of

# For the storage of each of a base's tensors: that tensor. Of copies on devices only the storage lives on.
_bases: weakref.WeakKeyDictionary[torch.UntypedStorage, weakref.ref[torch.Tensor]] = weakref.WeakKeyDictionary()


def note_base(tensors: Iterable[torch.Tensor]) -> None:
    """From here on these tensors belong to a base."""
    for tensor in tensors:
        for part in parts_of(tensor):
            _bases[part.untyped_storage()] = weakref.ref(tensor)


def is_base(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in memory of a base."""
    parts = parts_of(tensor) if _bases else []
    return bool(parts) and parts[0].untyped_storage() in _bases


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The base's own tensor that lies in the same memory; None if there is none, or none any more."""
    reference = _bases.get(parts_of(tensor)[0].untyped_storage()) if is_base(tensor) else None
    return None if reference is None else reference()
