"""What autograd does not say by itself."""

from __future__ import annotations

import torch


def forget_interrupted_backward() -> None:
    """After an exception in a backward PyTorch may keep the rest of its graph until the thread's next backward."""
    with torch.enable_grad():
        torch.ones((), requires_grad=True).backward()
