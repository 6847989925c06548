"""What only a GPU shows. Deterministic mode; the optimizer of a spilled trial steps on the host."""

import gc
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.utils.data import DataLoader

import hydra_tune
from hydra_tune.demo.gpt import GPT
from hydra_tune.devices.cuda_device import CudaDevice
from models import bytes_batch, gpt, loss_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
TOLERANCE = 2e-5  # AdamW on the host and on the device round differently; relative, after 6 steps


def train(pool, steps=6, dropout=0.1, epochs=1, make_optimizer=ADAMW, num_workers=0):
    torch.manual_seed(0)
    model = gpt(dropout)
    if pool is None:
        model.cuda()
    optimizer = make_optimizer(model.parameters())
    loader = DataLoader([bytes_batch() for _ in range(steps)], batch_size=None, num_workers=num_workers)
    if pool is not None:
        model, optimizer, loader = hydra_tune.prepare(model, optimizer, loader, pool=pool)
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            loss = loss_of(model, x.cuda(), y.cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    if pool is not None:
        hydra_tune.release(model)
    return losses, [p.detach().cpu() for p in model.parameters()]


def test_resident_equals_plain_cuda_bit_for_bit():
    with hydra_tune.ShardPool("cuda:0", "1GiB") as pool:
        losses, weights = train(pool)
        assert pool.report()["trials"][0]["resident"]
    plain_losses, plain_weights = train(None)
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=True))


def test_groups_and_states_stay_who_they_are_where_the_state_moves():
    torch.manual_seed(0)
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), foreach=False)
    x, y = bytes_batch()
    loss_of(model, x, y).backward()
    optimizer.step()
    p = model.get_parameter(next(name for name, _ in model.named_parameters()))
    group, rate, mean = optimizer.param_groups[0], optimizer.param_groups[0]["lr"], optimizer.state[p]["exp_avg"]
    with hydra_tune.ShardPool("cuda:0", "1GiB") as pool:
        hydra_tune.prepare(model, optimizer, pool=pool)
        loss_of(model, x.cuda(), y.cuda()).backward()
        assert p.device.type == mean.device.type == "cuda"
        hydra_tune.release(model)
    assert p.device.type == mean.device.type == "cpu"
    assert optimizer.param_groups[0] is group and group["lr"] is rate and optimizer.state[p]["exp_avg"] is mean


def test_spilled_equals_plain_cuda_within_tolerance_and_itself_bit_for_bit():
    runs = []
    for _ in range(2):
        with hydra_tune.ShardPool("cuda:0", "3MiB") as pool:
            runs.append(train(pool))
            assert not pool.report()["trials"][0]["resident"]
            assert pool.devices[0].used_bytes == 0
    (losses, weights), (losses_again, weights_again) = runs
    assert losses == losses_again
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_again, strict=True))
    plain_losses, plain_weights = train(None)
    assert losses[0] == plain_losses[0], "before the first step of an optimizer nothing differs"
    torch.testing.assert_close(losses, plain_losses, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(weights, plain_weights, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("width", "context", "steps", "budget"), [(128, 16, 10, "6MiB"), (1024, 256, 6, "500MiB")], ids=["small", "large"]
)
def test_company_equals_alone(width, context, steps, budget):
    """Large: copies of megabytes on every stream, while kernels of other trials run."""
    import optuna

    def run(concurrency):
        results = {}

        def objective(trial):
            torch.manual_seed(trial.number)
            model = GPT(8, width, 4, context, dropout=0.2)
            optimizer = torch.optim.AdamW(model.parameters())
            model, optimizer = hydra_tune.prepare(model, optimizer)
            losses = []
            for _ in range(steps):
                x, y = torch.randint(0, 128, (2, 2, context)).cuda()
                loss = loss_of(model, x, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            results[trial.number] = losses, [p.detach().clone() for p in model.parameters()]
            return losses[-1]

        with hydra_tune.ShardPool("cuda:0", budget) as pool:
            hydra_tune.HydraTrialRunner(pool, concurrency).optimize(optuna.create_study(), objective, n_trials=4)
            report = pool.report()
        assert not any(trial["resident"] for trial in report["trials"]), report
        assert pool.devices[0].used_bytes == 0
        return results

    together, alone = run(4), run(1)
    assert together.keys() == alone.keys() == set(range(4))
    for number, (losses, weights) in alone.items():
        assert together[number][0] == losses
        assert all(torch.equal(a, b) for a, b in zip(together[number][1], weights, strict=True))


def test_a_timeline_shows_what_the_gpu_did():
    """Tasks one after another, in less time than passed, and every promotion before its task."""
    with hydra_tune.ShardPool("cuda:0", "3MiB") as pool:
        train(pool)
        torch.cuda.synchronize()
        spans, elapsed_s = pool.timeline(), pool.report()["elapsed_s"]
    runs = [span for span in spans if span["kind"] == "run"]
    assert len(runs) > 20
    assert {span["kind"] for span in spans} >= {"run", "promote", "spill"}
    for before, after in pairwise(runs):
        assert before["end_s"] <= after["start_s"] + 1e-6
    assert 0 < sum(span["end_s"] - span["start_s"] for span in runs) < elapsed_s


@pytest.fixture
def room():
    """`room(n)`: from here on the allocator gives no more than n bytes beyond those in use."""
    total = torch.cuda.get_device_properties(0).total_memory

    def limit(num_bytes):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def train_large(steps=4):
    torch.manual_seed(0)
    model = GPT(8, 1024, 4, 256, dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters())
    with hydra_tune.ShardPool("cuda:0", "500MiB") as pool:
        hydra_tune.prepare(model, optimizer, pool=pool)
        losses = []
        for _ in range(steps):
            x, y = torch.randint(0, 128, (2, 4, 256)).cuda()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del loss
        assert not pool.report()["trials"][0]["resident"]
        (device,) = pool.report()["devices"]
    return losses, [p.detach().clone() for p in model.parameters()], device


def test_what_the_allocator_counts_stays_within_the_budget():
    train_large(1)  # cuBLAS keeps a workspace for each thread
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    *_, device = train_large()
    assert before < device["measured_peak_bytes"] <= before + device["peak_bytes"] <= before + device["budget_bytes"]


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_a_gpu_that_has_less_than_was_promised_changes_no_number(share, room, caplog):
    """What else is on it may have grown since: promotions and tasks run out of memory as CUDA tells it."""
    losses, weights, device = train_large()
    assert not caplog.records
    room(int(share * device["peak_bytes"]))
    losses_again, weights_again, _ = train_large()
    assert losses_again == losses
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_again, strict=True))
    assert "ran out of memory" in caplog.text


