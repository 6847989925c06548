"""What counts as a device's bytes, when a virtual device is full, and which tensors may meet in an operator."""

import threading

import optuna
import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune.errors import MixedDevicesError
from hydra_tune.meter import DeviceOutOfMemoryError, Meter, TrialMeter
from hydra_tune.mode import TrialMode
from models import mlp

WAIT_S = 20  # for the other trial; only a failed test ever waits so long


@pytest.fixture
def meters():
    return Meter("left", 1000, enforce=True), Meter("right", 1000, enforce=True)


@pytest.fixture
def pair(meters):
    """Forty bytes on either device."""
    tensors = torch.ones(10), torch.ones(10)
    for meter, tensor in zip(meters, tensors, strict=True):
        meter.add(0, [tensor])
    return tensors


def on(meter, trial=0):
    """In it operators run as in a trial whose home is this device."""
    return TrialMode(meter=TrialMeter(meter, trial, always=True))


# ---- bytes ----


def test_storages_count_once_while_they_live_and_one_too_many_is_refused(meters):
    meter, _ = meters
    a = torch.zeros(100)
    meter.add(0, [a, a[:10], a.view(10, 10)])
    assert meter.live_bytes == 400
    b = torch.zeros(150)
    meter.add(1, [b])
    with pytest.raises(DeviceOutOfMemoryError, match=r"left holds 1000 B and was asked for 4 B more") as error:
        meter.add(1, [torch.zeros(1)])
    assert isinstance(error.value, torch.OutOfMemoryError), "as a GPU's"
    del a
    assert (meter.live_bytes, meter.trial_bytes[0], meter.peak_bytes) == (600, 0, 1000)
    meter.end_trial(1)
    assert meter.live_bytes == 0


def test_an_operator_on_the_device_makes_device_bytes_unless_it_is_a_view_or_in_place(pair, meters):
    x, meter = pair[0], meters[0]
    with on(meter):
        y = x * 2
        assert meter.live_bytes == 80
        z = y.view(2, 5).t()[1:]
        y += 1
        x.mul_(y)
        assert meter.live_bytes == 80
        del y
        assert meter.live_bytes == 80, "a view keeps its storage"
        del z
        assert meter.live_bytes == 40
        with pytest.raises(DeviceOutOfMemoryError):
            x.repeat(25)
        host = torch.ones(500)
        host += 1
        assert meter.live_bytes == 40, "host memory is free"


@pytest.mark.parametrize(
    "enlarge",
    [
        lambda x, empty: torch.cat([x, x], out=empty),
        lambda x, empty: empty.resize_(20),
        lambda x, empty: x.resize_(20),
    ],
    ids=["out", "resize_ of nothing", "resize_"],
)
def test_what_an_operator_enlarges_counts(enlarge, pair, meters):
    x, meter = pair[0], meters[0]
    with on(meter):
        empty = x.new_empty(0)
        before = meter.live_bytes
        enlarge(x, empty)
        assert meter.live_bytes - before == (40 if x.numel() == 20 else 80)
        with pytest.raises(DeviceOutOfMemoryError):
            empty.resize_(1000)


def test_a_copy_to_the_host_takes_no_device_bytes(pair, meters):
    """A buffer for predictions, filled with slices, was counted: out of memory where no GPU is."""
    predictions = torch.zeros(1000, 10)
    with on(meters[0]):
        predictions[3] = pair[0]
        torch._foreach_copy_([predictions[4]], [pair[0]])
    assert meters[0].live_bytes == 40


def test_a_sparse_gradient_counts_its_indices_and_values(meters):
    """The meter raised NotImplementedError: no model with a sparse embedding got past its pilot."""
    table, meter = nn.Embedding(20, 4, sparse=True), meters[0]
    meter.add(0, [table.weight])
    with on(meter):
        table(torch.tensor([1, 2])).sum().backward()
    assert table.weight.grad.layout is torch.sparse_coo
    assert meter.live_bytes == 20 * 4 * 4 + 2 * 8 + 2 * 4 * 4
    table.weight.grad = None
    assert meter.live_bytes == 20 * 4 * 4


