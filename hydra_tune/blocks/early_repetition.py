"""Repeats a block's forward right after its first run, as the backward would. So a pilot finds out whether the
repetition makes the same values, and how many bytes and seconds it takes.

This run is not a part of the step's graph. So a user's hooks on tensors must not fire in it, but only in the step's own
backward.
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
    """Call `run(args, kwargs, tensors)`: the call's arguments, detached, and the tensors for which it may compute
    gradients (inputs and weights). Returns whether the forward has put hooks on tensors; these hooks do nothing."""
    copy = call.trial.visits.begin(call.block, Direction.FORWARD)
    try:
        with call.as_at_first(copy, as_it_is) as weights, _WithoutHooks() as hooks:
            bare = without_history(call.leaves)
            run(*call.arguments(bare), [x for x in (*bare, *weights) if isinstance(x, torch.Tensor)])
        return bool(hooks.found)
    finally:
        call.trial.visits.end(copy, Direction.FORWARD)


class _WithoutHooks(TorchFunctionMode):
    """Replaces hooks that a forward puts on tensors by hooks that do nothing."""

    found = False  # whether a hook was put on a tensor

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.register_hook:
            self.found, args = True, (args[0], lambda _: None)
        return function(*args, **(kwargs or {}))
