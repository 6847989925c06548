"""What a pool computes on: slots within a budget, and how bytes get there and back.

    host buffer --h2d--> slot --compute--> gradients --d2h--> p.grad

A `Device` is a virtual one, in host memory: promotion is a real copy into an arena of the budget's size, and freed
slots are poisoned under ``HYDRA_TUNE_CHECKS=1``. A GPU (`cuda_device.py`) overrides what it does otherwise.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from ctypes import addressof, c_char, memset
from typing import Any

import torch

from hydra_tune.config import checks_enabled, format_bytes
from hydra_tune.devices.meter import TrialMeter
from hydra_tune.process.fork import gate
from hydra_tune.schedule.ledger import Ledger

CPU = torch.device("cpu")
POISON = 0xFF  # NaN in every float format, -1 in every signed integer
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]  # to, from


class Arrival:
    """Of copies in host memory, which nobody reads before `wait`. `marks` say when they begin and end, where the host
    is ahead of the device; what they are made of is kept until then."""

    def __init__(self, tensors: Sequence[torch.Tensor] = (), marks: tuple[Any, Any] | None = None) -> None:
        self._tensors = tensors
        self.marks = marks

    def wait(self) -> None:
        """Until they are complete; more often than once does no harm."""
        if self.marks is not None:
            self.marks[1].synchronize()
        self._tensors = ()


class Device:
    """One device with an enforced budget. Slots are one-dimensional uint8 tensors."""

    is_virtual = True  # a slot at the same offset is the same memory; trials' homes may move among such ones
    link_bytes_per_s = 5e9  # as one core copies; decides only which ways are worth it
    least_ahead_bytes: int | None = 1 << 20  # of a promotion that pays in a thread of its own: to wake it takes 0.1 ms
    spills_behind = False  # do gradients go to the host while the device goes on?
    ledger: Ledger  # its pool's, of who has reserved what

    def __init__(self, number: int, budget_bytes: int, torch_device: torch.device = CPU) -> None:
        self.number = number  # in its pool
        self.name = f"cpu:{number} (virtual)" if self.is_virtual else str(torch_device)
        self.torch_device = torch_device
        self.budget_bytes = budget_bytes
        self.live_bytes = self.most_live_bytes = 0  # of storages, as far as they are counted
        self.of_slots = TrialMeter(self, -1)  # no trial's: a step's bytes are what it has beside them
        self.generators: list[torch.Generator] = []  # of its own, that operators there draw from by default
        self.process = gate.process
        if self.is_virtual:
            self._arena = mmap.mmap(-1, budget_bytes, access=mmap.ACCESS_COPY)
            self._beside_arena: dict[int | None, mmap.mmap] = {}
            self._poisons = checks_enabled()

    # ---- what its user may see ----

    @property
    def used_bytes(self) -> int:
        """Reserved now: by trials, steps, slots and the running task."""
        return self.ledger.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The highest `used_bytes` so far, pilots included."""
        return self.ledger.peak_bytes

    @property
    def measured_peak_bytes(self) -> int:
        """The highest count of real storages: by CUDA's allocator, or by the meter while it counted."""
        return self.most_live_bytes

    def __repr__(self) -> str:
        return f"<{self.name}: {format_bytes(self.used_bytes)} of {format_bytes(self.budget_bytes)} used>"

    # ---- slots ----

    def slot(self, offset: int | None, num_bytes: int) -> torch.Tensor:
        """Room for a shard's weights, uninitialised. A pilot's, of which there is one at a time, has no offset."""
        if num_bytes == 0:  # a block whose weights are all held
            return torch.empty(0, dtype=torch.uint8, device=CPU)
        if offset is None:
            self._beside_arena[None] = mmap.mmap(-1, num_bytes, access=mmap.ACCESS_COPY)
        memory = self._beside_arena.get(offset, self._arena)
        return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset or 0)

    def free_slot(self, offset: int | None, num_bytes: int) -> None:
        """Called once no tensor of ours is read or written there any more.

        Poisoned by no operator: who frees a slot has the pool's lock, for which a thread inside an operator may wait,
        and a fork for that, for whose end the next operator would wait.
        """
        memory = self._beside_arena.pop(offset, self._arena)
        if self._poisons and num_bytes:
            memset(addressof(c_char.from_buffer(memory, offset or 0)), POISON, num_bytes)

    def retire(self, slot: torch.Tensor, used: Any) -> None:
        """Let what is promoted from here on have the slot's memory, which was used up to the moment `used`."""

    def mark(self) -> Any:
        """This moment of the calling thread's computing, as a `torch.Event` tells it; None where the host is never
        ahead of that."""
        return None

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""

    # ---- copies ----

    def promote(self, copies: Copies, *, in_use: bool = False) -> None:
        """Copy host tensors into slots that nothing uses, unless they are said to be in use; later compute sees the
        copies done."""
        for slot, host in copies:
            slot.copy_(host)

    def spill(
        self, tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Arrival]:
        """Copies in host memory, laid out as `like`, complete on arrival."""
        hosts, late = [], not self.is_virtual
        for t, h in zip(tensors, like, strict=True):
            if t.layout is torch.strided:
                host = torch.empty_strided(h.size(), h.stride(), dtype=t.dtype, device=CPU, pin_memory=late)
                hosts.append(host.copy_(t, non_blocking=late))
            else:
                hosts.append(t.to(CPU, copy=True))
        return hosts, Arrival()

    def free_cache(self) -> None:
        """Give back what an allocator keeps for later."""

    def pin(self, buffer: torch.Tensor) -> None:
        """Make a host buffer fast to copy from, if this device can."""

    def unpin(self, buffer: torch.Tensor) -> None:
        """Undo `pin`."""
