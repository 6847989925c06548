"""What NVIDIA's management library (NVML) says of the GPUs of this machine, as plain data.

No error of NVML leaves this file. Where it does not tell a field, the field is None, and `unread` has the reason. It is
asked through the package nvidia-ml-py, whose module `pynvml` is imported when it is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class MigInstance:
    """A part of a GPU that is a device of its own."""

    uuid: str
    free_bytes: int | None
    total_bytes: int | None


@dataclass(frozen=True)
class NvmlGpu:
    """One GPU.

    `link_generation`       of PCIe, as it is now; it drops while the card is idle
    `most_link_generation`  that card and slot reach together
    `card_generation`       that the card would reach in another slot
    `link_width`            lanes that are used
    `most_link_width`       lanes that card and slot have together
    `has_mig`               whether the card is divided into instances
    `others`                processes that compute there, without this one: their ids, and bytes where they are told
    """

    uuid: str | None
    name: str | None
    free_bytes: int | None
    total_bytes: int | None
    link_generation: int | None = None
    most_link_generation: int | None = None
    card_generation: int | None = None
    link_width: int | None = None
    most_link_width: int | None = None
    has_mig: bool = False
    instances: tuple[MigInstance, ...] = ()
    others: tuple[tuple[int, int | None], ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NvmlReading:
    """All of it. `error` says why there is nothing; its `cause` is "package" where nvidia-ml-py is not installed,
    "driver" where NVIDIA's driver is not here, and "other" where the driver does not answer."""

    gpus: tuple[NvmlGpu, ...] = ()
    driver: str | None = None
    cuda: tuple[int, int] | None = None  # the newest version of CUDA that the driver runs
    error: str = ""
    cause: str = ""


def read_nvml() -> NvmlReading:
    """Ask NVML once. Takes some milliseconds, and makes no CUDA context."""
    try:
        pynvml: Any = import_module("pynvml")
    except ImportError as error:
        return NvmlReading(error=str(error), cause="package")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return NvmlReading(error=str(error), cause="driver" if error.value in absent else "other")
    try:
        return _Reader(pynvml).reading()
    except pynvml.NVMLError as error:
        return NvmlReading(error=str(error), cause="other")
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


class _Reader:
    """Calls NVML's functions for one handle after another, and notes which of them fail."""

    def __init__(self, pynvml: Any) -> None:
        self._pynvml = pynvml
        self._unread: dict[str, str] = {}

    def reading(self) -> NvmlReading:
        cuda = self._ask("cuda", "nvmlSystemGetCudaDriverVersion")  # 12080 is CUDA 12.8
        return NvmlReading(
            gpus=tuple(self._gpu(index) for index in range(self._pynvml.nvmlDeviceGetCount())),
            driver=self._text("driver", "nvmlSystemGetDriverVersion"),
            cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        )

    def _gpu(self, index: int) -> NvmlGpu:
        self._unread = {}
        handle = self._ask("handle", "nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            return NvmlGpu(None, None, None, None, unread=self._unread)
        free_bytes, total_bytes = self._memory(handle)
        has_mig = self._has_mig(handle)
        return NvmlGpu(
            uuid=self._text("uuid", "nvmlDeviceGetUUID", handle),
            name=self._text("name", "nvmlDeviceGetName", handle),
            free_bytes=free_bytes,
            total_bytes=total_bytes,
            link_generation=self._ask("PCIe generation", "nvmlDeviceGetCurrPcieLinkGeneration", handle),
            most_link_generation=self._ask("PCIe generation", "nvmlDeviceGetMaxPcieLinkGeneration", handle),
            card_generation=self._ask("", "nvmlDeviceGetGpuMaxPcieLinkGeneration", handle),  # newer drivers have it
            link_width=self._ask("PCIe width", "nvmlDeviceGetCurrPcieLinkWidth", handle),
            most_link_width=self._ask("PCIe width", "nvmlDeviceGetMaxPcieLinkWidth", handle),
            has_mig=has_mig,
            instances=self._instances(handle) if has_mig else (),
            others=self._others(handle),
            unread=self._unread,
        )

    def _memory(self, handle: Any) -> tuple[int | None, int | None]:
        memory = self._ask("memory", "nvmlDeviceGetMemoryInfo", handle)
        return (None, None) if memory is None else (int(memory.free), int(memory.total))

    def _has_mig(self, handle: Any) -> bool:
        """Most cards cannot be divided, and answer that they do not support the question."""
        mode = self._ask("", "nvmlDeviceGetMigMode", handle)
        return mode is not None and bool(mode[0])

    def _instances(self, handle: Any) -> tuple[MigInstance, ...]:
        instances = []
        for index in range(self._ask("MIG instances", "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            instance = self._ask("", "nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            if instance is not None:  # not all that there may be are made
                uuid = self._text("MIG instances", "nvmlDeviceGetUUID", instance)
                instances.append(MigInstance(uuid or "", *self._memory(instance)))
        return tuple(instances)

    def _others(self, handle: Any) -> tuple[tuple[int, int | None], ...]:
        processes = self._ask("processes", "nvmlDeviceGetComputeRunningProcesses", handle) or ()
        return tuple((int(p.pid), p.usedGpuMemory) for p in processes if p.pid != os.getpid())

    def _text(self, name: str, function: str, *arguments: Any) -> str | None:
        text = self._ask(name, function, *arguments)
        return text.decode() if isinstance(text, bytes) else text  # bytes in old versions of the package

    def _ask(self, name: str, function: str, *arguments: Any) -> Any:
        """What the function returns, or None; then `name` is noted as unread, if there is one."""
        try:
            return getattr(self._pynvml, function)(*arguments)
        except (self._pynvml.NVMLError, AttributeError) as error:
            if name:
                self._unread[name] = str(error)
            return None
