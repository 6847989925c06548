"""Findings about the host: its memory and who limits it, what can be pinned, /dev/shm, and its cores."""

from __future__ import annotations

import os
import platform
import shutil
import warnings
from contextlib import suppress
from dataclasses import dataclass

import psutil
import torch

from hydra_tune.config import format_bytes
from hydra_tune.devices.open_devices import cgroup_folders, host_free_bytes, memory_cgroups
from hydra_tune.doctor.finding import Finding

LITTLE_BYTES = 2 << 30  # of free host memory
LEAST_SHM_BYTES = 1 << 30
SWAPPED_BYTES = 1 << 28
ADAM_BYTES_PER_WEIGHT = 16  # weight, gradient and two moments in fp32


@dataclass(frozen=True)
class Host:
    """`limit_bytes` is the least limit of a memory cgroup; `memlock_bytes` is RLIMIT_MEMLOCK. These, `quota_cores` (of
    a CPU cgroup) and the bytes of /dev/shm are None where there are none. `allowed_cores` are by affinity."""

    total_bytes: int
    free_bytes: int
    limit_bytes: int | None
    swap_total_bytes: int
    swap_used_bytes: int
    memlock_bytes: int | None
    shm_total_bytes: int | None
    shm_free_bytes: int | None
    cores: int
    allowed_cores: int
    quota_cores: float | None
    threads: int
    omp_num_threads: str | None
    is_wsl: bool = False


