"""Which calls use a weight, how often, and cast or not: their gradients are added in plain PyTorch's order.

A program says it: one string for each forward, a word for each call of a block. "c" uses the weight by autocast's copy,
"d" as it is, a capital letter the other block, which shares it. No flag or shape of an argument tells calls apart.
"o" stands for the root, which uses the weight itself.
Behind a word "!" switches autocast off around the call, "^" gradients, "~" lets go of its output, "*" clears casts.
"""

import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from compared import assert_as_in_plain_pytorch

WIDTH = 16
PROGRAM = [""]  # a global variable: no pilot asks for it
SEEDS = range(40)


def used(x, weight, word):
    for use in word.lower():
        if use == "c":
            x = x + nn.functional.linear(x, weight).tanh()
        elif use == "d":
            x = x + x * weight.square().sum(0).sin()
    return x


class Block(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.own = nn.Linear(WIDTH, 4 * WIDTH)
        self.back = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, word):
        x = used(x, self.weight, word)
        return x + self.back(self.own(x).relu())


class Stranger(Block):
    """Of another class: no pilot takes it for a block that it has seen called."""


class Programmed(nn.Module):
    def __init__(self, within, second=Block):
        super().__init__()
        self.within = within  # as accelerate has it
        weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.first, self.second = Block(weight), second(weight)
        self.others = nn.ModuleList([Block(nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)) for _ in range(4)])

    def forward(self, x):
        words = PROGRAM[-1].split()
        with self.within:
            for i, (other, word) in enumerate(zip(self.others, ("cd", "cc", "c", "dd"), strict=True)):
                if f"drop{i}" not in words:
                    x = other(x, word)
            for word in (word for word in words if "drop" not in word):
                x = self.called(x, word)
            return x

    def called(self, x, word):
        if "o" in word:
            return used(x, self.first.weight, word)
        block = self.second if word.isupper() else self.first
        with (
            torch.autocast("cpu", enabled=False) if "!" in word else nullcontext(),
            torch.no_grad() if "^" in word else nullcontext(),
        ):
            y = block(x, word)
        if "*" in word:
            torch.clear_autocast_cache()
        return y + (x - x.detach()) if "^" in word else x + y.detach() if "~" in word else y


def loss_of(model, words, read=lambda output: output):
    PROGRAM[:] = [words]
    return read(model(torch.randn(5, WIDTH))).float().square().mean()


def trained(steps, *, autocast=True, inside=False, second=Block):
    """`steps` are lists of forwards before one backward; `autocast` may say it for each step."""

    def within(step=0):
        enabled = autocast if isinstance(autocast, bool) else autocast[step]
        return torch.autocast("cpu", torch.bfloat16) if enabled else nullcontext()

    def scenario(prepare):
        torch.manual_seed(0)
        model = Programmed(within() if inside else nullcontext(), second)
        model = prepare(model)
        found = []
        for step, forwards in enumerate(steps):
            model.zero_grad()
            with nullcontext() if inside else within(step):
                losses = [loss_of(model, words) for words in forwards]
            sum(losses).backward()
            found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        return found

    return scenario


@pytest.mark.sample(2)
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize(
    "steps",
    [
        [["c"], ["ccc"], ["c c c"], ["cc"]],
        [["cc"], ["ccc"], ["cccc"]],
        [["- c"], ["cc c"], ["cc - cc"]],
        [["- dd dd"], ["dd dd -"], ["dd - dd"]],
        [["- d"], ["d - d"]],
        [["dcd dcd"], ["dc cd"], ["dcc", "ddc"], ["cd", "dc", "d"]],
        [["c"], ["c", "ccc"], ["cc", "c c"]],
        [["cc"], ["C"], ["cc", "C"], ["C", "cc"], ["C cc"], ["DC dc", "dd DD"]],
        [["c", "c c"], ["cc c", "c"]],
        [["c drop0 drop3"], ["c drop1", "c"]],
    ],
    ids=str,
)
def test_sums_are_those_of_plain_pytorch_under_autocast(steps, inside):
    assert_as_in_plain_pytorch(trained(steps, inside=inside), num_bytes=40_000)


@pytest.mark.parametrize(
    "steps", [[["dcd"], ["dcd D"]], [["cc"], ["dcd dd CC"]], [["dcd"], ["dcd", "D dcd"]], [["dcd"], ["C dcd"]]], ids=str
)
def test_what_a_forward_has_cast_before_it_is_started_anew_is_cast_again(steps):
    assert_as_in_plain_pytorch(trained(steps, second=Stranger), num_bytes=40_000)


@pytest.mark.parametrize(
    "steps",
    [
        [["c!"], ["c c"]],
        [["c!"], ["c", "c"], ["c c!", "cc"]],
        [["c^"], ["dcd dcd"], ["c", "cc^ cd"]],
        [["c"], ["c^", "d DC"], ["c^ dcd"], ["cd^", "dcd"]],
        [["dc~"], ["dcd dcd"], ["c", "cc~ cd"]],
        [["c", "c* c", "c"], ["c*", "c"]],
        [["d c~", "cd"], ["d C~ c", "ccc"]],
    ],
    ids=str,
)
def test_sums_of_calls_in_other_contexts(steps):
    if "^" in str(steps) and torch.__version__ < (2, 11):
        pytest.skip("in plain PyTorch a cast of a call without gradients serves the others")
    assert_as_in_plain_pytorch(trained(steps), num_bytes=40_000)


