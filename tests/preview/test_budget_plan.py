"""`hydra_tune.plan`: its figures are those of a trial that is run, and it leaves no trace."""

import copy
import json
import random
import time

import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune.blocks.root import trial_of
from hydra_tune.errors import BudgetError, ConfigError
from hydra_tune.preview.budget_plan import plan
from hydra_tune.preview.factory import plan_of_factory
from hydra_tune.preview.feeding import loss_of, size_of
from hydra_tune.preview.least_budget import least_rehearsal, resident_rehearsal
from hydra_tune.preview.rehearsal import Needs, Rehearsal
from hydra_tune.schedule.plan import TrialPlan
from hydra_tune.simulation.cost import CostModel

WIDTH, ROWS, EVAL_ROWS = 64, 8, 32
COST = CostModel(flops_per_s=1e9, h2d_bytes_per_s=1e6, d2h_bytes_per_s=1e6, host_bytes_per_s=1e9)


def build(depth=4):
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.Tanh()) for _ in range(depth)
    ]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batches():
    return torch.randn(ROWS, WIDTH), torch.randn(EVAL_ROWS, WIDTH)


def train(memory, steps=4):
    """A trial alone. Returns the device's report, and bytes to the device and to the host of the last training step and
    the last evaluation."""
    (model, optimizer), (batch, eval_batch) = build(), batches()
    with hydra_tune.ShardPool("cpu", memory) as pool:
        hydra_tune.prepare(model, optimizer, pool=pool)
        moved = []

        def note():
            device = pool.report()["devices"][0]
            moved.append((device["promoted_bytes"], device["spilled_bytes"]))

        for _ in range(2):
            for _ in range(steps):
                note()
                outputs = model(batch)
                loss = outputs.mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            note()
            model.eval()
            for _ in range(3):
                with torch.no_grad():
                    outputs = model(eval_batch)
                note()
            model.train()
        del outputs, loss
        step, evaluation = (moved[-5], moved[-4]), (moved[-2], moved[-1])
        return pool.report()["devices"][0], *(
            [b - a for a, b in zip(*pair, strict=True)] for pair in (step, evaluation)
        )


def planned(**options):
    (model, optimizer), (batch, eval_batch) = build(), batches()
    return plan(model, optimizer, batch=batch, eval_batch=eval_batch, **options)


@pytest.fixture(scope="module")
def comfortable():
    return planned(cost=COST)


def test_peaks_and_link_bytes_are_those_of_a_trial(comfortable):
    at = comfortable.at_budget
    device, step, evaluation = train(at.budget_bytes)
    assert not at.resident
    assert at.shards > 1
    assert [at.step.to_device_bytes, at.step.gradient_bytes] == step
    assert [at.evaluation.to_device_bytes, 0] == evaluation
    assert at.reserved_bytes == device["peak_bytes"]
    assert at.peak_bytes == device["measured_peak_bytes"]  # tests count in every operator


def test_a_trial_fits_the_least_budget_and_none_below_it(comfortable):
    train(comfortable.least_bytes)
    with pytest.raises(BudgetError):
        train(int(comfortable.least_bytes * 0.98))


class Played:
    """A script whose trials fit from `least` bytes on, while the arithmetic proposes what `proposes` says."""

    has_both = True

    def __init__(self, least, proposes, resident=10_000, in_one_order_from=0):
        self.least, self.proposes, self.resident, self.in_one_order_from = least, proposes, resident, in_one_order_from

    def at(self, budget_bytes, *, evaluations=3):
        fits = budget_bytes >= (self.least if evaluations == 3 else self.in_one_order_from)
        needs = Needs(self.proposes(budget_bytes), 0, self.resident - 100, 0)
        found = Rehearsal(budget_bytes, None if fits else BudgetError("no"), needs=needs)
        found.plans = [TrialPlan(resident=budget_bytes >= self.resident)]
        return found


@pytest.mark.parametrize(
    "script",
    [
        Played(6_000, lambda _: 5_000),  # a first step needs more than later ones
        Played(6_000, lambda _: 5_950),
        Played(6_000, lambda budget: 9_000 if budget > 9_000 else 6_000),  # a small budget is cut finer
        Played(6_000, lambda _: 7_000),
        Played(5_000, lambda _: 5_000, in_one_order_from=6_000),
    ],
)
def test_the_least_budget_fits_and_what_is_a_hundredth_smaller_does_not(script):
    found = least_rehearsal(script, script.at(100_000)).budget_bytes
    assert 6_000 <= found <= 6_061


def test_the_least_budget_is_sought_until_a_given_time():
    script = Played(6_000, lambda _: 5_000)
    enough = script.at(100_000)
    assert least_rehearsal(script, enough, until_s=time.monotonic() - 1) is enough


def test_a_resident_budget_is_tried_out():
    script = Played(6_000, lambda _: 6_000)
    found = resident_rehearsal(script, script.at(100_000))
    assert found.is_resident
    assert 10_000 <= found.budget_bytes <= 10_050


