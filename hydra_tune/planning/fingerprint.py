"""Fingerprints of models, made from their modules' attributes. They answer two questions:

    `plan_key`      may two models share measurements and a plan?
    `model_state`   is this model still as it was when its plan was made? (asked at each forward)

The numbers of one model's pilot hold for another model only if both behave alike. A dropout rate of zero, a flag in a
config object, a function in a closure: any of them may decide what a forward keeps or draws.

A plan outlives its model. So its key is a digest, which keeps no reference to the model. Two classes of one name are
different (a notebook makes such when a cell runs twice). So each class has a number. A number is never used again,
as an `id` would be.
"""

from __future__ import annotations

import hashlib
import itertools
import marshal
import types
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from hydra_tune.blocks.stand_ins import StandIn, own_forward_of
from hydra_tune.devices.tensor_bytes import is_wrapper
from hydra_tune.planning.optimizer_memory import options_of

_STRUCTURE = ("_parameters", "_buffers", "_modules", "forward", "_apply", "training")
# The values of larger tensors do not count, only their shape and dtype.
_FEW = 8  # the most elements of a buffer whose values count: it may be a setting. Larger ones are running values
_MANY = 1024  # the most elements of a tensor or array in an attribute whose values count
HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Hooks of these libraries are not a user's: they compute weights (torch) or collect outputs (transformers).
_LIBRARIES = ("torch.", "transformers.")
# How a switch is read, by the type of its value. A string is hashed, since it may be long and the result outlives the
# model.
_SWITCHES: dict[type, Any] = {bool: bool, str: hash, type(None): hash, torch.Tensor: attrgetter("requires_grad")}
PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))

_numbers: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
_count = itertools.count()


