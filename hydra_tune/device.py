"""The devices of a pool: where slots lie, how bytes get there and back, how many there may be.

The only file that names torch.cuda or NVML. A `CpuDevice` stands in for a GPU with the same interface:
promotion is a real copy into an arena of the budget's size.

    host buffer --h2d--> slot --compute--> gradients --d2h--> p.grad      (CUDA: one stream each, for life)
"""

from __future__ import annotations

import logging
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import psutil
import torch

from hydra_tune.config import checks_enabled, format_bytes, parse_bytes
from hydra_tune.errors import ConfigError
from hydra_tune.meter import Meter
from hydra_tune.transfer import copies_on

logger = logging.getLogger("hydra_tune")
POISON = 0xFF  # NaN in every float format, -1 in every signed integer
CUDA_MARGIN_BYTES = 1 << 29  # context, kernels' workspaces, allocator rounding
CPU_SHARE = 4  # memory="auto" takes a quarter of what is left on the host


class Device(ABC):
    """One device with an enforced budget. Slots are one-dimensional uint8 tensors."""

    foreach_by_default = False  # does torch.optim choose `foreach` here by itself?
    slots_stay = False  # is a slot at the same offset the same memory?
    takes_travellers = False  # may tasks of trials that are at home elsewhere run here?
    link_bytes_per_s = inf
    least_ahead_bytes: int | None = None  # of a promotion that pays in a thread of its own, ahead of its task

    def __init__(self, number: int, name: str, torch_device: torch.device, budget_bytes: int, *, enforce: bool) -> None:
        self.number = number  # in its pool
        self.name = name
        self.torch_device = torch_device
        self.budget_bytes = budget_bytes
        self.meter = Meter(name, budget_bytes, enforce=enforce)

    @abstractmethod
    def slot(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Room for a shard's weights, uninitialised."""

    @abstractmethod
    def free_slot(self, offset: int, num_bytes: int) -> None:
        """Called once no tensor of ours is read or written there any more."""

    @abstractmethod
    def promote(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy host tensors to device tensors, (to, from) each; later compute sees the copies done."""

    def receive(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of another device's tensors, in all else as they are."""
        return copies_on(self.torch_device, tensors)

    @abstractmethod
    def to_host(self, tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies in host memory, laid out as `like`, complete on return."""

    @abstractmethod
    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device that lives as long as its trial."""

    @abstractmethod
    def generators(self) -> list[torch.Generator]:
        """The generators that operators on this device draw from by default."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""

    def free_cache(self) -> None:
        """Give back what an allocator keeps for later."""

    def pin(self, buffer: torch.Tensor) -> None:
        """Make a host buffer fast to copy from, if this device can."""

    def unpin(self, buffer: torch.Tensor) -> None:
        """Undo `pin`."""

    @property
    def measured_peak_bytes(self) -> int:
        """The highest count by the allocator (CUDA), or by the meter while it counted (CPU)."""
        return self.meter.peak_bytes


class CpuDevice(Device):
    """A virtual device in host memory. Freed slots are poisoned under ``HYDRA_TUNE_CHECKS=1``."""

    slots_stay = True
    takes_travellers = True
    link_bytes_per_s = 5e9  # as one core copies; decides only which ways are worth it
    least_ahead_bytes = 1 << 20  # a copy of 0.1 ms; to wake the thread takes about as long

    def __init__(self, number: int, budget_bytes: int) -> None:
        super().__init__(number, f"cpu:{number} (virtual)", torch.device("cpu"), budget_bytes, enforce=True)
        self._arena = mmap.mmap(-1, budget_bytes, access=mmap.ACCESS_COPY)
        self._poison = checks_enabled()

    def slot(self, offset: int, num_bytes: int) -> torch.Tensor:
        if num_bytes == 0:  # a block whose weights are all held
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._arena, dtype=torch.uint8, count=num_bytes, offset=offset)

    def free_slot(self, offset: int, num_bytes: int) -> None:
        if self._poison:
            self.slot(offset, num_bytes).fill_(POISON)

    def promote(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for slot, host in copies:
            slot.copy_(host)

    def to_host(self, tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            torch.empty_strided(h.size(), h.stride(), dtype=t.dtype).copy_(t)
            if t.layout is torch.strided
            else t.clone()
            for t, h in zip(tensors, like, strict=True)
        ]

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone(memory_format=torch.preserve_format)

    def generators(self) -> list[torch.Generator]:
        return [torch.default_generator]

    def synchronize(self) -> None:
        """The CPU is never behind."""


class CudaDevice(Device):
    """A GPU: compute on the caller's stream, one stream for each direction of copies, events between."""

    foreach_by_default = True

    def __init__(self, number: int, index: int, budget_bytes: int) -> None:
        device = torch.device("cuda", index)
        super().__init__(number, str(device), device, budget_bytes, enforce=False)
        self._h2d = torch.cuda.Stream(device)
        self._d2h = torch.cuda.Stream(device)
        self._pinned: set[int] = set()
        self._generators = [torch.default_generator, torch.cuda.default_generators[index]]  # never a trial's proxy

    def slot(self, offset: int, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def free_slot(self, offset: int, num_bytes: int) -> None:
        """The allocator takes the slot back; it was allocated, and last read, on the compute stream."""

    def promote(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        compute = torch.cuda.current_stream(self.torch_device)
        self._h2d.wait_stream(compute)  # what used these bytes before is done
        with torch.cuda.stream(self._h2d):
            for slot, host in copies:
                slot.copy_(host, non_blocking=True)
        compute.wait_stream(self._h2d)
        self._h2d.synchronize()  # the host buffer may be written again from here on

    def to_host(self, tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._d2h.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._d2h):
            hosts = [
                torch.empty_strided(h.size(), h.stride(), dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                if t.layout is torch.strided
                else t.cpu()
                for t, h in zip(tensors, like, strict=True)
            ]
        self._d2h.synchronize()
        return hosts

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.torch_device, copy=True)

    def generators(self) -> list[torch.Generator]:
        return self._generators

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def free_cache(self) -> None:
        torch.cuda.empty_cache()

    def pin(self, buffer: torch.Tensor) -> None:
        error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
        if int(error) == 0:
            self._pinned.add(buffer.data_ptr())
        else:
            logger.warning("%s could not pin %s; copies stay pageable", self.name, format_bytes(buffer.numel()))

    def unpin(self, buffer: torch.Tensor) -> None:
        if buffer.data_ptr() in self._pinned:
            self._pinned.remove(buffer.data_ptr())
            self.synchronize()
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())

    @property
    def measured_peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.torch_device))


# ---- which devices, and how much of each -------------------------------------------------------------


def open_devices(devices: str | Sequence[str | torch.device], memory: int | str | Sequence[int | str]) -> list[Device]:
    """The devices of a pool, from what the user wrote.

    Raises:
        ConfigError: an unknown device, or a budget that is not bytes or that the device does not have.
    """
    if devices == "auto":
        names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    else:
        names = [str(devices)] if isinstance(devices, (str, torch.device)) else [str(d) for d in _listed(devices)]
    if not names:
        raise ConfigError('devices is empty. Name at least one, such as devices=["cpu"], or leave "auto".')
    parsed = [_parse_device(name) for name in names]
    cuda = [d.index for d in parsed if d.type == "cuda"]
    if len(set(cuda)) < len(cuda):
        raise ConfigError(f"each GPU may appear once, got devices={names}.")
    budgets: list[Any] = list(memory) if isinstance(memory, (list, tuple)) else [memory] * len(parsed)
    if len(budgets) != len(parsed):
        raise ConfigError(f"memory has {len(budgets)} entries for {len(parsed)} devices. Give one, or one a device.")
    num_cpu = sum(d.type == "cpu" for d in parsed)
    opened: list[Device] = []
    for number, (device, budget) in enumerate(zip(parsed, budgets, strict=True)):
        most = _cuda_free_bytes(device) if device.type == "cuda" else host_free_bytes()
        if budget == "auto":
            budget_bytes = most - CUDA_MARGIN_BYTES if device.type == "cuda" else most // CPU_SHARE // num_cpu
        else:
            budget_bytes = parse_bytes(budget)
        if not 0 < budget_bytes <= most:
            raise ConfigError(
                f"a budget lies within what the device has free: {device} has {format_bytes(most)}, "
                f'asked were {format_bytes(budget_bytes)}. Lower memory, or use memory="auto".'
            )
        opened.append(
            CudaDevice(number, device.index, budget_bytes) if device.type == "cuda" else CpuDevice(number, budget_bytes)
        )
    return opened


def _listed(devices: object) -> Sequence[object]:
    if not isinstance(devices, (list, tuple)):
        raise ConfigError(f'devices is "auto", a name or a list of names, got {devices!r}.')
    return devices


def _parse_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cuda" and torch.cuda.is_available():
        index = torch.cuda.current_device() if device.index is None else device.index
        if index < torch.cuda.device_count():
            return torch.device("cuda", index)
    elif device.type == "cpu":
        return torch.device("cpu")
    raise ConfigError(f'a device is "cpu" (virtual) or one of the {torch.cuda.device_count()} GPUs here, got {name!r}.')


def host_bytes_for(host_memory: int | str, devices: Sequence[Device]) -> int:
    """What trials may have of host memory, from what the user wrote.

    Raises:
        ConfigError: not bytes, or more than there are.
    """
    most = host_free_bytes()
    virtual = sum(device.budget_bytes for device in devices if device.torch_device.type == "cpu")
    if host_memory == "auto":
        return max(1, most - virtual)
    num_bytes = parse_bytes(host_memory, "host_memory")
    if num_bytes > most:
        raise ConfigError(
            f"host_memory lies within what the host has free, {format_bytes(most)}; asked were "
            f'{format_bytes(num_bytes)}. Lower it, or use host_memory="auto".'
        )
    return num_bytes


def host_free_bytes() -> int:
    """Host memory that this process may still take: what the system has and the cgroup allows."""
    available: int = psutil.virtual_memory().available
    return min([available, *_cgroup_free_bytes()])


def _cgroup_free_bytes() -> list[int]:
    """What each memory cgroup around this process leaves; page cache that can be reclaimed counts as left."""
    left = []
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in _cgroup_folders():
            with suppress(OSError, ValueError):  # absent file, or the word "max"
                limit_bytes = int((folder / limit).read_text())
                used_bytes = int((folder / usage).read_text())
                stat = (folder / usage).with_name("memory.stat").read_text().split()
                cached = int(stat[stat.index(cache) + 1]) if cache in stat else 0
                left.append(max(0, limit_bytes - used_bytes + cached))
    return left


def _cgroup_folders() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    folders = [root]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            path = root / line.split(":", 2)[2].lstrip("/")
            folders += [path, *(p for p in path.parents if root in p.parents)]
    return list(dict.fromkeys(folders))


def _cuda_free_bytes(device: torch.device) -> int:
    """Free bytes by NVML, which sees other processes before a context exists; by CUDA where NVML can't say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        free_bytes: int = pynvml.nvmlDeviceGetMemoryInfo(handle).free
        return free_bytes
    except Exception as error:  # every NVML field may be missing: no driver library, MIG, a container
        logger.info("NVML has no answer for %s (%s); asking CUDA", device, error)
        return int(torch.cuda.mem_get_info(device)[0])


def is_lost(error: BaseException) -> bool:
    """Whether this error has spoilt CUDA for the process: then every call fails from here on."""
    if isinstance(error, torch.OutOfMemoryError) or "CUDA error" not in str(error) or not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
