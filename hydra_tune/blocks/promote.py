"""The one node of ours in a user's graph: from a call's weights in host memory to their copies on the device.

    host weight --Promote--> device copy --> the block's operators, as in plain PyTorch --> output

Its backward is called once, when every gradient of the call is there: it sends them home, and the visit ends. What
sums them, in which order and with which hooks, is PyTorch's engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hydra_tune.interrupts import interrupts

if TYPE_CHECKING:
    from hydra_tune.blocks.call import Call, UsedUpCall


class Promote(torch.autograd.Function):
    """Inputs are the weights in host memory that require a gradient; `copies` hold the same values on the device."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, copies: Sequence[torch.Tensor], *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: Call | UsedUpCall | None = ctx.call
        if call is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: what a block keeps for its backward is gone. "
                "Specify retain_graph=True the first time."
            )
        sent = call.sent_home(gradients)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call = call.used_up()  # a kept loss shall not keep the call's inputs
        if interrupts.pending:
            interrupts.check()
        return (None, None, *sent)


# As `Promote.apply` where no transform of torch.func is around, which would be refused; in less time.
promote: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, Promote).apply
