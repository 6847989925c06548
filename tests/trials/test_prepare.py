"""What `prepare` gives back, what it refuses, and how a prepared model behaves as an object."""

import copy
import gc
import io
import pickle
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hydra_tune
from comparison import assert_same
from models import bytes_batch, gpt, hf_gpt2, loss_of


@pytest.fixture
def pool():
    with hydra_tune.ShardPool(["cpu"], "3.6MiB") as pool:
        yield pool


def trained(pool, steps=2):
    torch.manual_seed(0)
    model = gpt()
    model, optimizer = hydra_tune.prepare(model, torch.optim.AdamW(model.parameters()), pool=pool)
    for _ in range(steps):
        loss_of(model, *bytes_batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_model_and_optimizer_come_back_as_the_same_objects(pool):
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters())
    loader = DataLoader(TensorDataset(torch.zeros(4)), batch_size=2)
    got = hydra_tune.prepare(model, optimizer, loader, pool=pool)
    assert got[0] is model
    assert got[1] is optimizer
    assert len(got[2]) == 2
    assert got[2].dataset is loader.dataset
    hydra_tune.release(model)
    assert hydra_tune.prepare(model, pool=pool) is model


def test_names_and_state_dict_are_those_of_the_plain_model_at_any_moment(pool):
    model, _ = trained(pool)
    plain = gpt()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert isinstance(model, type(plain))
    plain.load_state_dict(model.state_dict())
    x, y = bytes_batch()
    model.eval(), plain.eval()
    assert torch.equal(loss_of(model, x, y), loss_of(plain, x, y))
    torch.manual_seed(5)
    model.load_state_dict(gpt().state_dict())
    torch.manual_seed(5)
    plain.load_state_dict(gpt().state_dict())
    assert torch.equal(loss_of(model, x, y), loss_of(plain, x, y)), "what was loaded is what runs"


def test_saving_writes_the_weights_once_not_the_buffer_they_lie_in(pool):
    model, _ = trained(pool)
    file, plain = io.BytesIO(), io.BytesIO()
    torch.save(model.state_dict(), file)
    torch.save(gpt().state_dict(), plain)
    assert file.tell() <= plain.tell() * 1.01
    from safetensors.torch import save

    assert len(save(model.state_dict())) <= plain.tell()


@pytest.mark.sample(2)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
@pytest.mark.parametrize("budget", ["3MiB", "100MiB"], ids=["spilled", "resident"])
def test_copies_are_plain_and_independent(duplicate, budget):
    pool = hydra_tune.ShardPool(["cpu"], budget)
    model, optimizer = trained(pool)
    twin = duplicate(model).eval()
    x, y = bytes_batch()
    before = loss_of(twin, x, y)
    used = pool.report()["devices"][0]["busy_s"]
    loss_of(twin, x, y).backward()
    assert pool.report()["devices"][0]["busy_s"] == used, "the copy does not run in the pool"
    loss_of(model, x, y).backward()
    optimizer.step()
    assert torch.equal(loss_of(twin, x, y), before), "the original's step does not reach the copy"
    hydra_tune.release(model)
    hydra_tune.prepare(twin, pool=pool)
    assert torch.equal(loss_of(twin, x, y), before), "a copy can be prepared itself"
    hydra_tune.release(twin)


def test_release_makes_it_plain_again(pool):
    model, optimizer = trained(pool)
    hydra_tune.release(model)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert pool.devices[0].used_bytes == 0
    loss_of(model, *bytes_batch()).backward()
    optimizer.step()
    with pytest.raises(hydra_tune.PrepareError, match="not prepared"):
        hydra_tune.release(model)


def test_accumulation_adds_to_gradients_bit_for_bit(pool):
    def run(pool):
        torch.manual_seed(0)
        model = hf_gpt2()
        optimizer = torch.optim.AdamW(model.parameters())
        if pool is not None:
            model, optimizer = hydra_tune.prepare(model, optimizer, pool=pool)
        for _ in range(2):
            for _ in range(3):
                (loss_of(model, *bytes_batch()) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        if pool is not None:
            hydra_tune.release(model)
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(None), run(pool), strict=True))


