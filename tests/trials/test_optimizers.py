"""What users do between `prepare` and the last step, each in ordinary PyTorch code: optimizers, gradients, state."""

import copy
import inspect
import io

import optuna
import pytest
import torch
from torch import optim
from torch.nn import utils
from torch.optim import lr_scheduler, swa_utils

import hydra_tune
from comparison import assert_as_in_plain_pytorch, both_budgets, left_by, made, train
from models import TIED_BUDGETS, TiedNet, batch, loss_on

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
        few = {"history_size": 5} if cls is optim.LBFGS else {}  # or it would not fit
        for budget in ["resident"] if cls is optim.LBFGS else TIED_BUDGETS:  # it makes one vector of all weights
            yield pytest.param(cls, few, budget, id=f"{cls.__name__}-{budget}")
        for switch in ("maximize", "foreach", "fused"):
            if takes(cls, switch):
                yield pytest.param(cls, {switch: True}, "spilled", id=f"{cls.__name__}-{switch}")


def groups_for(cls, model):
    """Two groups, the second with a rate, and where there is one a decay, of its own."""
    parameters = [p for p in model.parameters() if cls.__name__ != "Muon" or p.dim() == 2]
    if cls is optim.LBFGS:
        return parameters
    if cls is optim.SparseAdam:
        parameters = [model.embedding.weight]
    own = {"lr": 0.003, **({"weight_decay": 0.1} if takes(cls, "weight_decay") else {})}
    half = len(parameters) // 2
    return [{"params": parameters[half:]}, *([{"params": parameters[:half], **own}] if half else [])]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("cls", "options", "budget"), list(variations()))
def test_every_optimizer_of_torch(cls, options, budget):

    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet(sparse=cls is optim.SparseAdam)
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

    # LBFGS makes vectors as long as all weights
    num_bytes = 400 * 1024 if (cls, budget) == (optim.LBFGS, "spilled") else None
    assert_as_in_plain_pytorch(scenario, budget, num_bytes)


