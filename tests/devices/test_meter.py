"""What counts as a device's bytes, and when a virtual device is full."""

import optuna
import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune.devices.counting_mode import TrialMode
from hydra_tune.devices.device import Device
from hydra_tune.devices.meter import TrialMeter, end_trial
from models import mlp


@pytest.fixture
def devices():
    return Device(0, 1000), Device(1, 1000)


@pytest.fixture
def pair(devices):
    """Forty bytes on either device."""
    tensors = torch.ones(10), torch.ones(10)
    for device, tensor in zip(devices, tensors, strict=True):
        TrialMeter(device, 0).add([tensor])
    return tensors


def on(device, trial=0):
    """In it operators run as in a trial whose home is this device."""
    return TrialMode(meter=TrialMeter(device, trial, always=True))


# ---- bytes ----


def test_storages_count_once_while_they_live_and_one_too_many_is_refused(devices):
    device, _ = devices
    first, second = TrialMeter(device, 0), TrialMeter(device, 1)
    a = torch.zeros(100)
    first.add([a, a[:10], a.view(10, 10)])
    assert device.live_bytes == 400
    b = torch.zeros(150)
    second.add([b])
    with pytest.raises(torch.OutOfMemoryError, match=r"cpu:0 .* holds 1000 B and was asked for 4 B more") as error:
        second.add([torch.zeros(1)])
    assert isinstance(error.value, torch.OutOfMemoryError), "as a GPU's"
    del a
    assert (device.live_bytes, first.trial_bytes, device.most_live_bytes) == (600, 0, 1000)
    end_trial(1, [device])
    assert device.live_bytes == 0


def test_an_operator_on_the_device_makes_device_bytes_unless_it_is_a_view_or_in_place(pair, devices):
    x, device = pair[0], devices[0]
    with on(device):
        y = x * 2
        assert device.live_bytes == 80
        z = y.view(2, 5).t()[1:]
        y += 1
        x.mul_(y)
        assert device.live_bytes == 80
        del y
        assert device.live_bytes == 80, "a view keeps its storage"
        del z
        assert device.live_bytes == 40
        with pytest.raises(torch.OutOfMemoryError):
            x.repeat(25)
        host = torch.ones(500)
        host += 1
        assert device.live_bytes == 40, "host memory is free"


def test_a_copy_to_the_host_takes_no_device_bytes(pair, devices):
    """A buffer for predictions, filled with slices, was counted: out of memory where no GPU is."""
    predictions = torch.zeros(1000, 10)
    with on(devices[0]):
        predictions[3] = pair[0]
        torch._foreach_copy_([predictions[4]], [pair[0]])
    assert devices[0].live_bytes == 40


def test_a_sparse_gradient_counts_its_indices_and_values(devices):
    """The meter raised NotImplementedError: no model with a sparse embedding got past its pilot."""
    table, device = nn.Embedding(20, 4, sparse=True), devices[0]
    TrialMeter(device, 0).add([table.weight])
    with on(device):
        table(torch.tensor([1, 2])).sum().backward()
    assert table.weight.grad.layout is torch.sparse_coo
    assert device.live_bytes == 20 * 4 * 4 + 2 * 8 + 2 * 4 * 4
    table.weight.grad = None
    assert device.live_bytes == 20 * 4 * 4


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
        assert pool.events.devices[0].live_bytes == 0


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
        assert pool.devices[0].used_bytes == pool.events.devices[0].live_bytes == 0


def test_what_two_trials_have_counts_for_the_first_until_that_ends(devices):
    """A batch that both took from one data set."""
    batch, (left, right) = torch.ones(100)[:10], devices
    of_left, of_right = TrialMeter(left, 0), TrialMeter(right, 1)
    for trial in (of_left, of_right):
        trial.adopt([batch])
    assert [m.live_bytes for m in devices] == [40, 0]
    with on(right, trial=1) as mode:
        doubled = batch * 2
        assert mode.meter.trial_bytes == doubled.nbytes == right.live_bytes
    end_trial(0, [left])
    of_right.adopt([batch])
    assert [m.live_bytes for m in devices] == [0, 80]


def test_a_trials_bytes_move_with_its_home(devices):
    left, right = devices
    trial, kept = TrialMeter(left, 0), torch.ones(10)
    trial.add([kept])
    trial.move(right)
    assert [m.live_bytes for m in devices] == [0, 40]
    del kept
    assert right.live_bytes == trial.trial_bytes == 0


def test_what_is_outside_of_visits_is_counted_apart():
    meter = TrialMeter(Device(0, 1_000), 0, always=False)
    kept = [torch.zeros(25)]
    meter.add(kept)
    meter.watch_outside()
    for size in (25, 25, 1, 1):
        kept.append(torch.zeros(size))
        meter.outside_ends()
        visited = torch.zeros(50)
        meter.add([visited])
        del visited
        meter.outside_starts()
        meter.add(kept[-1:])
    assert meter.outside_peak() == 208
