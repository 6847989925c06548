"""Cutting a model into blocks, and blocks into shards."""

import functools
import gc
import pathlib
import sys
import types
import weakref
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy
import optuna
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hydra_tune
from hydra_tune.errors import BudgetError
from hydra_tune.planning import fingerprint, partition
from hydra_tune.planning.known_steps import StepKind
from hydra_tune.planning.partition import find_blocks, make_plan, pack_shards
from hydra_tune.schedule.events import (
    Done,
    Invalidated,
    PlanReady,
    Promoted,
    PromoteShard,
    StepDone,
    StepReady,
    TaskReady,
    TrialAdded,
)
from hydra_tune.schedule.machine import Machine
from hydra_tune.schedule.plan import BlockProfile, Direction, Shard, Task, TrialPlan
from models import bytes_batch, gpt, hf_gpt2, hf_vit, loss_of, mlp, vector_batch

LARGE = 1 << 30


def plan_key(model, optimizer, x):
    """Of a model with at most one optimizer, and of what it is given."""
    return fingerprint.plan_key(model, [] if optimizer is None else [optimizer]), partition.input_signature(x)


def names(model, limit=LARGE):
    return list(find_blocks(model, limit))


def test_elements_of_a_stack_are_blocks_and_so_are_their_neighbours():
    assert names(gpt(depth=3)) == ["bytes", "positions", "layers.0", "layers.1", "layers.2", "norm", "head"]
    assert names(mlp()) == [str(i) for i in range(0, 25, 3)], "layers without weights belong to no block"


def test_hugging_face_models_are_cut_at_their_layers():
    layers = [f"transformer.h.{i}" for i in range(6)]
    assert names(hf_gpt2()) == ["transformer.wte", "transformer.wpe", *layers, "transformer.ln_f", "lm_head"]
    found = names(hf_vit())
    assert found[0] == "vit.embeddings"
    assert found[-1] == "classifier"
    assert len(found) == 1 + 6 + 2


def test_a_layer_beyond_the_limit_is_cut_at_its_children():
    layer_bytes = sum(p.numel() * 4 for p in gpt(depth=1).layers[0].parameters())
    assert "layers.0" in names(gpt(depth=1), 2 * layer_bytes)
    assert "layers.0.qkv" in names(gpt(depth=1), 2 * layer_bytes - 1)


def block(size, work=0, saved=0):
    return BlockProfile(f"b{size}", size, work, work, saved)


# ---- the objective: fewest bytes promoted a step, then fewest shards, then the smallest largest shard ----


def shard(profiles, start, end):
    part = profiles[start:end]
    works = [max(getattr(p, f"{direction}_work_bytes") for p in part) for direction in ("forward", "backward")]
    return Shard(tuple(range(start, end)), sum(p.weight_bytes for p in part), *works)


def every_cut(profiles):
    inner = range(1, len(profiles))
    for count in range(len(profiles)):
        for edges in combinations(inner, count):
            yield tuple(shard(profiles, *ends) for ends in pairwise([0, *edges, len(profiles)]))


def first_fit(profiles, limit):
    """Shards filled from the first block to the last, as the partition did before it had an objective."""
    shards, start = [], 0
    for end in range(1, len(profiles) + 1):
        if end == len(profiles) or shard(profiles, start, end + 1).slot_bytes > limit:
            shards.append(shard(profiles, start, end))
            start = end
    return tuple(shards)


def promoted_bytes(plan, budget):
    """What the scheduler promotes in one step of a trial alone on its device; no more in the next, when it knows the
    order and promotes ahead: what makes way for that may be a smaller shard."""
    machine = Machine([budget])
    for event in (TrialAdded(0), PlanReady(0, plan)):
        machine.handle(event)
    visits = [max(plan.blocks[i].visits for i in shard.blocks) for shard in plan.shards]
    forward = [(n, Direction.FORWARD) for n, v in enumerate(visits) if v > 0]
    backward = [(n, Direction.BACKWARD) for n, v in reversed(list(enumerate(visits))) if v > 1]
    totals = []
    for step in (1, 2):
        totals.append(0)
        pending = [StepReady(0), Invalidated(0)]
        for task in [Task(0, step, *place) for place in [*forward, *backward]]:
            pending += [TaskReady(task), Done(task)]
        pending.append(StepDone(0))
        while pending:
            promotes = [i for i in machine.handle(pending.pop(0)) if isinstance(i, PromoteShard)]
            totals[-1] += sum(promote.num_bytes for promote in promotes)
            pending[:0] = [Promoted(promote.task, 0) for promote in promotes]
    machine.validate()
    assert totals[1] <= totals[0]
    return totals[0]


