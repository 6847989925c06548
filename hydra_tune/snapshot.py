"""What Python objects hold at one moment: to be put back after a pilot, or to see what a forward changes.

A model keeps state beside its weights: counters, lists, caches, generators of its own, objects that are passed
from layer to layer. Followed are containers and the attributes of objects; not what is in modules (they are
given one by one; one that the model does not know, a teacher in a list, is), classes, and what belongs to PyTorch
or to Python itself.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.quasirandom import SobolEngine

from hydra_tune.host_buffer import same_bits, same_values, version_of

_MOST_OBJECTS = 50_000  # a reference to a trainer leads to everything
_MOST_ITEMS = 10_000  # that are followed of a container: a data set is not a state
MOST_ELEMENTS = 1_000_000  # that are kept of an array or tensor
_IMMUTABLE = (int, float, complex, str, bytes, type, type(None))
_CONTAINERS = (list, set, deque, dict)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_STATES = (types.SimpleNamespace, argparse.Namespace, SobolEngine, torch.optim.Optimizer)  # that are followed
FOREIGN = (frozenset(("torch", "hydra_tune", "optuna", "ray")) | sys.stdlib_module_names) - {"collections"}
_NOTHING = object()
_TENSORS_AND_CHILDREN = ("_parameters", "_modules", "forward", "_apply")


class Snapshot:
    """Of everything that can be reached from `values`.

    `tensors` are not copied: what operators write into them a pilot's journal sees and undoes, what is written unseen
    its `Rewind`.
    """

    def __init__(self, values: Mapping[str, Any], model: nn.Module | None = None) -> None:
        self.tensors: list[torch.Tensor] = []
        self._ids = set(map(id, model.modules() if model is not None else ()))  # of what is found, or not followed
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # of modules that the model does not know
        self._saved: list[tuple[str, Any, Any]] = []  # name, object, what it held
        self._buffer_dicts: list[dict[str, Any]] = []
        self._follow(values)

    def _follow(self, values: Mapping[str, Any]) -> None:
        pending = deque(values.items())
        while pending and len(self._ids) < _MOST_OBJECTS:
            name, value = pending.popleft()
            if id(value) in self._ids or isinstance(value, _IMMUTABLE):
                continue
            self._ids.add(id(value))
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
            if isinstance(value, nn.Module):
                self._buffers += [(b, b.detach().clone()) for b in value._buffers.values() if b is not None]
            held = _held_by(value)
            if held is not None:
                self._saved.append((name, value, held))
            children = list(_children(value, held))
            if isinstance(value, _CONTAINERS) and type(value) not in _CONTAINERS:
                fields = _fields(value)
                self._saved.append((name, _Fields(value), fields))
                children += fields.values()
            pending.extend((name, child) for child in children if not isinstance(child, _IMMUTABLE))

    @classmethod
    def of_modules(cls, modules: Iterable[tuple[str, nn.Module]], model: nn.Module) -> Snapshot:
        """Of the attributes of these modules of a model, without their weights and children; buffers by identity."""
        found = cls({}, model)
        for prefix, module in modules:
            own = {k: v for k, v in vars(module).items() if k not in _TENSORS_AND_CHILDREN}
            found._saved.append((prefix, _Attributes(module), own))
            buffers = own.pop("_buffers")
            found._saved.append((prefix, module._buffers, dict(buffers)))
            found._buffer_dicts.append(module._buffers)
            found._follow({f"{prefix}.{name}".lstrip("."): value for name, value in own.items()})
        return found

    def reaches(self, values: Iterable[Any]) -> bool:
        """Whether one of these is among them."""
        return not self._ids.isdisjoint(map(id, values))

    def restore(self) -> None:
        for _, value, held in self._saved:
            if not _is_same(value, held):
                _restore(value, held)
        with torch.no_grad():
            for buffer, value in self._buffers:
                if not same_bits(buffer, value):
                    buffer.copy_(value)

    def changes_in_place(self) -> Iterator[str]:
        """Names of the objects and containers that hold other values now, not of attributes that were set anew."""
        for name, value, held in self._saved:
            of_modules = isinstance(value, _Attributes) or any(value is m for m in self._buffer_dicts)
            if of_modules or _is_same(value, held):
                continue
            if isinstance(value, torch.Tensor) or not equal(held, _held_by(value)):
                yield name
        if not all(same_bits(buffer, value) for buffer, value in self._buffers):
            yield "a buffer of another module"

    def changes(self) -> Iterator[str]:
        """Names of what holds other values now; equal ones in new objects are no change."""
        for name, value, held in self._saved:
            if isinstance(value, _Attributes):
                for key, now in value.items():
                    if key not in held or not equal(held[key], now):
                        yield f"{name}.{key}".lstrip(".")
            elif not _is_same(value, held) and (isinstance(value, torch.Tensor) or not equal(held, _held_by(value))):
                yield name


class _Attributes:
    """A module's `__dict__`, as far as it is looked at."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def items(self) -> Iterator[tuple[str, Any]]:
        for key, value in vars(self.module).items():
            if key not in _TENSORS_AND_CHILDREN and key != "_buffers":
                yield key, value


