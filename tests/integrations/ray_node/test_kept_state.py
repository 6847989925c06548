"""What a pool keeps of a trial, for the trial itself or another one to go on from."""

import copy
import json
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)
from torch.utils.data import DataLoader

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
pytest.importorskip("ray")

from ray import cloudpickle
from ray.tune import Checkpoint, Trainable
from ray.tune.result import TRIAL_INFO

import hydra_tune
from hydra_tune.checkpoints.hyperparameters import Hyperparameters
from hydra_tune.checkpoints.interval import Interval
from hydra_tune.checkpoints.resumption import Resumption
from hydra_tune.errors import ResumeError
from hydra_tune.integrations.ray_node import user_code
from hydra_tune.integrations.ray_node.kept_state import KeptState, KeptStates
from hydra_tune.integrations.ray_node.messages import (
    CallMethod,
    Ended,
    Order,
    Raised,
    Returned,
    SaveState,
    StateSaved,
    Stopped,
)
from hydra_tune.integrations.ray_node.trial_thread import TrialThread
from hydra_tune.trials.context import trial_context

STEPS, HALF = 6, 3


@pytest.fixture
def pool():
    with hydra_tune.ShardPool(["cpu"], "64KiB") as pool:
        yield pool


def run(pool, config, *, found=None, perturbed=False, steps=STEPS, asks=True, keep_at=None, schedule_of=None):
    """A trial: its weights, rates and draws after so many steps, and what was kept of it there, or after `keep_at`."""
    with trial_context(pool, 0) as context:
        sources = [] if found is None else [found]
        context.resumption = Resumption(None, sources, Interval(), context.random_state, "trial 0", perturbed=perturbed)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)), nn.Dropout(config.get("dropout", 0.2)))
        optimizer = torch.optim.SGD(
            model.parameters(), lr=config["lr"], momentum=config.get("momentum", 0.9), weight_decay=1e-4
        )
        schedule = ExponentialLR(optimizer, 0.5) if schedule_of is None else schedule_of(optimizer)
        model, optimizer = hydra_tune.prepare(model, optimizer, extra_state=schedule)
        rates = []
        start = hydra_tune.resume_step() if asks else 0
        assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]]
        kept = None
        for step in range(start, steps):
            if step == keep_at:
                kept = KeptState.of(context, "donor")
            loss = model(torch.randn(4, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        if asks and keep_at is None:
            kept = KeptState.of(context, "donor")
        weights = [p.detach().clone() for p in model.parameters()]
        return weights, rates, torch.rand(3), kept, optimizer.param_groups[0], start


@pytest.fixture(params=["in memory", "in a checkpoint"])
def states(request):
    return KeptStates(lambda: 1 << 30 if request.param == "in memory" else 0)


def through(states, kept, path):
    kept.write(str(path))
    states.keep(kept)
    return states.found_in(Checkpoint.from_directory(str(path)))


def test_a_trial_goes_on_bit_for_bit(pool, states, tmp_path):
    whole = run(pool, {"lr": 0.1})
    half = run(pool, {"lr": 0.1}, steps=HALF)
    rest = run(pool, {"lr": 0.1}, found=through(states, half[3], tmp_path))
    assert rest[5] == HALF
    assert whole[1] == [*half[1], *rest[1]]
    assert all(map(torch.equal, whole[0], rest[0])) and torch.equal(whole[2], rest[2])
    assert sum(states.continued.values()) == 1


def test_what_is_kept_stays_as_it_was_when_somebody_goes_on_from_it(pool, tmp_path):
    states = KeptStates(lambda: 1 << 30)
    half = run(pool, {"lr": 0.1}, steps=HALF)
    first = run(pool, {"lr": 0.1}, found=through(states, half[3], tmp_path))
    again = run(pool, {"lr": 0.1}, found=states.found_in(Checkpoint.from_directory(str(tmp_path))))
    assert all(map(torch.equal, first[0], again[0]))
    assert states.continued == {"in_memory": 2, "from_checkpoint": 0}


def test_what_is_kept_stays_as_it_was_when_its_trial_goes_on(pool, tmp_path):
    whole = run(pool, {"lr": 0.1}, keep_at=HALF)
    rest = run(pool, {"lr": 0.1}, found=through(KeptStates(lambda: 1 << 30), whole[3], tmp_path))
    assert rest[5] == HALF
    assert all(map(torch.equal, whole[0], rest[0]))


def test_a_schedule_in_closed_form_goes_on_from_the_new_rate(pool, states, tmp_path):
    def schedule_of(optimizer):
        return LambdaLR(optimizer, lambda step: 1 / (1 + step))

    half = run(pool, {"lr": 0.1}, steps=HALF, schedule_of=schedule_of)
    found = through(states, half[3], tmp_path)
    clone = run(pool, {"lr": 0.4}, found=found, perturbed=True, schedule_of=schedule_of)
    assert clone[1] == pytest.approx([0.4 / (1 + n) for n in (4, 5, 6)], rel=1e-6)


SCHEDULES = {
    "one after another": lambda o, lr: SequentialLR(
        o, [LinearLR(o, 0.1, total_iters=5), CosineAnnealingLR(o, 20)], [5]
    ),
    "cyclic": lambda o, lr: CyclicLR(o, lr / 10, lr, step_size_up=4, cycle_momentum=False),
    "from 0": lambda o, lr: LambdaLR(o, lambda step: step / 10),
    "several at once": lambda o, lr: ChainedScheduler([LinearLR(o, 0.5, total_iters=3), CosineAnnealingLR(o, 4)]),
    "one cycle": lambda o, lr: OneCycleLR(o, lr, total_steps=20),
    "restarts": lambda o, lr: CosineAnnealingWarmRestarts(o, 4),
    "milestones": lambda o, lr: MultiStepLR(o, [2, 5]),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # what torch 2.6 warns of in one of its own schedules
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rate_given_otherwise_has_its_place_in_any_schedule(name):
    def made(rate, steps):
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=rate)
        schedule = SCHEDULES[name](optimizer, rate)
        given = Hyperparameters.of(optimizer, [schedule])
        return optimizer, schedule, given, rates(optimizer, schedule, steps)

    def rates(optimizer, schedule, steps):
        found = []
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    (donor, its_schedule, its_own, _), (clone, schedule, own, _) = made(1e-3, 3), made(3e-3, 0)
    clone.load_state_dict(copy.deepcopy(donor.state_dict()))
    schedule.load_state_dict(copy.deepcopy(its_schedule.state_dict()))
    own.stay(json.loads(json.dumps(its_own.plain())), clone, [schedule])
    *_, whole = made(3e-3, 11)
    assert [clone.param_groups[0]["lr"], *rates(clone, schedule, 8)] == pytest.approx(whole[2:], rel=1e-9)


def test_a_rate_that_is_a_tensor_stays_one():
    def made(rate):
        weight = nn.Parameter(torch.ones(2))
        return torch.optim.Adam([weight], lr=torch.tensor(rate), foreach=False)

    donor, clone = made(0.1), made(0.4)
    given, own = Hyperparameters.of(donor, []), Hyperparameters.of(clone, [])
    rate = clone.param_groups[0]["lr"]
    rate.fill_(0.05)  # as the donor's state says
    own.stay(given.plain(), clone, [])
    assert clone.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.4 * 0.5)


def test_another_trial_keeps_the_hyperparameters_that_it_was_given_otherwise(pool, states, tmp_path):
    """Its rate, at the schedule's place, and its momentum; not its weight decay, which has the same value in both. And
    what its model is given besides may differ."""
    half = run(pool, {"lr": 0.1}, steps=HALF)
    found = through(states, half[3], tmp_path)
    clone = run(pool, {"lr": 0.4, "momentum": 0.5, "dropout": 0.1}, found=found, perturbed=True)
    assert clone[1] == pytest.approx([0.4 * 0.5**n for n in (4, 5, 6)], rel=1e-6)
    assert (clone[4]["momentum"], clone[4]["weight_decay"], clone[4]["initial_lr"]) == (0.5, 1e-4, 0.4)
    again = states.found_in(Checkpoint.from_directory(str(tmp_path)))
    same = run(pool, {"lr": 0.1}, found=again, perturbed=True)
    whole = run(pool, {"lr": 0.1})
    assert all(map(torch.equal, whole[0], same[0])), "a clone that was given the same is the same"


def test_a_trial_that_has_changed_is_refused(pool, tmp_path):
    half = run(pool, {"lr": 0.1}, steps=HALF)
    found = through(KeptStates(lambda: 0), half[3], tmp_path)
    with pytest.raises(ResumeError, match="its model had"):
        run(pool, {"lr": 0.1, "dropout": 0.5}, found=found)


def test_who_never_asks_where_to_go_on_is_not_kept(pool):
    with trial_context(pool, 0) as context:
        context.resumption = Resumption(None, [], Interval(), context.random_state, "trial 0")
        with pytest.raises(ResumeError, match="no prepared model"):
            KeptState.of(context, "donor")
        model = hydra_tune.prepare(nn.Linear(4, 4))
        with pytest.raises(ResumeError, match="never calls"):
            KeptState.of(context, "donor")
        hydra_tune.resume_step()
        assert KeptState.of(context, "donor").num_bytes > sum(p.nbytes for p in model.parameters())


def test_who_cannot_be_counted_is_not_kept(pool):
    """Two backwards, one step of the optimizer."""
    with trial_context(pool, 0) as context:
        context.resumption = Resumption(None, [], Interval(), context.random_state, "trial 0")
        model = nn.Linear(4, 4)
        model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        hydra_tune.resume_step()
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with pytest.raises(ResumeError, match="2 backwards were made for 1 steps"):
            KeptState.of(context, "donor")


class Said(list):
    """A line that only notes what is said on it."""

    say = list.append


def test_of_a_state_that_could_not_be_written_none_is_kept(pool, tmp_path):
    """What was kept before would take the trial back further than Tune believes."""
    states, said, held = KeptStates(lambda: 1 << 30), Said(), []

    def work(attempt):
        model = nn.Linear(4, 4)
        model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        hydra_tune.resume_step()
        for name in ("folder", "file"):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            attempt.answer(SaveState(str(tmp_path / name)))
            attempt.answer(None)
            attempt.await_answer()
            held.append([state.trial_id for state in states._of.values()])

    (tmp_path / "file").write_text("no folder")
    tune_context = {"trial_id": "t", "trial_name": "t", "experiment_name": "e", "loaded_checkpoint": None}
    order = Order("job", b"", {}, tune_context)
    attempt = TrialThread(pool, order, said, work, lambda: None, states)
    attempt.start()
    attempt._thread.join(60)
    assert [type(message) for message in said] == [StateSaved, StateSaved, Ended], said
    assert said[0].why_not == "" and "file" in said[1].why_not
    assert held == [["t"], []]


def test_the_oldest_make_room(pool):
    half = run(pool, {"lr": 0.1}, steps=1)[3]
    states = KeptStates(lambda: 2 * half.num_bytes + 10)
    made = []
    for trial in "abc":
        kept = KeptState(trial, *half.newest())
        made.append(kept)
        states.keep(kept)
    assert [states.named(kept.name) is kept for kept in made] == [False, True, True]
    states.forget("b")
    assert states.named(made[1].name) is None


def test_the_oldest_is_what_was_kept_first_not_whose_trial_was_the_first(pool):
    half = run(pool, {"lr": 0.1}, steps=1)[3]
    states = KeptStates(lambda: 2 * half.num_bytes + 10)
    made = [KeptState(trial, *half.newest()) for trial in "abac"]
    for kept in made:
        states.keep(kept)
    assert [states.named(kept.name) is kept for kept in made] == [False, False, True, True]


def test_a_checkpoint_of_the_functions_own_is_left_to_it(tmp_path):
    (tmp_path / "state.pt").write_bytes(b"")
    assert KeptStates(lambda: 0).found_in(Checkpoint.from_directory(str(tmp_path))) is None


def test_a_torn_checkpoint_is_an_error(pool, tmp_path):
    half = run(pool, {"lr": 0.1}, steps=1)[3]
    half.write(str(tmp_path))
    (tensors,) = tmp_path.glob("*/tensors.safetensors")
    tensors.write_bytes(b"torn")
    with pytest.raises(ResumeError, match="not sound"):
        KeptStates(lambda: 0).found_in(Checkpoint.from_directory(str(tmp_path)))


def batches_of(pool, found, *, until, batch_size=2):
    """What is trained on with the loop of docs/checkpoints.md, up to that many mini-batches; and what is kept there."""
    with trial_context(pool, 0) as context:
        sources = [] if found is None else [found]
        context.resumption = Resumption(None, sources, Interval(), context.random_state, "trial 0", perturbed=True)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.arange(6.0).repeat(32, 1).T.contiguous(), batch_size=batch_size, shuffle=True)
        model, optimizer, loader = hydra_tune.prepare(model, optimizer, loader)
        trained = []
        epoch, seen = divmod(hydra_tune.resume_step(), len(loader))
        for epoch in range(epoch, 3):  # noqa: B020
            for step, batch in enumerate(loader, seen):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                trained.append((epoch, step, batch[:, 0].tolist()))
                if len(trained) == until:
                    return trained, KeptState.of(context, "donor")
            seen = 0
        return trained, None


