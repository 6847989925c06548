"""What one look at a model tells, at each forward: all that may decide which plan holds and that a script may change
between two forwards."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from hydra_tune.hooks import HOOKS_OF_MODULES, user_hooks


@dataclass(frozen=True)
class Glance:
    """Modules in the order of `nn.Module.modules`; parameters and buffers by the place of their module there.

    `switches` is what is on or off in modules and in their configs: truth values, names, what is absent, what requires
    a gradient. These decide what a forward computes more often than numbers do.
    """

    parameters: tuple[tuple[int, str, int], ...]  # the last is its id
    needs_gradient: tuple[bool, ...]  # of each of these
    buffers: tuple[tuple[int, str, tuple[int, ...], torch.dtype], ...]
    training: tuple[bool, ...]
    hooked: tuple[int, ...]  # ids of modules with a user's hook
    hooks: tuple[tuple[int, Any], ...]  # on these, by their ids, and each one's code
    pre_hooked: bool  # one of these has one that fires before its forward
    switches: Hashable


def glance_at(model: nn.Module) -> Glance:
    modules = modules_of(model)
    parameters, needs_gradient, buffers = [], [], []
    owners: dict[int, Any] = {}
    for place, module in enumerate(modules):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                parameters.append((place, name, id(parameter)))
                needs_gradient.append(parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                buffers.append((place, name, tuple(buffer.shape), buffer.dtype))
        has_config = "config" in vars(module) or hasattr(type(module), "config")  # `getattr` is slow where it fails
        config = getattr(module, "config", None) if has_config else None
        for owner in (module,) if config is None else (module, config):
            if hasattr(owner, "__dict__"):
                owners[id(owner)] = owner
    hooked = [module for module in modules if user_hooks(module)]
    return Glance(
        tuple(parameters),
        tuple(needs_gradient),
        tuple(buffers),
        tuple([module.training for module in modules]),
        tuple([id(module) for module in hooked]),
        tuple([(id(module), _code_of(hook)) for module in hooked for hook in _hooks_of(module)]),
        any(user_hooks(module, ("_forward_pre_hooks",)) for module in hooked),
        tuple([_switches_of(owner) for owner in owners.values()]),
    )


class Parts(NamedTuple):
    """Which modules a model has, in the order of `nn.Module.modules`, and of which classes; it keeps none alive."""

    modules: list[ref[nn.Module]]
    classes: list[type]

    def replaced(self, before: Parts) -> list[nn.Module]:
        """The modules that came, and those that went and live still."""
        now, then = {id(r): r for r in self.modules}, {id(r): r for r in before.modules}  # a module has one such `ref`
        found = [(now.get(i) or then[i])() for i in now.keys() ^ then.keys()]
        return [module for module in found if module is not None]


def parts_of(model: nn.Module) -> Parts:
    modules = modules_of(model)
    return Parts([*map(ref, modules)], [*map(type, modules)])


def modules_of(model: nn.Module) -> list[nn.Module]:
    """As `model.modules()`, in a third of the time."""
    found: dict[nn.Module, None] = {}
    left = [model]
    while left:
        module = left.pop()
        if module not in found:
            found[module] = None
            left += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found)


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    for kind in HOOKS_OF_MODULES:
        yield from vars(module).get(kind, {}).values()


def _code_of(hook: Any) -> Any:
    """The same of a function that is made anew for each step."""
    hook = getattr(hook, "func", hook)  # functools.partial
    hook = getattr(hook, "__func__", hook)  # a method
    return getattr(hook, "__code__", type(hook))


def _switches_of(owner: Any) -> Hashable:
    own = vars(owner)
    found = compress(own.items(), map(_SWITCHES.__contains__, map(type, own.values())))
    return tuple([(k, _switch_of(v)) for k, v in found if k != "training"])


def _switch_of(value: Any) -> Hashable:
    """A text may be long, and what is known of a kind of forward outlives its model."""
    if type(value) is str:
        return hash(value)
    return value.requires_grad if type(value) is torch.Tensor else value


_SWITCHES = frozenset((bool, str, type(None), torch.Tensor))
