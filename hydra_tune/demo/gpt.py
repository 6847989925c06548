"""A byte-level GPT in ordinary PyTorch code. Nothing in it knows that it will be spilled.

Shape suffixes: B batch, T positions, D width, H heads, V vocabulary (256 bytes).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256


class Layer(nn.Module):
    """Attention, then a feed-forward net, each added to its normalised input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(self.norm1(x_BTD)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        a_BHTd = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x_BTD = x_BTD + self.drop(self.proj(a_BHTd.transpose(1, 2).reshape(B, T, D)))
        y_BTD: torch.Tensor = x_BTD + self.drop(self.down(F.gelu(self.up(self.norm2(x_BTD)))))
        return y_BTD


class GPT(nn.Module):
    def __init__(self, depth: int, width: int = 256, heads: int = 4, context: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList([Layer(width, heads, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) for the next byte at each position."""
        positions_T = torch.arange(x_BT.shape[1], device=x_BT.device)
        h_BTD = self.bytes(x_BT) + self.positions(positions_T)
        for layer in self.layers:
            h_BTD = layer(h_BTD)
        logits_BTV: torch.Tensor = self.head(self.norm(h_BTD))
        return logits_BTV