@pytest.mark.parametrize("retain", [False, True], ids=["one backward of two forwards", "two backwards of one forward"])
def test_unusual_orders_of_forward_and_backward(pool, retain):
    def run(pool):
        torch.manual_seed(0)
        model = gpt()
        if pool is not None:
            hydra_tune.prepare(model, pool=pool)
        if retain:
            loss = loss_of(model, *bytes_batch())
            loss.backward(retain_graph=True)
            loss.backward()
        else:
            (loss_of(model, *bytes_batch()) + loss_of(model, *bytes_batch())).backward()
        loss_of(model, *bytes_batch())  # a step that is skipped
        loss_of(model, *bytes_batch()).backward()
        if pool is not None:
            hydra_tune.release(model)
        return [p.grad.clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(None), run(pool), strict=True))


@pytest.mark.parametrize("budget", ["7MiB", "100MiB"], ids=["spilled", "resident"])
def test_autocast_is_that_of_plain_pytorch(budget):
    def run(pool):
        torch.manual_seed(0)
        model = gpt()
        optimizer = torch.optim.AdamW(model.parameters())
        if pool is not None:
            model, optimizer = hydra_tune.prepare(model, optimizer, pool=pool)
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, *bytes_batch())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if pool is not None:
            hydra_tune.release(model)
        return [p.detach().clone() for p in model.parameters()]

    pool = hydra_tune.ShardPool(["cpu"], budget)
    assert all(torch.equal(a, b) for a, b in zip(run(None), run(pool), strict=True))


def test_hugging_face_caches_are_off_while_prepared(pool):
    model = hf_gpt2()
    assert model.config.use_cache
    hydra_tune.prepare(model, pool=pool)
    assert not model.config.use_cache
    assert model(torch.zeros(1, 4, dtype=torch.long)).past_key_values is None
    hydra_tune.release(model)
    assert model.config.use_cache


def test_a_config_that_models_were_made_of_says_what_it_did(pool):
    """Its cache stayed off where a model was collected, and in what was made of the config next."""
    config, others = hf_gpt2().config, []
    for end in ("collected", "refused"):
        model = nn.Sequential(nn.Linear(4, 4))
        model.config = config
        optimizer = torch.optim.SGD(model.parameters())
        if end == "refused":
            optimizer.register_step_post_hook = None  # which `prepare` calls last
            with pytest.raises(TypeError):
                hydra_tune.prepare(model, optimizer, pool=pool)
            assert model.config.use_cache
        else:
            hydra_tune.prepare(model, optimizer, pool=pool)
            assert config.use_cache and not model.config.use_cache
            others.append(optimizer)  # has hooks of the trial's
        del model, optimizer
        gc.collect()
        assert config.use_cache


def test_parts_of_a_model_that_have_one_config_have_one_still(pool):
    inner = SimpleNamespace(use_cache=True)
    outer = SimpleNamespace(use_cache=True, inner=inner)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.config, model[0].config, model[1].config = outer, inner, inner
    hydra_tune.prepare(model, pool=pool)
    assert model.config.inner is model[0].config is model[1].config is not inner
    assert not model.config.use_cache and not model[0].config.use_cache
    hydra_tune.release(model)
    assert model.config == outer and outer.use_cache and inner.use_cache


# ---- what a first user's tests found ----


def compared(build, step, budget, steps=4):
    """(losses, weights, gradients) of plain PyTorch and of a pool, `step(model, i)` giving the loss."""
    results = []
    for pool in (None, hydra_tune.ShardPool(["cpu"], budget)):
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if pool is not None:
            model, optimizer = hydra_tune.prepare(model, optimizer, pool=pool)
        losses, grads = [], []
        for i in range(steps):
            loss = step(model, i)
            loss.backward()
            grads += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if pool is not None:
            hydra_tune.release(model)
            assert pool.devices[0].used_bytes == 0
        results.append((losses, [p.detach().clone() for p in model.parameters()], grads))
    return results


