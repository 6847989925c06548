"""Which calls use a weight, how often, and cast or not: gradients are added in plain PyTorch's order.

Each string is a forward, each word in it the call of a block. "c" uses the weight by autocast's copy, "d" as it is; a
capital letter calls the other block, which shares it.
"""

import pytest
import torch
from torch import nn

from comparison import assert_as_in_plain_pytorch

WIDTH = 16


class Block(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.own = nn.Linear(WIDTH, 4 * WIDTH)
        self.back = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, word):
        for use in word.lower():
            if use == "c":
                x = x + nn.functional.linear(x, self.weight).tanh()
            else:
                x = x + x * self.weight.square().sum(0).sin()
        return x + self.back(self.own(x).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.first, self.second = Block(weight), Block(weight)
        self.others = nn.ModuleList([Block(nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)) for _ in range(4)])

    def forward(self, x, words):
        for other, word in zip(self.others, ("cd", "cc", "c", "dd"), strict=True):
            x = other(x, word)
        for word in words.split():
            x = (self.second if word.isupper() else self.first)(x, word.lower())
        return x


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("forwards", [["c"], ["cc"], ["dd"], ["cdc"], ["c c"], ["c C"], ["C c c"]], ids=str)
def test_sums_are_those_of_plain_pytorch(forwards, autocast):
    def scenario(prepare):
        torch.manual_seed(0)
        model, found = prepare(Net()), []
        for _ in range(3):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses = [model(torch.randn(5, WIDTH), words).float().square().mean() for words in forwards]
            sum(losses).backward()
            found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        return found

    assert_as_in_plain_pytorch(scenario, num_bytes=70_000)
