"""A forward that is set on a module itself, before its class's: what stands in its place while the module is prepared.

accelerate and trl set one, as does who patches a model by hand: ``model.forward = types.MethodType(wrapped, model)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hydra_tune.interrupts import interruptible


class StandIn:
    """In the instance attribute `forward` of a prepared module. A copy of the module gets what is `own` there, if
    anything is, else its class's."""

    def __init__(self, module: nn.Module) -> None:
        before = vars(module).get("forward")
        self.module = module
        self.own = own_forward_of(module)
        self._before: Any = before._before if isinstance(before, StandIn) else before

    @property
    def original(self) -> Callable[..., Any]:
        """What the module would run in plain PyTorch."""
        forward: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return forward if self.own is None else self.own

    @interruptible
    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self.original(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (getattr, (self.module, "forward")) if self.own is None else (_itself, (self.own,))

    def give_back(self) -> None:
        """The module is as it was. Who has put a forward around this one since keeps that; it leads here still."""
        present: Any = vars(self.module).get("forward")
        if present is not self and getattr(present, "__func__", None) is not self:
            return
        if self._before is not None:
            vars(self.module)["forward"] = self._before  # in its place among the attributes
        else:
            del vars(self.module)["forward"]


def own_forward_of(module: nn.Module) -> Callable[..., Any] | None:
    """None, if the module runs its class's."""
    forward: Any = vars(module).get("forward")
    if isinstance(forward, StandIn):
        return forward.own
    if getattr(forward, "__func__", None) is type(module).forward and getattr(forward, "__self__", None) is module:
        return None  # the copy of a prepared module has that
    return forward  # type: ignore[no-any-return]


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