@pytest.mark.parametrize("until", range(1, 9))
def test_a_loader_goes_on_wherever_its_trial_reported(pool, states, tmp_path, until):
    """After an epoch's last batch the next epoch begins, though the loader has not been asked for one more."""
    whole, _ = batches_of(pool, None, until=99)
    first, kept = batches_of(pool, None, until=until)
    rest, _ = batches_of(pool, through(states, kept, tmp_path), until=99)
    assert [*first, *rest] == whole and len(whole) == 9


def test_a_clone_with_other_batches_is_refused(pool, states, tmp_path):
    """It would go on at another place, or at none."""
    _, kept = batches_of(pool, None, until=4)
    with pytest.raises(ResumeError, match=r"of 3 batches of 2.*of 6 batches of 1.*out of the mutations"):
        batches_of(pool, through(states, kept, tmp_path), until=99, batch_size=1)


def test_a_clone_with_other_layers_is_refused(pool, tmp_path):
    half = run(pool, {"lr": 0.1}, steps=HALF)
    found = through(KeptStates(lambda: 0), half[3], tmp_path)
    with trial_context(pool, 0) as context:
        context.resumption = Resumption(None, [found], Interval(), context.random_state, "t", perturbed=True)
        model = nn.Linear(32, 32)
        with pytest.raises(ResumeError, match="leave what changes them out of the mutations"):
            hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


