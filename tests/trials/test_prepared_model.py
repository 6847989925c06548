"""The model as an object while it trains: copies, evaluation, what is saved and loaded, and changes to it."""

import copy
import os

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import parametrizations
from torch.optim import swa_utils

import hydra_tune
from comparison import assert_as_in_plain_pytorch, both_budgets, left_by, made, refused, train
from models import TIED_BUDGETS, WIDTH, TiedLayer, TiedNet, batch, loss_on


@pytest.fixture
def pool():
    with hydra_tune.ShardPool(["cpu"], TIED_BUDGETS["spilled"]) as pool:
        yield pool


# ---- copies of a model in training ----


@both_budgets
@pytest.mark.parametrize("use_buffers", [True, False], ids=["buffers averaged", "buffers copied"])
def test_moving_averages_and_their_batch_norm(use_buffers, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet()
        early = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        model, optimizer = made(prepare, model)
        swa = swa_utils.AveragedModel(model, use_buffers=use_buffers)  # before the first batch
        late, seen = None, []
        for _ in range(4):
            seen += train(model, optimizer, 1)
            late = late or swa_utils.AveragedModel(model, use_buffers=use_buffers)
            for average in (early, swa, late):
                average.update_parameters(model)
        for average in (swa, late):
            swa_utils.update_bn([batch()[0] for _ in range(2)], average)
            average.eval()
            seen.append(loss_on(average, *batch()).item())
        return seen, [left_by(m) for m in (model, early, swa, late)]

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_update_bn_on_the_model_that_trains(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        losses = train(model, optimizer)
        swa_utils.update_bn([batch()[0] for _ in range(3)], model)
        losses.append(loss_on(model.eval(), *batch()).item())
        return losses, train(model.train(), optimizer), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_deep_copies_train_on_their_own(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        losses = train(model, optimizer)
        twin = copy.deepcopy(model)
        assert type(twin) is TiedNet
        assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in model.parameters()}
        losses += train(twin, optim.SGD(twin.parameters(), lr=0.1))
        losses += train(model, optimizer)
        return losses, left_by(model, optimizer), left_by(twin)

    num_bytes = 240 * 1024 if budget == "spilled" else None  # a block of each of the two has its gradients
    assert_as_in_plain_pytorch(scenario, budget, num_bytes)


# ---- evaluation and state between steps ----


def named(model):
    """Everything by which a model's values can be reached, under its names."""
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "parameters": {k: v.detach().clone() for k, v in model.named_parameters()},
        "buffers": {k: v.clone() for k, v in model.named_buffers()},
        "of a layer": {k: v.clone() for k, v in model.layers[1].state_dict().items()},
    }


@both_budgets
def test_values_are_current_under_their_names_at_any_moment(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet()
        parameters = list(model.parameters())
        model, optimizer = made(prepare, model)
        seen = [named(model)]
        for _ in range(2):
            loss = loss_on(model, *batch())
            seen.append(named(model))
            loss.backward()
            seen.append(named(model))
            optimizer.step()
            seen.append(named(model))
            optimizer.zero_grad()
            with torch.no_grad():
                loss_on(model.eval(), *batch())
            seen.append(named(model.train()))
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert all(a is b for a, b in zip(parameters, optimizer.param_groups[0]["params"], strict=True))
        return seen

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluation_before_and_between_steps(mode, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        seen = []
        for _ in range(3):
            model.eval()
            with mode():
                seen.append(model(batch()[0]).sum().item())
            model.train()
            seen += train(model, optimizer, 1)
            with mode():  # in training mode: running statistics move, dropout draws
                seen.append(model(batch()[0]).sum().item())
        return seen, left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_evaluation_between_a_forward_and_its_backward(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = prepare(TiedNet())
        loss = loss_on(model, *batch())
        with torch.no_grad():
            value = loss_on(model.eval(), *batch())
        model.train()
        loss.backward()
        return loss.item(), value, left_by(model)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_parts_may_be_frozen_and_put_into_eval_mode(budget):
    """As fine-tuning does: batch norm keeps its statistics in one half, the other trains."""

    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet()
        model.layers[:2].requires_grad_(False)
        model, optimizer = made(prepare, model)
        losses = []
        for i in range(4):
            model.train()
            model.layers[i % 2].eval()
            losses += train(model, optimizer, 1)
        return losses, left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_weights_written_in_place_are_what_runs(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        losses = train(model, optimizer, 1)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
        model.layers[2].up.weight.data = model.layers[2].up.weight.data.clone() * 2
        model.layers[1].batch_norm.running_mean.fill_(0.5)
        model.layers[0].batch_norm.reset_running_stats()
        nn.init.zeros_(model.layers[3].down.bias)
        losses.append(loss_on(model.eval(), *batch()).item())
        return losses, train(model.train(), optimizer), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


class ReadsItsWeights(nn.Linear):
    def forward(self, x):
        return super().forward(x) * getattr(self.weight, "scale", 1.0)


@both_budgets
def test_weights_that_get_other_memory_or_attributes_between_steps(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet()
        model.layers[2].up = ReadsItsWeights(WIDTH, 2 * WIDTH)
        model, optimizer = made(prepare, model)
        losses = train(model, optimizer, 1)
        model.layers[1].up.weight.data = model.layers[1].up.weight.data.clone() * 2
        losses += train(model, optimizer, 1)
        model.layers[2].up.weight.scale = 0.5
        losses += train(model, optimizer, 1)
        model.layers[2].up.weight.scale = 0.25
        return losses, train(model, optimizer), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_weights_that_are_shared_with_other_processes_train_on(budget):
    """torch.multiprocessing gives their storages new memory where they are, also when it pickles them."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        losses = train(model, optimizer, 1)
        model.share_memory()
        return losses, train(model, optimizer), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_a_forked_child_has_weights_of_its_own(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        losses = train(model, optimizer, 1)
        pid = os.fork()
        if pid == 0:
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            os._exit(0)
        os.waitpid(pid, 0)
        return losses, train(model, optimizer), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_loading_a_wrong_state_fails_as_in_plain_pytorch(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = prepare(TiedNet())
        losses = [loss_on(model, *batch()).item()]
        state = TiedNet().state_dict()
        del state["scale"]
        state["another"] = torch.zeros(1)
        with pytest.raises(RuntimeError, match=r'Missing key.*"scale"(.|\n)*Unexpected key.*"another"'):
            model.load_state_dict(state)
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert (missing, unexpected) == (["scale"], ["another"])
        with pytest.raises(RuntimeError, match="size mismatch for scale"):
            model.load_state_dict({**state, "scale": torch.zeros(2)}, strict=False)
        return losses, loss_on(model, *batch()).item(), left_by(model)

    assert_as_in_plain_pytorch(scenario, budget)


# ---- a model that changes after prepare ----


@both_budgets
@pytest.mark.parametrize("after", [0, 1], ids=["before the first batch", "after a step"])
def test_moving_to_where_it_is(after, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        losses = train(model, optimizer, after)
        assert model.to("cpu") is model.cpu() is model.float() is model.to(dtype=torch.float32)
        return losses, train(model, optimizer), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_another_dtype_before_the_first_batch(dtype, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        model.to(dtype)
        return train(model, optimizer), left_by(model, optimizer)

    assert_as_in_plain_pytorch(
        scenario, budget, num_bytes={"spilled": (110 if dtype.itemsize == 2 else 400) * 1024}.get(budget)
    )


@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.bfloat16, nn.Module.double])
def test_another_dtype_after_a_step_is_refused(change, pool):
    model, optimizer = made(lambda *both: hydra_tune.prepare(*both, pool=pool))
    train(model, optimizer, 1)
    with pytest.raises(hydra_tune.PrepareError, match=r"from torch.float32 on cpu to .*release\(model\) first"):
        change(model)
    hydra_tune.release(model)
    assert pool.devices[0].used_bytes == 0


@both_budgets
@pytest.mark.parametrize("after", [0, 1], ids=["before the first batch", "after a step"])
def test_a_model_that_went_to_meta_is_refused(after, budget):
    with hydra_tune.ShardPool(["cpu"], TIED_BUDGETS[budget]) as pool:
        model, optimizer = made(lambda *both: hydra_tune.prepare(*both, pool=pool))
        train(model, optimizer, after)
        with pytest.raises(hydra_tune.PrepareError, match=r"was to go .* on meta. Convert the model before"):
            model.to("meta")
        train(model, optimizer, 1)
        hydra_tune.release(model)
        assert pool.devices[0].used_bytes == 0


def replace_a_weight(model):
    model.layers[1].up.weight = nn.Parameter(model.layers[1].up.weight.detach().clone())


def replace_an_inner_module(model):
    model.layers[1].up = nn.Linear(WIDTH, 2 * WIDTH)


def add_an_inner_module(model):
    """As an adapter does."""
    model.layers[1].up = nn.Sequential(model.layers[1].up, nn.Linear(2 * WIDTH, 2 * WIDTH))


def replace_a_block(model):
    model.layers[1] = TiedLayer(WIDTH, True)


def add_a_block(model):
    model.layers.append(TiedLayer(WIDTH, True))


def remove_a_block(model):
    del model.layers[1]


def untie(model):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def load_by_assignment(model):
    model.load_state_dict(TiedNet().state_dict(), assign=True)


def parametrize(model):
    parametrizations.weight_norm(model.layers[1].up)


MODEL_CHANGES = (
    replace_a_weight,
    replace_an_inner_module,
    add_an_inner_module,
    replace_a_block,
    add_a_block,
    remove_a_block,
    untie,
    load_by_assignment,
    parametrize,
)


@pytest.mark.sample(4)
@both_budgets
@pytest.mark.parametrize("change", MODEL_CHANGES)
@pytest.mark.parametrize("after", [0, 1], ids=["before the first batch", "after a step"])
def test_a_model_changed_after_prepare(after, change, budget):
    """Exact, for the weights as they are then; ties that are assigned as views are refused."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        losses = train(model, optimizer, after)
        change(model)
        loss = loss_on(model, *batch())
        loss.backward()
        return losses, loss.item(), left_by(model)

    with refused("share theirs without being one tensor" if change is load_by_assignment else None):
        assert_as_in_plain_pytorch(scenario, budget)
