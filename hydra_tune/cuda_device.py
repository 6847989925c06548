"""A GPU: trials compute on their own streams' default, copies have a stream for each direction, for life.

    compute   | task of A | task of B | task of A |      a slot is memory of the promotions' stream: what it is given
    h2d       | B's shard | A's shard | ...              to next waits for the last task that used it, and for no other
    d2h       . . . . . . | A's gradients | ...

A task may end, for the host, before the device has computed it: streams keep the order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from hydra_tune.config import format_bytes
from hydra_tune.device import Arrival, Device
from hydra_tune.randomness.proxies import device_proxies

logger = logging.getLogger("hydra_tune")


class CudaDevice(Device):
    """The budget is kept by reservation alone: `measured_peak_bytes` is what PyTorch's allocator has counted."""

    homes_move = False  # what is held would go by way of the host; nobody has seen it on a GPU
    foreach_by_default = True
    link_bytes_per_s = 12e9  # of 15.75e9 of PCIe 3.0 x16, as pinned copies do; decides only which ways are worth it
    least_ahead_bytes = 1 << 20  # 20 us on a fast link, as long as it takes to wake the thread
    spills_behind = True
    pins = True

    def __init__(self, number: int, index: int, budget_bytes: int) -> None:
        device = torch.device("cuda", index)
        super().__init__(number, str(device), device, budget_bytes, enforce=False)
        of = torch.cuda.get_device_properties(device)  # kernels' grids, and so dropout's masks, depend on these
        self.model = of.name, of.major, of.minor, of.multi_processor_count, of.max_threads_per_multi_processor
        self._h2d = torch.cuda.Stream(device)
        self._d2h = torch.cuda.Stream(device)
        self._pinned: set[int] = set()
        # by offset, until they are retired; a model may be collected before
        self._slots: dict[int | None, torch.Tensor] = {}
        self._generators = [torch.default_generator, device_proxies.real()[index]]

    def slot(self, offset: int | None, num_bytes: int) -> torch.Tensor:
        with torch.cuda.stream(self._h2d):  # whose memory it is from now on
            slot = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        if num_bytes:
            self._slots[offset] = slot
        return slot

    def free_slot(self, offset: int | None, num_bytes: int) -> None:
        """One that nobody has retired was a collected model's; no one knows when, and in which stream, it was used."""
        slot = self._slots.pop(offset, None)
        if slot is not None:
            self.synchronize()

    def mark(self) -> torch.cuda.Event:
        return _marked(self._compute())

    def reached(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        return float(earlier.elapsed_time(later)) / 1e3

    def retire(self, slot: torch.Tensor, used: Any) -> None:
        if used is not None:
            self._h2d.wait_event(used)
        for offset in [offset for offset, other in list(self._slots.items()) if other is slot]:
            del self._slots[offset]

    def promote(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if any(host.is_cuda for _, host in copies):
            self.synchronize()  # a model may have made that buffer just now, and who copies ahead knows no stream of it
        with torch.cuda.stream(self._h2d):
            for slot, host in copies:
                slot.copy_(host, non_blocking=True)
        _marked(self._h2d).synchronize()  # the host may write there again from here on

    def refresh(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._h2d.wait_stream(self._compute())  # tasks before this one may still read what was there
        self.promote(copies)

    def to_host(self, tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        hosts, arrival = self.spill(tensors, like)
        arrival.wait()
        return hosts

    def spill(
        self, tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Arrival]:
        self._d2h.wait_stream(self._compute())
        start = _marked(self._d2h)
        with torch.cuda.stream(self._d2h):
            hosts = [
                torch.empty_strided(h.size(), h.stride(), dtype=t.dtype, device="cpu", pin_memory=True).copy_(
                    t, non_blocking=True
                )
                if t.layout is torch.strided
                else t.cpu()
                for t, h in zip(tensors, like, strict=True)
            ]
        return hosts, _Spill(list(tensors), start, _marked(self._d2h))

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.torch_device, copy=True)

    def generators(self) -> list[torch.Generator]:
        return self._generators

    def current(self) -> _Current:
        return _Current(self.torch_device)

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
            with suppress(RuntimeError):  # CUDA keeps the error for who launches a kernel next
                torch.zeros(1, device=self.torch_device)

    def unpin(self, buffer: torch.Tensor) -> None:
        if buffer.data_ptr() in self._pinned:
            self._pinned.remove(buffer.data_ptr())
            self.synchronize()
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())

    @property
    def measured_peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.torch_device))

    def _compute(self) -> torch.cuda.Stream:
        """The stream that the calling thread computes on."""
        return torch.cuda.current_stream(self.torch_device)


class _Current:
    """May be left more than once, or before it was entered: an interruption may come in between. Autograd goes on in
    the calling thread, too: else each GPU has one of its own, which knows of no visit."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.cuda.device(device)
        self._backward_here: torch.autograd.set_multithreading_enabled | None = None

    def __enter__(self) -> None:
        self._device.__enter__()
        self._backward_here = torch.autograd.set_multithreading_enabled(False)

    def __exit__(self, *error: object) -> None:
        if self._backward_here is not None:
            self._backward_here.__exit__(None, None, None)
        self._device.__exit__(None, None, None)


class _Spill(Arrival):
    """Keeps what is copied until it has arrived."""

    def __init__(self, tensors: list[torch.Tensor], start: torch.cuda.Event, done: torch.cuda.Event) -> None:
        self._tensors = tensors
        self._done = done
        self.marks = start, done

    def wait(self) -> None:
        self._done.synchronize()
        self._tensors.clear()


def _marked(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(stream)
    return event


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
