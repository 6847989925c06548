"""Python's own documentation, which ships with every interpreter, as bytes to train on."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

VALIDATION_SHARE = 0.1


def documentation() -> tuple[torch.Tensor, torch.Tensor]:
    """Train and validation text, one-dimensional uint8."""
    from pydoc_data import topics

    text = "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = int(len(data) * (1 - VALIDATION_SHARE))
    return data[:cut], data[cut:]


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of `context` bytes, and the same shifted by one: what comes next. Both int64 (context,)."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]