def plan_key(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> bytes:
    """A digest that is equal for trials of one architecture and dtype, whatever their learning rates."""
    order = {id(p): i for i, p in enumerate(model.parameters())}
    options = [
        (_number_of(type(optimizer)), [(told, [order.get(id(p)) for p in own]) for told, own in options_of(optimizer)])
        for optimizer in optimizers
    ]
    return _digest((Fingerprint().of_model(model), options))


class Fingerprint:
    """Reads a value into names, numbers and digests. Their `repr` is short, and equal for equal values."""

    most_items = 1_000  # of a container. A larger one is data: only its length counts
    deepest = 12  # levels of nesting; below, only an object's class counts

    def __init__(self, *, of_layers: bool = False) -> None:
        # Compares layers of a model: a layer's index does not count. transformers needs it for caches.
        self._of_layers = of_layers
        # The objects read so far, by id. It keeps the objects too, so that no other object can get their ids.
        self._known: dict[int, tuple[Any, Hashable]] = {}
        self._modules: set[int] = set()  # ids of the model's modules; a reference to one of them counts as None

    def of_model(self, model: nn.Module) -> bytes:
        """A digest of the model's structure and attributes.

        A float attribute of PyTorch's own modules counts only as zero or not: dropout keeps a mask or it does not.
        """
        self._modules.update(map(id, model.modules()))
        order = {id(p): i for i, p in enumerate(model.parameters())}  # tied weights get one number
        weights = [
            (name, order[id(p)], p.requires_grad, _of_values(p, 0 if p.requires_grad else 1))
            for name, p in model.named_parameters(remove_duplicate=False)
        ]
        modules = [(name, _number_of(type(m)), self._of_module(m)) for name, m in model.named_modules()]
        return _digest((weights, modules))

    def tensors_within(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """All tensors that can be reached from these objects."""
        for value in values:
            self._of(value, 0)
        return [met for met, _ in self._known.values() if isinstance(met, torch.Tensor)]

    def _of_module(self, module: nn.Module) -> Hashable:
        own = {k: v for k, v in vars(module).items() if k not in _STRUCTURE and "_hooks" not in k}
        buffers = module._buffers
        if self._of_layers and type(module).__module__.startswith("transformers."):
            own.pop("layer_idx", None)
        if type(module).__module__.startswith("torch.nn."):
            own = {k: v != 0 if isinstance(v, float) else v for k, v in own.items()}
            buffers = {}  # they do not change what a forward needs (a count of batches)
        values = [(k, None if b is None else _of_values(b, _FEW)) for k, b in buffers.items()]
        return (*((k, self._of(v, 0)) for k, v in own.items()), *values, self._of(own_forward_of(module), 0))

    def _of(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, type):
            return _number_of(value)
        if type(value) in PLAIN:
            return marshal.dumps(value, 2)  # exact, for a value of any length
        if depth > self.deepest:
            return _number_of(type(value))
        if id(value) not in self._known:
            kind = _number_of(type(value))
            self._known[id(value)] = value, kind  # for an object that contains itself
            self._known[id(value)] = value, _digest((kind, self._of_object(value, depth + 1)))
        return self._known[id(value)][1]

    def _of_object(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, StandIn):
            return self._of(value.own, depth)
        if isinstance(value, nn.Module):
            return None if id(value) in self._modules else self.of_model(value)
        if isinstance(value, types.ModuleType):
            return value.__name__
        if type(value).__module__ == "numpy":
            return getattr(value, "shape", None), repr(value.tolist()) if getattr(value, "size", 1) <= _MANY else None
        own = self._of(vars(value), depth) if hasattr(value, "__dict__") else None
        if isinstance(value, torch.Tensor):
            return _of_values(value, _MANY), own
        if isinstance(value, (list, tuple, set, frozenset, deque, dict, types.MappingProxyType)):
            if len(value) > self.most_items:
                return len(value), own
            items = value.items() if isinstance(value, (dict, types.MappingProxyType)) else value
            return tuple(self._of(item, depth) for item in items), own
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            defaults = value.__defaults__, value.__kwdefaults__
            return marshal.dumps(value.__code__, 2), self._of([value.__module__, *cells, *defaults], depth), own
        if isinstance(value, types.MethodType):
            return self._of([value.__func__, value.__self__], depth)
        try:
            reduced = value.__reduce_ex__(2)  # the state that pickle would save
        except Exception:  # it cannot be pickled: a lock, a generator
            reduced = None
        return self._of(reduced if isinstance(reduced, str) else list((reduced or ())[:3]), depth), own


def _of_values(tensor: torch.Tensor, most: int) -> Hashable:
    """Shape and dtype, and the values of a dense tensor that has at most `most` of them."""
    plain = tensor.layout is torch.strided and not tensor.is_meta and not is_wrapper(tensor)
    few = plain and tensor.numel() <= most
    return tuple(tensor.shape), tensor.dtype, repr(tensor.tolist()) if few else None


def _number_of(kind: type) -> int:
    return _numbers.setdefault(kind, next(_count))


def _digest(parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


# ---- at each forward ----


class ModelState(NamedTuple):
    """What may change a forward of a model, read quickly enough for each forward.

    A module is given by its place in the order of `nn.Module.modules`.

    `switches` are attributes of modules and of their configs: booleans (training mode and others), strings, what is
    None, whether a tensor requires a gradient. These decide what a forward computes more often than numbers do.
    """

    parameters: tuple[tuple[int, str, bool, int], ...]  # module, name, requires_grad, id
    buffers: tuple[tuple[int, str, tuple[int, ...], torch.dtype], ...]  # module, name, shape, dtype
    switches: Hashable


def model_state(model: nn.Module) -> ModelState:
    parameters, buffers = [], []
    modules: dict[nn.Module, int] = {}  # places by module. As `model.modules()`, in a third of its time
    left = [model]
    while left:
        if (module := left.pop()) in modules:
            continue
        place = modules[module] = len(modules)
        if children := module._modules:
            left += [child for child in reversed(children.values()) if child is not None]
        for name, parameter in module._parameters.items():
            if parameter is not None:
                parameters.append((place, name, parameter.requires_grad, id(parameter)))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                buffers.append((place, name, tuple(buffer.shape), buffer.dtype))
    configured = {kind for kind in set(map(type, modules)) if hasattr(kind, "config")}  # asking each module is slow
    having = [m for m in modules if "config" in vars(m) or type(m) in configured]
    configs = {id(config): config for m in having if hasattr(config := getattr(m, "config", None), "__dict__")}
    switches = tuple([_switches_of(owner) for owner in (*modules, *configs.values())])
    return ModelState(tuple(parameters), tuple(buffers), switches)


def has_users_hook(module: nn.Module) -> bool:
    own = vars(module)
    for kind in HOOKS_OF_MODULES:
        hooks = own.get(kind)
        if hooks and not all(origin_of(hook).startswith(_LIBRARIES) for hook in hooks.values()):
            return True
    return False


def origin_of(hook: Any) -> str:
    """The name of the Python module that a hook's code is in."""
    hook = getattr(hook, "func", hook)  # of a functools.partial
    return getattr(hook, "__module__", None) or type(hook).__module__


def _switches_of(owner: Any) -> Hashable:
    own = vars(owner)
    found = compress(own.items(), map(_SWITCHES.__contains__, map(type, own.values())))
    return tuple([(k, _SWITCHES[type(v)](v)) for k, v in found])
