"""A trial that was interrupted goes on from its checkpoint with the numbers of one that was not."""

import datetime
import errno
import logging
import queue
import threading

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import hydra_tune
from comparison import assert_same
from hydra_tune.checkpoints import checkpoint_folder, contents
from models import BUDGETS, WIDTH, Layer, Net
from waiting import wait_until

EPOCHS, BATCHES = 3, 5
STEPS = EPOCHS * BATCHES
DEPTH = 4


class NoisyLayer(Layer):
    def set_up(self):
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x, *_):
        self.calls += 1
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Noisy(torch.utils.data.Dataset):
    """Each item is drawn anew, as an augmentation does."""

    def __len__(self):
        return 4 * BATCHES

    def __getitem__(self, i):
        return torch.full((WIDTH,), i / 20) + 0.1 * torch.randn(WIDTH), i % 8


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(4 * BATCHES):
            yield torch.randn(WIDTH), i % 8


def drawn():
    return TensorDataset(torch.randn(4 * BATCHES, WIDTH), torch.randint(0, 8, (4 * BATCHES,)))


def with_own_generator():
    return DataLoader(drawn(), 4, shuffle=True, generator=torch.Generator().manual_seed(3))


def with_own_sampler():
    data = drawn()
    return DataLoader(data, 4, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(4)))


LOADERS = {
    "shuffled": lambda: DataLoader(drawn(), 4, shuffle=True),
    "own generator": with_own_generator,
    "own sampler": with_own_sampler,
    "augmented": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2),
    "stream": lambda: DataLoader(Stream(), 4),
    "persistent": lambda: DataLoader(drawn(), 4, num_workers=1, persistent_workers=True),
    "a list": lambda: [(torch.randn(4, WIDTH), torch.randint(0, 8, (4,))) for _ in range(BATCHES)],
}


