"""What one look at a model tells, at each forward: all that may decide which plan holds and that a script may change
between two forwards. And whether another look would tell the same, for a tenth of what it costs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from hydra_tune.hooks import HOOKS_OF_MODULES, user_hooks

_SWITCHES = frozenset((bool, str, type(None), torch.Tensor))
_DICTS = ("_parameters", "_buffers", "_modules", *HOOKS_OF_MODULES)
_wants_gradient = attrgetter("requires_grad")
_form = attrgetter("shape", "dtype")


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


class Unchanged:
    """What a glance reads are values of dicts: while each of a model's has the very values that it had, and each weight
    wants a gradient as it did, another glance tells the same.

    It keeps no tensor but weights and buffers: an activation would keep its graph.
    """

    def __init__(self, dicts: Sequence[dict[str, Any]], modules: Sequence[nn.Module]) -> None:
        self._dicts = dicts
        self._values = self._now()
        self._kept = [value for each in dicts for value in each.values() if type(value) is str]  # so that ids stay
        self._parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        self._buffers = [b for m in modules for b in m._buffers.values() if b is not None]
        self._gradients, self._forms = self._of_tensors()

    @classmethod
    def since_now(cls, model: nn.Module) -> Unchanged | None:
        """None of a model that has what is not in its dicts: a tensor of its own, or a config that is computed."""
        modules, dicts = modules_of(model), list[dict[str, Any]]()
        for module in modules:
            own = vars(module)
            if torch.Tensor in map(type, own.values()) or hasattr(type(module), "config"):
                return None
            dicts += [own, *(own[name] for name in _DICTS if name in own)]
            config = own.get("config")
            if hasattr(config, "__dict__"):
                if torch.Tensor in map(type, vars(config).values()):
                    return None
                dicts.append(vars(config))
        return cls(dicts, modules)

    def holds(self) -> bool:
        return self._now() == self._values and self._of_tensors() == (self._gradients, self._forms)

    def _now(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._dicts))))

    def _of_tensors(self) -> tuple[list[bool], list[Any]]:
        return list(map(_wants_gradient, self._parameters)), list(map(_form, self._buffers))
