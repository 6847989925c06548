"""What stands in a block's `forward`, and leads each call of it to the trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from hydra_tune.blocks.block import Block
from hydra_tune.interrupts import interrupts
from hydra_tune.own_forward import StandIn


class Executor(Protocol):
    """What a block needs of the trial that it runs for."""

    @property
    def has_model(self) -> bool: ...

    @property
    def in_visit(self) -> bool: ...

    def run_block(self, block: Block, args: Sequence[Any], kwargs: dict[str, Any]) -> Any: ...

    def end(self) -> None: ...


class BlockForward(StandIn):
    """Stands in a prepared block's instance attribute `forward`."""

    def __init__(self, block: Block, trial: Executor) -> None:
        super().__init__(block.module)
        self.block = block
        self.trial = trial
        self.__wrapped__ = self.original  # inspect.signature follows it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block, trial = self.block, self.trial
        if trial.in_visit or not block.is_current:  # a block within a block; a user's wrapper of one that was cut anew
            return block.forward(args, kwargs)
        if not trial.has_model:
            trial.end()
            return block.forward(args, kwargs)
        outputs = trial.run_block(block, args, kwargs)
        if interrupts.pending:
            interrupts.check()
        return outputs


def end_orphans(model: nn.Module) -> bool:
    """End the trials whose own model was collected, while this part of it lives on; whether there were any."""
    found = False
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, BlockForward) and not forward.trial.has_model:
            forward.trial.end()
            found = True
    return found
