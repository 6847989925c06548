"""Whether a look at a model and its inputs would tell what it has told before, for a tenth of what a look costs.

A glance reads modules, parameters, hooks and switches. All of these are values of dicts: while each dict has the very
values that it had, and each weight wants a gradient as it did, another glance tells the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from hydra_tune.glance import modules_of
from hydra_tune.hooks import HOOKS_OF_MODULES

_DICTS = ("_parameters", "_buffers", "_modules", *HOOKS_OF_MODULES)
_wants_gradient = attrgetter("requires_grad")
_form = attrgetter("shape", "dtype")


class Unchanged:
    """Of one model, from its making on. It keeps no tensor but weights and buffers: an activation would keep its
    graph."""

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