def read_host() -> Host:
    """This machine, as this process may use it."""
    total_bytes = psutil.virtual_memory().total
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # psutil's, where a container does not tell how much was swapped
        swap = psutil.swap_memory()
    shm = None
    with suppress(OSError):
        shm = shutil.disk_usage("/dev/shm")
    return Host(
        total_bytes=total_bytes,
        free_bytes=host_free_bytes(),
        limit_bytes=min((limit for limit, _ in memory_cgroups() if limit < total_bytes), default=None),
        swap_total_bytes=swap.total,
        swap_used_bytes=swap.used,
        memlock_bytes=_memlock_bytes(),
        shm_total_bytes=None if shm is None else shm.total,
        shm_free_bytes=None if shm is None else shm.free,
        cores=os.cpu_count() or 1,
        allowed_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        quota_cores=quota_cores(),
        threads=torch.get_num_threads(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        is_wsl="microsoft" in platform.release().lower(),
    )


def quota_cores() -> float | None:
    """The least quota of a CPU cgroup around this process, in cores; None without one."""
    quotas = []
    for folder in cgroup_folders():
        with suppress(OSError, ValueError):  # no such file, or it says "max"
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            quotas.append(quota / period)
        with suppress(OSError, ValueError):
            quota, period = (int((folder / "cpu" / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            quotas.append(quota / period)
    return min((quota for quota in quotas if quota > 0), default=None)  # version 1 says -1 where there is none


def _memlock_bytes() -> int | None:
    """None if it is unlimited, or the system has no such limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def host_findings(host: Host, gpu_bytes: int) -> list[Finding]:
    """Of memory, then of cores. `gpu_bytes` is the memory of all GPUs, 0 without one."""
    findings = [_memory(host, gpu_bytes)]
    if host.swap_used_bytes > SWAPPED_BYTES:
        findings.append(_swap(host))
    if gpu_bytes:
        findings.append(_pinnable(host))
    if host.shm_total_bytes is not None:
        findings.append(_shm(host))
    return [*findings, _cores(host)]


def _memory(host: Host, gpu_bytes: int) -> Finding:
    most_bytes = host.total_bytes if host.limit_bytes is None else host.limit_bytes
    limit = "" if host.limit_bytes is None else f" (cgroup's limit; the machine has {format_bytes(host.total_bytes)})"
    found = f"{format_bytes(host.free_bytes)} free of {format_bytes(most_bytes)}{limit}"
    weights = host.free_bytes / ADAM_BYTES_PER_WEIGHT
    meaning = (
        f"Trials' weights, gradients and optimizer state are here: {weights / 1e9:.1f} billion weights in all, "
        f"with Adam in fp32 ({ADAM_BYTES_PER_WEIGHT} bytes each)."
    )
    figures = {"free_bytes": host.free_bytes, "total_bytes": host.total_bytes, "limit_bytes": host.limit_bytes}
    ends = "End other processes" if host.limit_bytes is None else "Raise the container's or the job's memory limit"
    if host.free_bytes < LITTLE_BYTES:
        return Finding("host memory", "note", found, f"{meaning} Little is left.", f"{ends}.", figures)
    if host.free_bytes < gpu_bytes:
        meaning += f" That is less than the GPUs have ({format_bytes(gpu_bytes)}): trials larger than a GPU hardly fit."
        return Finding("host memory", "note", found, meaning, f"{ends}, or train fewer of the weights.", figures)
    return Finding("host memory", "ok", found, meaning, figures=figures)


def _swap(host: Host) -> Finding:
    return Finding(
        "host memory",
        "note",
        f"{format_bytes(host.swap_used_bytes)} of {format_bytes(host.swap_total_bytes)} swap in use",
        "Host memory was short. A promotion of weights that were swapped out waits for the disk.",
        "End what takes the memory, or set ShardPool(host_memory=...).",
        {"swap_used_bytes": host.swap_used_bytes, "swap_total_bytes": host.swap_total_bytes},
    )


def _pinnable(host: Host) -> Finding:
    """CUDA pins through its driver. Most versions do not count that as locked memory."""
    locked = "unlimited" if host.memlock_bytes is None else format_bytes(host.memlock_bytes)
    figures = {"pinnable_bytes": host.free_bytes, "memlock_bytes": host.memlock_bytes}
    found = f"up to {format_bytes(host.free_bytes)} can be pinned (RLIMIT_MEMLOCK: {locked})"
    if host.is_wsl:
        meaning = "Spilled weights are pinned, so that a GPU copies them fast. Windows allows WSL a part of that only."
        return Finding("host memory", "note", found, meaning, "Raise memory= in .wslconfig, or use Linux.", figures)
    meaning = (
        "Spilled weights are pinned, so that a GPU copies them fast. Host memory limits that; the driver does not "
        "count it against RLIMIT_MEMLOCK in most versions. Pinned memory is never swapped out."
    )
    return Finding("host memory", "ok", found, meaning, figures=figures)


def _shm(host: Host) -> Finding:
    assert host.shm_total_bytes is not None and host.shm_free_bytes is not None
    found = f"/dev/shm: {format_bytes(host.shm_free_bytes)} of {format_bytes(host.shm_total_bytes)} free"
    meaning = "DataLoader workers (num_workers > 0) of all live trials hand over their batches there. So does Ray."
    figures = {"shm_free_bytes": host.shm_free_bytes, "shm_total_bytes": host.shm_total_bytes}
    if host.shm_free_bytes >= LEAST_SHM_BYTES:
        return Finding("host memory", "ok", found, meaning, figures=figures)
    meaning += " When it is full, a worker dies of a bus error."
    to_do = "In Docker: --shm-size=8g or --ipc=host (64 MiB is its default). Or num_workers=0."
    return Finding("host memory", "note", found, meaning, to_do, figures)


def _cores(host: Host) -> Finding:
    usable = min(host.allowed_cores, host.quota_cores or host.allowed_cores)
    limits = [f"affinity allows {host.allowed_cores}"] * (host.allowed_cores < host.cores)
    if host.quota_cores is not None and host.quota_cores < host.allowed_cores:
        limits.append(f"the cgroup's quota is {host.quota_cores:.3g}")
    omp = "" if host.omp_num_threads is None else f" (OMP_NUM_THREADS={host.omp_num_threads})"
    threads = f"{host.threads} thread{'s' * (host.threads != 1)}"
    found = "; ".join([f"{host.cores} cores", *limits, f"torch computes with {threads}{omp}"])
    figures = {
        "cores": host.cores,
        "allowed_cores": host.allowed_cores,
        "quota_cores": host.quota_cores,
        "threads": host.threads,
    }
    fit = max(1, int(usable))
    if host.threads > max(1, usable):
        meaning = f"This process may use {usable:.3g} cores. More threads than that wait for each other: all is slow."
        return Finding("processor", "note", found, meaning, f"export OMP_NUM_THREADS={fit}", figures)
    meaning = "Optimizers of spilled trials step here. Virtual devices compute here."
    return Finding("processor", "ok", found, meaning, figures=figures)
