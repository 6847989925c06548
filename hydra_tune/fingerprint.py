"""What a model would do, as far as its modules' attributes tell: equal for models that may share a plan.

A pilot of one model stands for another only if both behave alike. A rate that is zero, a flag in a config object,
a function in a closure: any of them may decide what a forward keeps or draws.

A plan outlives its model, so its key is a digest and keeps nothing of it. Classes are told apart as objects, not by
name, for a notebook makes two of one name: each has a number, which is never given twice, as an id is.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import marshal
import types
import weakref
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hydra_tune.own_forward import StandIn, own_forward_of

_STRUCTURE = ("_parameters", "_buffers", "_modules", "forward", "_apply", "training")
_MOST_ITEMS = 1_000  # of a container; larger ones are data, and count by their size
_FEW = 8  # elements of a buffer that may be a setting, no running value
_MANY = 1024  # of a tensor or an array that is an attribute
_DEEPEST = 12
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, enum.Enum, torch.dtype, torch.device)

_numbers: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
_count = itertools.count()


@dataclass(frozen=True)
class PlanKey:
    """`kinds` are the classes that the digest tells apart: without one of them no model has this key any more."""

    digest: bytes
    kinds: tuple[weakref.ref[type], ...] = field(compare=False)

    @property
    def can_be_met(self) -> bool:
        return all(kind() is not None for kind in self.kinds)


class Fingerprint:
    """Reads values into what has a short `repr`, equal for equals: names, numbers and digests."""

    def __init__(self) -> None:
        self._kinds: set[type] = set()
        # What was met, by id. Values are kept: the next one may get the id of one that is collected.
        self._known: dict[int, tuple[Any, Hashable]] = {}
        self._modules: set[int] = set()  # by id; wherever else they are met, they are known

    def key(self, *parts: object) -> PlanKey:
        return PlanKey(_digest(parts), tuple(map(weakref.ref, self._kinds)))

    def number(self, kind: type) -> int:
        self._kinds.add(kind)
        return _numbers.setdefault(kind, next(_count))

    def of_model(self, model: nn.Module) -> Hashable:
        """Of PyTorch's own modules numbers count as zero or not (dropout keeps a mask or it doesn't)."""
        self._modules.update(map(id, model.modules()))
        return _digest([(name, self.number(type(m)), self._of_module(m)) for name, m in model.named_modules()])

    def _of_module(self, module: nn.Module) -> Hashable:
        own = {k: v for k, v in vars(module).items() if k not in _STRUCTURE and "_hooks" not in k}
        buffers = module._buffers
        if type(module).__module__.startswith("torch.nn."):
            own = {k: v != 0 if isinstance(v, float) else v for k, v in own.items()}
            buffers = {}  # they decide nothing (a count of batches)
        values = [(k, None if b is None else _of_tensor(b, _FEW)) for k, b in buffers.items()]
        return (*((k, self._of(v, 0)) for k, v in own.items()), *values, self._of(own_forward_of(module), 0))

    def _of(self, value: Any, depth: int) -> Hashable:
        kind = self.number(type(value))
        if isinstance(value, enum.Enum):
            return kind, value._name_, self._of(value._value_, depth + 1)
        if isinstance(value, _PLAIN):
            return kind, self.number(value) if isinstance(value, type) else _spell(value)
        if depth > _DEEPEST:
            return (kind,)
        if id(value) not in self._known:
            self._known[id(value)] = value, (kind,)  # met again within itself
            self._known[id(value)] = value, _digest((kind, self._of_object(value, depth + 1)))
        return self._known[id(value)][1]

    def _of_object(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, StandIn):
            return self._of(value.own, depth)
        attributes = _attributes_of(value)
        own = None if attributes is None else self._of(attributes, depth)
        if isinstance(value, torch.Tensor):
            return _of_tensor(value, _MANY), own
        if isinstance(value, nn.Module):
            return None if id(value) in self._modules else (self.of_model(value), _weights_of(value))
        if isinstance(value, types.MappingProxyType):
            value = dict(value)
        if isinstance(value, (list, tuple, set, frozenset, deque, dict)):
            if len(value) > _MOST_ITEMS:
                return len(value), own
            items = value.items() if isinstance(value, dict) else value
            return tuple(self._of(item, depth) for item in items), own
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            defaults = value.__defaults__ or (), value.__kwdefaults__ or {}
            inside = tuple(self._of(x, depth) for x in (*cells, *defaults))
            return value.__module__, value.__qualname__, self._of(value.__code__, depth), inside, own
        if isinstance(value, types.CodeType):
            return marshal.dumps(value, 2)  # a later format depends on who else refers to its parts
        if isinstance(value, (types.MethodType, types.BuiltinFunctionType)):
            function = self._of(getattr(value, "__func__", None), depth)
            return value.__qualname__, function, self._of(getattr(value, "__self__", None), depth)
        if type(value).__module__ == "numpy":
            return getattr(value, "shape", None), repr(value.tolist()) if getattr(value, "size", 1) <= _MANY else None
        return own, None if attributes and not slots_of(type(value)) else self._of(_reduced(value), depth)


def _of_tensor(tensor: torch.Tensor, most: int) -> Hashable:
    """Its values, if they are few."""
    few = tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() <= most
    return tuple(tensor.shape), tensor.dtype, repr(tensor.tolist()) if few else None


def _weights_of(module: nn.Module) -> Hashable:
    return tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters())


def _attributes_of(value: Any) -> Any:
    try:
        return vars(value)
    except Exception:  # it has none, or a `__getattr__` of its own
        return None


def slots_of(kind: type) -> list[str]:
    """The names of attributes that instances have in slots."""
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return [name for names in found for name in ((names,) if isinstance(names, str) else names) if name[:2] != "__"]


def _reduced(value: Any) -> Any:
    """What pickle would keep of an object; None of what it can't keep (a lock, a generator)."""
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:
        return None
    return reduced[:3] if isinstance(reduced, tuple) else reduced


def _spell(value: Any) -> str:
    """As its base class does: a subclass may have any `repr`."""
    if isinstance(value, int):
        return int.__format__(value, "x")  # of any length
    for base in (float, complex, str, bytes):
        if isinstance(value, base):
            return base.__repr__(value)
    return repr(value)


def _digest(parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
