"""What the attributes of modules are set to: training mode, flags, numbers, objects, tensors that are no buffers; which
children they have, and of which classes they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

STRUCTURE = frozenset((  # not what a module is set to
    "_parameters", "_buffers", "_modules", "_apply", "_flat_weights", "_flat_weight_refs",
))  # fmt: skip
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CHILDREN = itemgetter("_modules")


class State(NamedTuple):
    """`found` is by identity and order: an equal number in a new object is put back for nothing."""

    found: tuple[list[int], list[int], list[type]] | None
    attributes: list[dict[str, Any]]  # of each module by name
    build: list[tuple[type, list[tuple[str, nn.Module | None]]]]  # of each its class and children
    is_rebuilt: bool  # has other children, or classes, than at first


class ModuleStates:
    """Of the modules of a block. Calls that find the same share it: most attributes never change, and what each call
    keeps until its backward is work for the garbage collector."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._first = self._build()
        self.shared: State | None = None  # the latest, if it keeps nothing large alive: not to be changed

    def _build(self) -> list[tuple[type, list[tuple[str, nn.Module | None]]]]:
        return [(type(module), [*module._modules.items()]) for module in self._modules]

    def _found(self) -> tuple[list[int], list[int], list[type]]:
        """In PyTorch's and Python's own functions: it is asked several times a visit."""
        own = list(map(vars, self._modules))
        every = [*own, *map(_CHILDREN, own)]
        values = chain.from_iterable(map(dict.values, every))
        return list(map(id, values)), list(map(len, every)), list(map(type, self._modules))

    def now(self) -> State:
        """The caller's own, unless it is `shared`."""
        found = self._found()
        if self.shared is not None and self.shared.found == found:
            return self.shared
        build = self._build()
        state = State(found, list(map(dict, map(vars, self._modules))), build, build != self._first)
        keeps = any(_keeps(v) for own in state.attributes for k, v in own.items() if k not in _OF_EVERY_MODULE)
        self.shared = None if keeps else state
        return state

    def are(self, state: State) -> bool:
        return self._found() == state.found

    def set(self, state: State) -> None:
        stays = STRUCTURE | {"forward"}  # the first one is the block, which may be cut otherwise since
        for module, values, (kind, children) in zip(self._modules, state.attributes, state.build, strict=True):
            own = vars(module)
            for name in [k for k, v in own.items() if not (k in values or k in stays or is_activation(v))]:
                del own[name]
            own.update((k, v) for k, v in values.items() if k not in stays)
            stays = STRUCTURE
            if [*module._modules.items()] != children:
                module._modules.clear()
                module._modules.update(children)
            if type(module) is not kind:
                module.__class__ = kind


def _keeps(value: Any) -> bool:
    """Memory, which shall not live longer for it."""
    return any(map(_keeps, value)) if isinstance(value, tuple) else isinstance(value, (torch.Tensor, list, dict, set))


def is_activation(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None
