"""What `hydra-tune doctor` finds: on this machine, and on machines that are made of fakes."""

import io
import json
import os
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rich.console import Console

from hydra_tune.devices import open_devices, torch_build
from hydra_tune.devices.device import Device
from hydra_tune.devices.nvml import NvmlReading, read_nvml
from hydra_tune.devices.torch_build import TorchBuild, TorchGpu, read_torch
from hydra_tune.doctor import copies, examination, host, versions
from hydra_tune.doctor.copies import DeviceRates, copy_findings
from hydra_tune.doctor.examination import examine
from hydra_tune.doctor.finding import Finding, exit_status, summary
from hydra_tune.doctor.gpus import gpu_findings
from hydra_tune.doctor.host import Host, host_findings
from hydra_tune.doctor.table import table

GIB = 1 << 30
UUID, INSTANCE, OTHER = "aaaa-1", "bbbb-2", "cccc-3"
CPU_BUILD = TorchBuild("2.13.0+cpu", None, None)
CUDA_BUILD = TorchBuild("2.13.0+cu126", "12.6", None)
WITH_GPU = replace(CUDA_BUILD, gpus=(TorchGpu("NVIDIA T9", UUID, 24 * GIB),))
NO_DRIVER = NvmlReading(error="NVML Shared Library Not Found", cause="driver")


class FakeNvml(ModuleType):
    """The module `pynvml`, of a machine with these cards. What a card does not have it does not support."""

    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NOT_FOUND = 3, 6
    NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND = 9, 12

    class NVMLError(Exception):
        def __init__(self, value):
            super().__init__({3: "Not Supported", 12: "NVML Shared Library Not Found"}.get(value, f"error {value}"))
            self.value = value

    def __init__(self, *cards, fails=0, driver="570.86", cuda=12080):
        super().__init__("pynvml")
        self.cards, self.fails, self.open = cards, fails, 0
        self.nvmlSystemGetDriverVersion = lambda: driver
        self.nvmlSystemGetCudaDriverVersion = lambda: cuda
        self.nvmlDeviceGetCount = lambda: len(cards)
        self.nvmlDeviceGetHandleByIndex = lambda index: cards[index]
        for function, key in {
            "nvmlDeviceGetUUID": "uuid",
            "nvmlDeviceGetName": "name",
            "nvmlDeviceGetMemoryInfo": "memory",
            "nvmlDeviceGetCurrPcieLinkGeneration": "generation",
            "nvmlDeviceGetMaxPcieLinkGeneration": "most_generation",
            "nvmlDeviceGetGpuMaxPcieLinkGeneration": "card_generation",
            "nvmlDeviceGetCurrPcieLinkWidth": "width",
            "nvmlDeviceGetMaxPcieLinkWidth": "most_width",
            "nvmlDeviceGetMigMode": "mig",
            "nvmlDeviceGetComputeRunningProcesses": "processes",
        }.items():
            setattr(self, function, lambda card, key=key: self.tell(card, key))
        self.nvmlDeviceGetMaxMigDeviceCount = lambda card: 7
        self.nvmlDeviceGetMigDeviceHandleByIndex = self.instance

    def nvmlInit(self):
        if self.fails:
            raise self.NVMLError(self.fails)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def tell(self, card, key):
        if key not in card:
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return card[key]

    def instance(self, card, index):
        if index >= len(card["instances"]):
            raise self.NVMLError(self.NVML_ERROR_NOT_FOUND)
        return card["instances"][index]


def card(free=23.5, total=24, **changes):
    memory = SimpleNamespace(free=int(free * GIB), total=total * GIB, used=int((total - free) * GIB))
    fine = {"uuid": f"GPU-{UUID}", "name": "NVIDIA T9", "memory": memory, "processes": []}
    link = {"generation": 4, "most_generation": 4, "card_generation": 4, "width": 16, "most_width": 16}
    return {**fine, **link, **changes}


