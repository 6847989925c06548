"""What a block's copy reaches that is not its own: objects that it is given, what functions close over, other modules,
and globals that its modules' code names. A measure looks whether it has changed them, and puts them back."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.host_buffer import same_bits, version_of
from hydra_tune.snapshot import FOREIGN, MOST_ELEMENTS, Snapshot
from hydra_tune.tree import flatten, is_fixed

_MOST_FUNCTIONS = 1_000


class Around:
    """A context manager, once: what is reached is the same afterwards, as are `weights` that live on the device."""

    def __init__(
        self,
        twin: nn.Module,
        given: Sequence[Any],
        forward: Callable[..., Any] | None,
        weights: Sequence[torch.Tensor],
    ) -> None:
        self._attributes = Snapshot.of_modules(twin.named_modules(), twin)
        reached = {"an argument": list(given), "its forward": forward, **_globals_of(twin, forward)}
        self._others = Snapshot(reached, twin)
        tensors = {id(t): t for t in (*self._attributes.tensors, *self._others.tensors) if _may_be_put_back(t)}
        self._tensors = [(t, version_of(t), t.detach().clone()) for t in (*weights, *tensors.values())]

    def __enter__(self) -> Around:
        tensors = tuple(t for t, _, _ in self._tensors if not t.is_inference())
        self._versions = _unsafe_preserve_version_counter(tensors)  # as if nothing were written into them
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()
        self._versions.__exit__(*error)

    def has(self, objects: Sequence[Any]) -> bool:
        """Whether one of these is an attribute of the block, or in one."""
        return self._attributes.reaches(objects)

    def change(self) -> str:
        """The name of something that has changed, if anything has."""
        for snapshot in (self._attributes, self._others):
            for name in snapshot.changes_in_place():
                return name or "an attribute"
        return "a tensor" if any(_is_changed(*each) for each in self._tensors) else ""

    def restore(self) -> None:
        self._attributes.restore()
        self._others.restore()
        with torch.no_grad():
            for tensor, version, value in self._tensors:
                if _is_changed(tensor, version, value):
                    tensor.data = value.clone() if tensor.shape != value.shape else tensor.data
                    tensor.data.copy_(value)


def weights_in(outputs: Any, at: DeviceCopy) -> list[nn.Parameter]:
    """The weights in a slot that a block returns where a copy would not do: frozen ones, into which others may write,
    and those in objects."""
    leaves = [x for x in flatten(outputs)[0] if not is_fixed(x) or isinstance(x, torch.Tensor)]
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and at.has(x)]
    found = [p for t in tensors if not (p := at.parameter_at(t.data_ptr())[0]).requires_grad]
    objects = [x for x in leaves if not isinstance(x, torch.Tensor)]
    hidden = Snapshot({"": objects}).tensors if objects else []
    return [*found, *(at.parameter_at(t.data_ptr())[0] for t in hidden if at.has(t))]


def _may_be_put_back(tensor: torch.Tensor) -> bool:
    dense = tensor.layout is torch.strided and type(tensor) is torch.Tensor and tensor.device.type != "meta"
    return dense and tensor.numel() <= MOST_ELEMENTS


def _is_changed(tensor: torch.Tensor, version: int, value: torch.Tensor) -> bool:
    if version_of(tensor) != version or tensor.shape != value.shape:
        return True
    return not same_bits(tensor.detach().contiguous(), value.contiguous())


def _globals_of(twin: nn.Module, forward: Callable[..., Any] | None) -> dict[str, Any]:
    """By name, what is neither a function nor a class nor a module."""
    found: dict[str, Any] = {}
    left = [f for kind in dict.fromkeys(map(type, twin.modules())) for f in _methods_of(kind)]
    left += _functions_in(forward)
    met = set[int]()
    while left and len(met) < _MOST_FUNCTIONS:
        function = left.pop()
        if id(function) in met:
            continue
        met.add(id(function))
        for name in _names_in(function.__code__):
            value = function.__globals__.get(name)
            if isinstance(value, types.FunctionType):
                left += [] if _is_foreign(value.__module__) else [value]
            elif value is not None and not isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
                found[f"the global {name}"] = value
    return found


def _methods_of(kind: type) -> tuple[types.FunctionType, ...]:
    kinds = [each for each in kind.__mro__ if not _is_foreign(each.__module__)]
    return tuple(f for each in kinds for value in vars(each).values() for f in _functions_in(value))


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    for each in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
        if isinstance(each, types.FunctionType):
            yield each


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


@functools.lru_cache(maxsize=4096)
def _is_foreign(module: str | None) -> bool:
    """Whether it is a library's: what these keep in globals decides nothing."""
    if (module or "").partition(".")[0] in FOREIGN or module in sys.builtin_module_names:
        return True
    return "site-packages" in (getattr(sys.modules.get(module or ""), "__file__", None) or "")
