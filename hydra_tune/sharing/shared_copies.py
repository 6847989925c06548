"""The part of a trial's `Residency` for frozen weights: of those that several trials have (`SharedWeights`) each place
has one copy for all of them.

    host memory    where `share`, or the model's maker, has put them. A GPU copies from a pinned buffer, to which the
                   first trial moves them, and the others follow
    a slot         filled by the first trial that visits the shard
    held           on the device for life, moved there by the first trial that holds them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.devices.device import Device
from hydra_tune.devices.host_weights import HostWeights
from hydra_tune.devices.meter import TrialMeter
from hydra_tune.devices.shared_slot import SharedSlot
from hydra_tune.devices.tensor_bytes import tensor_bytes
from hydra_tune.schedule.ledger import SHARED, SlotKey
from hydra_tune.sharing.base_storages import base_of, note_base
from hydra_tune.sharing.shared_parameter import note_shared
from hydra_tune.sharing.shared_weights import HOST, PINNED, SharedWeights

if TYPE_CHECKING:
    from hydra_tune.pool.report import Report


class SharedCopies:
    """One trial's. `numbers` are those of its shards' weights, None where a shard is the trial's own; empty if all are.

    Methods that move tensors are called with counting paused.
    """

    def __init__(self, meter: TrialMeter, frozen: SharedWeights, report: Report) -> None:
        self.numbers: Sequence[int | None] = ()
        self._meter = meter
        self._frozen = frozen
        self._report = report
        self._pinned: dict[int, HostWeights] = {}  # by id: pinned buffers with weights of this trial

    # ---- slots ----

    def slot_key(self, shard: int) -> SlotKey:
        number = self.numbers[shard] if self.numbers else None
        return (self._meter.trial, shard) if number is None else (SHARED, number)

    def filled_slot(self, shard: int, device: Device) -> SharedSlot | None:
        """The shard's shared slot, if a trial has filled it."""
        number = self.numbers[shard] if self.numbers else None
        return None if number is None else device.shared_slots.get(number)

    def has_filled(self, shard: int, copy: DeviceCopy) -> None:
        """The trial has filled the shard's slot. If the shard is shared, other trials use it from here on."""
        number = self.numbers[shard] if self.numbers else None
        copy.shared = None if number is None else SharedSlot(copy.device, copy.slot)
        if number is not None and copy.shared is not None:
            copy.shared.counted, copy.device.shared_slots[number] = copy.counted, copy.shared

    # ---- held ----

    def hold(self, tensor: torch.Tensor, device: Device) -> bool:
        """Have a shared weight on the device. Returns False, and does nothing, if it is the trial's own."""
        weight = self._frozen.shared(tensor)
        if weight is None:
            return False
        with self._frozen.moving:
            there = weight.at(device.number)
            if there is None:
                there = tensor.detach().to(device.torch_device, copy=True)
                note_base([there])  # what a trial trains must leave it
                if self._meter.counting:
                    device.slot_meter.adopt([there])
                self._report.note_moved(self._meter.trial, "promoted_bytes", device, tensor_bytes(there))
            set_data(tensor, there)
            note_shared(tensor)
            self._frozen.has_moved(tensor, device.number)
        return True

    def bring_home(self, tensor: torch.Tensor) -> bool:
        """Have a shared weight in host memory again. Returns False, and does nothing, if it is the trial's own or is
        nowhere in host memory."""
        weight = self._frozen.shared(tensor)
        if weight is None:
            return False
        for place in (PINNED, HOST):
            if (there := weight.at(place)) is not None:
                set_data(tensor, there)
                self._frozen.has_moved(tensor, place)
                return True
        return False

    def has_moved(self, tensor: torch.Tensor, place: int = HOST) -> None:
        """The trial has moved a tensor of its own."""
        if not tensor.requires_grad:
            self._frozen.has_moved(tensor, place)

    # ---- pinned ----

    def pin(self, parameters: Sequence[nn.Parameter], device: Device) -> None:
        """Have frozen weights in pinned memory: where other trials have them, or in a new buffer."""
        with self._frozen.moving:
            for p in parameters:
                weight = self._frozen.shared(p)
                buffer = None if weight is None else weight.pinned
                if weight is not None and buffer is not None and (there := weight.at(PINNED)) is not None:
                    set_data(p, there)
                    self._frozen.has_moved(p, PINNED)
                    self._pinned[id(buffer)] = buffer
            left = [p for p in parameters if not self._frozen.is_at(p, PINNED)]
            if left:
                bases = list(map(base_of, left))
                buffer = HostWeights(left, device)
                self._pinned[id(buffer)] = buffer
                for p, base in zip(left, bases, strict=True):
                    if base is not None:  # so that modules to come lie there, and the former memory is free
                        set_data(base, p.data)
                        note_base([base])
                    self._frozen.is_pinned(p, base, buffer)

    def close(self) -> None:
        """The trial ends. The last one that has a pinned buffer unpins it."""
        self._pinned.clear()


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Change a tensor's data in place: it stays the same object, so that all who refer to it see the new data."""
    with torch.inference_mode(tensor.is_inference()):
        tensor.data = data