@dataclass
class Case:
    """A trial that does not fit, on a budget under which each of its blocks does."""

    profiles: list
    held: int
    step: int
    room: int

    @property
    def budget(self):
        return self.held + self.step + self.room

    @property
    def limit(self):
        """What a shard of several blocks may be, so that two fit beside the largest work."""
        return (self.room - max(p.work_bytes for p in self.profiles)) // 2

    def plan(self, shards=None):
        if shards is not None:
            return TrialPlan(False, shards, tuple(self.profiles), self.held, self.step)
        return make_plan(
            self.profiles,
            budget_bytes=self.budget,
            loose_bytes=self.held,
            resident_bytes=LARGE,
            step_bytes=self.step,
            may_be_resident=False,
        )

    def cost(self, plan):
        return promoted_bytes(plan, self.budget), len(plan.shards), max(s.slot_bytes for s in plan.shards)


@st.composite
def cases(draw, max_blocks=8, first_visits=0):
    """Some of the first blocks may have only `first_visits` visits a step."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=max_blocks))
    works = st.integers(0, draw(st.sampled_from([0, 5, 40])))
    num_first = draw(st.integers(0, len(sizes) - 1)) if draw(st.booleans()) else 0
    profiles = [
        BlockProfile(f"b{i}", size, visits=0)
        if i < num_first and first_visits == 0
        else BlockProfile(f"b{i}", size, draw(works), draw(works), visits=first_visits if i < num_first else 2)
        for i, size in enumerate(sizes)
    ]
    least = max(p.weight_bytes + p.work_bytes for p in profiles)
    most = sum(sizes) + max(p.work_bytes for p in profiles)
    held, step = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    return Case(profiles, held, step, draw(st.integers(least, most)))


def allowed_cuts(case):
    for shards in every_cut(case.profiles):
        if all(len(s.blocks) == 1 or s.slot_bytes <= case.limit for s in shards):
            yield case.plan(shards)


def check_no_cut_is_better(case):
    plan = case.plan()
    assert [i for s in plan.shards for i in s.blocks] == list(range(len(case.profiles)))
    assert case.cost(plan) == min(case.cost(other) for other in allowed_cuts(case))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_no_cut_is_better(case):
    """Brute force: the scheduler plays a step for each of the 2^(n-1) cuts."""
    check_no_cut_is_better(case)


@pytest.mark.proof
@settings(max_examples=10_000, deadline=None, derandomize=True)
@given(cases())
def test_no_cut_is_better_at_length(case):
    check_no_cut_is_better(case)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases(first_visits=1))
def test_no_cut_promotes_fewer_bytes_where_the_first_blocks_are_frozen(case):
    best = min(case.cost(other) for other in allowed_cuts(case))
    found = case.cost(case.plan())
    assert found[0] == best[0]
    assert found[1] <= best[1] + 1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases(max_blocks=40))
def test_no_cut_is_worse_than_children_in_order(case):
    """Neither one block a shard, nor shards filled in order."""
    found = case.cost(case.plan())
    ones = tuple(shard(case.profiles, i, i + 1) for i in range(len(case.profiles)))
    assert found <= case.cost(case.plan(ones))
    assert found <= case.cost(case.plan(first_fit(case.profiles, case.limit)))


def cut(sizes, room, work=0):
    return [s.slot_bytes for s in pack_shards([block(size, work) for size in sizes], room)]


def test_the_best_cut_by_hand():
    assert cut([], 100) == []
    assert cut([30], 30) == [30]
    assert cut([10] * 6, 60) == [30, 30], "all stay"
    assert cut([10] * 6, 59) == [10, 20, 20, 10], "five stay; of [20, 20, 20] only four"
    assert cut([10] * 6, 20) == [10] * 6
    assert cut([90, 10, 10, 10], 100) == [90, 30]
    assert cut([10, 10, 90], 110) == [20, 90], "a block beyond half of the room has a shard of its own"
    assert cut([10, 10, 90], 105) == [10, 10, 90], "the second stays, if it need not wait for the first"
    assert cut([10, 30, 10, 30, 50], 100, work=10) == [40, 40, 50]


def test_a_block_with_much_work_is_not_joined_to_the_next_where_that_costs_one_that_could_stay():
    profiles = [block(10), block(20), block(25), block(10, work=40), block(15)]
    case = Case(profiles, held=0, step=0, room=100)
    assert [s.slot_bytes for s in case.plan().shards] == [10, 20, 25, 10, 15]
    assert promoted_bytes(case.plan(), 100) == 80 + 10, "20 + 25 + 10 + 40 fit; 20 + 25 + (10 + 15) + 40 would not"


def test_a_block_without_visits_is_never_promoted_and_one_without_backward_once():
    profiles = [BlockProfile(f"b{v}", 10, visits=v) for v in (0, 1, 1, 2, 2, 2)]
    case = Case(profiles, held=0, step=0, room=40)
    plan = case.plan()
    assert [s.blocks for s in plan.shards] == [(0,), (1, 2), (3, 4), (5,)]
    assert promoted_bytes(plan, 40) == 50


def plan(profiles, budget, **options):
    figures = {"loose_bytes": 10, "resident_bytes": 500, "step_bytes": 20, **options}
    return make_plan(profiles, budget_bytes=budget, **figures)


def test_a_trial_is_resident_as_soon_as_all_of_it_fits_and_spilled_before():
    profiles = [block(40, work=5, saved=7)] * 4
    need = 500 + 20 + 4 * 7 + 5
    assert plan(profiles, need).resident
    assert plan(profiles, need).need_bytes == need
    assert not plan(profiles, need - 1).resident
    assert not plan(profiles, need, may_be_resident=False).resident


def test_two_shards_fit_beside_the_step_where_the_budget_allows_and_one_always():
    profiles = [block(40, work=5)] * 4
    roomy = plan(profiles, 10 + 20 + 5 + 2 * 80)
    assert [s.blocks for s in roomy.shards] == [(0, 1), (2, 3)]
    tight = plan(profiles, 10 + 20 + 5 + 40)
    assert [s.blocks for s in tight.shards] == [(0,), (1,), (2,), (3,)]
    assert tight.need_bytes == 75
    with pytest.raises(
        BudgetError, match=r"block b40 does not fit: it needs 75 B \(40 B of w.*, 5 B to c.*, 30 B held.*74 B"
    ):
        plan(profiles, 74)


def test_a_refusal_tells_all_blocks_that_do_not_fit_the_largest_first():
    """They are opened together: one a step, a trial would train for as many before the last cut is refused."""
    with pytest.raises(BudgetError, match="block b50 does not fit") as refused:
        plan([block(40), block(10), block(50), block(45)], 10 + 20 + 42)
    assert refused.value.blocks == ["b50", "b45"]


def test_a_model_without_blocks_is_resident_or_refused():
    assert plan([], 520).resident
    with pytest.raises(BudgetError, match=r"in which no block can be spilled, does not fit: it needs 520 B"):
        plan([], 519)


def test_plans_are_keyed_by_architecture_not_by_hyperparameters():
    x = torch.zeros(2, 16, dtype=torch.long)
    base = plan_key(gpt(0.1), torch.optim.SGD(gpt().parameters(), lr=0.1), x)
    assert plan_key(gpt(0.1), torch.optim.SGD(gpt().parameters(), lr=0.5), x) == base
    assert (
        plan_key(nn.Dropout(0.1), None, x) == plan_key(nn.Dropout(0.3), None, x) != plan_key(nn.Dropout(0.0), None, x)
    )
    assert plan_key(gpt(0.3), torch.optim.SGD(gpt().parameters(), lr=0.1), x) != base, "who knows what it does by it?"
    assert plan_key(gpt(0.0), torch.optim.SGD(gpt().parameters(), lr=0.1), x) != base
    assert plan_key(gpt(0.1), torch.optim.SGD(gpt().parameters(), lr=0.1, momentum=0.9), x) != base
    assert plan_key(gpt(0.1), torch.optim.AdamW(gpt().parameters()), x) != base
    assert plan_key(gpt(0.1).double(), torch.optim.SGD(gpt().parameters(), lr=0.1), x) != base
    assert plan_key(gpt(0.1), torch.optim.SGD(gpt().parameters(), lr=0.1), x[:1]) != base
    frozen = gpt(0.1)
    frozen.bytes.requires_grad_(False)
    assert plan_key(frozen, torch.optim.SGD(gpt().parameters(), lr=0.1), x) != base
    first, second = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.GELU())
    assert plan_key(first, None, x) != plan_key(second, None, x)


class Setting:
    def __init__(self, rate):
        self.rate = rate


class Configured(nn.Module):
    """Does otherwise by a setting, wherever that is."""

    def __init__(self, rate, where):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if where == "attribute":
            self.rate = rate
        elif where == "private":
            self._rate = rate
        elif where == "object":
            self.config = Setting(rate)
        elif where == "nested":
            self.settings = {"all": [{"rate": rate}]}
        elif where == "closure":
            self.act = lambda x: x * rate
        elif where == "constant":
            self.act = eval(f"lambda x: x * {rate}")
        elif where == "buffer":
            self.register_buffer("rate", torch.tensor(rate))
        elif where == "array":
            self.rates = numpy.array([rate])
        elif where == "larger array":
            self.rates = numpy.full(20, rate)
        elif where == "tensor":
            self.rates = torch.full((20,), rate)
        elif where == "frozen weight":
            self.rate = nn.Parameter(torch.tensor(rate), requires_grad=False)
        elif where == "slots":
            self.config = Slots(rate)
        elif where == "partial":
            self.act = functools.partial(nn.functional.dropout, p=rate)
        elif where == "keyword":
            self.act = eval(f"lambda x, *, rate={rate}: x * rate")
        elif where == "hidden module":
            self.hidden = [Configured(rate, "attribute")]
        elif where == "proxy":
            self.config = types.MappingProxyType({"rate": rate})
        elif where == "path":
            self.path = pathlib.Path(str(rate))
        elif where == "range":
            self.steps = range(int(rate * 10))
        elif where == "list's attribute":
            self.rates = Rates()
            self.rates.rate = rate


class Slots:
    __slots__ = ("rate",)

    def __init__(self, rate):
        self.rate = rate


class Rates(list):
    pass


WHERE = (
    "attribute", "private", "object", "nested", "closure", "constant", "buffer", "array", "larger array", "tensor",
    "frozen weight", "slots", "partial", "keyword", "hidden module", "proxy", "path", "range", "list's attribute",
)  # fmt: skip


@pytest.mark.parametrize("where", WHERE)
def test_a_plan_is_not_shared_by_models_that_may_behave_otherwise(where):
    keys = [plan_key(Configured(rate, where), None, torch.zeros(1)) for rate in (0.1, 0.1, 0.4, 0.0)]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


@pytest.mark.parametrize("where", ["object", "dict"])
def test_a_plan_is_not_shared_whichever_setting_differs(where):
    """An item of a dict took the id of one before it, and counted as that: from the third on all were equal."""
    keys = []
    for odd_one in range(8):
        model = nn.Linear(4, 4)
        rates = {f"rate_{i}": float(i == odd_one) for i in range(8)}
        model.config = rates if where == "dict" else types.SimpleNamespace(**rates)
        keys.append(plan_key(model, None, torch.zeros(1)))
    assert len(set(keys)) == 8


def run_in(pool, model):
    hydra_tune.prepare(model, pool=pool)
    model(torch.ones(2, 4)).sum().backward()
    hydra_tune.release(model)


def test_a_plan_keeps_no_class_and_tells_those_of_one_name_apart():
    """The keys of plans kept the classes of every trial's model, with all that their methods closed over."""

    class Closed:
        pass

    def make():
        closed = Closed()

        class Local(nn.Linear):
            def forward(self, x):
                assert closed is not None
                return super().forward(x)

        return Local, weakref.ref(closed)

    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
        kinds, closed = zip(*(make() for _ in range(3)), strict=True)
        for kind in kinds:
            for _ in range(2):
                run_in(pool, nn.Sequential(kind(4, 4)))
        assert len(pool.plans) == 3
        kept = kinds[0]
        del kind, kinds
        gc.collect()
        assert [ref() is not None for ref in closed] == [True, False, False]
        run_in(pool, nn.Sequential(kept(4, 4)))
        assert len(pool.plans) == 3