class WithoutCheckpoints(Trainable):
    """Accumulates gradients, leaves its loader before its end, and draws after `prepare`: by no count of mini-batches
    would anybody know where to go on."""

    def setup(self, config):
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)), nn.Dropout(0.2))
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
        data = torch.arange(12.0).repeat(32, 1).T.contiguous()
        loader = DataLoader(data / 12, batch_size=2, shuffle=True)
        self.schedule = ExponentialLR(optimizer, 0.5)
        self.model, self.optimizer, self.loader = hydra_tune.prepare(
            model, optimizer, loader, extra_state=self.schedule
        )
        torch.rand(3)

    def step(self):
        for batch, _ in zip(self.loader, range(3), strict=False):
            loss = self.model(batch).square().mean()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        weights = [p.tolist() for p in self.model.parameters()]
        return {"weights": weights, "rate": self.optimizer.param_groups[0]["lr"], "loss": loss.item()}


class OwnCheckpoints(WithoutCheckpoints):
    def save_checkpoint(self, folder):
        return {"its": "own"}

    def load_checkpoint(self, state):
        assert state == {"its": "own"}


class OnlySaves(WithoutCheckpoints):
    def save_checkpoint(self, folder):
        return {"its": "own"}


class ResetsItself(WithoutCheckpoints):
    def reset_config(self, config):
        return True


