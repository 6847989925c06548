"""What users do between `prepare` and the last step, each in ordinary PyTorch code: optimizers, gradients, state."""

import copy
import inspect
import io

import pytest
import torch
from torch import nn, optim
from torch.nn import utils
from torch.optim import lr_scheduler, swa_utils

from compared import BUDGETS, Net, batch, compare, left_by, loss_on, train

both_budgets = pytest.mark.parametrize("budget", BUDGETS)


# ---- optimizers ----

OPTIMIZERS = sorted(
    (c for c in vars(optim).values() if isinstance(c, type) and issubclass(c, optim.Optimizer)),
    key=lambda c: c.__name__,
)
OPTIMIZERS.remove(optim.Optimizer)


def takes(cls, option):
    return option in inspect.signature(cls).parameters


def variations():
    """Each class spilled and resident; spilled also with each of its switches."""
    for cls in OPTIMIZERS:
        for budget in BUDGETS:
            yield pytest.param(cls, {}, budget, id=f"{cls.__name__}-{budget}")
        for switch in ("maximize", "foreach", "fused"):
            if takes(cls, switch):
                yield pytest.param(cls, {switch: True}, "spilled", id=f"{cls.__name__}-{switch}")


def groups_for(cls, model):
    """Two groups, the second with a rate, and where there is one a decay, of its own."""
    parameters = [p for p in model.parameters() if cls is not optim.Muon or p.dim() == 2]
    if cls is optim.LBFGS:
        return parameters
    if cls is optim.SparseAdam:
        parameters = [model.embedding.weight]
    own = {"lr": 0.003, **({"weight_decay": 0.1} if takes(cls, "weight_decay") else {})}
    half = len(parameters) // 2
    return [{"params": parameters[half:]}, *([{"params": parameters[:half], **own}] if half else [])]


@pytest.mark.parametrize(("cls", "options", "budget"), list(variations()))
def test_every_optimizer_of_torch(cls, options, budget, request):
    if cls is optim.SparseAdam:
        request.applymarker(pytest.mark.xfail(strict=True, reason="the meter asks a sparse gradient for its storage"))

    def scenario(prepare):
        torch.manual_seed(0)
        model = Net(sparse=cls is optim.SparseAdam)
        own = {"max_iter": 4} if cls is optim.LBFGS else {}
        model, optimizer = prepare(model, cls(groups_for(cls, model), lr=0.01, **own, **options))
        losses = []
        for _ in range(2):
            x, y = batch()

            def closure():
                optimizer.zero_grad()
                loss = loss_on(model, x, y)  # noqa: B023
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return losses, left_by(model, optimizer)

    compare(scenario, budget)


@both_budgets
def test_a_learning_rate_that_is_a_tensor(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = Net()
        model, optimizer = prepare(model, optim.AdamW(model.parameters(), lr=torch.tensor(0.01)))
        losses = train(model, optimizer, 1)
        optimizer.param_groups[0]["lr"].fill_(0.1)
        return losses, train(model, optimizer, 2), left_by(model, optimizer)

    compare(scenario, budget)


SCHEDULES = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=6),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 4)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3),
}


