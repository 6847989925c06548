"""A GPU. Trials compute on their threads' current stream; each direction of copies has one stream for all trials.

    compute   | task of A | task of B | task of A |
    h2d       | B's shard | A's shard | ...
    d2h       . . . . . . | A's gradients | ...

A slot is allocated on the h2d stream. Its next user waits for the last task that used it, and for no other task.
For the host a task has ended once its operators are launched. Streams keep the order on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from hydra_tune.config import format_bytes
from hydra_tune.devices.device import Arrival, Copies, Device
from hydra_tune.randomness.random_state import gpu_generators

logger = logging.getLogger("hydra_tune")


class CudaDevice(Device):
    """Keeps its budget by reservations alone. `measured_peak_bytes` is the count of PyTorch's allocator."""

    counts_as_gpu = True
    is_virtual = False
    spills_behind = True

    def __init__(self, number: int, budget_bytes: int, torch_device: torch.device) -> None:
        super().__init__(number, budget_bytes, torch_device)
        self._h2d = torch.cuda.Stream(torch_device)
        self._d2h = torch.cuda.Stream(torch_device)
        self._riders = torch.cuda.Stream(torch_device)
        self._pinned: set[int] = set()
        # by offset, until `retire`. If a model is garbage collected first, its slots stay here until `free_slot`
        self._slots: dict[int | None, torch.Tensor] = {}
        self.generators.append(gpu_generators()[torch_device.index])

    @property
    def measured_peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.torch_device))

    def slot(self, offset: int | None, num_bytes: int) -> torch.Tensor:
        with torch.cuda.stream(self._h2d):  # the allocator takes the memory for that stream's
            slot = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        if num_bytes:
            self._slots[offset] = slot
        return slot

    def scratch(self, num_bytes: int) -> torch.Tensor:
        with torch.cuda.stream(self._riders):  # filled there; its memory is used again once `retire` lets that stream
            return super().scratch(num_bytes)

    def free_slot(self, offset: int | None, num_bytes: int) -> None:
        """A slot that is still here was never retired: its model was garbage collected. Nobody knows when, and on which
        stream, it was used last, so the host waits for the whole device."""
        slot = self._slots.pop(offset, None)
        if slot is not None:
            self.synchronize()

    def retire(self, slot: torch.Tensor, used: Any) -> None:
        if used is not None:
            self._h2d.wait_event(used)
            self._riders.wait_event(used)
        for offset in [offset for offset, other in list(self._slots.items()) if other is slot]:
            del self._slots[offset]

    def mark(self) -> torch.cuda.Event:
        return _marked(torch.cuda.current_stream(self.torch_device))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def promote(self, copies: Copies, *, in_use: bool = False) -> None:
        if in_use:
            # earlier tasks may still read the old values
            self._h2d.wait_stream(torch.cuda.current_stream(self.torch_device))
        if any(host.is_cuda for _, host in copies):
            self.synchronize()  # a model may just have made that buffer, on a stream that is not known here
        with torch.cuda.stream(self._h2d):
            for slot, host in copies:
                slot.copy_(host, non_blocking=True)
        _marked(self._h2d).synchronize()  # after return the host may overwrite the source

    def promote_riders(self, copies: Copies) -> None:
        with torch.cuda.stream(self._riders):
            for slot, host in copies:
                slot.copy_(host, non_blocking=True)
        _marked(self._riders).synchronize()  # after return the host may overwrite the source

    def spill(
        self, tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Arrival]:
        self._d2h.wait_stream(torch.cuda.current_stream(self.torch_device))
        start = _marked(self._d2h)
        with torch.cuda.stream(self._d2h):
            hosts, _ = super().spill(tensors, like)
        return hosts, Arrival(list(tensors), (start, _marked(self._d2h)))

    def free_cache(self) -> None:
        torch.cuda.empty_cache()

    def pin(self, buffer: torch.Tensor) -> None:
        error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
        if int(error) == 0:
            self._pinned.add(buffer.data_ptr())
        else:
            logger.warning("%s could not pin %s; copies stay pageable", self.name, format_bytes(buffer.numel()))
            with suppress(RuntimeError):  # CUDA reports the error once more at the next kernel launch; take it here
                torch.zeros(1, device=self.torch_device)

    def unpin(self, buffer: torch.Tensor) -> None:
        if buffer.data_ptr() in self._pinned:
            self._pinned.remove(buffer.data_ptr())
            self.synchronize()
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


def _marked(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(stream)
    return event


def is_lost(error: BaseException) -> bool:
    """Whether this error has broken CUDA for the whole process, so that every later call fails."""
    if isinstance(error, torch.OutOfMemoryError) or "CUDA error" not in str(error) or not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
