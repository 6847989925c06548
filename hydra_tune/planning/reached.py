"""What a block's forward can reach beside its weights and buffers: whether it holds other values after a measure.

Of the block's copy that says that its activations are kept. The block itself, what it is given, and globals that its
modules' code names may be changed by the first run of a copy, as by what fills a table, but by no other run: else the
model is refused.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.quasirandom import SobolEngine

from hydra_tune.fingerprint import PLAIN, Fingerprint
from hydra_tune.host_buffer import digest, version_of

_MOST_OBJECTS = 50_000  # a reference to a trainer leads to everything
_MOST_BYTES = 1_000_000  # of an array that is read
_FEW_BYTES = 65_536  # of a tensor that is read byte by byte, in sixteen times its memory
_PYTHONS: Any = random.random.__self__  # type: ignore[attr-defined]  # the generator behind the module's functions
_FOREIGN = (frozenset(("torch", "hydra_tune", "optuna", "ray")) | sys.stdlib_module_names) - {"collections"}
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_FOLLOWED = (  # for all that their classes are somebody else's
    *_CONTAINERS, types.MappingProxyType, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
    functools.partial, types.SimpleNamespace, argparse.Namespace, random.Random,
    torch.Generator, torch.Tensor, torch.optim.Optimizer, SobolEngine,
)  # fmt: skip
STRUCTURE = frozenset((  # attributes of modules that are no state of theirs
    "_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs", "forward", "_apply",
))  # fmt: skip


class _Global(NamedTuple):
    """It may be set anew."""

    names: Mapping[str, Any]
    name: str


class Reached(Fingerprint):
    """The attributes of modules, without their weights, buffers and children, and `others` by name: as they are now.
    An attribute that is set anew is no change: each repetition has the values of before."""

    most_items = 10_000
    deepest = 100

    def __init__(self, module: nn.Module, others: Mapping[str, Any], *, without: Sequence[str] = ()) -> None:
        super().__init__()
        self._modules = set(map(id, module.modules()))
        self._roots = dict(others)
        for prefix, part in module.named_modules():
            for name, value in vars(part).items():
                if type(value) not in PLAIN and name not in STRUCTURE and name not in without:
                    self._roots[f"{prefix}.{name}".lstrip(".")] = value
        self._before = self._read()
        self._met = self._known

    def changes(self) -> list[str]:
        """The names of what holds other values than when it was asked last."""
        before, self._before = self._before, self._read()
        return [name for name, state in self._before.items() if state != before[name]]

    def has(self, objects: Sequence[Any]) -> bool:
        """Whether one of these was among them."""
        return any(id(each) in self._met for each in objects)

    def _read(self) -> dict[str, Hashable]:
        self._known = {}
        values = ((k, v.names.get(v.name) if type(v) is _Global else v) for k, v in self._roots.items())
        return {name: self._of(value, 0) for name, value in values}

    def _of_object(self, value: Any, depth: int) -> Hashable:
        if type(value) in (list, dict, OrderedDict) and not value:
            return 0
        if value is _PYTHONS or value is getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None):
            return None  # the process's own generators are another matter
        if isinstance(value, nn.Module):  # hidden from the model, a teacher in a list
            return None if id(value) in self._modules else self._of(vars(value), depth)
        if type(value).__module__ == "numpy":
            return value.tobytes() if getattr(value, "nbytes", _MOST_BYTES + 1) <= _MOST_BYTES else None
        if len(self._known) > _MOST_OBJECTS or (_is_of_others(value) and not isinstance(value, _FOLLOWED)):
            return None
        if isinstance(value, _CONTAINERS) and len(value) > self.most_items:
            return tuple(map(id, value))
        return super()._of_object(value, depth)

    def _of_tensor(self, tensor: torch.Tensor) -> Hashable:
        state = version_of(tensor), tuple(tensor.shape), tensor.dtype
        if isinstance(tensor, nn.Parameter) or tensor.is_meta or tensor.layout is not torch.strided:
            return state
        if tensor.nbytes > _FEW_BYTES or tensor.is_quantized:
            return *state, digest(tensor.detach())
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        return *state, int((flat.long() * torch.arange(1, len(flat) + 1, device=flat.device)).sum())


def globals_of(module: nn.Module, forward: Any) -> dict[str, Any]:
    """By name, those that its forward, or one that is set on it, names, or what these call, and that are neither
    functions nor classes nor modules."""
    found: dict[str, Any] = {}
    methods: dict[str, list[types.FunctionType]] = {}
    for kind in dict.fromkeys(base for part in module.modules() for base in type(part).__mro__):
        for name, value in {} if _is_foreign(kind.__module__) else vars(kind).items():
            of_property = getattr(value, "fget", getattr(value, "__func__", value))
            if isinstance(of_property, types.FunctionType):
                methods.setdefault(name, []).append(of_property)
    own = getattr(forward, "__func__", None)
    left, met = [*methods.get("forward", ()), *([own] if isinstance(own, types.FunctionType) else [])], set[int]()
    while left:
        function = left.pop()
        if id(function) in met:
            continue
        met.add(id(function))
        for name in _names_in(function.__code__):
            left += methods.get(name, ())
            value = function.__globals__.get(name, function)
            if isinstance(value, types.FunctionType):
                left += [] if _is_foreign(value.__module__) else [value]
            elif not isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
                found[f"the global {name}"] = _Global(function.__globals__, name)
    return found


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_of_others(value: Any) -> bool:
    """Not an iterator or a bytearray, which hold something."""
    module = type(value).__module__
    return module.partition(".")[0] in _FOREIGN and module not in ("array", "builtins", "itertools")


@functools.lru_cache(maxsize=4096)
def _is_foreign(module: str | None) -> bool:
    """Whether it is a library's: what these keep in globals decides nothing."""
    if (module or "").partition(".")[0] in _FOREIGN or module in sys.builtin_module_names:
        return True
    return "site-packages" in (getattr(sys.modules.get(module or ""), "__file__", None) or "")
