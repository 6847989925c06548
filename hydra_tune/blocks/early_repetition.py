"""Runs a block a second time at once, as the backward would repeat it: does it make the same, and what does it take?

This run belongs to no graph of the step's. So a user's hooks on tensors must not fire in it: they wait for the step's
own backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hydra_tune.blocks.repeated_call import RepeatedCall, as_it_is, without_history
from hydra_tune.schedule.plan import Direction


def repeat_early(
    call: RepeatedCall, run: Callable[[Sequence[Any], dict[str, Any], Sequence[torch.Tensor]], None]
) -> bool:
    """Call `run` with the call's arguments, without their history, and the tensors that may be asked for gradients.
    Returns whether it has put hooks on tensors; these are left out."""
    copy = call.trial.visits.begin(call.block, Direction.FORWARD)
    try:
        with call.as_at_first(copy, as_it_is) as weights, _WithoutHooks() as hooks:
            bare = without_history(call.leaves)
            run(*call.arguments(bare), [x for x in (*bare, *weights) if isinstance(x, torch.Tensor)])
        return bool(hooks.found)
    finally:
        call.trial.visits.end(copy, Direction.FORWARD)


class _WithoutHooks(TorchFunctionMode):
    """Leaves hooks on tensors out of a forward whose graph is nobody's, though it has a backward."""

    found = False  # any

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.register_hook:
            self.found, args = True, (args[0], lambda _: None)
        return function(*args, **(kwargs or {}))
