"""Reentrant checkpoints within blocks: plain PyTorch adds what each gives to a weight to `.grad` at once, not with the
gradients of the weight's other uses."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hydra_tune
from comparison import assert_as_in_plain_pytorch

WIDTH, BUDGET = 32, 70_000


class Layer(nn.Module):
    """By `uses`: its part in a checkpoint, once or twice, or as it is."""

    def __init__(self, uses):
        super().__init__()
        self.uses = uses
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())

    def forward(self, x):
        for use in self.uses:
            if use == "use":
                x = self.part(x)
            else:
                x = checkpoint(self.part, x, use_reentrant=True)
        return x


LAYERS = {
    "one": ["checkpoint"],
    "several": ["checkpoint"] * 3,
    "one behind a use": ["use", "checkpoint"],
}


class Net(nn.Module):
    def __init__(self, uses):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer(uses) for _ in range(4)])

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def trained(model, forwards=2, before=lambda model: None, autocast=False):
    """The gradients after each of three backwards of several forwards, added up."""
    found = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = sum(model(torch.randn(6, WIDTH)).square().mean() for _ in range(forwards))
        before(model)
        loss.backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("forwards", [1, 3])
@pytest.mark.parametrize("uses", LAYERS.values(), ids=LAYERS)
def test_gradients_are_added_checkpoint_by_checkpoint(uses, forwards, autocast):
    def scenario(prepare):
        torch.manual_seed(0)
        return trained(prepare(Net(uses)), forwards, autocast=autocast)

    assert_as_in_plain_pytorch(scenario, num_bytes=BUDGET * 4 // 7 if autocast and forwards == 1 else BUDGET)


def test_hooks_fire_for_each_checkpoint():
    def scenario(prepare):
        torch.manual_seed(0)
        model = prepare(Net(LAYERS["several"]))
        fired = []
        for name, p in model.named_parameters():
            p.register_hook(lambda g, name=name: fired.append((name, g.clone())))
            p.register_post_accumulate_grad_hook(lambda p, name=name: fired.append((name, p.grad.clone())))
        found = trained(model)
        names = [[name for name, _ in fired if name == n] for n, _ in model.named_parameters()]
        assert len(names[2]) == 2 * 3 * 2 * 3, "two hooks, checkpoints, forwards and backwards"
        return found, [[g for name, g in fired if name == n] for n, _ in model.named_parameters()]

    assert_as_in_plain_pytorch(scenario, num_bytes=BUDGET)


def test_a_weight_that_is_frozen_before_the_backward():
    """The checkpoint meets it so when it repeats its forward."""

    def scenario(prepare):
        torch.manual_seed(0)
        model = prepare(Net(LAYERS["one"]))
        trained(model)

        def freeze(model):
            model.layers[2].part[0].weight.requires_grad_(False)

        return trained(model, before=freeze)

    assert_as_in_plain_pytorch(scenario, num_bytes=BUDGET)


class Skipping(nn.Module):
    """Some layers of which decide by the batch."""

    def __init__(self, skipped):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Layer(["checkpoint"]), nn.Linear(WIDTH, WIDTH)])
        self.skipped = skipped

    def forward(self, x):
        later = x.sum() > 0
        self.layers[1].uses = ["checkpoint"] if later or self.skipped == "a layer" else ["use"]
        for layer in self.layers[0 if later or self.skipped == "a checkpoint" else 1 :]:
            x = layer(x)
        return x


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("skipped", ["a layer", "a checkpoint"])
def test_a_checkpoint_that_the_pilot_has_not_seen(skipped):
    """In whose inputs no gradients were required, or which was not called."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, found = prepare(Skipping(skipped)), []
        for shift in (-5, 5, 5):
            model(torch.randn(6, WIDTH) + shift).square().mean().backward()
            found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        return found

    assert_as_in_plain_pytorch(scenario, num_bytes=24_500)


class Maps(nn.Module):
    """A checkpoint around every two of its blocks, the second of which gets what requires no gradient at first."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(6, 6, 1)
        self.convolutions = nn.ModuleList([nn.Conv2d(6, 6, 3, padding=1) for _ in range(4)])
        self.norms = nn.ModuleList([nn.GroupNorm(3, 6) for _ in range(4)])

    def forward(self, x):
        x = self.first(x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = checkpoint(nn.Sequential(convolution, norm), x, use_reentrant=True)
        return x


def test_a_norm_of_maps_within_one():
    """PyTorch's kernel for channels-last maps ends the process where it is not asked for the input's gradient."""

    def scenario(prepare):
        torch.manual_seed(0)
        model = prepare(Maps().to(memory_format=torch.channels_last))
        for _ in range(2):
            model(torch.randn(1, 6, 2, 2).to(memory_format=torch.channels_last)).square().mean().backward()
        return [p.grad for p in model.parameters()]

    assert_as_in_plain_pytorch(scenario, num_bytes=10_000)


def test_no_bytes_are_left():
    torch.manual_seed(0)
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        model, used = hydra_tune.prepare(Net(LAYERS["several"]), pool=pool), []
        for _ in range(3):
            trained(model)
            used.append(pool.devices[0].used_bytes)
        assert len(set(used)) == 1
        hydra_tune.release(model)
        assert pool.devices[0].used_bytes == 0


class Bilinear(nn.Module):
    """The last operator asks for a weight before it asks for what a checkpoint has to recompute."""

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(32, 32, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(x) * x)


class Recomputed(nn.Module):
    """Each checkpoint is around several blocks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Bilinear() for _ in range(6))

    def forward(self, x):
        for i in (0, 3):
            x = checkpoint(nn.Sequential(*self.layers[i : i + 3]), x, use_reentrant=False)
        return x


@pytest.mark.parametrize(("budget", "num_bytes"), [("spilled", 40_000), ("resident", 1 << 20)])
def test_a_checkpoint_visits_other_blocks_after_a_weight_was_asked_for(budget, num_bytes):
    """Freed slots are poisoned in these tests."""

    def scenario(prepare):
        torch.manual_seed(0)
        model = Recomputed()
        model, optimizer = prepare(model, torch.optim.AdamW(model.parameters()))
        for _ in range(3):
            model(torch.randn(2, 3, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    assert_as_in_plain_pytorch(scenario, budget, num_bytes)