def deep():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(7)), nn.Linear(64, 4))


@pytest.mark.parametrize("budget", [78_000, "8MiB"], ids=["spilled", "resident"])
def test_layers_may_be_unfrozen_between_steps(budget):
    """Blocks that were frozen when the pilot ran got no gradient ever after, without a word."""

    def step(model, i):
        for p in model[:3].parameters():
            p.requires_grad_(i >= 2)
        return nn.functional.cross_entropy(model(torch.randn(8, 64)), torch.arange(8) % 4)

    assert_same(*compared(deep, step, budget))


@pytest.mark.parametrize("budget", [150_000, "8MiB"], ids=["spilled", "resident"])
def test_batches_may_grow(budget):
    """A resident model measured its second pilot on unwrapped blocks, and was refused."""

    def step(model, i):
        x = torch.randn((8, 3, 12, 16)[i], 64)
        return nn.functional.cross_entropy(model(x), torch.arange(len(x)) % 4)

    assert_same(*compared(deep, step, budget))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 96)
        self.layers = nn.ModuleList([nn.LSTM(96, 96, batch_first=True) for _ in range(4)])
        self.head = nn.Linear(96, 32)

    def forward(self, x):
        h = self.embedding(x)
        for lstm in self.layers:
            h, _ = lstm(h)
        return self.head(h)


def test_a_lstm_runs_the_operators_of_training_in_its_forward_too():
    """oneDNN's LSTM differs in the last bit where no gradient is asked for."""

    def step(model, i):
        x = torch.randint(0, 32, (4, 10))
        return nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())

    assert_same(*compared(Recurrent, step, 1_300_000))


@pytest.mark.parametrize("budget", [150_000, "8MiB"], ids=["spilled", "resident"])
def test_inference_mode_evaluates_before_and_between_steps(budget):
    def step(model, i):
        with torch.inference_mode():
            x = torch.randn(8, 64)
            value = model(x).sum().item()
        loss = nn.functional.cross_entropy(model(torch.randn(8, 64)), torch.arange(8) % 4)
        return loss + value

    assert_same(*compared(deep, step, budget))


def test_a_model_may_be_made_anew_in_one_thread_while_its_loss_is_kept(pool):
    """As a notebook does whose cell is run again, or a loop over folds."""
    for _ in range(3):
        model = gpt()
        loader = DataLoader(TensorDataset(*bytes_batch()), batch_size=2)
        model, optimizer, loader = hydra_tune.prepare(model, torch.optim.SGD(model.parameters()), loader, pool=pool)
        for x, y in loader:
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
    assert sum(t["state"] == "live" for t in pool.report()["trials"]) == 1
    hydra_tune.release(model)
    assert pool.devices[0].used_bytes == 0


def test_a_plan_does_not_depend_on_the_checks(monkeypatch):
    """Without them a plain script's pilot measured no operator, and its plan had no room to compute."""
    plans = []
    for checks in ("0", "1"):
        monkeypatch.setenv("HYDRA_TUNE_CHECKS", checks)
        pool = hydra_tune.ShardPool(["cpu"], "3MiB")
        model = hydra_tune.prepare(gpt(), pool=pool)
        loss_of(model, *bytes_batch()).backward()
        plans.append([(s["slot_bytes"], s["backward_work_bytes"]) for s in pool.report()["trials"][0]["shards"]])
        hydra_tune.release(model)
    assert plans[0] == plans[1]
    assert min(work for _, work in plans[0]) > 0


# ---- loaders ----


class Curriculum:
    """Batches that depend on its epoch."""

    epoch = 0

    def __iter__(self):
        return (torch.full((2, 4), float(self.epoch)) for _ in range(2))

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return list(self)[i]


def loaders_of(pool, *loaders):
    return hydra_tune.prepare(nn.Linear(4, 4), None, *loaders, pool=pool)[2:]