class Scaled(nn.Linear):
    def forward(self, x, by):
        return super().forward(x) * torch.sparse.mm(by, torch.ones(1000, 1)).sum()


class ScaledBy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Scaled(64, 64) for _ in range(6))

    def forward(self, x, by):
        for layer in self.layers:
            x = layer(x, by)
        return x


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_argument_counts_its_indices_and_values(layout):
    """A plan had room for all its zeros: four megabytes."""
    by = torch.sparse_coo_tensor([[3], [5]], [1.0], (1000, 1000), check_invariants=False).to_sparse(layout=layout)
    with hydra_tune.ShardPool(["cpu"], "100KiB") as pool:
        model = hydra_tune.prepare(ScaledBy(), pool=pool)
        for _ in range(2):
            model(torch.ones(4, 64), by).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("budget", [70_000, "1MiB"], ids=["spilled", "resident"])
def test_batches_may_be_views_of_a_data_set_larger_than_the_device(budget):
    """Its whole storage was counted, though a GPU gets a copy of the batch alone."""
    data = torch.randn(10_000, 64)
    with hydra_tune.ShardPool(["cpu"], budget) as pool:
        model = hydra_tune.prepare(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), pool=pool)
        for i in range(2):
            model(data[8 * i : 8 * i + 8]).sum().backward()
        hydra_tune.release(model)
        assert pool._devices[0].meter.live_bytes == 0


def test_a_trial_that_keeps_more_than_it_reserved_is_out_of_memory_and_others_go_on():
    def objective(trial):
        model = hydra_tune.prepare(mlp())
        kept = []
        for _ in range(40):
            with torch.no_grad():
                out = model(torch.randn(4, 128))
            if trial.number == 0:
                kept.append(out.repeat(1, 200))
        return 0.0

    with hydra_tune.ShardPool(["cpu"], "300KiB") as pool:
        study = optuna.create_study()
        runner = hydra_tune.HydraTrialRunner(pool, concurrency=1)
        runner.optimize(study, objective, n_trials=2, catch=(torch.OutOfMemoryError,))
        assert [t.state.name for t in study.trials] == ["FAIL", "COMPLETE"]
        assert pool.devices[0].used_bytes == pool._devices[0].meter.live_bytes == 0


# ---- devices ----


@pytest.mark.parametrize(
    "operator",
    [
        lambda a, b: a + b,
        lambda a, b: a.add_(b),
        lambda a, b: torch.dot(a, b),
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.where(a > 0, b, 0.0),
        lambda a, b: a.view(2, 5)[1] + (b * 2)[:5],
        lambda a, b: torch.mul(a, 2, out=b),
    ],
    ids=["add", "in place", "dot", "list", "three", "views and results", "out"],
)
def test_tensors_of_two_devices_do_not_meet(operator, pair, meters):
    before = [t.clone() for t in pair]
    words = r"on the same device, but found at least two devices, (left and right|right and left)! \(in aten\..*trial 7"
    with on(meters[0], trial=7), pytest.raises(MixedDevicesError, match=words) as error:
        operator(*pair)
    assert isinstance(error.value, RuntimeError), "as PyTorch's"
    assert all(torch.equal(a, b) for a, b in zip(pair, before, strict=True)), "nothing was computed"


def test_devices_of_two_pools_are_told_apart_where_they_have_one_name():
    meters = [Meter("cpu:0", 1000, enforce=True) for _ in range(2)]
    tensors = torch.ones(10), torch.ones(10)
    for meter, tensor in zip(meters, tensors, strict=True):
        meter.add(0, [tensor])
    with on(meters[0]), pytest.raises(MixedDevicesError, match="cpu:0 and cpu:0 of another pool"):
        tensors[0] + tensors[1]


def test_copies_cross_devices_and_belong_where_they_arrive(pair, meters):
    left, right = pair
    with on(meters[0]):
        left.copy_(right)
        assert [m.live_bytes for m in meters] == [40, 40]
        arrived = right.to("cpu", copy=True)
        assert [m.live_bytes for m in meters] == [80, 40]
        assert torch.equal(left + arrived, right.to(torch.float64) * 2)
        with pytest.raises(MixedDevicesError):
            right + arrived