@pytest.fixture
def nvml(monkeypatch):
    """Puts a fake in the place of `pynvml`, and reads it."""

    def read(*cards, **options):
        fake = FakeNvml(*cards, **options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        reading = read_nvml()
        assert fake.open == 0, "what was opened is closed"
        return reading

    return read


def levels(findings):
    return [finding.level for finding in findings]


def words(finding):
    return f"{finding.found}. {finding.meaning} {finding.to_do}"


# ---- this machine ----


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_a_machine_without_a_gpu_works_and_the_doctor_says_that_there_is_none(monkeypatch):
    monkeypatch.setattr(copies, "MOST_S", 0.03)
    monkeypatch.setattr(copies, "COPY_BYTES", 1 << 20)
    findings = examine()
    assert exit_status(findings) == 0, [words(f) for f in findings if f.level == "problem"]
    (none,) = [f for f in findings if f.area == "devices"]
    assert none.level == "note" and none.found.startswith("no GPU") and "virtual device" in none.meaning
    assert {f.area for f in findings} == {"devices", "host memory", "processor", "copies", "versions"}
    plain = json.loads(json.dumps([finding.to_dict() for finding in findings], allow_nan=False))
    assert [Finding(**finding) for finding in plain] == findings
    (rates,) = [f.figures for f in findings if f.area == "copies"]
    assert rates["h2d_bytes_per_s"] > 1e6 and rates["d2h_bytes_per_s"] > 1e6 and rates["flops_per_s"] > 1e6


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_measures_nothing_is_copied(monkeypatch):
    monkeypatch.setattr(copies, "measure", lambda *_: pytest.fail("measured"))
    assert not [f for f in examine(measures=False) if f.area == "copies"]


def test_a_device_that_is_not_here_is_a_problem():
    findings = examine(["cpu", "cuda:99"], measures=False)
    assert exit_status(findings) == 1
    assert any(f.found.startswith("cuda:99 cannot be used: a device is") for f in findings)


# ---- NVML and the driver, beside torch's build ----


@pytest.mark.parametrize(("fails", "cause"), [(12, "driver"), (9, "driver"), (18, "other")])
def test_an_nvml_that_fails_is_data_and_no_error(nvml, fails, cause):
    reading = nvml(fails=fails)
    assert reading == NvmlReading(error=str(FakeNvml.NVMLError(fails)), cause=cause)


def test_a_missing_package_is_a_note_with_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reading = read_nvml()
    assert reading.cause == "package"
    for build in (CPU_BUILD, WITH_GPU):
        first = gpu_findings(reading, build, {})[0]
        assert first.level == "note" and first.to_do == 'pip install "nvidia-ml-py>=12"'


def test_no_driver_is_a_note():
    (finding,) = gpu_findings(NO_DRIVER, CPU_BUILD, {})
    assert (finding.level, finding.to_do) == ("note", "") and "Library Not Found" in finding.found
    (finding,) = gpu_findings(NO_DRIVER, CUDA_BUILD, {})
    assert finding.level == "note" and "--gpus all" in finding.to_do, "torch is built for one"


def test_a_driver_that_does_not_answer_is_a_problem_unless_torch_has_the_gpu(nvml):
    reading = nvml(fails=18)
    assert levels(gpu_findings(reading, CUDA_BUILD, {})) == ["problem"]
    first, gpu = gpu_findings(reading, WITH_GPU, {})
    assert first.level == "note" and "error 18" in first.found
    assert gpu.found == "cuda:0: NVIDIA T9, 24.0 GiB"


@pytest.mark.parametrize(("cuda", "index"), [(12080, "cu126"), (13000, "cu130")])
def test_a_build_for_the_cpu_beside_a_gpu_is_a_problem_with_the_pip_line(nvml, cuda, index):
    problem, memory, link = gpu_findings(nvml(card(), cuda=cuda), CPU_BUILD, {})
    assert problem.level == "problem" and "built for the CPU only" in problem.found
    assert f"--index-url https://download.pytorch.org/whl/{index}" in problem.to_do
    assert memory.meaning.startswith("Not used") and memory.found.startswith("GPU 0 (by NVML): NVIDIA T9")
    assert link.level == "ok"


def test_a_driver_too_old_for_torch_is_a_problem(nvml):
    problem = gpu_findings(nvml(card(), cuda=11080, driver=b"450.1"), CUDA_BUILD, {})[0]
    assert problem.level == "problem" and "driver 450.1 (for CUDA up to 11.8)" in problem.found
    assert "too old" in problem.meaning and "pip" not in problem.to_do, "no such torch has a build for CUDA 11"
    problem = gpu_findings(nvml(card(), cuda=12080), replace(CUDA_BUILD, cuda="13.0"), {})[0]
    assert "too old" in problem.meaning and problem.to_do.startswith("Update the driver") and "cu126" in problem.to_do


def test_within_a_major_version_an_older_driver_is_not_too_old(nvml):
    problem = gpu_findings(nvml(card(), cuda=12020), replace(CUDA_BUILD, words="CUDA unknown error"), {})[0]
    assert problem.level == "problem" and "too old" not in words(problem)
    assert "torch says: CUDA unknown error" in problem.meaning


@pytest.mark.parametrize(("visible", "level"), [("", "note"), ("-1", "note"), ("7", "problem")])
def test_gpus_that_are_hidden_on_purpose_are_no_problem(nvml, visible, level):
    finding = gpu_findings(nvml(card()), CUDA_BUILD, {"CUDA_VISIBLE_DEVICES": visible})[0]
    assert finding.level == level and "CUDA_VISIBLE_DEVICES" in words(finding) and repr(visible) in words(finding)


def test_what_torch_warns_of_is_kept_as_words(monkeypatch):
    def is_available():
        warnings.warn("The NVIDIA driver on your\n system is too old", UserWarning, stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert read_torch().words == "The NVIDIA driver on your system is too old"


def test_torchs_gpus_are_read_in_its_order(monkeypatch):
    found = [SimpleNamespace(name=f"T{i}", uuid=f"u{i}", total_memory=i) for i in range(2)]
    monkeypatch.setattr(torch_build, "torch", SimpleNamespace(
        __version__="2.13.0", version=SimpleNamespace(cuda="12.6", hip=None),
        cuda=SimpleNamespace(
            is_available=lambda: True, device_count=lambda: 2, get_device_properties=found.__getitem__
        ),
    ))  # fmt: skip
    assert read_torch().gpus == (TorchGpu("T0", "u0", 0), TorchGpu("T1", "u1", 1))
    assert read_torch().name == "torch 2.13.0, built for CUDA 12.6"


# ---- one GPU ----


def test_a_gpu_with_which_all_is_fine(nvml):
    driver, memory, link = findings = gpu_findings(nvml(card()), WITH_GPU, {})
    assert levels(findings) == ["ok"] * 3
    assert driver.found == "driver 570.86 (for CUDA up to 12.8); torch 2.13.0+cu126, built for CUDA 12.6"
    assert memory.found == "cuda:0: NVIDIA T9, 23.5 GiB of 24.0 GiB free"
    assert memory.meaning == 'memory="auto" is 23.0 GiB now.', "less 512 MiB"
    assert link.found == "cuda:0: PCIe generation 4 x16" and "31.5 GB/s" in link.meaning
    assert memory.figures == {"free_bytes": 23.5 * GIB, "total_bytes": 24 * GIB}


def test_devices_are_in_torchs_order_whatever_nvmls_is(nvml):
    cards = [card(uuid=f"GPU-{OTHER}", name="B"), card(name="A"), card(uuid="GPU-dddd", name="C")]
    build = replace(WITH_GPU, gpus=(*WITH_GPU.gpus, TorchGpu("B", OTHER, 24 * GIB)))
    found = [f.found for f in gpu_findings(nvml(*cards), build, {"CUDA_VISIBLE_DEVICES": "1,0"})]
    assert [f.partition(",")[0] for f in found if "free" in f] == ["cuda:0: A", "cuda:1: B"]
    assert found[-1] == "1 of 3 GPUs not used by CUDA_VISIBLE_DEVICES='1,0': C"


def test_another_process_has_much_of_the_memory(nvml):
    processes = [SimpleNamespace(pid=77, usedGpuMemory=10 * GIB), SimpleNamespace(pid=78, usedGpuMemory=None)]
    processes.append(SimpleNamespace(pid=os.getpid(), usedGpuMemory=1))
    memory = gpu_findings(nvml(card(free=10, processes=processes)), WITH_GPU, {})[1]
    assert memory.level == "note" and memory.found.endswith("free; used by process 77 (10.0 GiB), process 78")
    assert "14.0 GiB are in use" in memory.meaning and "9.5 GiB now" in memory.meaning
    unseen = gpu_findings(nvml(card(free=10)), WITH_GPU, {})[1]
    assert "not seen from here" in unseen.found


def test_a_gpu_without_room_for_a_pool_is_a_problem(nvml):
    memory = gpu_findings(nvml(card(free=0.5)), WITH_GPU, {})[1]
    assert memory.level == "problem" and "nothing is left" in memory.meaning


@pytest.mark.parametrize(
    ("changes", "level", "found"),
    [
        ({"generation": 1}, "ok", "generation 4 x16 (now 1: an idle card slows its link)"),
        ({"width": 8}, "note", "generation 4 x8 of x16"),
        ({"width": 4, "most_width": 8}, "note", "generation 4 x4 of x16"),
        ({"width": 8, "most_width": 8}, "note", "generation 4 x8 of x16"),
        ({"card_generation": 5}, "note", "generation 4 x16, of a card for generation 5"),
        ({"most_generation": 9, "generation": 9}, "ok", "generation 9 x16"),
    ],
)
def test_links_that_are_narrow_or_slow(nvml, changes, level, found):
    link = gpu_findings(nvml(card(**changes)), WITH_GPU, {})[2]
    assert (link.level, link.found) == (level, f"cuda:0: PCIe {found}")
    assert bool(link.to_do) == (level == "note")


def test_what_nvml_does_not_support_is_one_note(nvml):
    bare = {"uuid": f"GPU-{UUID}", "name": b"NVIDIA T9"}
    _, memory, note = gpu_findings(nvml(bare), WITH_GPU, {})
    assert memory.found == "cuda:0: NVIDIA T9, 24.0 GiB", "torch knows it"
    assert note.level == "note"
    assert note.found == "cuda:0: NVML does not tell memory, PCIe generation, PCIe width, processes (Not Supported)"


def test_an_instance_of_a_divided_gpu_is_the_device(nvml):
    instances = [card(10, 12, uuid=f"MIG-{INSTANCE}"), card(12, 12, uuid=f"MIG-{OTHER}")]
    divided = nvml(card(mig=[1, 1], instances=instances))
    build = replace(CUDA_BUILD, gpus=(TorchGpu("NVIDIA T9 MIG 3g.12gb", INSTANCE, 12 * GIB),))
    _, memory, mig, _ = gpu_findings(divided, build, {})
    assert "10.0 GiB of 12.0 GiB free" in memory.found, "the instance's, not the card's"
    assert mig.level == "note" and "MIG is on, 2 instances" in mig.found and "CUDA_VISIBLE_DEVICES=MIG-" in mig.to_do


def test_a_divided_gpu_without_an_instance_is_a_problem(nvml):
    problem, _, mig, _ = gpu_findings(nvml(card(mig=[1, 1], instances=[])), CUDA_BUILD, {})
    assert problem.level == "problem" and "no instance is made" in problem.meaning
    assert "0 instances" in mig.found


# ---- copies ----


class Gpu(Device):
    """Stands for a GPU in host memory."""

    is_virtual = False

    def __init__(self):
        super().__init__(0, 0, torch.device("cuda", 0))


def test_rates_of_a_gpu_and_what_they_mean(nvml, monkeypatch):
    monkeypatch.setattr(copies, "open_devices", lambda names, memory: [Gpu()])
    monkeypatch.setattr(copies.torch, "ones", lambda *_, device: torch.zeros(1))
    rates = DeviceRates(25e9, 26e9, 100e12, is_pinned=True)
    monkeypatch.setattr(copies, "measure", lambda *_: rates)
    reading = nvml(card())

    def found():
        (finding,) = copy_findings("auto", reading, WITH_GPU, measures=True)
        return finding

    assert found().level == "ok"
    assert found().found == "cuda:0: host to device 25.0 GB/s, device to host 26.0 GB/s (pinned)"
    assert "promotes 25.0 MB" in found().meaning and "4000 flop for a byte" in found().meaning
    assert "from about 2000 tokens" in found().meaning, "bF/4W: 2 x 100e12 / (4 x 25e9)"
    rates = replace(rates, d2h_bytes_per_s=6e9)
    assert found().level == "note" and "The link can carry 31.5 GB/s" in found().meaning
    rates = replace(rates, is_pinned=False)
    assert found().level == "note" and "Pinning failed" in found().meaning and "(not pinned)" in found().found


def test_a_gpu_that_torch_has_but_cannot_use_is_a_problem(monkeypatch):
    def open_devices(names, memory):
        raise RuntimeError("CUDA error: no kernel image\nis available")

    monkeypatch.setattr(copies, "open_devices", open_devices)
    (finding,) = copy_findings("auto", NO_DRIVER, WITH_GPU, measures=True)
    assert (finding.area, finding.level) == ("devices", "problem")
    assert finding.found == "cuda:0 cannot be used: CUDA error: no kernel image is available"


# ---- the host ----

HOST = Host(
    total_bytes=64 * GIB, free_bytes=48 * GIB, limit_bytes=None, swap_total_bytes=0, swap_used_bytes=0,
    memlock_bytes=8 << 20, shm_total_bytes=32 * GIB, shm_free_bytes=32 * GIB,
    cores=16, allowed_cores=16, quota_cores=None, threads=8, omp_num_threads=None,
)  # fmt: skip


def changed(gpu_bytes=0, **changes):
    """The findings that are not those of a fine host."""
    fine, found = host_findings(HOST, gpu_bytes), host_findings(replace(HOST, **changes), gpu_bytes)
    return [finding for finding in found if finding not in fine]


def test_a_host_with_which_all_is_fine():
    memory, shm, cores = findings = host_findings(HOST, 0)
    assert levels(findings) == ["ok"] * 3
    assert memory.found == "48.0 GiB free of 64.0 GiB" and "3.2 billion weights" in memory.meaning, "48 GiB / 16 bytes"
    assert shm.found == "/dev/shm: 32.0 GiB of 32.0 GiB free"
    assert cores.found == "16 cores; torch computes with 8 threads"


def test_limits_of_host_memory():
    (finding,) = changed(limit_bytes=16 * GIB, free_bytes=12 * GIB)
    assert finding.level == "ok"
    assert finding.found == "12.0 GiB free of 16.0 GiB (cgroup's limit; the machine has 64.0 GiB)"
    (finding,) = changed(limit_bytes=4 * GIB, free_bytes=1 * GIB)
    assert finding.level == "note" and "memory limit" in finding.to_do
    memory = host_findings(HOST, 80 * GIB)[0]
    assert memory.level == "note" and "less than the GPUs have (80.0 GiB)" in memory.meaning


def test_swap_that_is_used_is_told_of():
    assert changed(swap_total_bytes=8 * GIB) == []
    (finding,) = changed(swap_total_bytes=8 * GIB, swap_used_bytes=3 * GIB)
    assert finding.level == "note" and finding.found == "3.0 GiB of 8.0 GiB swap in use"


def test_what_can_be_pinned_is_told_where_there_is_a_gpu():
    pinned = host_findings(HOST, 24 * GIB)[1]
    assert pinned.level == "ok" and pinned.found == "up to 48.0 GiB can be pinned (RLIMIT_MEMLOCK: 8.0 MiB)"
    (finding,) = changed(24 * GIB, is_wsl=True, memlock_bytes=None)
    assert finding.level == "note" and "unlimited" in finding.found and ".wslconfig" in finding.to_do


def test_a_small_shm_is_dockers():
    (finding,) = changed(shm_total_bytes=64 << 20, shm_free_bytes=64 << 20)
    assert finding.level == "note" and "--shm-size" in finding.to_do
    assert not any("/dev/shm" in f.found for f in host_findings(replace(HOST, shm_total_bytes=None), 0))


def test_more_threads_than_cores():
    assert levels(changed(allowed_cores=8)) == ["ok"]
    (finding,) = changed(allowed_cores=8, quota_cores=2.5, omp_num_threads="8")
    assert finding.level == "note" and finding.to_do == "export OMP_NUM_THREADS=2"
    assert finding.found == (
        "16 cores; affinity allows 8; the cgroup's quota is 2.5; torch computes with 8 threads (OMP_NUM_THREADS=8)"
    )
    (finding,) = changed(quota_cores=0.5, threads=1)
    assert finding.level == "ok", "less than one thread there cannot be"


def test_limits_are_read_from_cgroups_of_both_versions(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "cgroup_folders", lambda: [tmp_path])
    monkeypatch.setattr(open_devices, "cgroup_folders", lambda: [tmp_path])
    assert host.quota_cores() is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert host.quota_cores() is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert host.quota_cores() == 1.5
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert host.quota_cores() == 1.5
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    assert host.quota_cores() == 0.5
    assert host.read_host().limit_bytes is None
    (tmp_path / "memory.max").write_text("9000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 1000\n")
    assert open_devices.memory_cgroups() == [(9000, 3000)]
    assert (host.read_host().limit_bytes, host.read_host().free_bytes) == (9000, 6000)
    (tmp_path / "memory.max").write_text(f"{1 << 62}\n")
    assert host.read_host().limit_bytes is None, "more than the machine has limits nothing"


# ---- versions ----


@pytest.fixture
def packages(monkeypatch):
    """What is installed, and what hydra_tune requires."""
    here = {"hydra-tune": "0.1.0", "torch": "2.13.0+cpu", "ray": "2.60.0"}
    required = ["torch>=2.9", 'ray[tune]>=2.49; extra == "ray"', 'peft>=0.17; extra == "dev"']

    def version(name):
        if name not in here:
            raise versions.metadata.PackageNotFoundError(name)
        return here[name]

    monkeypatch.setattr(versions.metadata, "version", version)
    monkeypatch.setattr(versions.metadata, "requires", lambda name: required)
    return here


def test_versions_that_are_new_enough(packages):
    (finding,) = versions.version_findings()
    assert finding.level == "ok" and "torch 2.13.0+cpu, ray 2.60.0" in finding.found
    assert "not installed: optuna, transformers, accelerate, lightning, peft" in finding.found


def test_a_version_below_the_least_is_a_problem_with_the_pip_line(packages):
    packages.update(ray="2.9.0", peft="0.5")
    _, ray, peft = findings = versions.version_findings()
    assert levels(findings) == ["ok", "problem", "problem"]
    assert ray.found == "ray 2.9.0, but hydra_tune needs ray>=2.49", "not 2.9 > 2.49, as text"
    assert (ray.to_do, peft.to_do) == ('pip install "ray[tune]>=2.49"', 'pip install "peft>=0.17"')


@pytest.mark.parametrize("version", ["2.9.0a0+50eac811a6.nv25.09", "my-own"])
def test_builds_that_are_no_releases_are_not_too_old(packages, version):
    packages["torch"] = version
    assert levels(versions.version_findings()) == ["ok"]


def test_a_checkout_that_is_not_installed_is_a_note(packages):
    del packages["hydra-tune"]
    (finding,) = versions.version_findings()
    assert finding.level == "note" and "pip install -e ." in finding.to_do


def test_every_library_that_is_shown_has_a_least_version():
    pytest.importorskip("optuna")
    assert set(versions.LIBRARIES) <= versions.least_versions().keys()


# ---- all together ----


def test_the_page_says_of_problems_and_notes_what_the_doctor_says(nvml, packages, monkeypatch):
    """Each row of the last two tables of docs/doctor.md begins with words of a finding."""
    packages["optuna"] = "3.6.0"
    monkeypatch.setattr(versions.metadata, "requires", lambda name: ["optuna>=4"])
    rates = DeviceRates(6e9, 6e9, 1e12, is_pinned=True)
    found = [
        *gpu_findings(nvml(card()), CPU_BUILD, {}),
        *gpu_findings(nvml(card(), cuda=11080), CUDA_BUILD, {}),
        *gpu_findings(nvml(fails=18), CUDA_BUILD, {}),
        *gpu_findings(nvml(card()), CUDA_BUILD, {}),
        *gpu_findings(nvml(card(mig=[1, 1], instances=[])), CUDA_BUILD, {}),
        *gpu_findings(nvml(card(free=0.5)), WITH_GPU, {}),
        *gpu_findings(nvml(card(free=10, width=8)), WITH_GPU, {}),
        *gpu_findings(NO_DRIVER, CPU_BUILD, {}),
        copies._failed("cuda:0", RuntimeError("no kernel image")),
        copies._finding(Gpu(), rates, 31.5e9),
        copies._finding(Gpu(), replace(rates, is_pinned=False), None),
        *host_findings(replace(HOST, swap_used_bytes=GIB, shm_free_bytes=64 << 20, quota_cores=2), 80 * GIB),
        *versions.version_findings(),
    ]
    page = (Path(__file__).parent.parent / "docs" / "doctor.md").read_text()
    for level, title in (("problem", "Problems"), ("note", "Notes")):
        rows = re.findall(r"^\| `([^`]+)`", page.partition(f"## {title}")[2].partition("##")[0], re.MULTILINE)
        assert len(rows) > 5
        for row in rows:
            assert any(row in words(f) for f in found if f.level == level), row


OK = Finding("devices", "ok", "a GPU", "it is used")
NOTE = Finding("devices", "note", "[red]narrow[/red] link", "copies are slow", "use another slot")
PROBLEM = Finding("versions", "problem", "ray 1", "it fails", "pip install ray")


@pytest.mark.parametrize(
    ("findings", "status", "line"),
    [
        ([OK], 0, "hydra_tune works here."),
        ([OK, NOTE, NOTE], 0, "hydra_tune works here, with 2 notes."),
        ([PROBLEM], 1, "1 problem: something will not work here."),
        ([NOTE, PROBLEM], 1, "1 problem and 1 note: something will not work here."),
    ],
)
def test_the_exit_status_is_1_if_something_will_not_work(findings, status, line):
    assert (exit_status(findings), summary(findings)) == (status, line)


def test_the_table_is_plain_text_of_80_columns_where_it_is_piped():
    out = io.StringIO()
    long = replace(NOTE, meaning="word " * 40, to_do="x" * 100)
    Console(file=out, width=80).print(table([OK, long, PROBLEM]))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80 and "\x1b" not in out.getvalue()
    assert lines[:3] == ["devices", "  ok       a GPU", "           it is used"]
    assert "  note     [red]narrow[/red] link" in lines, "no markup of rich"
    assert sum(line.count("x") for line in lines) == 100, "nothing is cut off"
    assert lines[-6:-2] == ["versions", "  problem  ray 1", "           it fails", "           To do: pip install ray"]
    assert lines[-1] == "1 problem and 1 note: something will not work here."


def test_an_examination_puts_areas_together(monkeypatch, nvml):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(card()))
    monkeypatch.setattr(examination, "read_torch", lambda: WITH_GPU)
    tried = [Finding("devices", "problem", "cuda:0", ""), replace(OK, area="copies")]
    monkeypatch.setattr(examination, "copy_findings", lambda *_, measures: tried)
    areas = [finding.area for finding in examine()]
    assert list(dict.fromkeys(areas)) == ["devices", "host memory", "processor", "copies", "versions"]
    assert areas == sorted(areas, key=list(dict.fromkeys(areas)).index), "each area once"
    assert areas.count("host memory") == 3, "with what can be pinned"
