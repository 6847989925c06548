"""What a pool needs of a device, and the virtual one: slots, and how bytes get there and back.

    host buffer --h2d--> slot --compute--> gradients --d2h--> p.grad

A `CpuDevice` stands in for a GPU (`cuda_device.py`) with the same interface: promotion is a real copy into an arena
of the budget's size.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import addressof, c_char, memset
from math import inf
from typing import Any

import torch

from hydra_tune.config import checks_enabled
from hydra_tune.meter import Meter

_CPU = torch.device("cpu")
POISON = 0xFF  # NaN in every float format, -1 in every signed integer


class Arrival:
    """Of copies in host memory, which nobody reads before `wait`. `marks` say when they begin and end, where the host
    is ahead of the device."""

    marks: tuple[Any, Any] | None = None

    def wait(self) -> None:
        """Until they are complete; more often than once does no harm."""


class Device(ABC):
    """One device with an enforced budget. Slots are one-dimensional uint8 tensors."""

    foreach_by_default = False  # does torch.optim choose `foreach` here by itself?
    slots_stay = False  # is a slot at the same offset the same memory?
    homes_move = False  # may a trial have its home elsewhere from one step to the next?
    model: Hashable = None  # devices of one compute the same numbers
    link_bytes_per_s = inf
    least_ahead_bytes: int | None = 0  # of a promotion that pays in a thread of its own, ahead of its task
    pins = False  # does it make host buffers fast to copy from?
    spills_behind = False  # do gradients go to the host while the device goes on?

    def __init__(self, number: int, name: str, torch_device: torch.device, budget_bytes: int, *, enforce: bool) -> None:
        self.number = number  # in its pool
        self.name = name
        self.torch_device = torch_device
        self.budget_bytes = budget_bytes
        self.meter = Meter(name, budget_bytes, enforce=enforce)

    @abstractmethod
    def slot(self, offset: int | None, num_bytes: int) -> torch.Tensor:
        """Room for a shard's weights, uninitialised. A pilot's, of which there is one at a time, has no offset."""

    @abstractmethod
    def free_slot(self, offset: int | None, num_bytes: int) -> None:
        """Called once no tensor of ours is read or written there any more."""

    def mark(self) -> Any:
        """This moment of the calling thread's computing; None where the host is never ahead of that."""
        return None

    def reached(self, mark: Any) -> bool:
        """Whether the device has got as far as this moment."""
        return True

    def seconds(self, earlier: Any, later: Any) -> float:
        """From one moment to another, both reached."""
        return 0.0

    def retire(self, slot: torch.Tensor, used: Any) -> None:
        """Let what is promoted from here on have the slot's memory, which was used up to the moment `used`."""

    @abstractmethod
    def promote(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy host tensors into slots that nothing uses, (to, from) each; later compute sees the copies done."""

    def refresh(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """As `promote`, into slots that are in use."""
        self.promote(copies)

    @abstractmethod
    def to_host(self, tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies in host memory, laid out as `like`, complete on return."""

    def spill(
        self, tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Arrival]:
        """As `to_host`, but complete on arrival."""
        return self.to_host(tensors, like), Arrival()

    @abstractmethod
    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device that lives as long as its trial."""

    @abstractmethod
    def generators(self) -> list[torch.Generator]:
        """The generators that operators on this device draw from by default."""

    def current(self) -> AbstractContextManager[Any]:
        """Inside, in the calling thread, what names no device of this kind by its number means this one. It may be left
        before it was entered."""
        return nullcontext()

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
    homes_move = True
    model = "cpu"
    link_bytes_per_s = 5e9  # as one core copies; decides only which ways are worth it
    least_ahead_bytes = 1 << 20  # a copy of 0.1 ms; to wake the thread takes about as long

    def __init__(self, number: int, budget_bytes: int) -> None:
        super().__init__(number, f"cpu:{number} (virtual)", torch.device("cpu"), budget_bytes, enforce=True)
        self._arena = mmap.mmap(-1, budget_bytes, access=mmap.ACCESS_COPY)
        self._beside_arena: torch.Tensor | None = None
        self._poison = checks_enabled()

    def slot(self, offset: int | None, num_bytes: int) -> torch.Tensor:
        if num_bytes == 0:  # a block whose weights are all held
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        if offset is None:
            self._beside_arena = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            return self._beside_arena
        return torch.frombuffer(self._arena, dtype=torch.uint8, count=num_bytes, offset=offset)

    def free_slot(self, offset: int | None, num_bytes: int) -> None:
        if self._poison and num_bytes:
            self._fill_with_poison(offset, num_bytes)
        if offset is None:
            self._beside_arena = None

    def _fill_with_poison(self, offset: int | None, num_bytes: int) -> None:
        """By no operator: who frees a slot has the pool's lock, for which a thread inside an operator may wait, and a
        fork for that, for whose end the next operator would wait."""
        if offset is not None:
            memset(addressof(c_char.from_buffer(self._arena, offset)), POISON, num_bytes)
        elif self._beside_arena is not None:
            memset(self._beside_arena.data_ptr(), POISON, self._beside_arena.nbytes)

    def promote(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for slot, host in copies:
            slot.copy_(host)

    def to_host(self, tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            torch.empty_strided(h.size(), h.stride(), dtype=t.dtype, device=_CPU).copy_(t)
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
