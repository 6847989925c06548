"""Hooks of users, on weights and on modules: each fires as often as in plain PyTorch and sees the same values."""

import pytest
import torch
from torch import optim
from torch.nn.modules import module as global_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from comparison import assert_as_in_plain_pytorch, both_budgets, left_by, made, refused, train
from models import TiedNet, batch, loss_on

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # where no input has a gradient


class Log(list):
    """What hooks saw, as numbers: a copy as a tensor would count as the device's."""

    def __call__(self, *seen):
        self.append(tree_map_only(torch.Tensor, lambda t: t.detach().tolist(), seen))


# ---- on weights ----


@both_budgets
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_weights(register, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, logs = TiedNet(), {}
        for i, (name, p) in enumerate(model.named_parameters()):
            logs[name] = Log()
            if i % 2:
                getattr(p, register)(logs[name])
        model, optimizer = made(prepare, model)
        losses = train(model, optimizer, 1)
        for i, (name, p) in enumerate(model.named_parameters()):
            if i % 2 == 0:
                getattr(p, register)(logs[name])
        return losses, train(model, optimizer, 2), {k: list(v) for k, v in logs.items()}

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_weights_get_their_gradients_block_by_block_in_the_order_of_plain_pytorch(budget):
    """Within a spilled block, whose gradients come all at once, the order of its weights is the engine's own."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, order = TiedNet(), []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        model, optimizer = made(prepare, model)
        train(model, optimizer, 1)  # whose blocks are visited one by one, to measure them
        order.clear()
        loss_on(model, *batch()).backward()
        if budget == "resident":
            return order
        assert len(set(order)) == len(order)
        blocks = [".".join(name.split(".")[:2]) for name in order if name.startswith("layers")]
        return list(dict.fromkeys(blocks)), sorted(order)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_hooks_may_change_gradients(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet()
        for p in model.parameters():
            p.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
            p.register_hook(lambda grad: 2 * grad)
        model, optimizer = made(prepare, model)
        return train(model, optimizer), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
@pytest.mark.parametrize("given", [True, False], ids=["one given to prepare", "none given to prepare"])
def test_an_optimizer_in_the_backward(given, budget):
    """Each weight is stepped as soon as its gradient is there, and the gradient freed."""

    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet()
        optimizers = {p: optim.AdamW([p], lr=0.02) for p in model.parameters()}

        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        if given:
            prepare(model, optimizers[model.layers[1].up.weight])
        else:
            prepare(model)
        losses = []
        for _ in range(3):
            loss = loss_on(model, *batch())
            loss.backward()
            losses.append(loss.item())
        return losses, left_by(model)

    assert_as_in_plain_pytorch(scenario, budget)


# ---- on modules ----

WHEN = ["before prepare", "after a step"]
REGISTER = {
    "forward pre": lambda m, log: m.register_forward_pre_hook(lambda _, args: log(args)),
    "forward": lambda m, log: m.register_forward_hook(lambda _, args, output: log(args, output)),
    "backward pre": lambda m, log: m.register_full_backward_pre_hook(lambda _, grads: log(grads)),
    "backward": lambda m, log: m.register_full_backward_hook(lambda _, inner, outer: log(inner, outer)),
}
PLACES = {
    "root": lambda model: model,
    "first block": lambda model: model.embedding,
    "block": lambda model: model.layers[1],
    "inside a block": lambda model: model.layers[1].up,
    "inside a block, without saved tensors": lambda model: model.layers[1].shift,
}


@pytest.mark.sample(8)
@both_budgets
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("place", ["root", "first block", "block", "inside a block"])
@pytest.mark.parametrize("kind", REGISTER)
def test_hooks_on_modules(kind, place, when, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, log = TiedNet(), Log()
        optimizer = optim.AdamW(model.parameters(), lr=0.02)
        if when == "before prepare":
            REGISTER[kind](PLACES[place](model), log)
        prepare(model, optimizer)
        losses = train(model, optimizer, 1)
        if when == "after a step":
            REGISTER[kind](PLACES[place](model), log)
        losses += train(model, optimizer, 1)
        assert log
        return losses, list(log)

    assert_as_in_plain_pytorch(scenario, budget)


CHANGES = {
    "forward pre": lambda m: m.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,)),
    "forward": lambda m: m.register_forward_hook(lambda _, args, output: output * 0.5),
    "backward pre": lambda m: m.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 0.5,)),
    "backward": lambda m: m.register_full_backward_hook(lambda _, inner, outer: (inner[0] * 0.5,)),
}


@pytest.mark.sample(2)
@both_budgets
@pytest.mark.parametrize("place", ["block", "inside a block"])
@pytest.mark.parametrize("kind", CHANGES)
def test_hooks_on_modules_may_change_what_they_see(kind, place, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet()
        CHANGES[kind](PLACES[place](model))
        model, optimizer = made(prepare, model)
        return train(model, optimizer), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


GLOBAL = {
    "forward pre": lambda log: global_hooks.register_module_forward_pre_hook(
        lambda m, args: log(type(m).__name__, args)
    ),
    "forward": lambda log: global_hooks.register_module_forward_hook(
        lambda m, args, output: log(type(m).__name__, args, output)
    ),
    "backward pre": lambda log: global_hooks.register_module_full_backward_pre_hook(
        lambda m, grads: log(type(m).__name__, grads)
    ),
    "backward": lambda log: global_hooks.register_module_full_backward_hook(
        lambda m, inner, outer: log(type(m).__name__, inner, outer)
    ),
}


@both_budgets
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("kind", GLOBAL)
def test_hooks_on_all_modules(kind, when, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, log = TiedNet(), Log()
        model, optimizer = made(prepare, model)
        losses = [] if when == "before prepare" else train(model, optimizer, 1)
        handle = GLOBAL[kind](log)
        try:
            return losses, train(model, optimizer, 1), list(log)
        finally:
            handle.remove()

    asks_for_a_plan = budget == "spilled" or when == "before prepare"
    with refused("on all modules of the process" if asks_for_a_plan else None):
        assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_flops_are_not_counted_meanwhile(budget):
    """Its hooks are on all modules of the process, and on activations: a local backward would fail on them."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare, TiedNet())
        with FlopCounterMode(display=False):
            return train(model, optimizer, 1)

    with refused("FlopCounterMode has such a hook"):
        assert_as_in_plain_pytorch(scenario, budget)


# ---- on activations ----


def trained_on_kept(prepare, place):
    """Two steps on the loss and the mean square of what a hook at `place` keeps."""
    torch.manual_seed(0)
    model, kept = TiedNet(residual=False), []
    PLACES[place](model).register_forward_hook(lambda _, args, output: kept.append(output))
    model, optimizer = made(prepare, model)
    losses = []
    for _ in range(2):
        kept.clear()
        optimizer.zero_grad()
        loss = loss_on(model, *batch())
        (loss + kept[-1].square().mean()).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, left_by(model, optimizer)


@both_budgets
@pytest.mark.parametrize("place", ["first block", "block"])
def test_a_loss_on_activations_that_a_hook_keeps(place, budget):
    assert_as_in_plain_pytorch(lambda prepare: trained_on_kept(prepare, place), budget)


@both_budgets
@pytest.mark.parametrize("place", ["inside a block", "inside a block, without saved tensors"])
def test_a_loss_on_activations_that_a_hook_keeps_inside_a_block(place, budget):
    """Its gradient reaches the weights."""
    assert_as_in_plain_pytorch(lambda prepare: trained_on_kept(prepare, place), budget)


@both_budgets
@pytest.mark.parametrize("place", ["first block", "block", "inside a block"])
def test_activations_kept_for_a_look(place, budget):
    """Detached, as for statistics or a distillation target: the latest is that of plain PyTorch."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, kept = TiedNet(), []
        PLACES[place](model).register_forward_hook(lambda _, args, output: kept.append(output.detach()))
        model, optimizer = made(prepare, model)
        means = []
        for _ in range(2):
            kept.clear()
            train(model, optimizer, 1)
            means.append(kept[-1].mean().item())
        return means

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_gradients_of_activations_between_blocks(budget):
    """`retain_grad` and a hook on a tensor, both on what a block returned."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, kept, log = TiedNet(), [], Log()

        def keep(_, args, output):
            output.retain_grad()
            output.register_hook(log)
            kept.append(output)

        model = prepare(model)
        loss_on(model, *batch())
        model.layers[1].register_forward_hook(keep)
        loss_on(model, *batch()).backward()
        return kept[0].grad, list(log)

    assert_as_in_plain_pytorch(scenario, budget)
