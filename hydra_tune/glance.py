"""What one look at a model tells, at each forward: all that may decide which plan holds and that a script may change
between two forwards."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import nn

HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LIBRARIES = ("torch.", "transformers.")  # whose hooks compute weights, or collect outputs
_SWITCHES = frozenset((bool, str, type(None), torch.Tensor))


class Glance(NamedTuple):
    """Modules in the order of `nn.Module.modules`; parameters and buffers by the place of their module there.

    `switches` is what is on or off in modules and in their configs: truth values, names, what is absent, what requires
    a gradient. These decide what a forward computes more often than numbers do.
    """

    parameters: tuple[tuple[int, str, bool, int], ...]  # whether it requires a gradient; its id
    buffers: tuple[tuple[int, str, tuple[int, ...], torch.dtype], ...]
    training: tuple[bool, ...]
    hooked: tuple[int, ...]  # ids of modules with a user's hook
    switches: Hashable


def glance_at(model: nn.Module) -> Glance:
    modules = modules_of(model)
    parameters, buffers = [], []
    owners: dict[int, Any] = {}
    for place, module in enumerate(modules):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                parameters.append((place, name, parameter.requires_grad, id(parameter)))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                buffers.append((place, name, tuple(buffer.shape), buffer.dtype))
        owners[id(module)] = module
        if "config" in vars(module) or hasattr(type(module), "config"):  # `getattr` is slow where it fails
            config = getattr(module, "config", None)
            if hasattr(config, "__dict__"):
                owners[id(config)] = config
    return Glance(
        tuple(parameters),
        tuple(buffers),
        tuple([module.training for module in modules]),
        tuple([id(module) for module in modules if _has_users_hook(module)]),
        tuple([_switches_of(owner) for owner in owners.values()]),
    )


def _has_users_hook(module: nn.Module) -> bool:
    own = vars(module)
    for kind in HOOKS_OF_MODULES:
        hooks = own.get(kind)
        if hooks and not all(_origin_of(hook).startswith(_LIBRARIES) for hook in hooks.values()):
            return True
    return False


def keep_only_pytorchs(module: nn.Module) -> None:
    """Of the hooks on a copy of a module: PyTorch's compute weights, all others tell somebody of a call."""
    for kind in HOOKS_OF_MODULES:
        hooks = vars(module).get(kind, {})
        for key in [key for key, hook in hooks.items() if not _origin_of(hook).startswith("torch.")]:
            del hooks[key]


def _origin_of(hook: Any) -> str:
    """The module that its code is in."""
    hook = getattr(hook, "func", hook)  # functools.partial
    return getattr(hook, "__module__", None) or type(hook).__module__


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


def _switches_of(owner: Any) -> Hashable:
    own = vars(owner)
    found = compress(own.items(), map(_SWITCHES.__contains__, map(type, own.values())))
    return tuple([(k, _switch_of(v)) for k, v in found if k != "training"])


def _switch_of(value: Any) -> Hashable:
    """A text may be long, and what is known of a kind of forward outlives its model."""
    if type(value) is str:
        return hash(value)
    return value.requires_grad if type(value) is torch.Tensor else value
