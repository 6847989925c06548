"""What the attributes of modules are set to: training mode, flags, numbers, objects, tensors that are no buffers."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import nn

State = dict[str, Any]  # by the attribute's name

_STRUCTURE = frozenset((  # not what a module is set to
    "_parameters", "_buffers", "_modules", "forward", "_apply", "_flat_weights", "_flat_weight_refs",
))  # fmt: skip
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size))


class ModuleStates:
    """Of the modules of a block. Calls that find the same share it: most attributes never change, and what each call
    keeps until its backward is work for the garbage collector."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._latest: list[State | None] = [None] * len(modules)

    def now(self) -> list[State]:
        """Of each module. One that has nothing but plain data is not to be changed; the others are the caller's own."""
        states = []
        for i, (own, latest) in enumerate(zip(map(vars, self._modules), self._latest, strict=True)):
            if latest is None or not _is_set(own, latest):
                latest = dict(own)
                self._latest[i] = latest if _is_plain(latest) else None  # objects shall not live longer for it
            states.append(latest)
        return states

    def are(self, states: Sequence[State]) -> bool:
        return all(map(_is_set, map(vars, self._modules), states))

    def set(self, states: Sequence[State]) -> None:
        for own, values in zip(map(vars, self._modules), states, strict=True):
            extra = [k for k, v in own.items() if k not in values and k not in _STRUCTURE and not _is_activation(v)]
            for name in extra:
                del own[name]
            own.update((k, v) for k, v in values.items() if k not in _STRUCTURE)


def _is_set(own: State, then: State) -> bool:
    """By identity and order: an equal number in a new object is put back for nothing."""
    return tuple(own) == tuple(then) and all(map(is_, own.values(), then.values()))


def _is_plain(state: State) -> bool:
    others = [value for name, value in state.items() if name not in _OF_EVERY_MODULE]
    return all(type(x) in _PLAIN or (type(x) is tuple and _PLAIN.issuperset(map(type, x))) for x in others)


def _is_activation(value: Any) -> bool:
    return type(value) is torch.Tensor and value.grad_fn is not None
