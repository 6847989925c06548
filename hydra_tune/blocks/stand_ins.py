"""Stand-ins: while a module is prepared, one takes the place of its `forward`, and leads each call to the trial.

A module may have a forward of its own that goes before its class's: accelerate and trl set one on the instance, and so
do users who patch a model by hand, ``model.forward = types.MethodType(wrapped, model)``. A stand-in calls that one, and
puts it back in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from torch import nn

from hydra_tune.process.interrupts import interruptible, interrupts

if TYPE_CHECKING:
    from hydra_tune.blocks.block import Block
    from hydra_tune.trials.trial import Trial


class StandIn:
    """Takes the place of an attribute of a prepared module.

    `own` is what the instance had there before; None if it was its class's. A copy of the module, by `copy` or
    `pickle`, gets `own` or the class's method, and no stand-in.
    """

    attribute = "forward"

    def __init__(self, module: nn.Module, trial: Trial) -> None:
        self.module = module
        self.trial = trial
        self.own = own_forward_of(module, self.attribute)
        update_wrapper(self, self.original, updated=())  # type: ignore[arg-type]  # subclasses are callable

    @property
    def original(self) -> Callable[..., Any]:
        """The method that the module would run in plain PyTorch."""
        of_class: Callable[..., Any] = getattr(type(self.module), self.attribute).__get__(self.module)
        return of_class if self.own is None else self.own

    @interruptible
    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self.original(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (getattr, (self.module, self.attribute)) if self.own is None else (itemgetter(0), ((self.own,),))

    def give_back(self) -> None:
        """Put back what the instance had before. Call it only if this stand-in is in the attribute."""
        if self.own is not None:
            vars(self.module)[self.attribute] = self.own  # assigned, so that the order of attributes stays
        else:
            del vars(self.module)[self.attribute]


class BlockForward(StandIn):
    """Stands in for the forward of a block's module."""

    def __init__(self, block: Block, trial: Trial) -> None:
        super().__init__(block.module, trial)
        self.block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block, trial = self.block, self.trial
        calls = trial.block_calls
        # not current: the model was cut anew, but a wrapper of the user's still calls this stand-in
        if calls.are_within_another or not block.is_current:
            return block.forward(args, kwargs)
        if not (calls.are_expected or trial.models):  # the trial's models are garbage; this part lives on as plain
            trial.end()
            return block.forward(args, kwargs)
        outputs = calls.run(block, args, kwargs)
        interrupts.check()
        return outputs


def end_orphans(model: nn.Module) -> bool:
    """End the trials whose models were garbage collected, while this part of one lives on. Returns whether there were
    any."""
    forwards = [vars(module).get("forward") for module in model.modules()]
    trials = [f.trial for f in forwards if isinstance(f, BlockForward) and not f.trial.models]
    for trial in trials:
        trial.end()
    return bool(trials)


def own_forward_of(module: nn.Module, attribute: str = StandIn.attribute) -> Callable[..., Any] | None:
    """The method that is set on the instance, also if a stand-in has taken its place; None if it is the class's."""
    own: Any = vars(module).get(attribute)
    if isinstance(own, StandIn):
        return own.own
    of_class = getattr(type(module), attribute)
    if getattr(own, "__func__", None) is of_class and getattr(own, "__self__", None) is module:
        return None  # a copy of a prepared module has its class's method on the instance (`StandIn.__reduce__`)
    return own  # type: ignore[no-any-return]
