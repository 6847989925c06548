"""Finds what a block's forward can reach beside its weights and buffers, and notices when it changes.

If a forward changes such a value, a repetition would find it changed, or change it again.
"""

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
from hydra_tune.devices.tensor_bytes import digest, is_wrapper, version_of
from hydra_tune.planning.fingerprint import Fingerprint

_MOST_OBJECTS = 50_000  # that are followed: a reference to a trainer leads to everything
_MOST_BYTES = 1_000_000  # of a NumPy array; a larger one is not read
_PYTHONS: Any = random.random.__self__  # type: ignore[attr-defined]  # the generator of random.random()
_HOLD_SOMETHING = {"array", "builtins", "collections", "itertools"}
_FOREIGN = (frozenset(("torch", "hydra_tune", "optuna", "ray")) | sys.stdlib_module_names) - _HOLD_SOMETHING
_FOLLOWED = (  # classes of foreign modules whose objects are followed nevertheless
    functools.partial, SimpleNamespace, argparse.Namespace, random.Random,
    torch.Tensor, torch.optim.Optimizer, SobolEngine,
)  # fmt: skip
NO_STATE = STRUCTURE | {"forward"}
_FIXED = (torch.dtype, torch.device, torch.layout, Enum, type, nn.Module, bytes, complex)


class Reached(Fingerprint):
    """A snapshot of what a block can reach: attributes of its modules (without weights, buffers and children), `others`
    by name, and globals by namespace and name.

    An attribute that a forward replaces by another object is no change: a repetition starts with the former attributes.
    """

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
        self.met = {number: value for number, (value, _) in self._known.items()}  # the objects reached first, by id

    def changes(self) -> list[str]:
        """The names of what has changed since the last call, or since the snapshot was made."""
        before, self._before = self._before, self._read()
        return [name for (name, now), (_, then) in zip(self._before, before, strict=True) if now != then]

    def _read(self) -> list[tuple[str, Hashable]]:
        self._known = {}
        globals_ = [(f"the global {name}", space.get(name)) for space, name in self._names]
        return [(name, self._of(value, 0)) for name, value in (*self._roots.items(), *globals_)]

    def _of_object(self, value: Any, depth: int) -> Hashable:
        if value is _PYTHONS or value is getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None):
            return None  # the process's own generators are compared elsewhere (`PythonAndNumpyStates`)
        if isinstance(value, nn.Module):  # one that is not registered, as a teacher in a list
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
            value = value if is_wrapper(value) else value.detach()  # here a quantized one would lose its parts
            return known, version_of(value), None if value.is_meta else digest(value)
        return known


def globals_of(module: nn.Module, forward: Any) -> list[tuple[dict[str, Any], str]]:
    """The globals that a forward may read, each as its namespace and its name.

    These are the globals that are named in the code of the modules' classes, in a `forward` that is set on the module,
    and in functions that these name. Functions, classes and modules among them are left out.
    """
    kinds = dict.fromkeys(kind for part in module.modules() for kind in type(part).__mro__)
    own = (vars(kind).values() for kind in kinds if not _is_foreign(kind.__module__))
    left: list[Any] = [forward, *chain.from_iterable(own)]
    found, met = list[tuple[dict[str, Any], str]](), set[int]()
    while left:
        value = left.pop()
        function = getattr(value, "fget", getattr(value, "__func__", value))  # of a property, or of a static method
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
    """Whether a Python module is a library's. Globals of libraries are assumed not to affect a forward."""
    if (module or "").partition(".")[0] in _FOREIGN:
        return True
    return "site-packages" in (getattr(sys.modules.get(module or ""), "__file__", None) or "")


def weights_in(outputs: Any, at: DeviceCopy) -> list[nn.Parameter]:
    """The weights in a slot that a block returns, and for which returning a copy would be wrong: frozen weights, into
    which a caller may write, and weights within objects."""
    leaves = flatten(outputs)[0]
    found = [at.parameter_at(x.data_ptr())[0] for x in leaves if isinstance(x, torch.Tensor) and at.has(x)]
    objects = [x for x in leaves if not isinstance(x, torch.Tensor) and not stays_as_it_is(x)]
    hidden = [t for t in Fingerprint().tensors_within(objects) if at.has(t)] if objects else []
    return [p for p in found if not p.requires_grad] + [at.parameter_at(t.data_ptr())[0] for t in hidden]


def stays_as_it_is(value: Any) -> bool:
    """Whether an argument is immutable, as far as a block can see."""
    if isinstance(value, tuple):
        return all(map(stays_as_it_is, value))
    if type(value) in PLAIN or type(value) is object or isinstance(value, _FIXED):
        return True
    return isinstance(value, (FunctionType, BuiltinFunctionType)) and not getattr(value, "__closure__", None)