@pytest.mark.parametrize(
    "steps",
    [
        [["cc"], ["C"], ["cc", "C"], ["C", "cc"], ["C cc"]],
        [["cd cd"], ["c", "cd"], ["dd", "cc c"]],
        [["c drop0 drop3"], ["c drop1", "c"]],
    ],
    ids=str,
)
def test_sums_are_those_of_plain_pytorch_in_float32(steps):
    assert_as_in_plain_pytorch(trained(steps, autocast=False), num_bytes=40_000)


@pytest.mark.parametrize(
    "steps",
    [
        [["oc c"]],
        [["c oc"], ["oc c", "c oc"]],
        [["oc cc oc"], ["ocd cd"]],
        [["oc cc", "c od"], ["od cc od"], ["oc C c"]],
        [["ocd DC oc cdc"], ["oc c", "C oc"]],
    ],
    ids=str,
)
def test_a_cast_is_shared_with_operators_outside_of_blocks(steps):
    assert_as_in_plain_pytorch(trained(steps), num_bytes=60_000)


OPERATORS = {
    "bias": (lambda x, w: nn.functional.linear(x, torch.eye(WIDTH), w), (WIDTH,)),
    "conv1d": (lambda x, w: nn.functional.conv1d(x[:, None], w, padding=1)[:, 0], (1, 1, 3)),
    "conv2d": (lambda x, w: nn.functional.conv2d(x[None, None], w, padding=1)[0, 0], (1, 1, 3, 3)),
    "conv3d": (lambda x, w: nn.functional.conv3d(x[None, None, None], w, padding=1)[0, 0, 0], (1, 1, 3, 3, 3)),
}


@pytest.mark.parametrize("kind", OPERATORS)
def test_a_cast_of_any_shape_is_shared_with_operators_outside_of_blocks(kind):
    operator, shape = OPERATORS[kind]

    class Using(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight
            self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x):
            return x + operator(self.layers(operator(x, self.weight)), self.weight)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Using(nn.Parameter(torch.randn(shape))) for _ in range(8)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x) + operator(x, block.weight)
            return x

    def scenario(prepare):
        torch.manual_seed(0)
        model = prepare(Model())
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(5, WIDTH)).float().square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    assert_as_in_plain_pytorch(scenario, num_bytes=60_000)


@pytest.mark.parametrize("budget", [40_000, 10_000_000], ids=["spilled", "resident"])
@pytest.mark.parametrize("steps", [[["dcd"], ["dcd"]], [["dcd", "c"], ["dcd", "c"]]], ids=str)
def test_a_pilot_leaves_the_forward_no_casts_of_weights_outside_of_blocks(steps, budget):
    class Loose(Programmed):
        def __init__(self):
            super().__init__(nullcontext())
            self.loose = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

        def forward(self, x):
            return super().forward(used(x, self.loose, PROGRAM[-1]))

    def scenario(prepare):
        torch.manual_seed(0)
        model = prepare(Loose())
        found = []
        for forwards in steps:
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                sum(loss_of(model, words) for words in forwards).backward()
            found.append(model.loose.grad.clone())
        return found

    assert_as_in_plain_pytorch(scenario, "spilled" if budget < 1_000_000 else "resident", num_bytes=budget)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_sums_of_a_model_whose_outputs_nobody_sees(autocast):
    """The pilot's graph can't be read behind an object of the model's own."""

    class Output:
        def __init__(self, hidden):
            self.hidden = hidden

    class Hiding(Programmed):
        def forward(self, x):
            return Output(super().forward(x))

    def scenario(prepare):
        torch.manual_seed(0)
        model = prepare(Hiding(nullcontext()))
        found = []
        for forwards in (["dcd dcd", "c C"], ["cc c"]):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                sum(loss_of(model, words, lambda output: output.hidden) for words in forwards).backward()
            found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        return found

    assert_as_in_plain_pytorch(scenario, num_bytes=40_000)


@pytest.mark.sample(2)
@pytest.mark.parametrize("autocast", [(True, False, True, False), (False, True, False, True)], ids=str)
@pytest.mark.parametrize("words", ["c", "cc", "dd", "cd", "c c", "cc cc", "d C"])
def test_sums_are_those_of_plain_pytorch_with_and_without_autocast(words, autocast):
    assert_as_in_plain_pytorch(trained([[words, words]] * 4, autocast=autocast), num_bytes=40_000)


def word_of(rng):
    word = "".join(rng.choice("ccdd") for _ in range(rng.randint(0, 3))) or "-"
    word = word.upper() if rng.random() < 0.3 else word
    return word + rng.choice("!~") if rng.random() < 0.15 else word


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", SEEDS)
def test_sums_of_random_programs(seed):
    rng = random.Random(seed)
    steps = [
        [" ".join(word_of(rng) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 3))] for _ in range(6)
    ]
    second = rng.choice([Block, Stranger])
    assert_as_in_plain_pytorch(trained(steps, inside=rng.random() < 0.3, second=second), num_bytes=40_000)