def test_what_is_computed_on_another_device_lies_there(pair, meters):
    left, right = pair
    with on(meters[0]):
        doubled = right * 2
        assert [m.live_bytes for m in meters] == [40, 80]
        with pytest.raises(MixedDevicesError):
            left + doubled


def test_scalars_and_host_memory_go_with_every_device(pair, meters):
    left, right = pair
    with on(meters[0]):
        assert (left * right.sum())[0] == 10
        assert left.sum() + right.sum() == 20
        assert ((left + torch.ones(10)) == 2).all()


def test_a_tensor_on_both_devices_goes_with_either(pair, meters):
    """A batch that two trials took from one data set: on GPUs each has a copy."""
    left, right = pair
    batch = torch.ones(100)[:10]
    for meter in meters:
        meter.add(0, [batch], as_copies=True)
    with on(meters[0]):
        left + batch[:10]
        right + batch
        with pytest.raises(MixedDevicesError):
            torch.addcmul(batch, left, right)
    meters[0].end_trial(0)
    meters[0].add(1, [left])
    with on(meters[1]), pytest.raises(MixedDevicesError):
        left + batch


def test_a_freed_storage_is_of_no_device(pair, meters):
    left, _ = pair
    meters[1].end_trial(0)
    for _ in range(100):  # the allocator gives the same addresses again
        other = torch.ones(10)
        meters[1].add(1, [other])
        del other
        with on(meters[0]):
            left + torch.ones(10)
    assert meters[1].live_bytes == 0


def test_without_checks_nothing_is_refused(pair, meters):
    with TrialMode(meter=TrialMeter(meters[0], 0, always=False)) as mode:
        mode.meter.counting = True  # as in a pilot
        assert (pair[0] + pair[1] == 2).all()


@pytest.mark.parametrize("budget", ["300KiB", "8MiB"], ids=["spilled", "resident"])
def test_a_trial_that_uses_a_tensor_of_another_device_is_told(budget):
    outputs, messages, meet = {}, [], threading.Barrier(2, timeout=WAIT_S)
    data = torch.randn(4, 128)

    def objective(trial):
        model = hydra_tune.prepare(mlp())
        outputs[trial.number] = own = model(data).detach()
        meet.wait()
        other = outputs[1 - trial.number]
        with pytest.raises(MixedDevicesError) as error:
            own + other
        messages.append(str(error.value))
        assert torch.equal(own + other.to("cpu", copy=True), own.clone().copy_(other) + own)
        meet.wait()
        return (own.sum() + other.sum()).item()

    with hydra_tune.ShardPool(["cpu", "cpu"], budget) as pool:
        study = optuna.create_study()
        hydra_tune.HydraTrialRunner(pool, concurrency=2).optimize(study, objective, n_trials=2)
    assert [t.state.name for t in study.trials] == ["COMPLETE"] * 2
    assert all("cpu:0 (virtual)" in m and "cpu:1 (virtual)" in m for m in messages), messages
    assert len(messages) == 2


def test_what_is_outside_of_visits_is_counted_apart():
    meter = TrialMeter(Meter("cpu:0", 1_000, enforce=True), 0, always=False)
    kept = [torch.zeros(25)]
    meter.observe(meter.meter, kept)
    meter.watch_outside()
    for size in (25, 25, 1, 1):
        kept.append(torch.zeros(size))
        meter.outside_ends()
        visited = torch.zeros(50)
        meter.observe(meter.meter, [visited])
        del visited
        meter.outside_starts()
        meter.observe(meter.meter, kept[-1:])
    assert meter.outside_peak() == 208


def test_a_limit_is_one_trials():
    meter = Meter("cpu:0", 1_000, enforce=True)
    first, second = (TrialMeter(meter, number, always=False) for number in range(2))
    first.limit(100)
    kept = [torch.zeros(30), torch.zeros(25)]
    second.observe(meter, kept[:1])
    first.observe(meter, kept[1:])
    with pytest.raises(torch.OutOfMemoryError):
        first.observe(meter, [torch.zeros(1)])
    first.limit(None)
    first.observe(meter, [torch.zeros(1)])
