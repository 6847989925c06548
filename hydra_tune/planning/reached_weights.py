"""What a block's forward can reach beside its weights and buffers, and whether it holds other values since: then a
repetition would find it changed, or change it again."""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.quasirandom import SobolEngine

from hydra_tune.blocks.ambient_settings import STRUCTURE
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.blocks.tree import PLAIN, flatten
from hydra_tune.devices.tensor_bytes import digest, version_of
from hydra_tune.planning.fingerprint import Fingerprint

_MOST_OBJECTS = 50_000  # a reference to a trainer leads to everything
_MOST_BYTES = 1_000_000  # of an array that is read
_PYTHONS: Any = random.random.__self__  # type: ignore[attr-defined]  # the generator behind the module's functions
_HOLD_SOMETHING = {"array", "builtins", "collections", "itertools"}
_FOREIGN = (frozenset(("torch", "hydra_tune", "optuna", "ray")) | sys.stdlib_module_names) - _HOLD_SOMETHING
_FOLLOWED = (  # for all that their classes are somebody else's
    functools.partial, SimpleNamespace, argparse.Namespace, random.Random,
    torch.Tensor, torch.optim.Optimizer, SobolEngine,
)  # fmt: skip
NO_STATE = STRUCTURE | {"forward"}
_FIXED = (torch.dtype, torch.device, torch.layout, Enum, type, nn.Module, bytes, complex)


class Reached(Fingerprint):
    """The attributes of modules, without their weights, buffers and children, `others` by name, and what is set under
    a name: as they are now. An attribute that is set anew is no change: each repetition has the values of before."""

    most_items = 10_000
    deepest = 100

    def __init__(
        self, module: nn.Module, others: Mapping[str, Any], names: Sequence[tuple[Mapping[str, Any], str]] = ()
    ) -> None:
        super().__init__()
        self._modules = set(map(id, module.modules()))
        self._names = names
        self._roots = dict(others)
        for prefix, part in module.named_modules():
            for name, value in vars(part).items():
                if name not in NO_STATE and "_hooks" not in name:
                    self._roots[f"{prefix}.{name}".lstrip(".")] = value
        self._before = self._read()
        self.met = {number: value for number, (value, _) in self._known.items()}  # objects by id, as they were first

    def changes(self) -> list[str]:
        """The names of what holds other values than when it was asked last."""
        before, self._before = self._before, self._read()
        return [name for (name, now), (_, then) in zip(self._before, before, strict=True) if now != then]

    def _read(self) -> list[tuple[str, Hashable]]:
        self._known = {}
        globals_ = [(f"the global {name}", space.get(name)) for space, name in self._names]
        return [(name, self._of(value, 0)) for name, value in (*self._roots.items(), *globals_)]

    def _of_object(self, value: Any, depth: int) -> Hashable:
        if value is _PYTHONS or value is getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None):
            return None  # the process's own generators are another matter
        if isinstance(value, nn.Module):  # hidden from the model, a teacher in a list
            return None if id(value) in self._modules else self._of(vars(value), depth)
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        module = type(value).__module__
        if module == "numpy":
            return value.tobytes() if getattr(value, "nbytes", _MOST_BYTES + 1) <= _MOST_BYTES else None
        is_of_others = module.partition(".")[0] in _FOREIGN and not isinstance(value, _FOLLOWED)
        if len(self._known) > _MOST_OBJECTS or is_of_others:
            return None
        if isinstance(value, (list, tuple, set, frozenset, deque, dict)) and len(value) > self.most_items:
            return tuple(map(id, value))
        known = super()._of_object(value, depth)
        if isinstance(value, torch.Tensor):
            return known, version_of(value), None if value.is_meta else digest(value.detach())
        return known


def globals_of(module: nn.Module, forward: Any) -> list[tuple[dict[str, Any], str]]:
    """Those that the code of its modules' classes names, or a `forward` that is set on it, or functions that these
    name, and that are neither functions nor classes nor modules: where they are, and their names."""
    kinds = dict.fromkeys(kind for part in module.modules() for kind in type(part).__mro__)
    own = (vars(kind).values() for kind in kinds if not _is_foreign(kind.__module__))
    left: list[Any] = [forward, *chain.from_iterable(own)]
    found, met = list[tuple[dict[str, Any], str]](), set[int]()
    while left:
        value = left.pop()
        function = getattr(value, "fget", getattr(value, "__func__", value))  # a property's, or a static method's
        if not isinstance(function, FunctionType) or id(function) in met:
            continue
        met.add(id(function))
        space = function.__globals__
        for name in [name for name in _names_in(function.__code__) if name in space]:
            if isinstance(space[name], FunctionType):
                left += [] if _is_foreign(space[name].__module__) else [space[name]]
            elif not isinstance(space[name], (type, ModuleType, BuiltinFunctionType)):
                found.append((space, name))
    return found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


@functools.lru_cache(maxsize=4096)
def _is_foreign(module: str | None) -> bool:
    """Whether it is a library's: what these keep in globals decides nothing."""
    if (module or "").partition(".")[0] in _FOREIGN:
        return True
    return "site-packages" in (getattr(sys.modules.get(module or ""), "__file__", None) or "")


def weights_in(outputs: Any, at: DeviceCopy) -> list[nn.Parameter]:
    """The weights in a slot that a block returns where a copy would not do: frozen ones, into which others may write,
    and those in objects."""
    leaves = flatten(outputs)[0]
    found = [at.parameter_at(x.data_ptr())[0] for x in leaves if isinstance(x, torch.Tensor) and at.has(x)]
    objects = [x for x in leaves if not isinstance(x, torch.Tensor) and not stays_as_it_is(x)]
    hidden = [t for t in Fingerprint().tensors_within(objects) if at.has(t)] if objects else []
    return [p for p in found if not p.requires_grad] + [at.parameter_at(t.data_ptr())[0] for t in hidden]


def stays_as_it_is(value: Any) -> bool:
    """Whether nobody can change what a block sees of this argument."""
    if isinstance(value, tuple):
        return all(map(stays_as_it_is, value))
    if type(value) in PLAIN or type(value) is object or isinstance(value, _FIXED):
        return True
    return isinstance(value, (FunctionType, BuiltinFunctionType)) and not getattr(value, "__closure__", None)