class Training:
    """One objective; raises at a step, the first time that it comes there."""

    def __init__(self, loader=None, interrupt_at=None, optimizer=None):
        self.loader = loader
        self.interrupt_at = interrupt_at
        self.optimizer = optimizer or (lambda p: torch.optim.AdamW(p, lr=0.01))
        self.left, self.starts, self.losses = None, [], {}

    def __call__(self, trial):
        model = self.model()
        optimizer = self.optimizer(model.parameters())
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 9], gamma=0.5)
        loaders = [LOADERS[self.loader]()] if self.loader else []
        model, optimizer, *loaders = self.prepared(model, optimizer, *loaders, extra_state=schedule)
        torch.rand(())  # what is drawn before the loop is not drawn again
        self.starts.append(hydra_tune.resume_step())
        for step, (x, y) in self.batches(*loaders):
            if step == self.interrupt_at:
                self.interrupt_at = None
                raise KeyboardInterrupt
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            self.losses[step] = loss.item()
            self.update(step, model, optimizer, schedule)
            if step % BATCHES == BATCHES - 1:
                model.eval()
                with torch.no_grad():
                    score = model(torch.randn_like(x)).float().mean().item()
                trial.report(score + torch.rand(()).item(), step)
                model.train()
        self.left = [*model.state_dict().values(), *(m.calls for m in model.layers), torch.get_rng_state()]
        self.left += [v for state in optimizer.state_dict()["state"].values() for v in state.values()]
        self.left = [v.clone() if torch.is_tensor(v) else v for v in self.left] + [schedule.get_last_lr()]
        return loss.item()

    def prepared(self, *arguments, **options):
        return hydra_tune.prepare(*arguments, **options)

    def model(self):
        return Net(NoisyLayer, DEPTH)

    def update(self, step, model, optimizer, schedule):
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    def batches(self, loader=None):
        begin = hydra_tune.resume_step()
        if loader is None:
            yield from ((step, (torch.randn(4, WIDTH), torch.randint(0, 8, (4,)))) for step in range(begin, STEPS))
            return
        for epoch in range(begin // BATCHES, EPOCHS):
            first = begin % BATCHES if epoch == begin // BATCHES else 0
            for i, batch in enumerate(loader, first):
                yield epoch * BATCHES + i, batch


def search(objective, folder, budget="spilled", every=1, study=None, **options):
    """Again and again until no trial is interrupted; the study."""
    study = study or optuna.create_study()
    pool = hydra_tune.ShardPool(["cpu"], BUDGETS[budget], seed=0)
    runner = hydra_tune.HydraTrialRunner(pool, 1, checkpoint_dir=folder, checkpoint_every=every)
    for _ in range(5):
        try:
            runner.optimize(study, objective, n_trials=1, **options)
        except KeyboardInterrupt:
            continue
        assert pool.report()["trials"][-1]["resident"] == (budget == "resident")
        return study
    raise AssertionError("interrupted for ever")


def assert_left_the_same(got, plain):
    assert_same((got.left, got.losses), (plain.left, plain.losses))


def assert_same_as_uninterrupted(tmp_path, budget="spilled", every=1, at=(8,), kind=Training, written=None, **options):
    plain, got = kind(**options), None
    search(plain, None if every is None else tmp_path / "plain", budget, every)
    for number, step in enumerate(at):
        got = kind(interrupt_at=step, **options)
        study = search(got, tmp_path / str(number), budget, every)
        assert [t.state for t in study.trials] == [TrialState.FAIL, TrialState.COMPLETE]
        assert study.trials[1].user_attrs["hydra_tune: continues trials"] == [0]
        ready = step - 1  # it counts when the model is called for the next one
        assert got.starts == [0, (written or ready) // every * every]
        assert_left_the_same(got, plain)


OFTEN = ("shuffled",)


@pytest.mark.parametrize(
    "loader",
    [
        pytest.param(name, marks=() if name in OFTEN else pytest.mark.proof)
        for name in (*LOADERS, None)
        if name != "persistent"
    ],
)
def test_numbers_after_a_resume_are_the_uninterrupted_ones(tmp_path, loader):
    """At a step in an epoch's middle, at its first, and at the training's last."""
    assert_same_as_uninterrupted(tmp_path, loader=loader, at=(7, 10, 14))


@pytest.mark.parametrize("loader", ["shuffled", None])
def test_also_of_a_resident_trial_and_between_checkpoints(tmp_path, loader):
    assert_same_as_uninterrupted(tmp_path, "resident", every=4, at=(7, 11), loader=loader)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "two groups": lambda p: torch.optim.AdamW([{"params": [q], "lr": 0.01 + 0.001 * i} for i, q in enumerate(p)]),
}


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(make, id=name, marks=() if name == "two groups" else pytest.mark.proof)
        for name, make in OPTIMIZERS.items()
    ],
)
def test_optimizers_go_on(tmp_path, optimizer):
    assert_same_as_uninterrupted(tmp_path, optimizer=optimizer, loader="shuffled")


class Accumulating(Training):
    def update(self, step, model, optimizer, schedule):
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


class WithMasters(torch.optim.Optimizer):
    """SGD that keeps more digits than its weights have."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master", p.detach().float())
                p.copy_(master.sub_(p.grad.float(), alpha=group["lr"]))


class LowPrecision(Training):
    def __init__(self, *args, **options):
        super().__init__(*args, **options, optimizer=WithMasters)

    def model(self):
        return super().model().bfloat16()

    def batches(self, *loaders):
        return ((step, (x.bfloat16(), y)) for step, (x, y) in super().batches(*loaders))


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [Accumulating, LowPrecision])
def test_gradients_and_states_of_other_dtypes_go_on(tmp_path, kind):
    assert_same_as_uninterrupted(tmp_path, loader="shuffled", kind=kind, at=(7,))


class Folds(Training):
    """A model after the other, as in cross-validation; the first one's training is repeated."""

    def __call__(self, trial):
        at, self.interrupt_at = self.interrupt_at, None
        super().__call__(trial)
        first, self.interrupt_at, self.losses = self.left, at, {}
        super().__call__(trial)
        self.left = [*first, *self.left]
        return 0.0


def test_a_trial_of_two_models_goes_on_in_the_one_that_it_was_in(tmp_path):
    plain, got = Folds("shuffled"), Folds("shuffled", interrupt_at=8)
    search(plain, tmp_path / "plain")
    search(got, tmp_path / "got")
    assert got.starts == [0, 0, 0, 7]
    assert list(got.losses) == list(range(7, STEPS))
    got.losses = {**plain.losses, **got.losses}
    assert_left_the_same(got, plain)