def test_the_latest_architectures_are_remembered(monkeypatch):
    """Objectives that define their model's class have another one in each trial."""
    monkeypatch.setattr("hydra_tune.planning.known_steps._MOST_KNOWN", 2)
    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
        for width in (1, 2, 1, 3, 1):
            run_in(pool, nn.Linear(4, width))
        assert len(pool.plans) == 2


def test_a_plan_keeps_no_string_of_its_model():
    """A vocabulary, the text of a config: those of all trials stayed in host memory."""
    text = "words " * 1_000
    before = sys.getrefcount(text)
    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
        model = nn.Linear(4, 4)
        model.vocabulary, model.config = text, {"text": text}
        run_in(pool, model)
        del model
        gc.collect()
        assert len(pool.plans) == 1 and sys.getrefcount(text) == before


def test_a_pilot_on_a_batch_covers_smaller_ones():
    def kind(*sizes, dtype=torch.long):
        return StepKind(True, None, ((sizes, dtype),))

    measured = kind(4, 16)
    assert measured.covers(kind(4, 8))
    assert not measured.covers(kind(5, 16))
    assert not measured.covers(kind(4, 16, dtype=torch.int))
    assert not measured.covers(kind(4, 16, 1))


# ---- a plan's bytes are those of real steps ----


def real_step(build, batch, budget):
    """The trial's report, and the bytes that one of its later steps promoted."""
    counts = []
    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        model, optimizer = build(), None
        trained = [p for p in model.parameters() if p.requires_grad]
        model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(trained, lr=1e-3), pool=pool)
        for _ in range(3):
            loss_of(model, *batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
            (trial,) = pool.report()["trials"]
            counts.append(trial["promoted_bytes"])
        hydra_tune.release(model)
    assert counts[2] - counts[1] == counts[1] - counts[0], "steps are alike"
    return trial, counts[2] - counts[1]


def weight_bytes(build):
    return sum(p.numel() * p.element_size() for p in build().parameters())


@pytest.mark.parametrize("build", [gpt, hf_gpt2], ids=["gpt", "tied"])
@pytest.mark.parametrize(("share", "least", "most"), [(0.5, 1.7, 1.95), (0.8, 1.4, 1.7), (1.3, 1.0, 1.01)])
def test_a_step_promotes_no_more_than_it_must(build, share, least, most):
    """Between twice the weights, where all but the last shards are promoted again, and once, where all stay."""
    weights = weight_bytes(build)
    trial, promoted = real_step(build, bytes_batch, int(share * weights))
    assert least <= promoted / trial["weight_bytes"] < most


class Normalised(nn.Sequential):
    def __init__(self):
        layers = [nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128)) for _ in range(6)]
        super().__init__(*layers, nn.Linear(128, 10))


