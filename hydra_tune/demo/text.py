"""A text to train on that every Python interpreter has: the documentation of Python, as bytes."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

VALIDATION_SHARE = 0.1


def documentation() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation text, one-dimensional uint8."""
    from pydoc_data import topics

    text = "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = int(len(data) * (1 - VALIDATION_SHARE))
    return data[:cut], data[cut:]


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pairs of int64 tensors (context,): a window of the text, and the same window one byte later, which is to be
    predicted."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]
