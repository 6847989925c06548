"""A slot with frozen weights that several trials use. The first that visits them fills it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hydra_tune.devices.device import Device


class SharedSlot:
    """`is_current` until the scheduler drops it; from then on its memory belongs to another shard.

    counted    whether the device's meter counts it
    used       by trial, the mark of its last computation that needs the slot (`Device.mark`)
    """

    def __init__(self, device: Device, memory: torch.Tensor) -> None:
        self.device = device
        self.memory = memory
        self.counted = False
        self.used: dict[int, Any] = {}
        self.is_current = True

    def drop(self) -> None:
        """Give the memory up: later promotions may use it once the device has passed all marks."""
        self.is_current = False
        for mark in [*self.used.values()] or [None]:
            self.device.retire(self.memory, mark)
        if self.counted:
            self.device.slot_meter.disown(self.memory)
