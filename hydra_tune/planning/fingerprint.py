"""What a model would do, as far as its modules' attributes tell: whether it may share a plan with another one, and, by
one look at each forward, whether its own plan still holds.

A pilot of one model stands for another only if both behave alike. A rate that is zero, a flag in a config object,
a function in a closure: any of them may decide what a forward keeps or draws.

A plan outlives its model, so its key is a digest and keeps nothing of it. Classes are told apart as objects, not by
name, for a notebook makes two of one name: each has a number, which is never given twice, as an id is.
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
from hydra_tune.planning.optimizer_memory import options_of

_STRUCTURE = ("_parameters", "_buffers", "_modules", "forward", "_apply", "training")
_FEW = 8  # elements of a buffer that may be a setting, no running value
_MANY = 1024  # of a tensor or an array that is an attribute
HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LIBRARIES = ("torch.", "transformers.")  # whose hooks compute weights, or collect outputs
# A text may be long, and what is known of a kind of forward outlives its model.
_SWITCHES: dict[type, Any] = {bool: bool, str: hash, type(None): hash, torch.Tensor: attrgetter("requires_grad")}
PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))

_numbers: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
_count = itertools.count()


def plan_key(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> bytes:
    """Equal for trials of one architecture and dtype, whatever their learning rates."""
    order = {id(p): i for i, p in enumerate(model.parameters())}
    options = [
        (_number_of(type(optimizer)), [(told, [order.get(id(p)) for p in own]) for told, own in options_of(optimizer)])
        for optimizer in optimizers
    ]
    return _digest((Fingerprint().of_model(model), options))


class Fingerprint:
    """Reads values into what has a short `repr`, equal for equals: names, numbers and digests."""

    most_items = 1_000  # of a container; larger ones are data, and count by their size
    deepest = 12

    def __init__(self, *, of_layers: bool = False) -> None:
        self._of_layers = of_layers  # whose place among others does not count: transformers keep it for caches
        # What was met, by id. Values are kept: the next one may get the id of one that is collected.
        self._known: dict[int, tuple[Any, Hashable]] = {}
        self._modules: set[int] = set()  # by id; wherever else they are met, they are known

    def of_model(self, model: nn.Module) -> bytes:
        """Of PyTorch's own modules numbers count as zero or not (dropout keeps a mask or it doesn't)."""
        self._modules.update(map(id, model.modules()))
        order = {id(p): i for i, p in enumerate(model.parameters())}  # equal numbers are tied
        weights = [
            (name, order[id(p)], p.requires_grad, _of_values(p, 0 if p.requires_grad else 1))
            for name, p in model.named_parameters(remove_duplicate=False)
        ]
        modules = [(name, _number_of(type(m)), self._of_module(m)) for name, m in model.named_modules()]
        return _digest((weights, modules))

    def tensors_within(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """Those that these objects lead to."""
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
            buffers = {}  # they decide nothing (a count of batches)
        values = [(k, None if b is None else _of_values(b, _FEW)) for k, b in buffers.items()]
        return (*((k, self._of(v, 0)) for k, v in own.items()), *values, self._of(own_forward_of(module), 0))

    def _of(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, type):
            return _number_of(value)
        if type(value) in PLAIN:
            return marshal.dumps(value, 2)  # of any length, to the bit
        if depth > self.deepest:
            return _number_of(type(value))
        if id(value) not in self._known:
            kind = _number_of(type(value))
            self._known[id(value)] = value, kind  # met again within itself
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
            reduced = value.__reduce_ex__(2)  # what pickle would keep
        except Exception:  # it can't: a lock, a generator
            reduced = None
        return self._of(reduced if isinstance(reduced, str) else list((reduced or ())[:3]), depth), own


def _of_values(tensor: torch.Tensor, most: int) -> Hashable:
    """Themselves, if they are few."""
    few = tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() <= most
    return tuple(tensor.shape), tensor.dtype, repr(tensor.tolist()) if few else None


def _number_of(kind: type) -> int:
    return _numbers.setdefault(kind, next(_count))


def _digest(parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


# ---- at each forward ----


class ModelState(NamedTuple):
    """Modules in the order of `nn.Module.modules`; parameters and buffers by the place of their module there.

    `switches` is what is on or off in modules and in their configs: training mode and other truth values, names, what
    is absent, what requires a gradient. These decide what a forward computes more often than numbers do.
    """

    parameters: tuple[tuple[int, str, bool, int], ...]  # whether it requires a gradient; its id
    buffers: tuple[tuple[int, str, tuple[int, ...], torch.dtype], ...]
    switches: Hashable


def model_state(model: nn.Module) -> ModelState:
    parameters, buffers = [], []
    modules: dict[nn.Module, int] = {}  # as `model.modules()`, in a third of the time; their places
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
    configured = {kind for kind in set(map(type, modules)) if hasattr(kind, "config")}  # slow where there is none
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
    """The module that its code is in."""
    hook = getattr(hook, "func", hook)  # functools.partial
    return getattr(hook, "__module__", None) or type(hook).__module__


def _switches_of(owner: Any) -> Hashable:
    own = vars(owner)
    found = compress(own.items(), map(_SWITCHES.__contains__, map(type, own.values())))
    return tuple([(k, _SWITCHES[type(v)](v)) for k, v in found])
