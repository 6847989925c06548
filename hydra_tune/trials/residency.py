"""Where one trial's tensors are, and the copies that move them.

held       on the device for the trial's life: buffers, weights outside of blocks; of a resident trial, all
in a slot  a copy of a shard's weights, from a promotion until its room is needed or its values are stale
spilled    weights in host memory: trained ones in one buffer (`HostWeights`); frozen ones stay where they are, so that
           trials go on sharing them, and a memory-mapped file is read as it is promoted
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn

from hydra_tune.blocks.block import Block
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.blocks.tree import flatten, tensors_in, unflatten
from hydra_tune.devices.device import Arrival, Device
from hydra_tune.devices.host_weights import HostWeights
from hydra_tune.devices.meter import CountingPaused, TrialMeter
from hydra_tune.devices.tensor_bytes import is_wrapper, sites_of_parts, tensor_bytes
from hydra_tune.errors import PrepareError
from hydra_tune.sharing.shared_copies import SharedCopies, set_data

if TYPE_CHECKING:
    from hydra_tune.pool.shard_pool import ShardPool

MAX_FORMER_COPIES = 512  # at most so many former device copies are kept to be filled again


class Residency:
    """Moves a trial's bytes, and tells its pool how many."""

    def __init__(self, device: Device, meter: TrialMeter, pool: ShardPool) -> None:
        self.device = device  # the trial's home
        self.meter = meter
        self.shards: list[list[Block]] = []  # of the plan
        self.copies: dict[int, DeviceCopy] = {}  # by shard
        self._former_copies: dict[tuple[int, int, int], DeviceCopy] = {}  # by shard, offset and bytes
        self._weights: HostWeights | None = None
        # (module, attribute, parameter; None for a buffer) of what is held on the device. The module is weakly referred
        # to: it may be the model, which is garbage once its user has dropped it
        self._held: list[tuple[ref[nn.Module | torch.Tensor], str, torch.Tensor | None]] = []
        self._report = pool.events.report
        self.shared = SharedCopies(meter, pool.shared_weights, pool.events.report)
        self._arrival: Arrival | None = None  # gradients on their way to the host

    def move_home(self, to: Device) -> None:
        """Change the home device, between two steps. Only for virtual devices: no bytes move, they are only counted on
        the new home."""
        self.device = to
        self._former_copies.clear()
        self.meter.move(to)

    def cut(self, shards: list[list[Block]]) -> None:
        """Set the shards that `promote_shard` promotes."""
        self.shards = shards
        self.share(())

    def share(self, numbers: Sequence[int | None]) -> None:
        """Set which shards share their slots with other trials, None for those that do not."""
        self.shared.numbers = numbers
        self.copies = {shard: copy for shard, copy in self.copies.items() if copy.shared is None}
        self._former_copies.clear()

    def copy_of(self, shard: int) -> DeviceCopy | None:
        """The trial's copy of the shard on the device; None if it has none."""
        copy = self.copies.get(shard)
        return copy if copy is None or copy.shared is None or copy.shared.is_current else None

    @property
    def spilled(self) -> bool:
        """Whether the blocks' weights are in host memory."""
        return self._weights is not None

    # ---- slots ----

    def promote(self, block: Block) -> DeviceCopy:
        """Promote one block, for a pilot, in the trial's thread."""
        counting = self.meter.counting
        with CountingPaused():
            copy = DeviceCopy(self.device, self.device.slot(None, block.weight_bytes), [block], self._weights)
            self._fill(copy, counting=counting)
        self._report.note_moved(self.meter.trial, "promoted_bytes", self.device, copy.copied_bytes)
        return copy

    def promote_shard(self, shard: int, offset: int, num_bytes: int, *, ahead: bool = False) -> int:
        """Promote a shard into the slot at `offset`, and note its copy in `copies`. Returns the bytes that were copied.

        Called in the trial's thread; `ahead` of its task, in the device's copy thread. On a virtual device a slot at
        the same offset is the same memory, so that the shard's former copy there is filled again. If another trial
        has filled a shared slot, nothing is copied.
        """
        device, place = self.device, (shard, offset, num_bytes)
        counting = self.meter.always if ahead else self.meter.counting
        with CountingPaused():
            filled = self.shared.filled_slot(shard, device)
            copy = self._former_copies.get(place)
            if copy is None or not copy.can_refill:
                slot = device.slot(offset, num_bytes) if filled is None else filled.memory
                copy = DeviceCopy(device, slot, self.shards[shard], self._weights)
                if device.is_virtual:
                    if len(self._former_copies) >= MAX_FORMER_COPIES:
                        self._former_copies.clear()
                    self._former_copies[place] = copy
            if filled is not None:
                copy.take_filled(filled)
            else:
                self._fill(copy, counting=counting)
                self.shared.has_filled(shard, copy)
        copy.is_new = not ahead
        self.copies[shard] = copy
        return copy.copied_bytes if filled is None else 0

    def _fill(self, copy: DeviceCopy, *, counting: bool) -> None:
        copy.counted = counting
        if counting:
            copy.device.slot_meter.add([copy.slot])
        copy.fill()

    def drop_shard(self, shard: int) -> None:
        """Drop the shard's copy, if there is one. May be called in any thread."""
        if (copy := self.copies.pop(shard, None)) is not None and copy.shared is None:
            self.drop(copy)

    def drop(self, copy: DeviceCopy) -> None:
        """Give up the copy's slot: it no longer counts, and its memory may be used again. Others, such as the frames of
        an exception, may still refer to the copy."""
        copy.device.retire(copy.slot, copy.used)
        if copy.counted:
            copy.device.slot_meter.disown(copy.slot)

    def refresh(self, copy: DeviceCopy, block: Block) -> None:
        """Copy anew the block's weights that have changed on the host since the copy was filled."""
        if copy.is_new:  # this thread has just filled it
            copy.is_new = False
            return
        if stale := copy.stale(block.slot_parameters):
            if copy.shared is not None:
                raise PrepareError(
                    f"weights that several trials share are not written, but one of {block.name} was. Give this trial "
                    "its own weight before prepare: p.data = p.data.clone()."
                )
            with CountingPaused():
                copy.device.promote(stale, in_use=True)

    def bring_riders(self, copy: DeviceCopy, block: Block) -> None:
        """Promote the block's small trained weights, which are no part of its shard's slot."""
        with CountingPaused():
            copy.counted |= self.meter.counting
            copy.bring_riders(block)

    def spill_gradients(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None], *, late: bool
    ) -> list[torch.Tensor | None]:
        """Copy gradients to new host tensors.

        Their strides are those of the parameters, so that autograd takes them for `.grad` as they are. With
        `late` they are still on their way when this returns: nobody may read them before `await_gradients`.
        """
        self.await_gradients()  # the plan has room for one block's gradients on their way, beside those of the next
        given = [g for g in gradients if g is not None]
        like = [p for g, p in zip(gradients, parameters, strict=True) if g is not None]
        num_bytes, start_s = sum(map(tensor_bytes, given)), time.perf_counter()
        with CountingPaused():
            spilled, arrival = self.device.spill(given, like)
            if late and not torch.is_anomaly_enabled():  # anomaly detection reads what a node returns
                self._arrival = arrival
            else:
                arrival.wait()
        during = arrival.marks or time.perf_counter() - start_s
        self._report.note_spill(self.meter.trial, self.device, num_bytes, during)
        hosts = iter(spilled)
        return [None if g is None else next(hosts) for g in gradients]

    def await_gradients(self) -> None:
        """Wait until all gradients have reached the host."""
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None

    # ---- for the trial's life ----

    def spill(self, blocks: Sequence[Block], trained: Container[int]) -> None:
        """Move the blocks' trained parameters, given by their ids, into one host buffer, in this order, unless they are
        in one already."""
        promoted = list(dict.fromkeys(p for block in blocks for p in block.slot_parameters))
        own = [p for p in promoted if id(p) in trained]
        with CountingPaused():
            if not self.device.is_virtual:
                self.shared.pin([p for p in promoted if id(p) not in trained], self.device)
            if self._weights is None or not all(map(self._weights.has, own)):
                former, self._weights = self._weights, None  # the next lines may be interrupted
                if former is not None:
                    former.close()
                self._weights = HostWeights(own, self.device)

    def hold(self, model: nn.Module, besides: Sequence[Block], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Move all parameters and buffers to the device, except those of `besides`, and optimizer state with its
        parameters. What is there already stays."""
        held_sites = {(id(place), name) for b in besides for place, name, _ in b.sites}
        held_sites |= {(id(_place_in(owner(), name)), name) for owner, name, _ in self._held}
        moved: dict[torch.Tensor, None] = {}  # each once, though it may have several sites
        for owner, name, tensor in _sites_in(model):
            if (id(_place_in(owner, name)), name) not in held_sites:
                is_buffer = isinstance(owner, nn.Module) and name not in owner._parameters
                self._held.append((ref(owner), name, None if is_buffer else tensor))
                moved[tensor] = None
        with CountingPaused():
            for tensor in [t for t in moved if self.shared.hold(t, self.device)]:
                del moved[tensor]
            for tensor in moved:
                grad = tensor.grad if tensor.is_leaf else None  # PyTorch warns if one reads `.grad` of other tensors
                set_data(tensor, tensor.detach().to(self.device.torch_device, copy=True))
                self.shared.has_moved(tensor, self.device.number)
                # on a virtual device a gradient stays the same tensor, as a user's tensor may view it
                if grad is not None and grad.device != self.device.torch_device:
                    tensor.grad = grad.detach().to(self.device.torch_device)
                if self.meter.counting:
                    self.meter.adopt([tensor] if grad is None else [tensor, grad])
        if moved:
            self._report.note_moved(self.meter.trial, "promoted_bytes", self.device, sum(map(tensor_bytes, moved)))
            self._move_state(optimizers)

    def bring_home(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Move what is held on the device back to host memory."""
        self._former_copies.clear()
        found: dict[torch.Tensor, None] = {}
        for owner, name, parameter in self._held:
            place = _place_in(owner(), name)  # alive: it may have another tensor there by now
            tensor = parameter if place is None else place.get(name)
            if tensor is not None:
                found[tensor] = None
        with CountingPaused():
            for held in [t for t in found if not self.shared.bring_home(t)]:
                set_data(held, self._to_host(held))
                self.shared.has_moved(held)
                if (grad := held.grad if held.is_leaf else None) is not None:
                    self.meter.disown(grad)
                    if grad.device.type != "cpu":
                        held.grad = self._to_host(grad)
        self._held = []
        self._move_state(optimizers)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self._report.note_moved(self.meter.trial, "spilled_bytes", self.device, tensor_bytes(tensor))
        (host,), arrival = self.device.spill([tensor], [tensor])
        arrival.wait()
        return host

    def _move_state(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Move the optimizers' state to the devices of its parameters, by the rule of `load_state_dict`: `step` stays
        on the host unless the optimizer is capturable or fused. Groups and tensors stay the same objects."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                counts_there = group.get("capturable") or group.get("fused")
                for p in group["params"]:
                    values = optimizer.state.get(p, {})
                    for x in tensors_in([v for key, v in values.items() if key != "step" or counts_there]):
                        if x.device != p.device:
                            x.data = x.data.to(p.device)

    def close(self) -> None:
        """Drop all copies, and give up the host buffer."""
        # a list, as other threads may drop idle shards meanwhile
        for shard, copy in list(self.copies.items()):
            copy.note_use(self.meter.trial)  # Ctrl-C may have ended a visit before it did that
            self.drop_shard(shard)
        self._former_copies.clear()
        self.shared.close()
        if self._weights is not None:
            self._weights.close()

    def to_device(self, batch: Any) -> Any:
        """The batch with its tensors on the device, and with other objects that have a method `to`, such as a
        BatchEncoding. The copies are complete on return: a loader may write its next batch to the same memory."""
        device = self.device.torch_device
        leaves, structure = flatten(batch)
        moved = [leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf for leaf in leaves]
        return unflatten(moved, structure)


def _sites_in(model: nn.Module) -> Iterator[tuple[nn.Module | torch.Tensor, str, torch.Tensor]]:
    """For each tensor with memory among the model's parameters and buffers: who has it, the attribute, the tensor."""
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and is_wrapper(tensor):
                yield from sites_of_parts(tensor)
            elif tensor is not None:
                yield module, name, tensor


def _place_in(owner: nn.Module | torch.Tensor | None, name: str) -> dict[str, Any] | None:
    """The dict in which a module, or a quantized weight, has the tensor of this name; None if it is gone."""
    if isinstance(owner, nn.Module):
        return owner._parameters if name in owner._parameters else owner._buffers
    return None if owner is None else vars(owner)
