"""What a model would do, as far as its modules' attributes tell: equal for models that may share a plan.

A pilot of one model stands for another only if both behave alike. A rate that is zero, a flag in a config object,
a function in a closure: any of them may decide what a forward keeps or draws.
"""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

_STRUCTURE = ("_parameters", "_buffers", "_modules", "forward", "_apply", "training")
_MOST_ITEMS = 1_000  # of a container; larger ones are data, and count by their size
_FEW = 8  # elements of a tensor that may be a setting
_DEEPEST = 12
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, enum.Enum, torch.dtype, torch.device)


def fingerprint_of(model: nn.Module) -> Hashable:
    """Of PyTorch's own modules numbers count as zero or not (dropout keeps a mask or it doesn't)."""
    known: dict[int, tuple[Any, Hashable]] = {}
    return tuple((name, type(module), _of_module(module, known)) for name, module in model.named_modules())


def switches_of(model: nn.Module) -> Hashable:
    """What is on or off in its modules, and in their configs: truth values, names, what is absent, what requires a
    gradient. A look at each forward: these decide what it computes more often than numbers do."""
    owners: dict[int, Any] = {}
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            if hasattr(owner, "__dict__"):
                owners[id(owner)] = owner
    return tuple(
        tuple((k, v.requires_grad if type(v) is torch.Tensor else v) for k, v in vars(owner).items() if _switches(k, v))
        for owner in owners.values()
    )


def _switches(name: str, value: Any) -> bool:
    return name != "training" and (value is None or type(value) in (bool, str, torch.Tensor))


def _of_module(module: nn.Module, known: dict[int, tuple[Any, Hashable]]) -> Hashable:
    own = {k: v for k, v in vars(module).items() if k not in _STRUCTURE and "_hooks" not in k}
    buffers = module._buffers
    if type(module).__module__.startswith("torch.nn."):
        own = {k: v != 0 if isinstance(v, float) else v for k, v in own.items()}
        buffers = {}  # they decide nothing (a count of batches)
    return tuple((k, _of(v, known, 0)) for k, v in (*own.items(), *buffers.items()))


def _of(value: Any, known: dict[int, tuple[Any, Hashable]], depth: int) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), repr(value) if isinstance(value, (float, complex)) else value
    if depth > _DEEPEST:
        return (type(value),)
    if id(value) not in known:  # values are kept there: the next one may get the id of one that is collected
        known[id(value)] = value, (type(value),)  # met again within itself
        known[id(value)] = value, _of_object(value, known, depth + 1)
    return known[id(value)][1]


def _of_object(value: Any, known: dict[int, tuple[Any, Hashable]], depth: int) -> Hashable:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        few = value.layout is torch.strided and not value.is_meta and value.numel() <= _FEW
        return kind, tuple(value.shape), value.dtype, repr(value.tolist()) if few else None
    if isinstance(value, (list, tuple, set, frozenset, deque, dict)):
        if len(value) > _MOST_ITEMS:
            return kind, len(value)
        items = value.items() if isinstance(value, dict) else value
        return kind, tuple(_of(item, known, depth) for item in items)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        inside = tuple(_of(x, known, depth) for x in (*cells, *(value.__defaults__ or ())))
        return value.__module__, value.__qualname__, value.__code__, inside
    if isinstance(value, (types.MethodType, types.BuiltinFunctionType)):
        return value.__qualname__, _of(getattr(value, "__self__", None), known, depth)
    if kind.__module__ == "numpy":
        return kind, repr(value) if getattr(value, "size", 1) <= _FEW else getattr(value, "shape", None)
    if isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
        return (kind,)
    return kind, _of(vars(value), known, depth)
