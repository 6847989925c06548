"""A copy of a block and of what it is given, to be run once: what its forward changes goes with the copy; and whether
what it reaches holds other values then.

the block   its modules, with all that their attributes lead to; the weights are those of its visit
arguments   tensors without a history, or clones of them; copies of objects
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.quasirandom import SobolEngine

from hydra_tune.blocks.block import Block, has_hooks
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.fingerprint import HOOKS_OF_MODULES, Fingerprint, keep_only_pytorchs
from hydra_tune.host_buffer import digest, version_of
from hydra_tune.meter import storages_of
from hydra_tune.process_state import STRUCTURE, is_activation
from hydra_tune.tree import PLAIN, Structure, flatten, tensors_in, unflatten

_MOST_OBJECTS = 50_000  # a reference to a trainer leads to everything
_MOST_BYTES = 1_000_000  # of an array that is read
_PYTHONS: Any = random.random.__self__  # type: ignore[attr-defined]  # the generator behind the module's functions
_HOLD_SOMETHING = {"array", "builtins", "collections", "itertools"}
_FOREIGN = (frozenset(("torch", "hydra_tune", "optuna", "ray")) | sys.stdlib_module_names) - _HOLD_SOMETHING
_FOLLOWED = (  # for all that their classes are somebody else's
    functools.partial, SimpleNamespace, argparse.Namespace, random.Random,
    torch.Generator, torch.Tensor, torch.optim.Optimizer, SobolEngine,
)  # fmt: skip
Called = tuple[list[Any], Structure]  # the leaves of its arguments, and how they belong together
_NO_STATE = STRUCTURE | {"forward"}
_BUFFERS = "a buffer"
_FIXED = (torch.dtype, torch.device, torch.layout, Enum, type, nn.Module, bytes, complex)
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


class Twin:
    """`weights` are those of the visit, `held` those that are on the device anyway, `given` the leaves of the
    arguments, `asked` those of them that gradients are asked for.

    With `gone`, activations among the attributes are no more what they were: a repetition would not find them.
    """

    def __init__(
        self, block: Block, model: nn.Module, at: DeviceCopy, call: Called, *, clones: bool, gone: bool
    ) -> None:
        self._block, self._at, (leaves, self._structure) = block, at, call
        self.weights, self.held = list(map(_like, at.leaves(block.slot_parameters))), list(map(_like, block.held))
        own = zip((*block.slot_parameters, *block.held), (*self.weights, *self.held), strict=True)
        given = {id(x): x.detach().requires_grad_(x.requires_grad) for x in leaves if isinstance(x, torch.Tensor)}
        self.asked = [x for x in given.values() if x.requires_grad]
        given = {number: x.clone() for number, x in given.items()} if clones else given
        memo: dict[int, Any] = {id(p): p for p in model.parameters()} | {id(p): leaf for p, leaf in own}
        ours = vars(block.module).get("forward")
        values = [ours, *leaves, *(value for module in block.modules for value in vars(module).values())]
        memo |= {id(x): x for x in values if x is ours or type(x) is object}  # known by its identity alone
        with torch.no_grad(), _CopiesTensors():
            self.module = copy.deepcopy(block.module, memo)
            memo |= {number: tensor for number, tensor in given.items() if number not in memo}
            self.given = [given[id(x)] if isinstance(x, torch.Tensor) else copy.deepcopy(x, memo) for x in leaves]
            for part, twin in zip(block.modules, self.module.modules(), strict=True) if gone else ():
                for name in [name for name, value in vars(part).items() if is_activation(value)]:
                    vars(twin)[name].fill_(torch.nan if vars(twin)[name].is_floating_point() else 0)
        vars(self.module).pop("forward", None)
        for part in self.module.modules():
            if part is not self.module:
                keep_only_pytorchs(part)
        self.buffers_of_modules = [m._buffers for m in self.module.modules()]
        self._marks = self._marks_now()

    def note(self) -> None:
        """What is there before its forward."""
        others = {
            "an argument": [x for x in self.given if not isinstance(x, torch.Tensor)],
            "what is noted on a weight": [leaf.__dict__ for leaf in (*self.weights, *self.held)],
            "a hook": [vars(m)[kind] for m in self.module.modules() for kind in HOOKS_OF_MODULES],
            _BUFFERS: self.buffers_of_modules,
        }
        self._reached = Reached(self.module, others)

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [b for own in self.buffers_of_modules for b in own.values() if b is not None]

    def forward(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Any:
        """By the module's class, or a forward of its own, with these hooks on what autograd saves."""
        args, kwargs = unflatten(self.given, self._structure)
        own, caches = self._block.own_forward, torch.is_autocast_cache_enabled()
        run = getattr(own, "__func__", None) if getattr(own, "__self__", None) is self._block.module else None
        cached, parametrize._cache_enabled = parametrize._cache_enabled, 0  # the original's keys are the copy's, too
        torch.set_autocast_cache_enabled(False)  # its casts would outlive the copy
        _push_hooks(pack, unpack)
        try:
            return (run or type(self.module).forward)(self.module, *args, **kwargs)
        finally:
            _pop_hooks()
            torch.set_autocast_cache_enabled(caches)
            parametrize._cache_enabled = cached

    # ---- what its forward has done ----

    def misuse(self) -> str:
        """What it does with its weights that it cannot do in a visit."""
        own = [{k: v for k, v in vars(m).items() if k not in _NO_STATE} for m in self.module.modules()]
        if any(map(self._at.has, tensors_in(own))):
            return "keeps a view of a weight in an attribute"
        return "puts a hook on a weight in its forward" if any(map(has_hooks, (*self.weights, *self.held))) else ""

    def look(self, outputs: Any) -> tuple[str, bool]:
        """What of its forward a repetition would not do alike, or undo, empty if nothing; and whether it has written
        buffers since it was noted what is there."""
        changes = self._reached.changes()
        others = [name for name in changes if name != _BUFFERS]
        others += ["a buffer into an activation"] if any(map(is_activation, self.buffers)) else []
        return f"changes {others[0]}" if others else self._gives_away(outputs), _BUFFERS in changes

    def _gives_away(self, outputs: Any) -> str:
        kept = self._reached.met
        memory = {s._cdata for t in (*kept.values(), *self.held) if isinstance(t, torch.Tensor) for s in storages_of(t)}
        within = Reached(nn.Module(), {"": outputs}).met.items()
        same = any(number in kept and not stays_as_it_is(x) for number, x in within if not isinstance(x, torch.Tensor))
        if same or any(s._cdata in memory for t in tensors_in(outputs) for s in storages_of(t)):
            return "returns a buffer, or another tensor, list, dict or object that it keeps"
        if not all(isinstance(x, torch.Tensor) or stays_as_it_is(x) for x in flatten(outputs)[0]):
            return "returns an object"
        return "puts a hook or an attribute on an input" if self._marks_now() != self._marks else ""

    def _marks_now(self) -> list[tuple[Any, ...]]:
        """What a forward may leave on a tensor that it is given."""
        given = [x for x in self.given if isinstance(x, torch.Tensor)]
        return [(x._backward_hooks is not None, x.retains_grad, x.requires_grad, tuple(x.__dict__)) for x in given]