def test_from_the_resident_budget_on_a_trial_is_resident(comfortable):
    at = planned(memory=comfortable.resident_bytes).at_budget
    assert at.resident
    assert (at.step.to_device_bytes, at.step.gradient_bytes) == (0, 0)
    assert sum(at.held.values()) == at.held_bytes
    assert not planned(memory=comfortable.resident_bytes - 1).at_budget.resident


def test_nothing_of_the_users_is_touched():
    (model, optimizer), (batch, eval_batch) = build(), batches()
    model(batch).mean().backward()
    optimizer.step()
    hook = model[0].register_forward_hook(lambda *_: random.seed(torch.randint(9, ()).item()))
    torch._C._set_multithreading_enabled(True)  # `prepare` turns it off
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    states = torch.get_rng_state(), random.getstate(), torch._C._is_multithreading_enabled()
    own = [set(vars(module)) for module in model.modules()], len(optimizer._optimizer_step_post_hooks)
    modes = [module.training for module in model.modules()]
    given = batch.clone(), eval_batch.clone()
    plan(model, optimizer, batch=batch, eval_batch=eval_batch)
    after = model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]
    assert _same(before, after)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), torch._C._is_multithreading_enabled())
    assert own == ([set(vars(module)) for module in model.modules()], len(optimizer._optimizer_step_post_hooks))
    assert modes == [module.training for module in model.modules()]
    assert _same(given, (batch, eval_batch))
    assert trial_of(model) is None
    hook.remove()
    torch._C._set_multithreading_enabled(False)


def _same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return all(map(_same, a, b)) if isinstance(a, (list, tuple)) else a == b


def test_a_pool_gives_its_budget_and_runs_nothing():
    with hydra_tune.ShardPool("cpu", "96KiB", host_memory="1MiB") as pool:
        found = planned(pool=pool)
        assert found.at_budget.budget_bytes == 96 << 10
        assert found.host.host_memory_bytes == 1 << 20
        assert found.host.trials == (1 << 20) // found.host.trial_bytes
        report = pool.report()
        assert report["trials"] == []
        assert report["devices"][0]["peak_bytes"] == 0


def test_for_a_pool_of_gpus_batches_and_gradients_on_their_way_count(comfortable):
    with hydra_tune.ShardPool("cpu", "96KiB") as pool:
        pool.devices[0].counts_as_gpu = pool.spills_behind = True  # as a CudaDevice has it
        found = planned(pool=pool)
    batch_bytes = ROWS * WIDTH * 4
    assert found.least_bytes >= comfortable.least_bytes + 2 * batch_bytes + WIDTH * WIDTH * 4
    assert found.resident_bytes > comfortable.resident_bytes
    assert "a GPU" in found.how


def test_host_bytes_are_what_prepare_takes():
    model, optimizer = build()
    found = plan(model, optimizer, batch=batches()[0])
    with hydra_tune.ShardPool("cpu", "1MiB") as pool:
        hydra_tune.prepare(model, optimizer, pool=pool)
        assert pool.host_bytes == [found.host.trial_bytes]


def test_a_budget_that_is_too_small_is_an_entry_with_the_refusals_words():
    found = planned(memory="20KiB")
    (text,) = found.refused
    assert "The pool is out of memory" in text
    assert found.at_budget is None
    assert found.least_bytes > 20 << 10


def test_a_model_that_prepare_refuses_is_an_entry_with_the_refusals_words():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data  # one memory, two Parameters
    found = plan(model, batch=torch.ones(2, 4))
    (text,) = found.refused
    assert "share theirs" in text
    assert found.least_bytes is None
    assert "share theirs" in " ".join(str(found).split())


def test_blocks_that_keep_have_their_reason():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(WIDTH, WIDTH), []

        def forward(self, x):
            self.calls.append(1)
            return self.linear(x).tanh()

    model = nn.Sequential(*(Counts() for _ in range(4)))
    at = plan(model, batch=torch.randn(ROWS, WIDTH)).at_budget
    assert list(at.kept) == ["0", "1", "2", "3"]
    assert "calls" in at.kept["0"]
    assert at.repeated == ()
    assert all(not module.calls for module in model)


def test_transfers_hide_where_copies_take_as_long_as_computing(comfortable):
    time = comfortable.time
    assert time.unit == "rows"
    assert time.amount == ROWS
    at = comfortable.at_budget
    flops = 2 * ROWS * (4 * WIDTH * WIDTH + 3 * WIDTH)
    forward, backward = at.step.forward_bytes / 1e6, max(at.step.backward_bytes, at.step.gradient_bytes) / 1e6
    assert time.compute_s >= 3 * flops / 1e9
    # the forward's copies: rows at which its arithmetic takes as long
    assert time.hides_at >= int(ROWS * forward / (flops / 1e9))
    assert time.alone_s == pytest.approx(forward + backward + time.optimizer_s)  # this link is slow


def test_without_a_cost_model_there_are_no_seconds_and_it_says_so():
    found = planned()
    assert found.time is None
    assert any("no seconds" in note for note in found.notes)


