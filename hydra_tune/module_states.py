"""What the attributes of modules are set to: training mode, flags, numbers, objects, tensors that are no buffers; which
children they have, and of which classes they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

State = dict[str, Any]  # by the attribute's name

_STRUCTURE = frozenset((  # not what a module is set to
    "_parameters", "_buffers", "_modules", "_apply", "_flat_weights", "_flat_weight_refs",
))  # fmt: skip
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = frozenset((
    bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size, BuiltinFunctionType,
))  # fmt: skip


class Build(NamedTuple):
    """Of each module its children by name, in order, and its class."""

    children: list[list[tuple[str, nn.Module | None]]]
    classes: list[type]


class ModuleStates:
    """Of the modules of a block. Calls that find the same share it: most attributes never change, and what each call
    keeps until its backward is work for the garbage collector."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._latest: list[State | None] = [None] * len(modules)
        self._same: tuple[list[int], list[int], list[State]] | None = None  # by identity, while all of it is plain
        self._build = self._first_build = self._read_build()

    def build_now(self) -> Build:
        """As it is now; not to be changed."""
        if not self.have(self._build):
            self._build = self._read_build()
        return self._build

    def was_first(self, build: Build) -> bool:
        """Whether they were so at first."""
        return build is self._first_build or build == self._first_build

    def have(self, build: Build) -> bool:
        return self._read_build() == build

    def _read_build(self) -> Build:
        return Build([[*module._modules.items()] for module in self._modules], list(map(type, self._modules)))

    def rebuild(self, build: Build) -> None:
        for module, children, kind in zip(self._modules, *build, strict=True):
            if [*module._modules.items()] != children:
                module._modules.clear()
                module._modules.update(children)
            if type(module) is not kind:
                module.__class__ = kind

    def now(self) -> list[State]:
        """Of each module. One that has nothing but plain data is not to be changed; the others are the caller's own."""
        ids, lengths = self._ids_now()
        if self._same is not None and self._same[0] == ids and self._same[1] == lengths:
            return self._same[2]
        states = []
        for i, (own, latest) in enumerate(zip(map(vars, self._modules), self._latest, strict=True)):
            if latest is None or not _is_set(own, latest):
                latest = dict(own)
                self._latest[i] = latest if _is_plain(latest) else None  # objects shall not live longer for it
            states.append(latest)
        self._same = None if None in self._latest else (ids, lengths, states)
        return states

    def _ids_now(self) -> tuple[list[int], list[int]]:
        owns = list(map(vars, self._modules))
        return list(map(id, chain.from_iterable(map(dict.values, owns)))), list(map(len, owns))

    def are_plain(self, states: Sequence[State]) -> bool:
        """Whether these, just told by `now`, have no objects, nor tensors."""
        return self._same is not None and states is self._same[2]

    def are(self, states: Sequence[State]) -> bool:
        if self._same is not None and states is self._same[2]:
            return self._ids_now() == self._same[:2]
        return all(map(_is_set, map(vars, self._modules), states))

    def set(self, states: Sequence[State]) -> None:
        stays = _STRUCTURE | {"forward"}  # the first one is the block, which may be cut otherwise since
        for own, values in zip(map(vars, self._modules), states, strict=True):
            extra = [k for k, v in own.items() if k not in values and k not in stays and not _is_activation(v)]
            for name in extra:
                del own[name]
            own.update((k, v) for k, v in values.items() if k not in stays)
            stays = _STRUCTURE


def _is_set(own: State, then: State) -> bool:
    """By identity and order: an equal number in a new object is put back for nothing."""
    return tuple(own) == tuple(then) and all(map(is_, own.values(), then.values()))


def _is_plain(state: State) -> bool:
    others = [value for name, value in state.items() if name not in _OF_EVERY_MODULE]
    return all(map(_keeps_nothing, others))


def _keeps_nothing(value: Any) -> bool:
    """Alive; a function does by what it closes over, and by its attributes."""
    kind = type(value)
    if kind is FunctionType:
        return value.__closure__ is None and not value.__dict__
    return kind in _PLAIN or (kind is tuple and _PLAIN.issuperset(map(type, value)))


def _is_activation(value: Any) -> bool:
    return type(value) is torch.Tensor and value.grad_fn is not None