def _like(parameter: nn.Parameter) -> nn.Parameter:
    """Over the same values, with what the user has put on it."""
    leaf = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
    leaf.__dict__.update(parameter.__dict__)
    return leaf


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


class _CopiesTensors(TorchFunctionMode):
    """Within, `deepcopy` clones tensors with a history, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            made.__dict__.update(copy.deepcopy(tensor.__dict__, memo))
        return memo[id(tensor)]


# ---- what a forward can reach beside weights ----


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
                if name not in _NO_STATE and "_hooks" not in name:
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
        module = type(value).__module__
        if module == "numpy":
            return value.tobytes() if getattr(value, "nbytes", _MOST_BYTES + 1) <= _MOST_BYTES else None
        is_of_others = module.partition(".")[0] in _FOREIGN and not isinstance(value, _FOLLOWED)
        if len(self._known) > _MOST_OBJECTS or is_of_others:
            return None
        if isinstance(value, (list, tuple, set, frozenset, deque, dict)) and len(value) > self.most_items:
            return tuple(map(id, value))
        return super()._of_object(value, depth)

    def _of_tensor(self, tensor: torch.Tensor) -> Hashable:
        return version_of(tensor), super()._of_tensor(tensor), None if tensor.is_meta else digest(tensor.detach())


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
