"""One device of a pool, as its user sees it."""

from __future__ import annotations

from collections.abc import Callable

from hydra_tune.config import format_bytes
from hydra_tune.device import Device
from hydra_tune.ledger import Ledger


class PoolDevice:
    """Its name and its bytes; `settle` takes back what nobody has any more."""

    def __init__(self, device: Device, ledger: Ledger, settle: Callable[[], None]) -> None:
        self._device = device
        self._ledger = ledger
        self._settle = settle
        self.name = device.name

    @property
    def budget_bytes(self) -> int:
        return self._device.budget_bytes

    @property
    def used_bytes(self) -> int:
        """Reserved now: by trials, steps, slots and the running task."""
        self._settle()
        return self._ledger.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The highest `used_bytes` so far, pilots included."""
        return self._ledger.peak_bytes

    @property
    def measured_peak_bytes(self) -> int:
        """The highest count of real storages: CUDA's allocator, or the meter while it counted."""
        return self._device.measured_peak_bytes

    def __repr__(self) -> str:
        return f"<{self.name}: {format_bytes(self.used_bytes)} of {format_bytes(self.budget_bytes)} used>"
