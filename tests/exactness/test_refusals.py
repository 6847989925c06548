"""What cannot be done with a prepared model says so, by name and with a way out; what can is exact."""

import logging
from contextlib import nullcontext
from functools import partial

import optuna
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import hydra_tune
from comparison import assert_as_in_plain_pytorch, assert_same, both_budgets, left_by, made, train
from models import TIED_BUDGETS, WIDTH, TiedLayer, TiedNet, batch, loss_on


@pytest.fixture
def pool():
    with hydra_tune.ShardPool(["cpu"], TIED_BUDGETS["spilled"]) as pool:
        yield pool


# ---- other ways to a gradient ----


@both_budgets
@pytest.mark.parametrize("which", ["all", "some", "an input of the head"])
def test_autograd_grad(which, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, _ = made(prepare)
        kept = []
        model.head.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        loss = loss_on(model, *batch())
        wanted = {
            "all": list(model.parameters()),
            "some": [model.layers[2].up.weight, model.scale],
            "an input of the head": kept[-1:],
        }
        grads = torch.autograd.grad(loss, wanted[which])
        assert all(p.grad is None for p in model.parameters())
        return grads, loss_on(model, *batch()).backward(), left_by(model)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_backward_into_some_weights(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        loss_on(model, *batch()).backward(inputs=[model.layers[2].up.weight, model.embedding.weight])
        first = left_by(model)
        return first, train(model, optimizer), left_by(model)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_gradients_of_an_input(budget):
    class OfVectors(TiedNet):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    def scenario(prepare):
        torch.manual_seed(0)
        model, _ = made(prepare, OfVectors())
        x = torch.randn(4, 6, WIDTH, requires_grad=True)
        model(x).square().mean().backward()
        return x.grad, left_by(model)

    assert_as_in_plain_pytorch(scenario, budget)


def with_a_gradient_penalty(prepare):
    torch.manual_seed(0)
    model, optimizer = made(prepare)
    loss = loss_on(model, *batch())
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in grads)).backward()
    optimizer.step()
    return left_by(model)


@both_budgets
def test_gradients_of_gradients(budget):
    """Both graphs are on the device at once."""
    assert_as_in_plain_pytorch(with_a_gradient_penalty, budget, num_bytes={"spilled": 600 * 1024}.get(budget))


@both_budgets
def test_a_functional_call_of_the_whole_model(budget):
    """Its outputs are those of the weights it is given; the gradients of these are refused while spilled."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        train(model, optimizer)
        weights = {name: (p.detach() + 0.1).requires_grad_() for name, p in model.named_parameters()}
        x, y = batch()
        loss = loss_on(lambda x: torch.func.functional_call(model, weights, (x,)), x, y)
        losses.append(loss.item())
        return torch.autograd.grad(loss, list(weights.values()))

    losses = []
    if budget == "resident":
        assert_as_in_plain_pytorch(scenario, budget)
    else:
        with pytest.raises(
            hydra_tune.PrepareError,
            match=r"functional_call, or in .* Call hydra_tune\.release",
        ):
            assert_as_in_plain_pytorch(scenario, budget)
    assert losses[0] == losses[1]


@both_budgets
@pytest.mark.parametrize("batches", [0, 1])
def test_weights_that_are_computed_from_the_models_own(batches, budget):
    """As those after a step of MAML's, given by `functional_call`: refused, but where a plan for them is known and all
    is resident; and training goes on."""

    def scenario(prepare):
        torch.manual_seed(0)
        model = prepare(TiedNet())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        losses = train(model, optimizer, batches)
        weights = {name: 0.9 * p for name, p in model.named_parameters()}
        x, y = batch()
        loss = partial(loss_on, lambda x: torch.func.functional_call(model, weights, (x,)), x, y)
        if budget == "resident" and batches:
            loss().backward()
            optimizer.step()
        elif "forward" in vars(model):  # it is prepared
            with pytest.raises(hydra_tune.PrepareError, match=r"weights are leaves, but \S+ was computed from others"):
                loss()
        return losses + train(model, optimizer), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


class Averages(TiedLayer):
    def __init__(self, mean):
        super().__init__(WIDTH, True)
        self.register_buffer("mean", mean)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        x = super().forward(x)
        self.mean.copy_(x.mean((0, 1)))
        self.calls += 1
        return x


@both_budgets
@pytest.mark.parametrize("view", [False, True])
def test_a_buffer_that_a_forward_makes_part_of_its_graph(view, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet()
        model.layers[1] = Averages(torch.zeros(2, WIDTH)[0] if view else torch.zeros(WIDTH))
        model, optimizer = made(prepare, model)
        loss_on(model, *batch()).backward()
        optimizer.step()
        return left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
@pytest.mark.parametrize("trains", [False, True])
def test_a_buffer_of_a_block_that_is_computed_before_the_forward(trains, budget):
    """As a hypernetwork does; and not before the first forward."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, source = TiedNet(), torch.ones(WIDTH, requires_grad=True)
        model.layers[1].register_buffer("mean", torch.zeros(WIDTH))
        model, optimizer = made(prepare, model)
        if trains:
            train(model, optimizer, 1)
        model.layers[1].mean = 2 * source
        return train(model, optimizer, 1), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