class TrainsBesideThePool(Trainable):
    def step(self):
        return {}


def served(pool, states, kind, calls, lr=0.1, names=None):
    """What a trainable in a pool gives for each call, and how it ends; whose attempt it was then goes to `names`."""
    tune_context = {"trial_id": "t", "trial_name": "t", "experiment_name": "e", "storage": None, "trial_dir": None}
    order = Order("job", cloudpickle.dumps(kind), {"lr": lr}, tune_context)
    said = Said()
    attempt = TrialThread(pool, order, said, user_code.train, lambda: None, states)
    for method, *arguments in calls:
        attempt.answer(CallMethod(method, tuple(arguments), {"storage": None} if method == "reset" else {}))
    attempt.start()
    while attempt.is_alive and len(said) <= len(calls):
        attempt._thread.join(0.01)
    with pool.events.lock:
        assert len(pool.events.table.live) <= 1, "a former model's bytes are given back"
    if names is not None:
        names.append(attempt.order.trial_id)
    attempt.stop("it was stopped")
    attempt._thread.join(60)
    if isinstance(said[-1], Raised):
        raise cloudpickle.loads(said[-1].error)
    assert [type(message) for message in said] == [Returned] * (len(calls) + 1) + [Stopped]
    return [message.value for message in said[1:-1]]