def test_auto_memory_leaves_a_margin():
    budget = hydra_tune.ShardPool().devices[0].budget_bytes
    assert 0 < budget < torch.cuda.get_device_properties(0).total_memory  # others may use the device now


@pytest.mark.parametrize("is_users", [True, False])
def test_a_promotion_waits_for_what_the_device_computes(is_users):
    """A buffer that a model makes anew in each call is there, where its block's others come from the host. Who promotes
    ahead does not know in which stream it is made."""
    device = CudaDevice(0, 1 << 20, torch.device("cuda", 0))
    slot = device.slot(None, 4096).view(torch.float32)
    made = torch.zeros(1024, device="cuda:0")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if is_users else torch.cuda.current_stream()):
        torch.cuda._sleep(1 << 28)  # cycles
        made.fill_(1.0)
    device.promote([(slot, made)])
    assert slot.eq(1.0).all()


@pytest.mark.parametrize("budget", ["1GiB", "30KiB"])
def test_a_release_waits_for_a_stream_of_the_users(budget):
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    before = model[1].bias.detach().clone()
    with hydra_tune.ShardPool("cuda:0", budget) as pool:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        hydra_tune.prepare(model, optimizer, pool=pool)
        with torch.cuda.stream(torch.cuda.Stream()):
            model(torch.ones(4, 32, device="cuda:0")).sum().backward()
            torch.cuda._sleep(1 << 28)  # cycles
            optimizer.step()
        hydra_tune.release(model)
    assert torch.equal(model[1].bias, before - 2.0)


@pytest.mark.parametrize("is_kept", [True, False])
def test_batches_are_where_the_model_is(is_kept):
    """Of a model that is released, or collected, on the host."""
    with hydra_tune.ShardPool("cuda:0", "1GiB") as pool:
        model, _, loader = hydra_tune.prepare(torch.nn.Linear(4, 4), None, [torch.ones(2, 4)], pool=pool)
        for x in loader:
            assert model(x).device.type == "cuda"
        if is_kept:
            hydra_tune.release(model)
            assert [model(x).device.type for x in loader] == ["cpu"]
        del model
        gc.collect()
        assert [x.device.type for x in loader] == ["cpu"]


def test_a_loader_may_give_each_batch_in_the_same_memory():
    """Pinned, from which copies are made while the host goes on."""
    memory = torch.empty(1 << 24, pin_memory=True)

    def batches():
        for number in range(4):
            yield memory.fill_(number)

    with hydra_tune.ShardPool("cuda:0", "1GiB") as pool:
        _, _, loader = hydra_tune.prepare(torch.nn.Linear(4, 4), None, batches(), pool=pool)
        torch.cuda._sleep(1 << 28)  # cycles
        assert [x.mean().item() for x in list(loader)] == [0, 1, 2, 3]


def test_memory_that_can_not_be_pinned_leaves_no_error_behind(caplog):
    """CUDA would tell it to who launches the next kernel."""
    with hydra_tune.ShardPool("cuda:0", "64MiB") as pool:
        device = pool.events.devices[0]
        buffer = torch.zeros(1 << 16, dtype=torch.uint8)
        device.pin(buffer)
        device.pin(buffer)  # once more
        assert "could not pin" in caplog.text
        assert torch.ones(4, device="cuda").sum() == 4
        device.unpin(buffer)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_what_is_copied_to_a_gpu_after_a_fork_is_what_the_optimizer_has_written():
    """Workers are forked anew for each epoch, while the weights are pinned."""
    how = {"steps": 4, "epochs": 3, "make_optimizer": partial(torch.optim.SGD, lr=0.125), "num_workers": 2}
    with hydra_tune.ShardPool("cuda:0", "3MiB") as pool:
        losses, weights = train(pool, **how)
        assert not pool.report()["trials"][0]["resident"]
    plain_losses, plain_weights = train(None, **how)
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=True))
