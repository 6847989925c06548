"""What stands in a block's `forward`, and leads each call of it to the trial."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from hydra_tune.blocks.block import Block
from hydra_tune.interrupts import interrupts
from hydra_tune.own_forward import StandIn

if TYPE_CHECKING:
    from hydra_tune.trial import Trial


class BlockForward(StandIn):
    def __init__(self, block: Block, trial: Trial) -> None:
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
    forwards = [vars(module).get("forward") for module in model.modules()]
    trials = [f.trial for f in forwards if isinstance(f, BlockForward) and not f.trial.has_model]
    for trial in trials:
        trial.end()
    return bool(trials)
