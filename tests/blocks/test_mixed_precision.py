"""Autocast, gradient scalers, bfloat16 models and user-level checkpointing: the numbers of plain PyTorch."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

import hydra_tune
from comparison import assert_as_in_plain_pytorch, both_budgets, left_by, made, train
from models import TIED_BUDGETS, VOCABULARY, WIDTH, TiedLayer, TiedNet, batch, loss_on

both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


# ---- autocast ----


@both_budgets
@both_dtypes
@pytest.mark.parametrize("around", ["forward", "forward and loss", "backward too"])
def test_autocast_around(around, dtype, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        losses = []
        for _ in range(3):
            x, y = batch()
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                outputs = model(x)
                if around != "forward":
                    loss = nn.functional.cross_entropy(outputs.flatten(0, 1), y)
                if around == "backward too":
                    loss.backward()
            if around == "forward":
                loss = nn.functional.cross_entropy(outputs.float().flatten(0, 1), y)
            if around != "backward too":
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


class CastsInside(nn.Module):
    """Autocast is entered in the root's forward, and left for one block."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([TiedLayer(WIDTH, True) for _ in range(4)])
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        h = self.embedding(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.net[1](self.net[0](h))
            with torch.autocast("cpu", enabled=False):
                h = self.net[2](h.float())
            h = self.net[3](h)
        return self.head(h.float())


@both_budgets
def test_autocast_inside_of_the_model(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare, CastsInside())
        return train(model, optimizer), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


class Reaches(nn.Module):
    """Uses one weight twice, once without calling its module."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return nn.functional.linear(torch.tanh(self.inner(x)), self.inner.weight)


class Drops(TiedNet):
    """Leaves one layer out for small batches."""

    def __init__(self):
        super().__init__()
        self.layers.append(Reaches(WIDTH))

    def forward(self, x):
        h = self.embedding(x)
        for layer in self.layers if len(x) > 2 else self.layers[:-1]:
            h = layer(h)
        return self.head(h) * self.scale


@both_budgets
def test_a_block_that_the_first_batch_under_autocast_leaves_out(budget):
    """What it casts is not known from other batches."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare, Drops())
        losses = []
        for enabled, rows in [(False, 4), (True, 2), (True, 4), (False, 4), (True, 4)]:
            x, y = batch()
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                loss = loss_on(model, x[:rows], y[: x[:rows].numel()])
            loss.backward()
            losses.append(loss.item())
            losses += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
        return losses, left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


class CastsInABlock(TiedLayer):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


@both_budgets
def test_autocast_inside_of_blocks(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet()
        model.layers = nn.ModuleList([CastsInABlock(WIDTH, True) for _ in range(4)])
        model, optimizer = made(prepare, model)
        return train(model, optimizer), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


def two_forwards(prepare, cache_enabled=True, seed=0):
    """Gradients of two forwards in one autocast context and one backward."""
    torch.manual_seed(seed)
    model, optimizer = made(prepare)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache_enabled):
            loss = loss_on(model, *batch()) + loss_on(model, *batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, left_by(model, optimizer)


@both_budgets
def test_two_forwards_in_one_autocast_context(budget):
    """Plain PyTorch casts each weight once a context: both uses add in bf16 before the cast back."""
    assert_as_in_plain_pytorch(two_forwards, budget)


@both_budgets
def test_two_forwards_in_one_autocast_context_without_a_cache(budget):
    assert_as_in_plain_pytorch(lambda prepare: two_forwards(prepare, cache_enabled=False), budget)


class Twice(nn.Module):
    """Uses one weight twice."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(self.linear(x).relu())


class Repeats(nn.Module):
    """Calls one block three times, or once a block that uses its weight twice."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
        self.twice = Twice(64)

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            for _ in range(3 if i == 4 and self.where == "block" else 1):
                x = layer(x)
        return self.twice(x) if self.where == "inside a block" else x


@both_budgets
@pytest.mark.parametrize("where", ["block", "inside a block"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_modules_called_several_times(autocast, where, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare, Repeats(where))
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(torch.randn(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


class TwiceIn(Twice):
    """In an autocast context of the block's own."""

    def __init__(self, width, dtype):
        super().__init__(width)
        self.dtype = dtype

    def forward(self, x):
        with torch.autocast("cpu", dtype=self.dtype):
            return super().forward(x).float().tanh()


LATER = {"spilled": 310 * 1024, "resident": None}
HOLDING = {"spilled": 400 * 1024, "resident": None}  # the weights of two blocks, with all that training takes


def among_others(kind, *options):
    """Two blocks that cast a weight for several uses, which is held for that, and eight whose weights move."""
    return [*(kind(*options) for _ in range(2)), *(nn.Linear(64, 64) for _ in range(8))]


OUTER = {
    "none": None,
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "off": {"dtype": torch.bfloat16, "enabled": False},
    "no cache": {"dtype": torch.bfloat16, "cache_enabled": False},
}


def trained_in(*contexts, blocks, evaluates=False):
    """A step in each."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare, nn.Sequential(*blocks()))
        left = []
        for context in contexts:
            optimizer.zero_grad()
            around = OUTER[context]
            with nullcontext() if around is None else torch.autocast("cpu", **around):
                if evaluates:
                    with torch.no_grad():
                        left.append(model(torch.randn(8, 64)))
                loss = model(torch.randn(8, 64)).float().square().mean()
            loss.backward()
            left += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
        return left, left_by(model, optimizer)

    return scenario


@pytest.mark.sample(2)
@both_budgets
@both_dtypes
@pytest.mark.parametrize("evaluates", [False, True], ids=["", "evaluates"])
@pytest.mark.parametrize("outer", OUTER)
def test_blocks_that_cast_to_a_dtype_of_their_own(outer, evaluates, dtype, budget):
    """A weight's two uses were added in the dtype of the context around the block. And where that was switched off,
    the casts of all blocks outlived their visits, so that no budget was enough."""
    if evaluates and outer in ("bf16", "fp16", "off") and torch.__version__ < (2, 11):
        pytest.skip("in plain PyTorch a cast of the evaluation serves the training")
    assert_as_in_plain_pytorch(
        trained_in(outer, outer, blocks=lambda: among_others(TwiceIn, 64, dtype), evaluates=evaluates),
        budget,
        HOLDING[budget],
    )


@both_budgets
@pytest.mark.parametrize("contexts", [("none", "bf16"), ("off", "bf16"), ("bf16", "none", "fp16")])
def test_autocast_that_a_script_switches_on_later(contexts, budget):
    """The pilot without it counted no casts, and gradients of a weight's two uses were added in float32."""
    blocks = lambda: [Twice(64) for _ in range(8)]  # noqa: E731
    assert_as_in_plain_pytorch(trained_in(*contexts, blocks=blocks), budget, LATER[budget])


class EntersTwice(nn.Module):
    """Two contexts, in each of which the same blocks are called twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(8)])

    def forward(self, x):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for layer in [*self.layers, *self.layers]:
                    x = layer(x).tanh()
        return x


@both_budgets
@pytest.mark.parametrize("outer", OUTER)
def test_contexts_that_the_model_enters_one_after_another(outer, budget):
    """A weight is cast once in each; the gradients of both casts were added in the lower precision."""
    assert_as_in_plain_pytorch(trained_in(outer, outer, blocks=lambda: [EntersTwice()]), budget)


class OwnContext(nn.Module):
    """A block with an autocast context of its own, whose dtype follows the one around, in which it uses its input and
    a weight twice; and settings that others may be."""

    def __init__(self, **options):
        super().__init__()
        self.query, self.key, self.options = nn.Linear(64, 64), nn.Linear(64, 64), options

    def forward(self, x):
        with torch.autocast("cpu", **self.options):
            return x + (self.query(x).tanh() * self.key(x) + self.query(x)).float()


@pytest.mark.sample(2)
@both_budgets
@pytest.mark.parametrize("contexts", [("none",), ("off",), ("bf16",), ("off", "fp16")], ids="-".join)
def test_inputs_and_weights_that_a_block_uses_in_a_context_of_its_own(contexts, budget):
    """An activation is cast for each use, but autocast remembered the cast of the leaf that stands for it where the
    forward is repeated. And a dtype that the first step had shown was taken for the later ones'. Within a context that
    is off, which remembers casts all the same, all four weights of a block are held."""
    num_bytes = 500 * 1024 if budget == "spilled" and "off" in contexts else HOLDING[budget]
    assert_as_in_plain_pytorch(
        trained_in(*contexts, *contexts, blocks=lambda: among_others(OwnContext)), budget, num_bytes
    )


@both_budgets
@pytest.mark.parametrize("enabled", [False, True])
def test_a_backward_in_a_context_that_its_forward_was_not_in(enabled, budget):
    """Its weights were cast for each use there, or the casts of all blocks stayed."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare, nn.Sequential(*among_others(TwiceIn, 64, torch.bfloat16)))
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64)).square().mean()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                loss.backward()
            optimizer.step()
        return left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget, HOLDING[budget])


@both_budgets
@pytest.mark.parametrize("outer", ["none", "off", "no cache"])  # in others as if autocast had cast it: docs/limits.md
def test_casts_by_hand_are_not_autocasts(outer, budget):
    """A block that casts its weight itself, to the same dtype, has a cast for each use."""

    class ByHand(nn.Linear):
        def forward(self, x):
            for _ in range(2):
                x = nn.functional.linear(x.bfloat16(), self.weight.to(torch.bfloat16)).tanh()
            return x.float()

    assert_as_in_plain_pytorch(
        trained_in(outer, outer, blocks=lambda: among_others(ByHand, 64, 64, False)), budget, HOLDING[budget]
    )


class Sets(nn.Sequential):
    """Something of its thread's autocast, and leaves it so."""

    def __init__(self, setting, *blocks):
        super().__init__(*blocks)
        self.setting = setting

    def forward(self, x):
        x = super().forward(x)
        self.setting()
        return x


SETTINGS = {
    "no cache": lambda: torch.set_autocast_cache_enabled(False),
    "dtype": lambda: torch.set_autocast_dtype("cpu", torch.float16),
}


@both_budgets
@pytest.mark.parametrize("what", SETTINGS)
def test_a_forward_that_changes_autocast_for_good(what, budget):
    """Its first step was taken for one of the mode that it had left behind."""

    def scenario(prepare):
        try:
            return trained_in("bf16", "bf16", blocks=lambda: [Sets(SETTINGS[what], *(Twice(64) for _ in range(8)))])(
                prepare
            )
        finally:
            torch.set_autocast_cache_enabled(True)
            torch.set_autocast_dtype("cpu", torch.bfloat16)

    assert_as_in_plain_pytorch(scenario, budget)


def test_casts_by_hand_to_another_dtype_are_not_autocasts():
    class ByHand(nn.Linear):
        def forward(self, x):
            for _ in range(2):
                x = nn.functional.linear(x.double(), self.weight.double()).tanh()
            return x.float()

    assert_as_in_plain_pytorch(
        trained_in("bf16", blocks=lambda: among_others(ByHand, 64, 64, False)), num_bytes=500 * 1024
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_forward_that_converts_a_layer_of_its_own():
    """As the router of Switch does. An activation that came to lie where the cast had been was taken for the weight."""

    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier = nn.Linear(64, 64)

        def forward(self, x):
            self.classifier = self.classifier.to(torch.float32)
            x = self.classifier(x)
            for _ in range(12):  # each as large as the cast
                x = x + (x.repeat(8, 1) * x.repeat(8, 1).sigmoid())[: len(x)]
            return x

    scenario = trained_in("bf16", "bf16", blocks=lambda: among_others(Router))
    for _ in range(3):
        assert_as_in_plain_pytorch(scenario, num_bytes=1 << 19)


@both_budgets
def test_evaluation_and_training_in_one_autocast_context(budget):
    """A cast made without gradients must not serve the forward that needs them."""
    if budget == "spilled" and torch.__version__ < (2, 11):
        pytest.skip("in plain PyTorch it does, and its weight gets no gradient")

    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                value = loss_on(model.eval(), *batch()).item()
            loss = loss_on(model.train(), *batch())
        loss.backward()
        optimizer.step()
        return value, loss.item(), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


# ---- gradient scalers ----


@pytest.mark.sample(2)
@both_budgets
@both_dtypes
@pytest.mark.parametrize("clips", [False, True], ids=["plain", "unscale and clip"])
def test_a_gradient_scaler_with_a_step_that_overflows(clips, dtype, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        losses, scales = [], []
        for i in range(4):
            x, y = batch()
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = loss_on(model, x, y)
            scaler.scale(loss * (torch.inf if i == 1 else 1)).backward()
            if clips:
                scaler.unscale_(optimizer)
                scales.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            before = model.scale.clone()
            scaler.step(optimizer)
            assert torch.equal(before, model.scale) == (i == 1), "the step with inf is skipped, no other is"
            scaler.update()
            losses.append(loss.item())
            scales.append(scaler.get_scale())
        return losses, scales, scaler.state_dict(), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_a_scale_that_overflows_by_itself(budget):
    """fp16 gradients pass 65504 in the backward of a block."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        scaler = GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-8)
        scales = []
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_on(model, *batch())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert len(set(scales)) > 1
        return scales, left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


# ---- models in low precision ----


@both_budgets
def test_a_model_in_bfloat16(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare, TiedNet().bfloat16())
        return train(model, optimizer), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget, num_bytes={"spilled": 100 * 1024}.get(budget))


@both_budgets
def test_a_model_of_several_dtypes(budget):
    """Layers in bfloat16, their norms, the embedding and the head in float32, one layer in float64."""

    class Cast(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.dtype, self.layer = dtype, TiedLayer(WIDTH, True).to(dtype)

        def forward(self, x):
            return self.layer(x.to(self.dtype)).float()

    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet()
        model.layers = nn.ModuleList(
            [Cast(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.bfloat16)]
        )
        model, optimizer = made(prepare, model)
        return train(model, optimizer), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget, num_bytes={"spilled": 300 * 1024}.get(budget))


# ---- checkpointing by the user ----


class Checkpointed(nn.Module):
    def __init__(self, module, use_reentrant):
        super().__init__()
        self.module, self.use_reentrant = module, use_reentrant

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=self.use_reentrant)


both_checkpoints = pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])


def trained_with_checkpoints(prepare, model, autocast=False):
    model, optimizer = made(prepare, model)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = loss_on(model, *batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, left_by(model, optimizer)


def checkpointed_inside(use_reentrant, batch_norm):
    torch.manual_seed(0)
    model = TiedNet()
    for layer in model.layers:
        layer.batch_norm = layer.batch_norm if batch_norm else nn.Identity()
    model.layers = nn.ModuleList([Checkpointed(layer, use_reentrant) for layer in model.layers])
    return model


@pytest.mark.sample(2)
@both_budgets
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@both_checkpoints
def test_checkpointing_inside_of_blocks(reentrant, autocast, budget):
    assert_as_in_plain_pytorch(
        lambda prepare: trained_with_checkpoints(prepare, checkpointed_inside(reentrant, False), autocast), budget
    )


@both_budgets
def test_checkpointing_batch_norm_inside_of_blocks(budget):
    """Plain PyTorch moves the running statistics twice a step: in the forward, and when the backward repeats it."""
    assert_as_in_plain_pytorch(
        lambda prepare: trained_with_checkpoints(prepare, checkpointed_inside(False, True)), budget
    )


class CheckpointsItsBlocks(TiedNet):
    """The model itself repeats whole blocks; Hugging Face layers of today repeat themselves, inside of a block."""

    use_reentrant = False

    def forward(self, x):
        h = self.embedding(x)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=self.use_reentrant)
        return self.head(h) * self.scale


@both_budgets
@both_checkpoints
def test_checkpointing_of_blocks(reentrant, budget):

    def scenario(prepare):
        torch.manual_seed(0)
        model = CheckpointsItsBlocks()
        model.use_reentrant = reentrant
        return trained_with_checkpoints(prepare, model)

    assert_as_in_plain_pytorch(scenario, budget)


def test_blocks_within_checkpoints_are_spilled():
    """A look at autocast's casts within a checkpoint was taken for a part of what it repeats: all blocks were kept."""
    torch.manual_seed(0)
    model = CheckpointsItsBlocks()
    model.use_reentrant = False
    with hydra_tune.ShardPool(["cpu"], TIED_BUDGETS["spilled"]) as pool:
        hydra_tune.prepare(model, pool=pool)
        loss_on(model, *batch()).backward()
        (trial,) = pool.report()["trials"]
    assert trial["cut"]["kept"] == {} and not trial["resident"]


@both_budgets
def test_tensors_saved_by_the_model_may_go_through_hooks_of_the_user(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autograd.graph.save_on_cpu():
                loss = loss_on(model, *batch())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)