def test_a_checkpoint_by_time(tmp_path, monkeypatch):
    now = iter(range(0, 100_000, 10))
    monkeypatch.setattr("hydra_tune.checkpoints.interval.time.monotonic", lambda: next(now))
    got = Training("shuffled", interrupt_at=8)
    search(got, tmp_path, every=datetime.timedelta(seconds=1))
    assert got.starts == [0, 7]


def test_a_retry_of_optunas_goes_on_from_the_trial_that_it_retries(tmp_path):
    plain, got = Training("shuffled"), Training("shuffled", interrupt_at=8)
    search(plain, tmp_path / "plain")
    study = optuna.create_study()
    pool = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"], seed=0)
    runner = hydra_tune.HydraTrialRunner(pool, 1, checkpoint_dir=tmp_path / "got", checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        runner.optimize(study, got, n_trials=1)
    retried = optuna.create_study()  # as if that trial had been found stale, and the callback had been called
    retried.set_user_attr("hydra_tune: checkpoints", study.user_attrs["hydra_tune: checkpoints"])
    retried.add_trial(optuna.create_trial(state=TrialState.FAIL))
    history = {"failed_trial": 0, "retry_history": [0]}
    retried.add_trial(optuna.create_trial(state=TrialState.WAITING, system_attrs=history))
    runner.optimize(retried, got, n_trials=1)
    assert got.starts == [0, 7]
    assert retried.trials[1].user_attrs["hydra_tune: resumed at step"] == 7
    assert_left_the_same(got, plain)


def test_a_checkpoint_is_written_while_others_train(tmp_path, monkeypatch):
    """One trial's writing waits until the other has made steps."""
    steps, write, written = {0: 0, 1: 0}, checkpoint_folder._write, threading.Event()
    first = threading.Lock()

    def slow(place, state):
        number = int(place.parent.name.removeprefix("trial-"))
        if first.acquire(blocking=False):
            before = steps[1 - number]
            wait_until(lambda: steps[1 - number] >= before + 3)
            written.set()
        write(place, state)

    def objective(trial):
        model = Net(depth=3)
        model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(hydra_tune.resume_step(), 10_000):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            steps[trial.number] += 1
            if written.is_set() and steps[trial.number] > 4:
                break
        return 0.0

    monkeypatch.setattr(checkpoint_folder, "_write", slow)
    pool = hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"])
    runner = hydra_tune.HydraTrialRunner(pool, 2, checkpoint_dir=tmp_path, checkpoint_every=2)
    study = optuna.create_study()
    runner.optimize(study, objective, n_trials=2)
    assert {t.state for t in study.trials} == {TrialState.COMPLETE} and written.is_set()


def test_a_finished_trial_leaves_no_checkpoint(tmp_path):
    search(Training("shuffled", interrupt_at=8), tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


# ---- what cannot be resumed is not written -----------------------------------------------------------


def warned(caplog):
    return [r.getMessage() for r in caplog.records if "no checkpoints from here on" in r.getMessage()]


class Unaware(Training):
    def __call__(self, trial):
        model = self.model()
        model, optimizer = hydra_tune.prepare(model, self.optimizer(model.parameters()))
        for _ in range(3):
            model(torch.randn(4, WIDTH)).sum().backward()
            optimizer.step()
        return 0.0


def test_of_an_objective_that_does_not_ask_where_to_go_on_there_is_none(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hydra_tune"):
        search(Unaware(), tmp_path)
    (message,) = warned(caplog)
    assert "never calls hydra_tune.resume_step()" in message and "trial 0" in message


class FromAnotherThread(Training):
    """As a wrapper does that fetches batches in the background."""

    def batches(self, loader):
        batches = iter(loader)
        for step in range(hydra_tune.resume_step(), BATCHES):
            got = []
            thread = threading.Thread(target=lambda got=got: got.append(next(batches)))
            thread.start()
            thread.join()
            yield step, got[0]


def test_nor_of_one_whose_batches_are_drawn_in_another_thread(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hydra_tune"):
        search(FromAnotherThread("shuffled"), tmp_path)
    (message,) = warned(caplog)
    assert "drawn in another thread" in message


class Validating(Training):
    """With a second loader, of which each evaluation takes two batches and leaves the rest."""

    def prepared(self, *arguments, **options):
        *prepared, self.validation = hydra_tune.prepare(*arguments, LOADERS["shuffled"](), **options)
        return prepared

    def update(self, step, model, optimizer, schedule):
        super().update(step, model, optimizer, schedule)
        with torch.no_grad():
            for (x, _), _ in zip(self.validation, range(2), strict=False):
                self.losses[step] += model(x).mean().item()


def test_an_iteration_that_was_left_is_not_gone_on_with(tmp_path):
    assert_same_as_uninterrupted(tmp_path, kind=Validating, loader="shuffled", at=(7,))


class ValidatingOnAStream(Validating):
    """On an iterator, of which each evaluation takes what comes next."""

    def prepared(self, *arguments, **options):
        stream = iter(LOADERS["shuffled"]())
        *prepared, self.validation = hydra_tune.prepare(*arguments, stream, **options)
        return prepared


def test_nor_of_one_that_leaves_an_iterator_and_goes_on_with_it(tmp_path, caplog):
    """It was resumed where its last loop had begun: what was evaluated afterwards was not the same."""
    with caplog.at_level(logging.WARNING, "hydra_tune"):
        search(ValidatingOnAStream("shuffled"), tmp_path)
    (message,) = warned(caplog)
    assert "an iterator was left and is gone on with" in message
    assert_same_as_uninterrupted(tmp_path, kind=ValidatingOnAStream, loader="shuffled", at=(2,))


class Pairs(Training):
    """One backward for the losses of two batches: between these no checkpoint is the whole of it."""

    def __call__(self, trial):
        model = self.model()
        model, optimizer, loader = hydra_tune.prepare(model, self.optimizer(model.parameters()), LOADERS["shuffled"]())
        self.starts.append(hydra_tune.resume_step())
        before = None
        for step, (x, y) in self.batches(loader):
            if step == self.interrupt_at:
                self.interrupt_at = None
                raise KeyboardInterrupt
            loss = nn.functional.cross_entropy(model(x), y)
            if step % 2:
                (before + loss).backward()
                optimizer.step()
                optimizer.zero_grad()
            before = loss
        self.left = [*model.state_dict().values(), torch.get_rng_state()]
        return loss.item()


def test_none_is_written_between_a_forward_and_its_backward(tmp_path):
    assert_same_as_uninterrupted(tmp_path, kind=Pairs, at=(7,), written=6, budget="resident")


class FromAnIterator(Training):
    """One pass over what was begun before it was prepared."""

    def prepared(self, *arguments, **options):
        return hydra_tune.prepare(*arguments, iter(LOADERS["shuffled"]()), **options)

    def batches(self, batches):
        return enumerate(batches, hydra_tune.resume_step())


def test_an_iterator_goes_on(tmp_path):
    assert_same_as_uninterrupted(tmp_path, kind=FromAnIterator, at=(3,))


class HeadFirst(Training):
    """Takes an epoch's first batch by `next`, the others by a loop over the same iterator."""

    def batches(self, loader):
        for step in range(hydra_tune.resume_step(), STEPS, BATCHES):
            batches = iter(loader)
            yield step, next(batches)
            yield from enumerate(batches, step + 1)


def test_a_loop_over_an_iterator_goes_on_with_it(tmp_path):
    """It began the loader anew where checkpoints were written: the first batches were trained twice."""
    plain, got = Training("shuffled"), HeadFirst("shuffled")
    search(plain, None, every=None)
    search(got, tmp_path)
    assert_left_the_same(got, plain)


class Ahead(Training):
    """Draws a batch before the one before it is trained."""

    def batches(self, loader):
        batches = iter(loader)
        following = next(batches)
        for step in range(hydra_tune.resume_step(), BATCHES):
            batch, following = following, next(batches, None)
            yield step, batch


def test_nor_of_one_that_draws_batches_ahead(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hydra_tune"):
        search(Ahead("shuffled"), tmp_path)
    (message,) = warned(caplog)
    assert "2 batches were drawn before the first was trained" in message


def test_a_full_disk_ends_no_trial(tmp_path, caplog, monkeypatch):
    def full(place, state):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_folder, "_write", full)
    training = Training("shuffled")
    with caplog.at_level(logging.WARNING, "hydra_tune"):
        study = search(training, tmp_path)
    assert study.trials[0].state is TrialState.COMPLETE
    (message,) = warned(caplog)
    assert "No space left" in message


class Changed(Training):
    """Is another one when it is called again."""

    what = ""

    def model(self):
        again = bool(self.starts)
        net = Net(NoisyLayer, DEPTH - (self.what == "depth" and again))
        if self.what == "activation" and again:
            net.layers[2].drop = nn.Dropout(0.3)
        return net

    def prepared(self, model, optimizer, loader, **options):
        if self.starts and self.what == "optimizer":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if self.starts and self.what == "loader":
            loader = DataLoader(drawn(), 2)
        if self.starts and self.what == "extra":
            options = {}
        if self.starts and self.what == "groups":
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        return hydra_tune.prepare(model, optimizer, loader, **options)


CHANGES = {
    "depth": "its model had",
    "activation": f"its model had '.* {DEPTH} x NoisyLayer",
    "optimizer": "its optimizer had 'AdamW' where it has 'SGD' now",
    "loader": "its loaders had 'DataLoader of 5 batches of 4' where it has 'DataLoader of 10 batches of 2' now",
    "extra": "its number of extra states had '1' where it has '0' now",
    "groups": "the optimizer's state is another's",
}


@pytest.mark.parametrize(
    "what",
    [pytest.param(w, marks=() if w == "optimizer" else pytest.mark.proof) for w in CHANGES],
)
def test_a_checkpoint_of_another_objective_is_refused_and_waits_for_the_right_one(tmp_path, what):
    training = Changed("shuffled", interrupt_at=8)
    training.what, study = what, optuna.create_study()
    with pytest.raises(hydra_tune.PrepareError, match=f"{CHANGES[what]}.*Restore the objective as it was"):
        search(training, tmp_path, study=study)
    assert [t.state for t in study.trials] == [TrialState.FAIL] * 2
    training.what = ""
    search(training, tmp_path, study=study)
    assert study.trials[2].user_attrs["hydra_tune: continues trials"] == [0, 1]
    plain = Training("shuffled")
    search(plain, tmp_path / "plain")
    assert_left_the_same(training, plain)


@pytest.mark.parametrize("what", ["groups", "buffers"])
def test_a_checkpoint_that_is_refused_changes_neither_model_nor_optimizer(what):
    """Its weights were there already when its optimizer, or a buffer, was found to be another's."""

    def made():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    (donor, its), (model, optimizer) = made(), made()
    donor(torch.randn(4, 2)).sum().backward(), its.step()
    state = {**contents.state_of(donor), "optimizer": its.state_dict(), "extra_state": [], "loaders": []}
    if what == "groups":
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    else:
        model.register_buffer("more", torch.zeros(1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(contents.OtherStateError):
        contents.restore(state, model, optimizer, [], [])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not optimizer.state and model[0].weight.grad is None


# ---- where mini-batches cannot be told from other things, no checkpoint says so ----------------------


class Left(Training):
    def batches(self, loader):
        hydra_tune.resume_step()
        for epoch in range(EPOCHS):
            for i, batch in zip(range(BATCHES - 1), loader, strict=False):
                yield epoch * (BATCHES - 1) + i, batch


class LeftLater(Training):
    """After an epoch that was whole."""

    def batches(self, loader):
        yield from enumerate(loader, hydra_tune.resume_step())
        for epoch in (1, 2):
            for i, batch in zip(range(BATCHES - 1), loader, strict=False):
                yield epoch * BATCHES + i, batch


class EvaluatesOnIt(Training):
    def batches(self, loader):
        hydra_tune.resume_step()
        for epoch in range(EPOCHS):
            yield from enumerate(loader, epoch * BATCHES)
            self.losses["train"] = sum(x.sum().item() for x, _ in loader)


class TwoLoaders(Training):
    def prepared(self, *arguments, **options):
        *prepared, self.second = hydra_tune.prepare(*arguments, LOADERS["shuffled"](), **options)
        return prepared

    def batches(self, loader):
        yield from enumerate(loader, hydra_tune.resume_step())
        yield from enumerate(self.second, BATCHES)


class TwoBackwards(Training):
    def batches(self):
        for step in range(hydra_tune.resume_step(), STEPS):
            yield step, (torch.randn(4, WIDTH), torch.randint(0, 8, (4,)))

    def update(self, step, model, optimizer, schedule):
        if step % 2:
            super().update(step, model, optimizer, schedule)


UNCLEAR = {
    "left": (Left, "left before its end"),
    "left later": (LeftLater, "left before its end"),
    "evaluated": (EvaluatesOnIt, "gone through without training"),
    "two loaders": (TwoLoaders, "not the first loader's"),
    "two backwards": (TwoBackwards, "1 backwards were made for 0 steps of the optimizer"),
    "persistent": (Training, "persistent workers"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", UNCLEAR)
def test_where_it_is_unclear_what_a_number_of_mini_batches_means_none_is_written(tmp_path, caplog, case):
    kind, words = UNCLEAR[case]
    loader = None if case == "two backwards" else "persistent" if case == "persistent" else "shuffled"
    with caplog.at_level(logging.WARNING, "hydra_tune"):
        search(kind(loader), tmp_path)
    (message,) = warned(caplog)
    assert words in message


def test_a_generator_of_the_objectives_own_goes_on(tmp_path):
    class Drawing(Training):
        def prepared(self, *arguments, extra_state):
            self.generator = torch.Generator().manual_seed(5)
            return hydra_tune.prepare(*arguments, extra_state=[extra_state, self.generator])

        def update(self, step, model, optimizer, schedule):
            super().update(step, model, optimizer, schedule)
            self.losses[step] += torch.rand((), generator=self.generator).item()

    assert_same_as_uninterrupted(tmp_path, kind=Drawing, loader="shuffled", at=(7,))


def test_batches_drawn_from_a_generator_of_the_objectives_own_go_on(tmp_path):
    """Its state was taken when the model was called, and so with the next batch drawn."""

    class DrawingBatches(Training):
        def prepared(self, *arguments, extra_state):
            self.generator = torch.Generator().manual_seed(5)
            return hydra_tune.prepare(*arguments, extra_state=[extra_state, self.generator])

        def batches(self, *loaders):
            for step, (_, y) in super().batches():
                yield step, (torch.randn(4, WIDTH, generator=self.generator), y)

    assert_same_as_uninterrupted(tmp_path, kind=DrawingBatches, at=(7,))


@pytest.mark.parametrize("extra", [3, [torch.nn.Linear(1, 1), None]])
def test_what_has_no_state_is_no_extra_state(extra):
    model = Net()
    with (
        hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool,
        pytest.raises(hydra_tune.ConfigError, match="extra_state"),
    ):
        hydra_tune.prepare(model, pool=pool, extra_state=extra)


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "5 min", datetime.timedelta(0)])
def test_what_is_no_interval_is_refused(tmp_path, every):
    with pytest.raises(hydra_tune.ConfigError, match="checkpoint_every is"):
        hydra_tune.HydraTrialRunner(checkpoint_dir=tmp_path, checkpoint_every=every)


def test_outside_of_a_runner_a_script_begins_at_its_first_step():
    assert hydra_tune.resume_step() == 0


@pytest.mark.parametrize("writes", [False, True])
def test_a_thread_of_the_objectives_own_that_fetches_ahead(writes, tmp_path):
    """It may ask for a batch while the model computes."""

    def train(prepare):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(70, 64), nn.GELU(), nn.Linear(64, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(160, 70), torch.randint(0, 5, (160,)))
        model, optimizer, loader = prepare(model, optimizer, DataLoader(data, batch_size=8))
        fetched = queue.Queue(2)

        def fetch():
            try:
                for batch in loader:
                    fetched.put(batch)
                fetched.put(None)
            except Exception as error:
                fetched.put(error)

        thread = threading.Thread(target=fetch, daemon=True)
        thread.start()
        while (batch := fetched.get()) is not None:
            if isinstance(batch, Exception):
                thread.join()
                raise batch
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        thread.join()
        return [p.detach().clone() for p in model.parameters()]

    found, expected = [], train(lambda *given: given)

    def objective(trial):
        found.append(train(hydra_tune.prepare))
        return 0.0

    with hydra_tune.ShardPool(["cpu"], "80KiB") as pool:
        runner = hydra_tune.HydraTrialRunner(pool, 2, checkpoint_dir=tmp_path if writes else None)
        runner.optimize(optuna.create_study(), objective, n_trials=4)
    assert len(found) == 4
    for weights in found:
        assert all(map(torch.equal, weights, expected))
