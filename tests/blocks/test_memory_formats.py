"""Strides choose kernels: a block is given its inputs with the strides that they have outside, of sizes of 1, too."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from comparison import assert_as_in_plain_pytorch

CONVOLUTIONS = {
    "1d": (nn.Conv1d, nn.BatchNorm1d, (16,), None, 130_000),
    "2d": (nn.Conv2d, nn.BatchNorm2d, (8, 8), torch.channels_last, 410_000),
    "3d": (nn.Conv3d, nn.BatchNorm3d, (4, 4, 4), torch.channels_last_3d, 550_000),
}


def layers(convolution, norm, channels):
    return [nn.Sequential(convolution(a, b, 3, padding=1), norm(b), nn.SiLU()) for a, b in pairwise(channels)]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_channels_last(kind, batch):
    convolution, norm, size, memory_format, budget = CONVOLUTIONS[kind]

    def images():
        if memory_format is None:
            return torch.randn(batch, *size, 3).movedim(-1, 1)
        return torch.randn(batch, 3, *size).to(memory_format=memory_format)

    def scenario(prepare):
        torch.manual_seed(0)
        model = nn.Sequential(*layers(convolution, norm, (3, 32, 1, *[32] * 7)), convolution(32, 2, 1))
        model = model.to(memory_format=memory_format or torch.contiguous_format)
        model = prepare(model)
        losses = []
        for _ in range(2):
            losses.append(model(images()).square().mean())
            losses[-1].backward()
        return [loss.detach() for loss in losses], [p.grad.clone() for p in model.parameters()]

    assert_as_in_plain_pytorch(scenario, num_bytes=budget * batch)


class AddsToARow(nn.Module):
    """In place, before its layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))

    def forward(self, x):
        x[0].add_(1)
        return self.layers(x)


def test_an_expanded_input_that_the_model_changes():
    """All its rows are one, which a pilot puts back."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, x = prepare(AddsToARow()), torch.randn(1, 32).expand(4, 32)
        for _ in range(2):
            model(x).square().mean().backward()
        return x.clone(), [p.grad.clone() for p in model.parameters()]

    assert_as_in_plain_pytorch(scenario, num_bytes=20_000)
