"""A device of a pool: slots within a budget, and the copies of bytes there and back.

    host buffer --h2d--> slot --compute--> gradients --d2h--> p.grad

`Device` itself is a virtual device in host memory. A promotion is a real copy into an arena as large as the budget.
With ``HYDRA_TUNE_CHECKS=1`` freed slots are filled with NaN.

Another kind of device is a subclass, as `CudaDevice` in `cuda_device.py`. It sets `is_virtual = False` and its rates,
overrides what moves bytes or waits (`slot`, `free_slot`, `scratch`, `retire`, `mark`, `synchronize`, `promote`,
`promote_riders`, `spill`, `free_cache`, `pin`, `unpin`, `measured_peak_bytes`), is opened in `open_devices.py`, and
names the generators that its operators draw from (`randomness/random_state.py`).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from ctypes import addressof, c_char, memset
from typing import Any

import torch

from hydra_tune.config import checks_enabled, format_bytes
from hydra_tune.devices.meter import TrialMeter
from hydra_tune.devices.shared_slot import SharedSlot
from hydra_tune.process.fork import gate
from hydra_tune.schedule.ledger import Ledger

CPU = torch.device("cpu")
POISON = 0xFF  # NaN in every float format, -1 in every signed integer
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]  # to, from


class Arrival:
    """Copies on their way to host memory. Nobody reads them before `wait` has returned.

    `marks` are two events, the begin and the end of the copies; None where the copies were complete at once.
    The `tensors` that are copied from are kept alive until `wait`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = (), marks: tuple[Any, Any] | None = None) -> None:
        self._tensors = tensors
        self.marks = marks

    def wait(self) -> None:
        """Wait until the copies are complete. May be called more than once."""
        if self.marks is not None:
            self.marks[1].synchronize()
        self._tensors = ()


class Device:
    """One device with an enforced budget. Slots are one-dimensional uint8 tensors."""

    counts_as_gpu = False  # whether needs are counted as on a GPU: batches, an optimizer's foreach, tied weights
    is_virtual = True  # slots of one offset share memory; a trial's home may move between virtual devices
    link_bytes_per_s = 5e9  # what one core copies; used only to choose between plans
    # A promotion ahead is made in the device's copy thread from this size on; to wake that thread takes 0.1 ms.
    least_ahead_bytes: int | None = 1 << 20
    spills_behind = False  # whether the device computes while gradients are copied to the host
    ledger: Ledger  # set by the pool: who has reserved which bytes

    def __init__(self, number: int, budget_bytes: int, torch_device: torch.device = CPU) -> None:
        self.number = number  # its place among the pool's devices
        self.name = f"cpu:{number} (virtual)" if self.is_virtual else str(torch_device)
        self.torch_device = torch_device
        self.budget_bytes = budget_bytes
        self.live_bytes = self.most_live_bytes = 0  # bytes of the storages that meters count, now and at most
        self.slot_meter = TrialMeter(self, -1)  # slots are no trial's: a step's bytes do not include them
        self.shared_slots: dict[int, SharedSlot] = {}  # by the number of the weights; filled, and not dropped yet
        self.generators: list[torch.Generator] = []  # default generators of operators on this device; a CPU has none
        self.process = gate.process
        if self.is_virtual:
            self._arena = mmap.mmap(-1, budget_bytes, access=mmap.ACCESS_COPY)
            self._pilot_slots: dict[int | None, mmap.mmap] = {}
            self._poisons = checks_enabled()

    # ---- what users may read ----

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now: by trials, steps, slots and the running task."""
        return self.ledger.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The highest `used_bytes` so far, pilots included."""
        return self.ledger.peak_bytes

    @property
    def measured_peak_bytes(self) -> int:
        """The most bytes that tensors really took: as CUDA's allocator counts, or the meters while they counted."""
        return self.most_live_bytes

    def __repr__(self) -> str:
        return f"<{self.name}: {format_bytes(self.used_bytes)} of {format_bytes(self.budget_bytes)} used>"

    # ---- slots ----

    def slot(self, offset: int | None, num_bytes: int) -> torch.Tensor:
        """Memory for a shard's weights, uninitialised. `offset` is in the arena. A pilot's slot is beside the arena and
        has none; there is one such slot at a time."""
        if num_bytes == 0:  # all weights of the block are held on the device
            return torch.empty(0, dtype=torch.uint8, device=CPU)
        if offset is None:
            self._pilot_slots[None] = mmap.mmap(-1, num_bytes, access=mmap.ACCESS_COPY)
        memory = self._pilot_slots.get(offset, self._arena)
        return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset or 0)

    def free_slot(self, offset: int | None, num_bytes: int) -> None:
        """Called once no tensor of ours is read or written there any more.

        The poison is written by `memset`, not by an operator. The caller has the pool's lock, and an operator might
        wait for a fork to end. That fork waits until a thread has left its visit, and that thread may wait for the
        pool's lock: a deadlock.
        """
        memory = self._pilot_slots.pop(offset, self._arena)
        if self._poisons and num_bytes:
            memset(addressof(c_char.from_buffer(memory, offset or 0)), POISON, num_bytes)

    def retire(self, slot: torch.Tensor, used: Any) -> None:
        """Let later promotions use the slot's memory once the device has passed `used`, a mark of the last use."""

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """Memory beside the slots for weights that are promoted for one visit. Given up by `retire`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def drop_shared(self, number: int) -> None:
        """Give up the shared slot with the weights of this number, if it was filled."""
        if (slot := self.shared_slots.pop(number, None)) is not None:
            slot.drop()

    def mark(self) -> Any:
        """An event at the current end of the calling thread's work on the device; None where the host is never ahead
        of the device."""
        return None

    def synchronize(self) -> None:
        """Wait until the device has done all the work it was given."""

    # ---- copies ----

    def promote_riders(self, copies: Copies) -> None:
        """Copy small weights into `scratch`. They do not wait for a shard that is on its way."""
        for slot, host in copies:
            slot.copy_(host)

    def promote(self, copies: Copies, *, in_use: bool = False) -> None:
        """Copy host tensors into slots. Operators that are launched later see the copied values.

        With `in_use`, operators that were launched before may still read the old values of the slots.
        """
        for slot, host in copies:
            slot.copy_(host)

    def spill(
        self, tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Arrival]:
        """New host tensors with the values of `tensors` and the strides of `like`; complete once the arrival is."""
        hosts, late = [], not self.is_virtual
        for t, h in zip(tensors, like, strict=True):
            if t.layout is torch.strided:
                host = torch.empty_strided(h.size(), h.stride(), dtype=t.dtype, device=CPU, pin_memory=late)
                hosts.append(host.copy_(t, non_blocking=late))
            else:
                hosts.append(t.to(CPU, copy=True))
        return hosts, Arrival()

    def free_cache(self) -> None:
        """Give back the memory that an allocator keeps for later use."""

    def pin(self, buffer: torch.Tensor) -> None:
        """Make a host buffer fast to copy from, if this device can."""

    def unpin(self, buffer: torch.Tensor) -> None:
        """Undo `pin`."""
