"""Devices, budgets, and what memory="auto" means."""

import psutil
import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune.devices import cuda_device
from hydra_tune.devices import open_devices as devices
from hydra_tune.devices.device import Device
from hydra_tune.devices.open_devices import host_free_bytes


def test_auto_memory_on_the_cpu_is_a_quarter_of_what_is_left(monkeypatch):
    monkeypatch.setattr(devices, "host_free_bytes", lambda: 800 << 20)
    assert hydra_tune.ShardPool("cpu").devices[0].budget_bytes == 200 << 20
    assert [d.budget_bytes for d in hydra_tune.ShardPool(["cpu", "cpu"]).devices] == [100 << 20] * 2


def test_the_cgroup_limits_what_is_left(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 50\n")
    monkeypatch.setattr(devices, "cgroup_folders", lambda: [tmp_path])
    assert host_free_bytes() == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert host_free_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


@pytest.mark.parametrize(
    ("devices", "memory", "words"),
    [
        ("tpu", "1MiB", "or one of the"),
        (["cpu", "cuda:99"], "1MiB", "cuda:99"),
        ([], "1MiB", "a name or a list of names"),
        (["cpu", "cpu"], ["1MiB"], "1 entries for 2 devices"),
        ("cpu", "1000TiB", "at most what is free"),
        ("cpu", "some", "positive number of bytes"),
        ("cpu", 1.5, "positive number of bytes"),
        (3, "1MiB", "a name or a list of names"),
    ],
)
def test_pools_that_cannot_be_are_refused(devices, memory, words):
    with pytest.raises(hydra_tune.ConfigError, match=words):
        hydra_tune.ShardPool(devices, memory)


def test_each_device_may_have_its_own_budget():
    pool = hydra_tune.ShardPool(["cpu", "cpu"], ["1MiB", 2048])
    assert [d.budget_bytes for d in pool.devices] == [1 << 20, 2048]
    assert [d.used_bytes for d in pool.devices] == [0, 0]


def test_a_freed_slot_is_poisoned():
    device = Device(0, 4096)
    slot = device.slot(1024, 512)
    device.promote([(slot, torch.zeros(512, dtype=torch.uint8))])
    assert (slot == 0).all()
    device.free_slot(1024, 512)
    assert slot.view(torch.float32).isnan().all(), "a use after spill shows as NaN"


def test_a_report_is_plain_data():
    import json

    report = hydra_tune.ShardPool(["cpu"], "1MiB").report()
    assert json.loads(json.dumps(report)) == report
    expected = {"budget_bytes", "used_bytes", "peak_bytes", "promoted_bytes", "spilled_bytes", "dropped_bytes"}
    assert expected | {"busy_s", "stalled_s"} <= report["devices"][0].keys()


class Stream:
    """Of a GPU; notes what it waits for."""

    def __init__(self):
        self.waits = []

    def wait_event(self, event):
        self.waits.append(event)

    def wait_stream(self, stream):
        self.waits.append(stream)


def test_a_gpus_slot_is_given_on_once_its_last_use_is_waited_for():
    """Also where its model was collected, which then says nothing: the slot is kept until the scheduler drops it."""
    gpu = object.__new__(cuda_device.CudaDevice)
    gpu._h2d = Stream()
    gpu._riders = Stream()
    gpu.synchronize = lambda: gpu._h2d.wait_stream("all that was launched")
    slots = gpu._slots = {0: torch.zeros(1), 64: torch.zeros(1)}
    gpu.retire(slots[0], "its last visit")
    assert gpu._h2d.waits == ["its last visit"]
    gpu.free_slot(0, 64)
    assert gpu._h2d.waits == ["its last visit"]
    assert list(slots) == [64]
    gpu.free_slot(64, 64)
    assert gpu._h2d.waits[1:] == ["all that was launched"]
    assert not slots


def test_a_script_may_have_any_default_device():
    """What a pool makes in host memory is there; a default device in which nothing computes shows it."""

    def train(prepares):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(4, 32)
        if prepares:
            model, optimizer = hydra_tune.prepare(model, optimizer, pool=pool)
        with torch.device("meta"):
            for _ in range(3):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    with hydra_tune.ShardPool(["cpu"], "20KiB") as pool:
        assert all(map(torch.equal, train(prepares=True), train(prepares=False)))