def test_a_table_is_80_columns_and_data_is_json(comfortable):
    lines = str(comfortable).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("resident from" in line for line in lines)
    assert json.loads(json.dumps(comfortable.to_dict()))["least_bytes"] == comfortable.least_bytes


def test_batches_are_fed_by_their_type_and_a_loss_may_be_given():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

        def forward(self, x, y):
            return {"loss": (self.layers(x) - y).square().mean(), "ids": torch.ones(2, dtype=torch.int64)}

    x, y = torch.randn(2, ROWS, WIDTH)
    figures = [plan(Named(), batch=batch).least_bytes for batch in ({"x": x, "y": y}, (x, y))]
    assert figures[0] == figures[1]
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    found = plan(model, batch=(x, y), loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
    assert found.refused == ()
    with pytest.raises(ConfigError, match="loss=lambda"):
        loss_of({"ids": torch.ones(2)})


def test_tokens_are_counted_of_indices():
    assert size_of({"input_ids": torch.ones(2, 5, dtype=torch.int64)}) == (10, "tokens")
    assert size_of((torch.ones(2, 5), torch.ones(2))) == (2, "rows")


def test_evaluation_alone_needs_no_batch():
    model, _ = build()
    found = plan(model, batch=None, eval_batch=batches()[1])
    assert found.refused == ()
    assert found.at_budget.evaluation.to_device_bytes > 0
    assert found.at_budget.step.gradient_bytes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": None}, "needs a batch"),
        ({"memory": "many"}, "positive number of bytes"),
        ({"pool": 3}, "ShardPool or None"),
        ({"model": 3}, "torch.nn.Module"),
    ],
)
def test_what_makes_no_sense_is_said(options, message):
    arguments = {"model": build()[0], "batch": torch.ones(ROWS, WIDTH), **options}
    with pytest.raises(ConfigError, match=message):
        plan(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch": (torch.ones(2, WIDTH), torch.ones(2))},
            r"takes no such call: too many .* write loss=lambda model, b",
        ),
        ({"batch": {"x": torch.ones(2, WIDTH)}}, r"batch= is fed as model\(\*\*batch\) .* write loss=lambda"),
        ({"eval_batch": (torch.ones(2, WIDTH),) * 2}, r"eval_batch= is fed .* Give the model's inputs alone"),
        (
            {"loss": lambda model, batch: model(batch)},
            r"tensor of one number .* got a tensor of shape \(8, 3\)\. Write",
        ),
        ({"loss": lambda model, batch: model(batch).sum().detach()}, r"shape \(\) that requires no gradient"),
        ({"loss": lambda model, batch: None}, "got NoneType"),
        ({"loss": 3}, "loss is a function of the model and the batch, or None; got int"),
        ({"optimizer": "sgd"}, r"optimizer is a torch\.optim\.Optimizer or None, got str"),
    ],
)
def test_a_batch_that_the_model_does_not_take_and_a_loss_that_is_none_are_said(options, message):
    """A pair of inputs and targets ended in the forward's own traceback, without a word on loss=."""
    arguments = {"model": build()[0], "batch": torch.ones(ROWS, WIDTH), **options}
    with pytest.raises(ConfigError, match=message):
        plan(**arguments)


def test_a_prepared_model_is_refused():
    model, optimizer = build()
    with hydra_tune.ShardPool("cpu", "1MiB") as pool:
        hydra_tune.prepare(model, optimizer, pool=pool)
        with pytest.raises(ConfigError, match="prepared already"):
            plan(model, optimizer, batch=batches()[0])


FACTORIES = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return model, torch.optim.SGD(model.parameters()), torch.ones(2, 8)

def named():
    return {"model": build()[0], "eval_batch": torch.ones(2, 8)}

def odd():
    return {"model": 1, "batches": 2}

def fails():
    raise KeyError("weights")

def leaves():
    raise SystemExit(3)

class Odd(nn.Linear):
    def forward(self, x):
        raise RuntimeError("two\\nlines")

def odd_model():
    return Odd(8, 8), None, torch.ones(2, 8)

def odd_shape():
    return nn.Linear(8, 8), None, torch.ones(2, 9)
"""


def test_a_factory_is_planned(tmp_path, monkeypatch):
    (tmp_path / "some_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    assert plan_of_factory("some_factories:build", memory="64KiB").at_budget.budget_bytes == 64 << 10
    assert plan_of_factory("some_factories:named").refused == ()
    for where, message in (
        ("some_factories", "MODULE:FACTORY"),
        ("no_such_module:build", "can be imported"),
        ("some_factories:nothing", "no function 'nothing'"),
        ("some_factories:odd", "'batches'"),
        ("some_factories:fails", r"KeyError: 'weights' \(some_factories\.py:16\)"),
        ("some_factories:leaves", r"SystemExit: 3 \(some_factories\.py:19\)"),
        ("some_factories:odd_model", r"RuntimeError: two\nlines \(some_factories\.py:23\)"),
        ("some_factories:odd_shape", r"mat1 and mat2 .* \(some_factories\.py:28\)"),  # no line of the user's has raised
        ("torch:get_num_threads", "returned int"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan_of_factory(where)