class PartlyTrained(nn.Module):
    """Its first layers are frozen, and one is never called."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(9))
        for layer in self.layers[:3]:
            layer.requires_grad_(False)

    def forward(self, x):
        for layer in (*self.layers[:5], *self.layers[6:]):
            x = layer(x)
        return x


def test_only_what_a_step_visits_is_promoted():
    trial, promoted = real_step(PartlyTrained, vector_batch, int(0.5 * weight_bytes(PartlyTrained)))
    assert [s["blocks"] for s in trial["shards"]] == [[f"layers.{i}"] for i in (5, 0, 1, 2, 3, 4, 6, 7, 8)]
    assert promoted == (8 + 2) * trial["shards"][0]["slot_bytes"], (
        "each that is called, but two again: not the frozen ones, nor that behind them, whose input stays, nor the last"
    )


def test_buffers_are_not_promoted():
    """They live on the device."""
    trial, promoted = real_step(Normalised, vector_batch, int(0.8 * weight_bytes(Normalised)))
    slots = [s["slot_bytes"] for s in trial["shards"]]
    assert len(slots) == 6
    assert promoted == sum(slots) + sum(slots[:3])


def test_a_resident_trial_promotes_nothing():
    trial, promoted = real_step(gpt, bytes_batch, 40 * weight_bytes(gpt))
    assert trial["resident"]
    assert promoted == 0


def test_a_plan_whose_step_was_measured_is_cut_for_what_the_step_takes():
    """It kept the cut that was made for the estimate."""

    def objective(_):
        model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(10)])
        model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        for _ in range(2):
            loss = model(torch.randn(64, 128)).sum()
            loss.backward()
            optimizer.step()
        return loss.item()

    with hydra_tune.ShardPool(["cpu"], 1_200_000) as pool:
        study = optuna.create_study()
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(study, objective, n_trials=1)
        (plan,) = pool.plans.values()
    assert plan.shards == pack_shards(plan.blocks, 1_200_000 - plan.held_bytes - plan.step_bytes)


def test_no_shard_of_several_blocks_is_larger_than_pays(monkeypatch):
    """However much room there is: beside it others' shards are to be promoted ahead."""
    monkeypatch.setattr(partition, "MOST_SLOT_BYTES", 10)
    assert cut([4] * 6, 1000) == [8, 8, 8]
    assert cut([4, 30, 4], 1000) == [4, 30, 4], "a block is one thing"


def test_only_a_spilled_plan_has_room_for_late_gradients():
    profiles = [block(40, work=5, saved=7)] * 4
    need = 500 + 20 + 4 * 7 + 5
    assert plan(profiles, need, late_bytes=9).resident
    late, prompt = (plan(profiles, need - 1, late_bytes=n) for n in (9, 0))
    assert late.step_bytes == prompt.step_bytes + 9
