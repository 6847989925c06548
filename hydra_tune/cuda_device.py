"""A GPU: compute on the caller's stream, one stream for each direction of copies, for life."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from hydra_tune.config import format_bytes
from hydra_tune.device import Device

logger = logging.getLogger("hydra_tune")


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


def cuda_free_bytes(device: torch.device) -> int:
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