@pytest.mark.parametrize("before", [True, False], ids=["before prepare", "after prepare"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_schedules(name, before):
    def scenario(prepare):
        torch.manual_seed(0)
        model = Net()
        optimizer = optim.AdamW(model.parameters(), lr=0.02)
        schedule = SCHEDULES[name](optimizer) if before else None
        model, optimizer = prepare(model, optimizer)
        schedule = schedule or SCHEDULES[name](optimizer)
        losses, rates = [], []
        for _ in range(5):
            losses += train(model, optimizer, 1)
            schedule.step(*([losses[-1]] if name == "ReduceLROnPlateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        assert len(set(rates)) > 1
        return losses, rates, left_by(model, optimizer)

    compare(scenario)


@both_budgets
def test_a_parameter_group_may_be_added_after_prepare(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = Net()
        model, optimizer = prepare(model, optim.AdamW(model.layers[:2].parameters()))
        losses = train(model, optimizer)
        optimizer.add_param_group({"params": [*model.layers[2:].parameters(), model.scale], "lr": 0.1})
        return losses, train(model, optimizer), left_by(model, optimizer)

    compare(scenario, budget)


@both_budgets
def test_optimizers_that_prepare_was_not_given(budget):
    """One for weights and one for the rest; only the first is given to `prepare`."""

    def scenario(prepare):
        torch.manual_seed(0)
        model = Net()
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        model, muon = prepare(model, optim.Muon(matrices, lr=0.02))
        adam = optim.Adam(others, lr=0.02)
        losses = []
        for _ in range(3):
            muon.zero_grad(), adam.zero_grad()
            loss = loss_on(model, *batch())
            loss.backward()
            muon.step(), adam.step()
            losses.append(loss.item())
        return losses, left_by(model, muon, adam)

    compare(scenario, budget)


@both_budgets
@pytest.mark.parametrize("first", ["plain", "prepared"])
def test_a_checkpoint_is_continued_by_the_other_kind(first, budget):
    """Model and optimizer state move between a plain and a prepared model in the middle of training."""

    def scenario(prepare):
        def made(do_prepare):
            model = Net()
            optimizer = optim.AdamW(model.parameters(), lr=0.02)
            return prepare(model, optimizer) if do_prepare else (model, optimizer)

        torch.manual_seed(0)
        model, optimizer = made(first == "prepared")
        losses = train(model, optimizer)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        model, optimizer = made(first == "plain")
        checkpoint = torch.load(file, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        return losses, train(model, optimizer), left_by(model, optimizer)

    compare(scenario, budget)


@both_budgets
def test_state_may_be_loaded_back_into_the_model_that_trains(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = Net()
        model, optimizer = prepare(model, optim.AdamW(model.parameters(), lr=0.02))
        losses = train(model, optimizer, 2)
        best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        losses += train(model, optimizer, 2)
        model.load_state_dict(best[0]), optimizer.load_state_dict(best[1])
        return losses, train(model, optimizer, 2), left_by(model, optimizer)

    compare(scenario, budget)


# ---- gradients between backward and step ----


def clipped_by_total_norm(parameters):
    parameters = list(parameters)
    norm = utils.get_total_norm([p.grad for p in parameters])
    utils.clip_grads_with_norm_(parameters, 0.5, norm)
    return norm


def as_one_vector(parameters):
    gradients = [p.grad for p in parameters]
    vector = utils.parameters_to_vector(gradients) * 0.5
    utils.vector_to_parameters(vector, gradients)
    return vector.norm()


def weights_as_one_vector(parameters):
    parameters = list(parameters)
    vector = utils.parameters_to_vector(parameters).detach() * 0.9
    utils.vector_to_parameters(vector, parameters)
    return vector.norm()


CHANGES = {
    "clip_grad_norm_": lambda ps: utils.clip_grad_norm_(ps, 0.5),
    "clip_grad_norm_ foreach": lambda ps: utils.clip_grad_norm_(ps, 0.5, foreach=True),
    "clip_grad_norm_ no foreach": lambda ps: utils.clip_grad_norm_(ps, 0.5, foreach=False),
    "clip_grad_norm_ inf": lambda ps: utils.clip_grad_norm_(ps, 0.05, norm_type=torch.inf),
    "clip_grad_value_": lambda ps: utils.clip_grad_value_(ps, 0.01),
    "get_total_norm": clipped_by_total_norm,
    "gradients as one vector": as_one_vector,
    "weights as one vector": weights_as_one_vector,
    "gradients freed": lambda ps: [setattr(p, "grad", None) for p in list(ps)[:3]] and None,
}


@both_budgets
@pytest.mark.parametrize("name", CHANGES)
def test_gradients_and_weights_may_be_changed_before_the_step(name, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = Net()
        model, optimizer = prepare(model, optim.AdamW(model.parameters(), lr=0.02))
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_on(model, *batch())
            loss.backward()
            seen += [loss.item(), CHANGES[name](model.parameters())]
            optimizer.step()
        return seen, left_by(model, optimizer)

    compare(scenario, budget)


@both_budgets
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_with_skipped_steps(set_to_none, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = Net()
        model, optimizer = prepare(model, optim.AdamW(model.parameters(), lr=0.02))
        losses = []
        for i in range(6):
            loss = loss_on(model, *batch())
            losses.append(loss.item())
            if i == 1:
                continue  # a forward without a backward
            (loss / 2).backward()
            if i % 2:
                if i != 3:  # a backward without a step
                    optimizer.step()
                (optimizer if i == 3 else model).zero_grad(set_to_none=set_to_none)
        return losses, left_by(model, optimizer)

    compare(scenario, budget)


# ---- copies of a model in training ----


@both_budgets
@pytest.mark.parametrize("use_buffers", [True, False], ids=["buffers averaged", "buffers copied"])
def test_moving_averages_and_their_batch_norm(use_buffers, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = Net()
        early = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        model, optimizer = prepare(model, optim.AdamW(model.parameters(), lr=0.02))
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

    compare(scenario, budget)


@both_budgets
def test_update_bn_on_the_model_that_trains(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = Net()
        model, optimizer = prepare(model, optim.AdamW(model.parameters(), lr=0.02))
        losses = train(model, optimizer)
        swa_utils.update_bn([batch()[0] for _ in range(3)], model)
        losses.append(loss_on(model.eval(), *batch()).item())
        return losses, train(model.train(), optimizer), left_by(model, optimizer)

    compare(scenario, budget)


@both_budgets
def test_deep_copies_train_on_their_own(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = Net()
        model, optimizer = prepare(model, optim.AdamW(model.parameters(), lr=0.02))
        losses = train(model, optimizer)
        twin = copy.deepcopy(model)
        assert type(twin) is Net
        assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in model.parameters()}
        losses += train(twin, optim.SGD(twin.parameters(), lr=0.1))
        losses += train(model, optimizer)
        return losses, left_by(model, optimizer), left_by(twin)

    compare(scenario, budget)


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
        model = Net()
        parameters = list(model.parameters())
        model, optimizer = prepare(model, optim.AdamW(model.parameters(), lr=0.02))
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

    compare(scenario, budget)


@both_budgets
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluation_before_and_between_steps(mode, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = Net()
        model, optimizer = prepare(model, optim.AdamW(model.parameters(), lr=0.02))
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

    compare(scenario, budget)


@both_budgets
def test_evaluation_between_a_forward_and_its_backward(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = prepare(Net())
        loss = loss_on(model, *batch())
        with torch.no_grad():
            value = loss_on(model.eval(), *batch())
        model.train()
        loss.backward()
        return loss.item(), value, left_by(model)

    compare(scenario, budget)


@both_budgets
def test_parts_may_be_frozen_and_put_into_eval_mode(budget):
    """As fine-tuning does: batch norm keeps its statistics in one half, the other trains."""

    def scenario(prepare):
        torch.manual_seed(0)
        model = Net()
        model.layers[:2].requires_grad_(False)
        model, optimizer = prepare(model, optim.AdamW(model.parameters(), lr=0.02))
        losses = []
        for i in range(4):
            model.train()
            model.layers[i % 2].eval()
            losses += train(model, optimizer, 1)
        return losses, left_by(model, optimizer)

    compare(scenario, budget)


@both_budgets
def test_weights_written_in_place_are_what_runs(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = Net()
        model, optimizer = prepare(model, optim.AdamW(model.parameters(), lr=0.02))
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

    compare(scenario, budget)


@both_budgets
def test_loading_a_wrong_state_fails_as_in_plain_pytorch(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = prepare(Net())
        losses = [loss_on(model, *batch()).item()]
        state = Net().state_dict()
        del state["scale"]
        state["another"] = torch.zeros(1)
        with pytest.raises(RuntimeError, match=r'Missing key.*"scale"(.|\n)*Unexpected key.*"another"'):
            model.load_state_dict(state)
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert (missing, unexpected) == (["scale"], ["another"])
        with pytest.raises(RuntimeError, match="size mismatch for scale"):
            model.load_state_dict({**state, "scale": torch.zeros(2)}, strict=False)
        return losses, loss_on(model, *batch()).item(), left_by(model)

    compare(scenario, budget)
