"""Opens a pool's devices: which ones, how many bytes of each, and how many bytes of host memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from hydra_tune.config import format_bytes, parse_bytes
from hydra_tune.devices.cuda_device import CudaDevice
from hydra_tune.devices.device import CPU, Device
from hydra_tune.errors import ConfigError
from hydra_tune.process.fork import new_in_child

CUDA_MARGIN_BYTES = 1 << 29  # for the CUDA context, workspaces of kernels, and rounding by the allocator
CPU_SHARE = 4  # with memory="auto", virtual devices get a quarter of the free host memory

# `torch.manual_seed` takes these locks for a moment, in any thread. A child forked just then would wait for ever.
for _backend in (torch.cuda, torch.xpu, torch.mtia):
    new_in_child(_backend._initialization_lock)


def open_devices(devices: str | Sequence[str | torch.device], memory: int | str | Sequence[int | str]) -> list[Device]:
    """The devices of a pool.

    Args:
        devices: "auto" for all GPUs, or one virtual device where there are none; else a name, or a list of names.
        memory: the budget of each device: bytes, a string such as "20GiB", or "auto"; or a list, one for each device.

    Raises:
        ConfigError: a device is not here, or a budget is more than its device has free.
    """
    names: Any = [devices] if isinstance(devices, (str, torch.device)) else devices
    if devices == "auto":
        names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    if not isinstance(names, (list, tuple)) or not names:
        raise ConfigError(f'devices is "auto", a name or a list of names, such as ["cpu"]; got {devices!r}.')
    parsed = [_parse_device(str(name)) for name in names]
    budgets: list[Any] = list(memory) if isinstance(memory, (list, tuple)) else [memory] * len(parsed)
    if len(budgets) != len(parsed):
        raise ConfigError(f"memory has {len(budgets)} entries for {len(parsed)} devices. Give one, or one a device.")
    opened = []
    for number, (device, budget) in enumerate(zip(parsed, budgets, strict=True)):
        is_gpu = device.type == "cuda"
        free_bytes = torch.cuda.mem_get_info(device)[0] if is_gpu else host_free_bytes()
        if budget == "auto":  # a GPU that is named twice is two devices, for tests, and they share its memory
            share_bytes = free_bytes - CUDA_MARGIN_BYTES if is_gpu else free_bytes // CPU_SHARE
            budget = max(1, share_bytes // parsed.count(device))
        budget_bytes = _at_most_free(budget, free_bytes, "memory", str(device))
        opened.append(CudaDevice(number, budget_bytes, device) if is_gpu else Device(number, budget_bytes))
    return opened


def _at_most_free(amount: int | str, free_bytes: int, name: str, where: str) -> int:
    num_bytes = parse_bytes(amount, name)
    if num_bytes > free_bytes:
        raise ConfigError(
            f"{name} is at most what is free: {where} has {format_bytes(free_bytes)}, but {format_bytes(num_bytes)} "
            f'were asked for. Lower {name}, or use {name}="auto".'
        )
    return num_bytes


def _parse_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return CPU
    if device.type == "cuda" and torch.cuda.is_available():
        index = torch.cuda.current_device() if device.index is None else device.index
        if index < torch.cuda.device_count():
            return torch.device("cuda", index)
    raise ConfigError(f'a device is "cpu" (virtual) or one of the {torch.cuda.device_count()} GPUs here, got {name!r}.')


def host_bytes_for(host_memory: int | str, devices: Sequence[Device]) -> int:
    """The bytes of host memory that trials may take; "auto" is all that is free, less the virtual devices' budgets."""
    free_bytes = host_free_bytes()
    if host_memory == "auto":
        return max(1, free_bytes - sum(device.budget_bytes for device in devices if device.is_virtual))
    return _at_most_free(host_memory, free_bytes, "host_memory", "the host")


def host_free_bytes() -> int:
    """Bytes of host memory that this process may still take: the least of what the system has free, and what each
    memory cgroup around this process has left. Page cache that can be reclaimed counts as free."""
    available_bytes: int = psutil.virtual_memory().available
    return min([available_bytes, *(max(0, limit_bytes - used_bytes) for limit_bytes, used_bytes in memory_cgroups())])


def memory_cgroups() -> list[tuple[int, int]]:
    """Of each memory cgroup around this process that has a limit: the limit, and the bytes that it uses, less page
    cache that can be reclaimed. Version 1 has a limit of 2^63 bytes where none was set."""
    cgroups = []
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in cgroup_folders():
            with suppress(OSError, ValueError):  # no such file, or it says "max"
                limit_bytes = int((folder / limit).read_text())
                used_bytes = int((folder / usage).read_text())
                stat = (folder / usage).with_name("memory.stat").read_text().split()
                cached = int(stat[stat.index(cache) + 1]) if cache in stat else 0
                cgroups.append((limit_bytes, used_bytes - cached))
    return cgroups


def cgroup_folders() -> list[Path]:
    """Where the cgroups around this process may have their files."""
    folders = [root := Path("/sys/fs/cgroup")]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            path = root / line.split(":", 2)[2].lstrip("/")
            folders += [path, *(p for p in path.parents if root in p.parents)]
    return list(dict.fromkeys(folders))
