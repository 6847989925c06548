"""What stands in an attribute of a module, `forward` above all, while the module is prepared; in a block's, it leads
each call to the trial.

accelerate and trl set a forward on a module itself, before its class's, as does who patches a model by hand:
``model.forward = types.MethodType(wrapped, model)``.
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
    """In this attribute of a prepared module. A copy of the module gets what is `own` there, if anything is, else its
    class's."""

    attribute = "forward"

    def __init__(self, module: nn.Module, trial: Trial) -> None:
        self.module = module
        self.trial = trial
        self.own = own_forward_of(module, self.attribute)
        update_wrapper(self, self.original, updated=())  # type: ignore[arg-type]  # those below are callable

    @property
    def original(self) -> Callable[..., Any]:
        """What the module would run in plain PyTorch."""
        of_class: Callable[..., Any] = getattr(type(self.module), self.attribute).__get__(self.module)
        return of_class if self.own is None else self.own

    @interruptible
    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self.original(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (getattr, (self.module, self.attribute)) if self.own is None else (itemgetter(0), ((self.own,),))

    def give_back(self) -> None:
        """Where this one is in the module's attribute, what was its own is again, if anything was."""
        if self.own is not None:
            vars(self.module)[self.attribute] = self.own  # in its place among the attributes
        else:
            del vars(self.module)[self.attribute]


class BlockForward(StandIn):
    def __init__(self, block: Block, trial: Trial) -> None:
        super().__init__(block.module, trial)
        self.block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block, trial = self.block, self.trial
        calls = trial.block_calls
        if calls.are_within_another or not block.is_current:  # the latter: a user's wrapper of one that was cut anew
            return block.forward(args, kwargs)
        if not (calls.are_expected or trial.models):  # within its forward a model is alive
            trial.end()
            return block.forward(args, kwargs)
        outputs = calls.run(block, args, kwargs)
        interrupts.check()
        return outputs


def end_orphans(model: nn.Module) -> bool:
    """End the trials whose own model was collected, while this part of it lives on; whether there were any."""
    forwards = [vars(module).get("forward") for module in model.modules()]
    trials = [f.trial for f in forwards if isinstance(f, BlockForward) and not f.trial.models]
    for trial in trials:
        trial.end()
    return bool(trials)


def own_forward_of(module: nn.Module, attribute: str = StandIn.attribute) -> Callable[..., Any] | None:
    """One set on the module itself; None, if it runs its class's."""
    own: Any = vars(module).get(attribute)
    if isinstance(own, StandIn):
        return own.own
    of_class = getattr(type(module), attribute)
    if getattr(own, "__func__", None) is of_class and getattr(own, "__self__", None) is module:
        return None  # the copy of a prepared module has that
    return own  # type: ignore[no-any-return]
