"""Undoes what operators write into tensors: keeps the value each had before the first write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


class Journal:
    """Of these tensors. A dispatch mode shows it every operator before it runs; copies are made only of what
    is written. Operators that write without saying so in their schema (batch_norm) pass unnoticed."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._watched = {t.untyped_storage()._cdata: t for t in tensors if not t.is_meta}
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        schema = getattr(func, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                        self._keep(tensor.untyped_storage()._cdata)

    def _keep(self, key: int) -> None:
        tensor = self._watched.pop(key, None)
        if tensor is not None:
            self._before.append((tensor, tensor.detach().clone()))

    def undo(self) -> None:
        with torch.no_grad():
            for tensor, value in self._before:
                tensor.data.copy_(value)
