"""The baseline of spilled training: activations recomputed as there, with all weights in place."""

import torch
from torch.utils.checkpoint import checkpoint

from hydra_tune.demo.gpt import GPT


class CheckpointedGPT(GPT):
    """Every layer under `torch.utils.checkpoint`, as its documentation recommends."""

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        h_BTD = self.bytes(x_BT) + self.positions(torch.arange(x_BT.shape[1], device=x_BT.device))
        for layer in self.layers:
            h_BTD = checkpoint(layer, h_BTD, use_reentrant=False)
        logits_BTV: torch.Tensor = self.head(self.norm(h_BTD))
        return logits_BTV