def test_what_is_set_on_a_prepared_loader_reaches_the_loader(pool):
    """An epoch stayed on the wrapper: each epoch had the batches of the first, without a word."""
    loader = Curriculum()
    (prepared,) = loaders_of(pool, loader)
    prepared.epoch = 3
    assert loader.epoch == 3 and vars(prepared) == {"epoch": 3}
    assert [x[0, 0].item() for x in prepared] == [3, 3]
    (again,) = hydra_tune.prepare(nn.Linear(4, 4), None, prepared, pool=hydra_tune.ShardPool(["cpu"], "1MiB"))[2:]
    again.epoch = 4
    assert again[1][0, 0] == loader.epoch == 4


class Encoding(UserDict):
    """A batch that moves itself, as tokenizers give them."""

    def to(self, device):
        self.device = device
        return self


def test_batches_that_can_move_themselves_do(pool):
    batch = {"inputs": Encoding(ids=torch.zeros(4)), "label": "a"}
    (prepared,) = loaders_of(pool, [batch])
    (got,) = prepared
    assert got["inputs"] is batch["inputs"] and got["inputs"].device == torch.device("cpu") and got["label"] == "a"


def test_a_prepared_loader_is_used_as_the_plain_one(pool):
    data = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    batches = (torch.full((1, 4), float(i)) for i in range(3))
    prepared, stream, curriculum, empty = loaders_of(pool, data, batches, Curriculum(), [])
    assert isinstance(prepared, DataLoader) and not isinstance(stream, DataLoader)
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        prepared.batch_size = 3
    assert bool(prepared) and bool(stream) and not empty
    assert next(stream)[0, 0] == 0 and [x[0, 0].item() for x in stream] == [1, 2]
    assert curriculum[0].shape == (2, 4)
    for without, what in ((stream, len), (prepared, next), (prepared, lambda x: x[0])):
        with pytest.raises(TypeError):
            what(without)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "deepcopy", "pickle"]
)
def test_a_copy_of_a_prepared_loader_is_a_plain_one_and_its_own(duplicate, pool):
    data = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    prepared, curriculum, listed = loaders_of(pool, data, Curriculum(), [torch.ones(2)])
    twin = duplicate(prepared)
    assert type(twin) is DataLoader and [x.tolist() for (x,) in twin] == [[0, 1], [2, 3], [4, 5]]
    twin = duplicate(curriculum)
    twin.epoch = 5
    assert type(twin) is Curriculum and curriculum.epoch == 0
    assert type(duplicate(listed)) is list and torch.equal(duplicate(listed)[0], listed[0])


def test_an_epoch_goes_on_after_a_sample_that_fails(pool):
    class Corrupt(list):
        def __getitem__(self, i):
            if i == 1:
                raise KeyError("corrupt")
            return super().__getitem__(i)

    def seen(loader):
        batches, left = iter(loader), []
        assert len(batches) == 2
        while True:
            try:
                left.append(next(batches).tolist())
            except KeyError:
                left.append("corrupt")
            except StopIteration:
                return left

    loader = DataLoader(Corrupt([torch.tensor(i) for i in range(4)]), batch_size=2)
    (prepared,) = loaders_of(pool, loader)
    assert seen(prepared) == seen(loader) == ["corrupt", [2, 3]]


def test_a_loader_draws_its_seed_when_it_is_asked_for_an_iterator(pool):
    """It did at the first batch, so that what was drawn in between was otherwise."""

    def drawn(loader):
        torch.manual_seed(0)
        batches = iter(loader)
        return torch.rand(2).tolist(), [x.tolist() for (x,) in batches], torch.rand(2).tolist()

    data = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2, shuffle=True)
    (prepared,) = loaders_of(pool, data)
    assert drawn(prepared) == drawn(data)


# ---- refusals, each by its words ----