@both_budgets
def test_a_learning_rate_that_is_a_tensor(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet()
        model, optimizer = prepare(model, optim.AdamW(model.parameters(), lr=torch.tensor(0.01)))
        losses = train(model, optimizer, 1)
        optimizer.param_groups[0]["lr"].fill_(0.1)
        return losses, train(model, optimizer, 2), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


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


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch 2.6's own, of SequentialLR
@pytest.mark.sample(2)
@pytest.mark.parametrize("before", [True, False], ids=["before prepare", "after prepare"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_schedules(name, before):
    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet()
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

    assert_as_in_plain_pytorch(scenario)


@both_budgets
def test_a_parameter_group_may_be_added_after_prepare(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet()
        model, optimizer = prepare(model, optim.AdamW(model.layers[:2].parameters()))
        losses = train(model, optimizer)
        optimizer.add_param_group({"params": [*model.layers[2:].parameters(), model.scale], "lr": 0.1})
        return losses, train(model, optimizer), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


class Lookahead(optim.Optimizer):
    """As such wrappers are written: without Optimizer.__init__."""

    def __init__(self, base):
        self.base, self.steps = base, 0
        self.slow = [p.detach().clone() for group in base.param_groups for p in group["params"]]

    param_groups = property(lambda self: self.base.param_groups)
    state = property(lambda self: self.base.state)

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def step(self, closure=None):
        self.base.step(closure)
        self.steps += 1
        for slow, p in zip(self.slow, (p for group in self.param_groups for p in group["params"]), strict=True):
            if self.steps % 2 == 0:
                p.data.copy_(slow.lerp_(p.data, 0.5))


class StatefulLookahead(Lookahead):
    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state_dict):
        self.base.load_state_dict(state_dict)


@both_budgets
@pytest.mark.parametrize("given", ["the wrapper", "the inner one"])
def test_an_optimizer_that_wraps_another(given, budget):
    """One whose class does not call Optimizer.__init__ has no hooks: `prepare` ended with an AttributeError."""

    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet()
        base = optim.AdamW(model.parameters(), lr=0.02)
        optimizer = StatefulLookahead(base) if given == "the wrapper" else Lookahead(base)
        prepare(model, optimizer if given == "the wrapper" else base)
        return train(model, optimizer, steps=5), left_by(model, base)

    assert_as_in_plain_pytorch(scenario, budget)


def test_a_wrapper_whose_state_cannot_be_moved_is_refused():
    model = TiedNet()
    optimizer = Lookahead(optim.AdamW(model.parameters()))
    words = r"state_dict of Lookahead fails.*wraps another optimizer, give prepare that one"
    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool, pytest.raises(hydra_tune.PrepareError, match=words):
        hydra_tune.prepare(model, optimizer, pool=pool)
    assert pool.report()["trials"] == []
    Lookahead(optim.AdamW(model.parameters())).step()


@both_budgets
def test_optimizers_that_prepare_was_not_given(budget):
    """One for weights and one for the rest; only the first is given to `prepare`."""

    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet()
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        model, muon = prepare(model, getattr(optim, "Muon", optim.SGD)(matrices, lr=0.02))
        adam = optim.Adam(others, lr=0.02)
        losses = []
        for _ in range(3):
            muon.zero_grad(), adam.zero_grad()
            loss = loss_on(model, *batch())
            loss.backward()
            muon.step(), adam.step()
            losses.append(loss.item())
        return losses, left_by(model, muon, adam)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
@pytest.mark.parametrize("first", ["plain", "prepared"])
def test_a_checkpoint_is_continued_by_the_other_kind(first, budget):
    """Model and optimizer state move between a plain and a prepared model in the middle of training."""

    def scenario(prepare):
        def made(do_prepare):
            model = TiedNet()
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

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_state_may_be_loaded_back_into_the_model_that_trains(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        losses = train(model, optimizer, 2)
        best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        losses += train(model, optimizer, 2)
        model.load_state_dict(best[0]), optimizer.load_state_dict(best[1])
        return losses, train(model, optimizer, 2), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


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


@pytest.mark.sample(2)
@both_budgets
@pytest.mark.parametrize("name", CHANGES)
def test_gradients_and_weights_may_be_changed_before_the_step(name, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_on(model, *batch())
            loss.backward()
            seen += [loss.item(), CHANGES[name](model.parameters())]
            optimizer.step()
        return seen, left_by(model, optimizer)

    # one vector of all of them takes the script itself as much as they
    num_bytes = 310 * 1024 if budget == "spilled" and name.endswith("as one vector") else None
    assert_as_in_plain_pytorch(scenario, budget, num_bytes)


@both_budgets
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_with_skipped_steps(set_to_none, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
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

    assert_as_in_plain_pytorch(scenario, budget)


USES_OF_GRADIENTS = {
    "copied": lambda model, grads: [g.clone() for g in grads],
    "changed in place": lambda model, grads: [g.mul_(model.scale.detach()) for g in grads],
    "changed in a list": lambda model, grads: torch._foreach_mul_(grads, 0.5),
    "copied in a list": lambda model, grads: torch._foreach_mul(grads, 0.5),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("use", USES_OF_GRADIENTS)
def test_host_gradients_are_not_counted_as_the_devices(use):
    """In a runner every operator is seen; of all weights only `scale` is held on the device."""
    added = []

    def objective(trial):
        model, _ = made(hydra_tune.prepare)
        loss_on(model, *batch()).backward()
        grads = [p.grad for p in model.parameters()]
        before = pool.events.devices[0].live_bytes
        kept = USES_OF_GRADIENTS[use](model, grads)
        added.append(pool.events.devices[0].live_bytes - before)
        return float(kept is None)

    with hydra_tune.ShardPool(["cpu"], 2 * TIED_BUDGETS["spilled"]) as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(optuna.create_study(), objective, n_trials=1)
        (trial,) = pool.report()["trials"]
    assert not trial["resident"]
    assert added[0] <= 4, "the gradient of `scale`"


@both_budgets
def test_gradients_may_be_views_of_one_tensor(budget):
    """As flat clipping and bucketed communication have them."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        parameters = list(model.parameters())
        flat = torch.zeros(sum(p.numel() for p in parameters))
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)
        for _ in range(3):
            flat.zero_()
            loss_on(model, *batch()).backward()
            optimizer.step()
        return flat, left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)