class _Fields:
    """The attributes of a container of a class of one's own, beside its items."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner


def _held_by(value: Any) -> Any:
    """A copy of what the object holds; None if it is not followed."""
    if isinstance(value, torch.Tensor):
        return version_of(value)
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, _Fields):
        return _fields(value.owner)
    if isinstance(value, dict):  # whose class may look up its items otherwise
        return dict(OrderedDict.items(value) if isinstance(value, OrderedDict) else dict.items(value))
    if isinstance(value, _CONTAINERS):
        return list(value)
    if isinstance(value, tuple):
        return None
    if type(value).__module__ == "numpy":
        return value.copy() if getattr(value, "size", MOST_ELEMENTS + 1) <= MOST_ELEMENTS else None
    if type(value).__module__.startswith("numpy.random"):
        return _state_of(value)
    if isinstance(value, nn.Module):  # hidden from the model, a teacher in a list
        return dict(vars(value))
    if isinstance(value, types.FunctionType) and vars(value):
        return dict(vars(value))
    if isinstance(value, (*_CODE, functools.partial)) or (
        type(value).__module__.partition(".")[0] in FOREIGN and not isinstance(value, _STATES)
    ):
        return None
    return _fields(value) if hasattr(value, "__dict__") or hasattr(value, "__slots__") else None


def _state_of(generator: Any) -> dict[str, Any] | None:
    """Of a NumPy generator, of the older kind (RandomState), or of what either draws from."""
    if hasattr(generator, "get_state"):
        return generator.get_state(legacy=False)  # type: ignore[no-any-return]
    return getattr(getattr(generator, "bit_generator", generator), "state", None)


def _set_state(generator: Any, state: dict[str, Any]) -> None:
    if hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots included."""
    slots = (name for kind in type(value).__mro__ for name in _listed(kind.__dict__.get("__slots__", ())))
    return {
        **{
            name: getattr(value, name)
            for name in slots
            if name not in ("__dict__", "__weakref__") and hasattr(value, name)
        },
        **getattr(value, "__dict__", {}),
    }


def _listed(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _children(value: Any, held: Any) -> Iterable[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return [*cells, *vars(value).values()]
    if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        return [value.__self__]
    if isinstance(value, tuple):
        return value
    if isinstance(held, (list, dict)) and len(held) > _MOST_ITEMS:
        return ()
    if isinstance(held, dict):
        return (*held, *held.values()) if not type(value).__module__.startswith("numpy") else ()
    return held if held is not None and isinstance(value, (list, set, deque)) else ()


def _is_same(value: Any, held: Any) -> bool:
    """Whether nothing was put into the object since; a quick look."""
    if isinstance(value, torch.Tensor):
        return bool(version_of(value) == held)
    if isinstance(value, _Attributes):
        now = dict(value.items())
        return now.keys() == held.keys() and all(now[k] is v for k, v in held.items())
    now = _held_by(value)
    if isinstance(held, dict):
        return _are_same_keys(now, held) and all(map(is_, now.values(), held.values()))
    if isinstance(held, list):
        return len(now) == len(held) and all(a is b for a, b in zip(now, held, strict=True))
    return equal(now, held)


def _are_same_keys(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """In one order: an OrderedDict may be a queue."""
    pairs = list(zip_longest(a, b, fillvalue=_NOTHING))
    return all(x is y or (not isinstance(x, torch.Tensor) and type(x) is type(y) and bool(x == y)) for x, y in pairs)


def _restore(value: Any, held: Any) -> None:
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, torch.Generator):
        value.set_state(held)
    elif isinstance(value, random.Random):
        value.setstate(held)
    elif isinstance(value, list):
        value[:] = held
    elif isinstance(value, (set, deque)):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(held)
    elif isinstance(value, _Attributes):
        own = vars(value.module)
        for key, _ in list(value.items()):
            if key not in held:
                del own[key]
        own.update(held)
    elif isinstance(value, dict):
        value.clear()
        value.update(held)
    elif type(value).__module__ == "numpy":
        value[...] = held
    elif type(value).__module__.startswith("numpy.random"):
        _set_state(value, held)
    else:
        owner = value.owner if isinstance(value, _Fields) else value
        for name in [name for name in _fields(owner) if name not in held]:
            object.__delattr__(owner, name)
        for name, content in held.items():
            object.__setattr__(owner, name, content)


def equal(a: Any, b: Any) -> bool:
    """Whether two values are the same as far as a forward can tell; objects of a class of one's own are, if their
    attributes are."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return same_values(a, b)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return _are_same_keys(a, b) and all(map(equal, a.values(), b.values()))
    if type(a).__module__ == "numpy":
        return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    return bool(a == b) if isinstance(a, (int, float, complex, str, set, frozenset)) else True
