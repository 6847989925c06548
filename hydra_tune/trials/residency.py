"""Where one trial's tensors are: held on the device for life, in slots for a visit, or in host memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
from hydra_tune.devices.tensor_bytes import tensor_bytes

if TYPE_CHECKING:
    from hydra_tune.pool.shard_pool import ShardPool

MOST_FORMER = 512  # device copies that are kept to be filled again, where slots stay in place


class Residency:
    """Moves a trial's bytes and tells its pool."""

    def __init__(self, device: Device, meter: TrialMeter, pool: ShardPool) -> None:
        self.device = device  # the trial's home
        self.meter = meter
        self.shards: list[list[Block]] = []  # of the plan
        self.copies: dict[int, DeviceCopy] = {}  # by shard
        self._former: dict[tuple[int, int, int], DeviceCopy] = {}  # by shard, offset and bytes
        self._weights: HostWeights | None = None
        # weights and buffers; the module may be the model, which is garbage once its user has dropped it
        self._held: list[tuple[ref[nn.Module], str, nn.Parameter | None]] = []
        self._report = pool.events.report
        self._arrival: Arrival | None = None  # of gradients on their way to the host

    def move_home(self, to: Device) -> None:
        """Between two steps. On virtual devices, bytes move by being counted elsewhere."""
        self.device = to
        self._former.clear()
        self.meter.move(to)

    def cut(self, shards: list[list[Block]]) -> None:
        """What `promote_shard` promotes from here on."""
        self.shards = shards
        self._former.clear()

    @property
    def spilled(self) -> bool:
        return self._weights is not None

    # ---- slots ----

    def promote(self, block: Block) -> DeviceCopy:
        """For a pilot, in the trial's thread."""
        counting = self.meter.counting
        with CountingPaused():
            copy = DeviceCopy(self.device, self.device.slot(None, block.weight_bytes), [block], self._weights)
            self._fill(copy, counting=counting)
        self._report.note_moved(self.meter.trial, "promoted_bytes", self.device, copy.copied_bytes)
        return copy

    def promote_shard(self, shard: int, offset: int, num_bytes: int, *, ahead: bool = False) -> int:
        """Into `copies`, in the trial's thread; `ahead` of its task in one of the device's; bytes that were copied.
        Where slots stay in place, the copy that was there before is filled again."""
        device, place = self.device, (shard, offset, num_bytes)
        counting = self.meter.always if ahead else self.meter.counting
        with CountingPaused():
            copy = self._former.get(place)
            if copy is None or not copy.can_refill:
                copy = DeviceCopy(device, device.slot(offset, num_bytes), self.shards[shard], self._weights)
                if device.is_virtual:
                    if len(self._former) >= MOST_FORMER:
                        self._former.clear()
                    self._former[place] = copy
            self._fill(copy, counting=counting)
        copy.is_new = not ahead
        self.copies[shard] = copy
        return copy.copied_bytes

    def _fill(self, copy: DeviceCopy, *, counting: bool) -> None:
        copy.counted = counting
        if counting:
            copy.device.slot_meter.add([copy.slot])
        copy.fill()

    def drop_shard(self, shard: int) -> None:
        """In any thread."""
        if (copy := self.copies.pop(shard, None)) is not None:
            self.drop(copy)

    def drop(self, copy: DeviceCopy) -> None:
        """Whoever has it still, as an exception's frames: its slot counts no more, and its memory is another copy's."""
        copy.device.retire(copy.slot, copy.used)
        if copy.counted:
            copy.device.slot_meter.disown(copy.slot)

    def refresh(self, copy: DeviceCopy, block: Block) -> None:
        """Copy anew what has changed on the host since it was copied; this thread has just done so, if it is new."""
        if copy.is_new:
            copy.is_new = False
            return
        if stale := copy.stale(block.slot_parameters):
            with CountingPaused():
                copy.device.promote(stale, in_use=True)

    def spill_gradients(
        self, masters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None], *, late: bool
    ) -> list[torch.Tensor | None]:
        """Fresh host tensors, laid out as their master, so that autograd can take them for `.grad` as they are. With
        `late` nobody reads them before `await_gradients`."""
        self.await_gradients()  # a plan has room for those of one block beside the next one's
        given = [g for g in gradients if g is not None]
        like = [p for g, p in zip(gradients, masters, strict=True) if g is not None]
        num_bytes, start_s = sum(map(tensor_bytes, given)), time.perf_counter()
        with CountingPaused():
            spilled, arrival = self.device.spill(given, like)
            if late and not torch.is_anomaly_enabled():  # that reads what a node returns
                self._arrival = arrival
            else:
                arrival.wait()
        during = arrival.marks or time.perf_counter() - start_s
        self._report.note_spill(self.meter.trial, self.device, num_bytes, during)
        hosts = iter(spilled)
        return [None if g is None else next(hosts) for g in gradients]

    def await_gradients(self) -> None:
        """Those of the last backward that have not reached the host yet."""
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None

    # ---- for the trial's life ----

    def spill(self, blocks: Sequence[Block]) -> None:
        """Lay the blocks' parameters into one host buffer, in this order, unless they are in one."""
        if self._weights is not None:
            if all(map(self._weights.has, (p for block in blocks for p in block.slot_parameters))):
                return
            self._weights.close()
            self._weights = None  # should the next line be interrupted
        with CountingPaused():
            self._weights = HostWeights((p for block in blocks for p in block.slot_parameters), self.device)

    def hold(
        self, model: nn.Module, except_blocks: Sequence[Block], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Move parameters and buffers outside these blocks to the device, unless they are there."""
        there = {(m, name) for b in except_blocks for m, name, _ in b.sites}
        there |= {(module(), name) for module, name, _ in self._held}  # type: ignore[misc]
        moved: dict[torch.Tensor, None] = {}  # each once, though it may have several sites
        for module in model.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and (module, name) not in there:
                    self._held.append((ref(module), name, module._parameters.get(name)))
                    moved[tensor] = None
        with CountingPaused():
            for tensor in moved:
                grad = tensor.grad if tensor.is_leaf else None  # PyTorch warns of who asks one that was computed
                _put(tensor, tensor.detach().to(self.device.torch_device, copy=True))
                if grad is not None and grad.device != self.device.torch_device:  # a virtual one's may be a user's view
                    tensor.grad = grad.detach().to(self.device.torch_device)
                if self.meter.counting:
                    self.meter.adopt([tensor] if grad is None else [tensor, grad])
        if moved:
            self._report.note_moved(self.meter.trial, "promoted_bytes", self.device, sum(map(tensor_bytes, moved)))
            self._move_state(optimizers)

    def bring_home(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Move what is held on the device back to host memory."""
        self._former.clear()
        found: dict[torch.Tensor, None] = {}
        for reference, name, parameter in self._held:
            module = reference()  # which may have another one by now
            tensor = parameter if module is None else {**module._buffers, **module._parameters}.get(name)
            if tensor is not None:
                found[tensor] = None
        with CountingPaused():
            for held in found:
                _put(held, self._to_host(held))
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
        """To its parameters, as `load_state_dict` would; groups and tensors stay who they are."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                counts_there = group.get("capturable") or group.get("fused")
                for p in group["params"]:
                    values = optimizer.state.get(p, {})
                    for x in tensors_in([v for key, v in values.items() if key != "step" or counts_there]):
                        if x.device != p.device:
                            x.data = x.data.to(p.device)

    def close(self) -> None:
        for shard, copy in list(self.copies.items()):  # another trial may drop an idle one
            copy.device.retire(copy.slot, copy.device.mark())  # an interruption may have come before the visit's own
            self.drop_shard(shard)
        self._former.clear()
        if self._weights is not None:
            self._weights.close()

    def to_device(self, batch: Any) -> Any:
        """A batch's tensors on the device, and what has a `to` of its own (a BatchEncoding); what else it holds as it
        is. At once: a loader may write its next batch where this one was."""
        device = self.device.torch_device
        leaves, structure = flatten(batch)
        moved = [leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf for leaf in leaves]
        return unflatten(moved, structure)


def _put(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """It stays itself, so that who else has it goes on to see it."""
    with torch.inference_mode(tensor.is_inference()):
        tensor.data = data