class Assigns(TiedLayer):
    def __init__(self):
        super().__init__(WIDTH, True)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.mean = super().forward(x).mean((0, 1))
        return x + self.mean


@both_budgets
def test_a_buffer_that_a_forward_computes_may_have_a_history(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet()
        model.layers[1] = Assigns()
        model, optimizer = made(prepare, model)
        losses = train(model, optimizer)
        x, y = batch()
        loss_on(model, x[:2], y[: len(y) // 2]).backward()
        optimizer.step()
        return losses + train(model, optimizer), left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_retained_graphs(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        x, y = batch()
        outputs = model(x).flatten(0, 1)
        nn.functional.cross_entropy(outputs, y).backward(retain_graph=True)
        first = left_by(model)
        outputs.square().mean().backward(retain_graph=True)
        outputs.mean().backward()
        return first, left_by(model), train(model, optimizer), left_by(model)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
def test_a_second_backward_fails_as_in_plain_pytorch_and_training_goes_on(budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        loss = loss_on(model, *batch())
        loss.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            loss.backward()
        optimizer.step()
        return train(model, optimizer), left_by(model)

    assert_as_in_plain_pytorch(scenario, budget)


@both_budgets
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection(budget):
    """Also of what the first batch brings."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        weight = model.layers[0].up.weight
        before = weight.detach().clone()
        nn.init.constant_(weight, torch.nan)
        with torch.autograd.detect_anomaly():
            loss = loss_on(model, *batch())
            with pytest.raises(RuntimeError, match="returned nan"):
                loss.backward()
            weight.data.copy_(before)
            optimizer.zero_grad()
            losses = train(model, optimizer)
            with pytest.raises(RuntimeError, match="returned nan"):
                (loss_on(model, *batch()) * torch.nan).backward()
        return losses, train(model, optimizer), left_by(model)

    assert_as_in_plain_pytorch(scenario, budget)


class Shift(nn.Module):
    """Needs no input for its backward."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x + self.by


@both_budgets
def test_an_inference_tensor(budget):
    """May be used by what does not save it."""

    def scenario(prepare):
        torch.manual_seed(0)
        with torch.inference_mode():
            x = torch.randn(4, 6, WIDTH)
        model, optimizer = made(prepare, nn.Sequential(Shift(), *(TiedLayer(WIDTH, True) for _ in range(5))))
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
        return left_by(model, optimizer)

    assert_as_in_plain_pytorch(scenario, budget)


class Thaws(nn.Linear):
    def forward(self, x):
        if x[0, 0] > 0:
            self.weight.requires_grad_()
        return super().forward(x)


def test_a_block_that_thaws_its_weight_after_the_first_batch():
    words = r"but 0 changes requires_grad of a weight in its forward"
    with hydra_tune.ShardPool(["cpu"], "60KiB") as pool:
        model = nn.Sequential(Thaws(64, 64), *(nn.Linear(64, 64) for _ in range(5)))
        model[0].weight.requires_grad_(False)
        hydra_tune.prepare(model, pool=pool)
        model(-torch.ones(4, 64)).sum().backward()
        with pytest.raises(hydra_tune.PrepareError, match=words):
            model(torch.ones(4, 64))
        model(-torch.ones(4, 64)).sum().backward()


@both_budgets
def test_training_goes_on_after_an_error_of_the_user(budget):
    """In a forward (a batch of a wrong shape, a label out of range) and in a backward (a hook that raises)."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, optimizer = made(prepare)
        losses = train(model, optimizer, 1)
        with pytest.raises(IndexError):
            model(torch.full((4, 6), 10**6))
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            loss_on(model, *batch()[:1], torch.tensor([1]))
        handle = model.layers[1].up.weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_on(model, *batch()).backward()
        handle.remove()
        model.zero_grad()
        return losses, train(model, optimizer), left_by(model)

    assert_as_in_plain_pytorch(scenario, budget)


# ---- models whose weights are not plain parameters, or whose activations leave by a side door ----


def spectral_norm(layer):
    """Its power iteration moves buffers in every forward."""
    parametrizations.spectral_norm(layer.up)


def weight_norm(layer):
    parametrizations.weight_norm(layer.down)


def orthogonal(layer):
    parametrizations.orthogonal(layer.down)


def pruned(layer):
    """A hook writes the masked weight into an attribute before each forward."""
    prune.l1_unstructured(layer.up, "weight", amount=0.5)


@pytest.mark.sample(2)
@both_budgets
@pytest.mark.parametrize("wrap", [spectral_norm, weight_norm, orthogonal, pruned])
def test_weights_that_are_computed(wrap, budget):
    def scenario(prepare):
        torch.manual_seed(0)
        model = TiedNet()
        wrap(model.layers[0]), wrap(model.layers[2])
        model, optimizer = made(prepare, model)
        return train(model, optimizer), left_by(model, optimizer)

    # an orthogonal weight is solved for, between the three matrices of which this is done
    num_bytes = 250 * 1024 if (wrap, budget) == (orthogonal, "spilled") else None
    assert_as_in_plain_pytorch(scenario, budget, num_bytes)


class KeepsItsPenalty(TiedLayer):
    """Leaves a penalty on its shift where the training loop finds it."""

    def __init__(self, where, penalties):
        super().__init__(WIDTH, True)
        self.where, self._penalties, self.kept = where, {"of others": penalties}, {}

    def forward(self, x):
        penalty = (self.shift.bias + 1).sum()
        if self.where == "a dict of the block":
            self.kept["penalty"] = penalty
        elif self.where == "an attribute":
            self.penalty = penalty
        else:
            self._penalties["of others"].append(penalty)
        return super().forward(x)


@both_budgets
@pytest.mark.parametrize("where", ["an attribute", "a dict of the block", "a list outside"])
def test_a_loss_that_a_block_leaves_aside(where, budget):
    """As a mixture of experts does for its balance. Its gradient arrives."""

    def scenario(prepare):
        torch.manual_seed(0)
        model, penalties = TiedNet(), []
        model.layers[1] = KeepsItsPenalty(where, penalties)
        model, _ = made(prepare, model)
        loss_on(model, *batch())
        penalties.clear()
        loss = loss_on(model, *batch())
        kept = {
            "an attribute": lambda: model.layers[1].penalty,
            "a dict of the block": lambda: model.layers[1].kept["penalty"],
            "a list outside": lambda: penalties[-1],
        }
        (loss + kept[where]()).backward()
        return loss.item(), left_by(model)

    assert_as_in_plain_pytorch(scenario, budget)


class EndsEarly(TiedNet):
    def forward(self, x, early=False):
        self.kept = self.layers[0](self.embedding(x))
        if early:
            raise StopIteration
        return self.head(self.layers[1](self.kept))


def test_what_a_forward_has_left_that_its_own_exception_has_ended(pool):
    """In a first step nothing is planned that this backward could run by; training goes on."""
    torch.manual_seed(0)
    model, optimizer = made(lambda *both: hydra_tune.prepare(*both, pool=pool), EndsEarly())
    train(model, optimizer)
    with pytest.raises(StopIteration):
        model(batch()[0], early=True)
    with pytest.raises(hydra_tune.PrepareError, match="a later forward, in a first step, has failed"):
        model.kept.square().mean().backward()
    train(model, optimizer)
    hydra_tune.release(model)


# ---- outputs that share memory ----


class GivesAView(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return x, x[:, 1:]


def test_an_output_of_a_block_that_is_changed_through_another():
    def scenario(prepare):
        torch.manual_seed(0)
        model = prepare(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), GivesAView(64, 64)))
        for _ in range(2):
            x, view = model(torch.randn(4, 64))
            (x.sum() + view.sum()).backward()
        x, view = model(torch.randn(4, 64))
        view.mul_(2)
        x.square().sum().backward()
        return left_by(model)

    assert_as_in_plain_pytorch(scenario, num_bytes=70_000)


def test_nested_tensors():
    def scenario(prepare):
        torch.manual_seed(0)
        model = prepare(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
        for _ in range(2):
            parts = [torch.randn(3, 64), torch.randn(2, 64)]
            model(torch.nested.nested_tensor(parts, layout=torch.jagged)).values().square().sum().backward()
        return left_by(model)

    assert_as_in_plain_pytorch(scenario, num_bytes=70_000)


# ---- compiled models: refused, before anything is compiled ----


def compile_a_block(model):
    model.layers[1] = torch.compile(model.layers[1])


def compile_inside_a_block(model):
    model.layers[1].up = torch.compile(model.layers[1].up)


def compile_a_forward(model):
    model.layers[1].up.forward = torch.compile(model.layers[1].up.forward)


COMPILES = {
    "the model": torch.compile,
    "the model in place": lambda model: model.compile(),
    "a block": compile_a_block,
    "a block in place": lambda model: model.layers[1].compile(),
    "inside a block": compile_inside_a_block,
    "inside a block in place": lambda model: model.layers[1].up.compile(),
    "a forward inside a block": compile_a_forward,
}


@pytest.mark.filterwarnings("ignore:.*script_method")  # torch's own, when it loads its compiler
@pytest.mark.parametrize("what", COMPILES)
def test_compiled_models_are_refused_by_name(what, pool):
    model = TiedNet()
    compiled = COMPILES[what](model)
    model = model if compiled is None else compiled
    with pytest.raises(hydra_tune.PrepareError, match=r"torch\.compile|\bcompiled?\b"):
        hydra_tune.prepare(model, pool=pool)


# ---- what reads a forward, or records one ----

READERS = {
    "torch.compile": lambda model, x: torch.compile(model, backend="eager")(x),
    "torch.export": lambda model, x: torch.export.export(model, (x,)),
    "torch.jit.script": lambda model, x: torch.jit.script(model),
    "torch.jit.trace": lambda model, x: torch.jit.trace(model, x),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("what", READERS)
def test_a_prepared_model_is_not_traced(what, pool):
    model = hydra_tune.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), pool=pool)
    reads = what in ("torch.export", "torch.jit.script")
    with pytest.raises(AttributeError if reads else hydra_tune.PrepareError, match=rf"{what}.*release\(model\)"):
        READERS[what](model, torch.randn(2, 4))
    assert model(torch.randn(2, 4)).shape == (2, 4)


def test_a_prepared_models_forward_has_the_name_of_its_own(pool):
    model = hydra_tune.prepare(nn.Sequential(nn.Linear(4, 4)), pool=pool)
    assert (model.forward.__name__, model.forward.__doc__) == ("forward", nn.Sequential.forward.__doc__)
    assert not hasattr(model.forward, "__code__") and not hasattr(model.forward, "other")


# ---- pools ----


@both_budgets
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_closed_pool_stops_a_plain_script_too_and_gives_its_weights_back(where, budget):
    model = TiedNet()
    with hydra_tune.ShardPool(["cpu"], TIED_BUDGETS[budget]) as pool:
        model, optimizer = made(lambda *both: hydra_tune.prepare(*both, pool=pool), model)
        train(model, optimizer)
        before = model.embedding.weight.detach().clone()
        loss = loss_on(model, *batch()) if where == "backward" else None
    with pytest.raises(hydra_tune.PoolClosedError, match=r"pool, but that was closed.*release\(model\).*new ShardPool"):
        loss.backward() if loss is not None else model(batch()[0])
    hydra_tune.release(model)
    assert torch.equal(before, model.embedding.weight)
    assert pool.devices[0].used_bytes == 0
    train(model, optimizer)


def test_a_block_that_fits_no_budget_is_named_and_the_model_is_plain_again():
    with hydra_tune.ShardPool(["cpu"], "40KiB") as pool:
        torch.manual_seed(0)
        model, optimizer = made(lambda *both: hydra_tune.prepare(*both, pool=pool))
        words = r"block layers\.\d\S* does not fit: it needs .* is 40.0 KiB. What helps: \(1\) .* memory=.*children\.$"
        with pytest.raises(hydra_tune.BudgetError, match=words):
            model(batch()[0])
        hydra_tune.release(model)
        assert pool.devices[0].used_bytes == 0
    train(model, optimizer)


class ChangesItsInput(nn.Module):
    def __init__(self, uses):
        super().__init__()
        self.inner, self.uses = nn.Linear(WIDTH, WIDTH), uses

    def forward(self, x):
        x = self.inner(x.relu_())
        return x if self.uses == 1 else nn.functional.linear(x, self.inner.weight)


@both_budgets
@pytest.mark.parametrize(
    ("uses", "forwards", "starts_without", "words"),
    [
        (1, 1, False, ""),
        (1, 1, True, ""),
        (2, 1, False, "casts a weight for several uses, but the forward of 1"),
        (1, 2, False, "in one autocast context all calls use.*one was used without it before"),
        (1, 2, True, "in one autocast context all calls use.*two calls were without it"),
    ],
)
def test_a_block_that_changes_its_input_casts_a_weight_for_one_use_alone(budget, uses, forwards, starts_without, words):
    """PyTorch's autocast adds the gradients of several uses in the lower precision; a first run as a block does not."""

    def losses(pool):
        torch.manual_seed(0)
        parts = (nn.Linear(WIDTH, WIDTH), ChangesItsInput(uses), *(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        model = nn.Sequential(*parts)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if pool is not None:
            hydra_tune.prepare(model, optimizer, pool=pool)
        found = []
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=step > 0 or not starts_without):
                loss = sum(model(torch.randn(4, WIDTH)).square().mean() for _ in range(forwards))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return [*found, *(p.detach().clone() for p in model.parameters())]

    refused = pytest.raises(hydra_tune.PrepareError, match=words) if words else nullcontext()
    with hydra_tune.ShardPool(["cpu"], {"spilled": "40KiB"}.get(budget, "8MiB")) as pool, refused:
        assert_same(losses(None), losses(pool))


# ---- under a runner ----


def scaled(prepare, seed):
    """Training with a gradient scaler of its own, whose second step overflows for one of two seeds."""
    torch.manual_seed(seed)
    model, optimizer = made(prepare)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    seen = []
    for i in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_on(model, *batch())
        scaler.scale(loss * (torch.inf if (i, seed) == (1, 0) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen += [loss.item(), scaler.get_scale()]
    return seen, left_by(model, optimizer)


@both_budgets
def test_each_trial_has_its_own_scaler(budget):
    results = {}

    def objective(trial):
        results[trial.number] = scaled(hydra_tune.prepare, trial.number)
        return 0.0

    with hydra_tune.ShardPool(["cpu"], 2 * TIED_BUDGETS[budget]) as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=2).optimize(optuna.create_study(), objective, n_trials=2)
        assert pool.devices[0].used_bytes == 0
        assert [t["resident"] for t in pool.report()["trials"]] == [budget == "resident"] * 2
    for number, got in results.items():
        assert_same(got, scaled(lambda *both: both, number))


def test_an_objective_that_never_calls_prepare_simply_runs(pool):
    results = {}

    def objective(trial):
        torch.manual_seed(trial.number)
        model, optimizer = made(lambda *both: both)
        results[trial.number] = train(model, optimizer), left_by(model, optimizer)
        return results[trial.number][0][-1]

    study = optuna.create_study()
    hydra_tune.HydraTrialRunner(pool, concurrency=2).optimize(study, objective, n_trials=2)
    runner = dict(results)
    for trial in study.trials:
        objective(trial)
        assert trial.value == runner[trial.number][0][-1]
        assert_same(runner[trial.number], results[trial.number])
    assert pool.report()["devices"][0]["peak_bytes"] == 0


def test_an_objective_that_ends_without_prepare_is_warned_of_once_a_study(pool, caplog):
    """It completed in silence, while the pool knew nothing of it."""

    def objective(trial):
        if trial.number == 0:
            raise optuna.TrialPruned
        if trial.number == 1:
            raise ValueError("before it came to prepare")
        if trial.number == 2:
            hydra_tune.prepare(nn.Linear(2, 2))
        return 0.0

    def warnings():
        return [r.getMessage() for r in caplog.records if "without a call of hydra_tune.prepare" in r.getMessage()]

    study = optuna.create_study(study_name="of letters")
    runner = hydra_tune.HydraTrialRunner(pool, concurrency=2)
    with caplog.at_level(logging.WARNING, "hydra_tune"):
        runner.optimize(study, objective, n_trials=3, catch=ValueError)
        assert not warnings()
        runner.optimize(study, objective, n_trials=4)
        runner.optimize(study, objective, n_trials=2)
    assert len(warnings()) == 1 and "study of letters" in warnings()[0]
    assert [trial.state.name for trial in study.trials[:4]] == ["PRUNED", "FAIL", "COMPLETE", "COMPLETE"]


class Slotted(nn.Linear):
    __slots__ = ("calls",)


def test_attributes_in_slots_can_not_be_followed(pool):
    with pytest.raises(hydra_tune.PrepareError, match="0 has calls in __slots__"):
        hydra_tune.prepare(nn.Sequential(Slotted(4, 4)), pool=pool)


class Generating(TiedNet):
    def forward(self, x):
        yield super().forward(x)


def test_a_forward_that_computes_after_it_has_returned_is_refused(pool):
    model = hydra_tune.prepare(Generating(), pool=pool)
    with pytest.raises(hydra_tune.PrepareError, match="called outside of the model's forward"):
        next(model(torch.randint(0, 8, (4, 3))))


def test_another_method_than_forward_is_refused_with_gradients_and_evaluates_without(pool):
    class Encoding(TiedNet):
        def encode(self, x):
            return self.layers[0](self.embedding(x))

    model = Encoding().eval()
    x = torch.randint(0, 8, (4, 3))
    with torch.no_grad():
        expected = model.encode(x)
    hydra_tune.prepare(model, pool=pool)
    for _ in range(2):
        model(x).sum().backward()
    with pytest.raises(hydra_tune.PrepareError, match=r"block \S+ was called outside of the model's forward"):
        model.encode(x)
    with torch.no_grad():
        assert torch.equal(model.encode(x), expected)
