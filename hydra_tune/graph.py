"""The graph of one forward of a prepared model, and what autograd does not say of a backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FrameType

import torch

_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


@dataclass(eq=False)
class ForwardPass:
    """Lives as long as the graph of one forward of the root module; done once that graph was used up.

    `ended_by` is what a block raised to end it: a model may catch all exceptions, and would go on without the block.
    `calls` counts the calls of each block, by its name. A forward `has_trained` that has run a backward itself.
    """

    trains: bool = False
    has_trained: bool = False
    done: bool = False
    ended_by: Exception | None = None
    calls: dict[str, int] = field(default_factory=dict)

    def count(self, block: str) -> None:
        self.calls[block] = self.calls.get(block, 0) + 1


def calls_backward(frame: FrameType | None, times: int = 1) -> bool:
    """Whether there, or in what has called that, a backward was asked for, and so often."""
    while frame is not None:
        times -= frame.f_code is _BACKWARD
        if times == 0:
            return True
        frame = frame.f_back
    return False


def forget_interrupted_backward() -> None:
    """After an exception in a backward PyTorch may keep the rest of its graph until the thread's next backward."""
    with torch.enable_grad():
        torch.ones((), requires_grad=True).backward()
