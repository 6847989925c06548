"""What one look at a model tells, at each forward: all that may decide which plan holds and that a script may change
between two forwards."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import nn

from hydra_tune.hooks import user_hooks

_SWITCHES = frozenset((bool, str, type(None), torch.Tensor))


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
    return Glance(
        tuple(parameters),
        tuple(needs_gradient),
        tuple(buffers),
        tuple([module.training for module in modules]),
        tuple([id(module) for module in modules if user_hooks(module)]),
        tuple([_switches_of(owner) for owner in owners.values()]),
    )


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