def test_misuse_is_refused_with_a_way_out(pool):
    model, other = gpt(), gpt()
    with pytest.raises(hydra_tune.PrepareError, match="holds none of them"):
        hydra_tune.prepare(model, torch.optim.SGD(other.parameters()), pool=pool)
    with pytest.raises(hydra_tune.PrepareError, match="optimizer or None"):
        hydra_tune.prepare(model, [1, 2], pool=pool)
    with pytest.raises(hydra_tune.PrepareError, match="first argument is the model"):
        hydra_tune.prepare(other.parameters(), pool=pool)
    with torch.device("meta"), pytest.raises(hydra_tune.PrepareError, match="on meta"):
        hydra_tune.prepare(gpt(), pool=pool)
    hydra_tune.prepare(model, pool=pool)
    with pytest.raises(hydra_tune.PrepareError, match="prepared already"):
        hydra_tune.prepare(model, pool=pool)
    pool.close()
    with pytest.raises(hydra_tune.PoolClosedError, match="closed pool"):
        hydra_tune.prepare(other, pool=pool)
    hydra_tune.release(model)


NO_LOADERS = {
    "an optimizer": (lambda o: torch.optim.SGD(o.param_groups[0]["params"]), r"argument 4 is a SGD.*use it as it is"),
    "a schedule": (lambda o: torch.optim.lr_scheduler.StepLR(o, 1), r"argument 4 is a StepLR.*extra_state="),
    "a plateau": (lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o), r"a ReduceLROnPlateau.*extra_state="),
    "a scaler": (lambda _: torch.amp.GradScaler("cpu"), r"a GradScaler.*extra_state="),
    "a model": (lambda _: nn.Sequential(nn.Linear(4, 4)), r"argument 4 is a Sequential.*takes one model"),
    "a loss": (lambda _: nn.MSELoss(), r"argument 4 is a MSELoss.*use it as it is"),
    "a function": (lambda _: lambda: torch.ones(2, 4), r"argument 4 is a function.*Leave it out"),
    "nothing": (lambda _: None, r"argument 4 is a NoneType.*Leave it out"),
}


@pytest.mark.parametrize(("make", "words"), NO_LOADERS.values(), ids=NO_LOADERS)
def test_what_gives_no_batches_is_refused_as_a_loader(make, words, pool):
    """An optimizer or a schedule, as accelerate takes them, came back as a loader around it, without a word."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = make(optimizer)
    with pytest.raises(hydra_tune.PrepareError, match=words):
        hydra_tune.prepare(model, optimizer, [torch.ones(2, 4)], given, pool=pool)
    assert not pool.report()["trials"]


@pytest.mark.parametrize("budget", [100_000, "1MiB"], ids=["spilled", "resident"])
@pytest.mark.parametrize("shared", ["the model", "a block of it", "within a block"])
def test_a_weight_is_in_one_prepared_model(shared, budget):
    """In another pool a model around a prepared one was accepted; then neither could be called or released."""
    inner = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64)) for _ in range(4)])
    parts = {"the model": inner, "a block of it": inner[0], "within a block": inner[0][0]}
    outer = nn.Sequential(nn.Linear(64, 64), parts[shared])
    pool = hydra_tune.ShardPool(["cpu"], budget)
    hydra_tune.prepare(inner, pool=pool)
    for called in (False, True):
        if called:
            inner(torch.ones(2, 64)).sum().backward()
        with pytest.raises(hydra_tune.PrepareError, match=r"is also in a Sequential that is prepared already.*release"):
            hydra_tune.prepare(outer, pool=hydra_tune.ShardPool(["cpu"], "1MiB"))
    assert pool.report()["trials"][0]["resident"] == (budget == "1MiB")
    hydra_tune.release(inner)
    hydra_tune.release(hydra_tune.prepare(outer, pool=pool))


def test_what_cannot_be_exact_in_backward_says_so(pool):
    model, _ = trained(pool)
    loss = loss_of(model, *bytes_batch())
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        loss.backward()
    loss = loss_of(model, *bytes_batch())
    hydra_tune.release(model)
    with pytest.raises(hydra_tune.PrepareError, match="backward came too late"):
        loss.backward()