def trained(results):
    return [(result["weights"], result["rate"], result["loss"]) for result in results]


def test_a_trainable_without_checkpoints_of_its_own_goes_on_from_its_pools(pool, states, tmp_path):
    step, folder = ("train",), str(tmp_path)
    whole = trained(served(pool, states, WithoutCheckpoints, [step] * 4))
    *first, _ = served(pool, states, WithoutCheckpoints, [step, step, ("save", folder)])
    _, *rest = served(pool, states, WithoutCheckpoints, [("restore", folder), step, step])
    assert [*trained(first), *trained(rest)] == whole
    assert [result["training_iteration"] for result in first] == [1, 2]
    _, clone = served(pool, states, WithoutCheckpoints, [("restore", folder), step], lr=0.4)
    assert clone["rate"] == pytest.approx(0.4 * 0.5**3)
    assert clone["loss"] == whole[2][2], "from the donor's weights, momenta, batches and draws"
    assert sum(states.continued.values()) == 2


def test_a_trainable_goes_back_to_where_it_was(pool, states, tmp_path):
    step, folder = ("train",), str(tmp_path)
    calls = [step, ("save", folder), step, step, ("restore", folder), step]
    first, _, second, _, _, again = served(pool, states, WithoutCheckpoints, calls)
    assert trained([again]) == trained([second]) != trained([first])


def test_a_trainables_own_checkpoints_are_left_to_it(pool, states, tmp_path):
    calls = [("train",), ("save", str(tmp_path)), ("restore", str(tmp_path))]
    served(pool, states, OwnCheckpoints, calls)
    assert sum(states.continued.values()) == 0
    with pytest.raises(NotImplementedError):
        served(pool, states, OnlySaves, calls)


def test_an_attempt_is_that_of_the_trial_that_its_trainable_was_reset_for(pool, states, tmp_path):
    """Who begins another one of the former trial shall not end it; what is kept is the new trial's."""
    names, info = [], SimpleNamespace(trial_id="another", trial_name="another")
    calls = [("train",), ("reset", {"lr": 0.2, TRIAL_INFO: info}), ("train",), ("save", str(tmp_path))]
    served(pool, states, ResetsItself, calls, names=names)
    assert names == ["another"]
    assert json.loads((tmp_path / "hydra_tune.json").read_text())["trial_id"] == "another"


def test_a_trainable_that_prepares_nothing_has_to_save_itself(pool, states, tmp_path):
    with pytest.raises(ResumeError, match=r"TrainsBesideThePool has no save_checkpoint.*Write save_checkpoint"):
        served(pool, states, TrainsBesideThePool, [("train",), ("save", str(tmp_path))])


def test_a_trainable_without_checkpoints_refuses_anothers(pool, states, tmp_path):
    (tmp_path / "state.pt").write_bytes(b"")
    with pytest.raises(ResumeError, match=r"WithoutCheckpoints has no load_checkpoint, and .* is no checkpoint"):
        served(pool, states, WithoutCheckpoints, [("restore", str(tmp_path))])
