"""Counts the bytes that tensors really take on a device, storage by storage.

A ledger knows what is reserved; a meter knows what is used. Pilots measure blocks with meters. With
``HYDRA_TUNE_CHECKS=1`` they count in every operator of every trial, so that a virtual device raises out of memory where
a GPU would.

On a virtual device all tensors say ``cpu``. So a storage counts as the device's if an operator made it from a storage
that counts already, or without tensor inputs inside a model's forward or a block's backward. A batch that a script has
made counts on a GPU only: on a virtual device it stays in the script's own memory.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hydra_tune.config import format_bytes
from hydra_tune.devices.tensor_bytes import parts_of, tensor_bytes
from hydra_tune.errors import LARGER, SMALLER_STEP, BudgetError, does_not_fit
from hydra_tune.process.fork import gate, new_in_child

if TYPE_CHECKING:
    from hydra_tune.devices.device import Device
    from hydra_tune.planning.pilot import Pilot

# Garbage collection may call `_forget` while this thread already has the lock, for any meter's storage. So the lock is
# reentrant, and there is one for all meters: with a lock for each, two threads could wait for each other.
_lock = new_in_child(threading.RLock())
# Each live storage that is counted, by its address: a reference, its meter, its bytes. A storage that several trials
# share is counted for the first of them.
_counted: dict[int, tuple[weakref.ref[torch.UntypedStorage], TrialMeter, int]] = {}
_ADVICE = "Lower the batch size, keep fewer tensors, or raise the pool's memory=."
os.register_at_fork(after_in_child=_counted.clear)  # a forked child has nothing on a device


class NoRoomError(torch.OutOfMemoryError):
    """As a GPU raises it, where a budget is kept by counting. `needs` says how much would have been enough so far."""

    needs = ""


def no_room(needs: str, message: str = "") -> NoRoomError:
    error = NoRoomError(message or f"it needs {needs}")
    error.needs = needs
    return error


def told(error: Exception) -> str:
    """What it says, without advice, and without what CUDA says of the whole GPU."""
    return str(error).removesuffix(_ADVICE).partition(". GPU ")[0].rstrip(" .")


def needs(error: Exception) -> str:
    """For a refusal: what would have been needed."""
    return getattr(error, "needs", "") or f"more than is left ({told(error)})"


class TrialMeter:
    """Counts one trial's bytes on its home device. Thread-safe. A storage is no longer counted once it is freed.

    trial_bytes    the trial's bytes now
    window_peak    their highest value since the pilot has last set it
    inside         more than 0 within a prepared model's forward and within a visit to a block
    """

    def __init__(self, device: Device, trial: int, *, always: bool = False) -> None:
        self.device = device
        self.trial = trial
        self.always = always  # with HYDRA_TUNE_CHECKS=1
        self.counting = always
        self.trial_bytes = 0
        self.window_peak = 0
        self._outside_start = self._outside_peak = 0
        self._is_outside = False  # between visits to blocks
        # Returns the pilot under way. A weak reference: a mode on the thread's stack keeps this meter alive.
        self.pilot: Callable[[], Pilot | None] = lambda: None
        self.within_checkpoint = False  # a non-reentrant checkpoint was seen since this was last set to False
        self.inside = 0

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of these tensors, those that are not counted yet, with their size now."""
        for tensor in tensors:
            for storage in storages_of(tensor):
                self._add(storage, storage.nbytes())

    def adopt(self, tensors: Iterable[torch.Tensor], *, are_a_batch: bool = False) -> None:
        """Count tensors that came to the device by a copy, not by an operator.

        A tensor counts with its own bytes, not with those of its whole storage: a batch may be a view of a data set.
        On a virtual device a batch counts as none, for it still lies in the script's own memory. But it is known to
        be on the device, so that what operators make of it counts.
        """
        takes_none = are_a_batch and not self.device.counts_as_gpu
        for tensor in tensors:
            for part in parts_of(tensor) if tensor.numel() else ():
                storage = part.untyped_storage()
                own_bytes = min(storage.nbytes(), tensor_bytes(tensor))
                self._add(storage, 0 if takes_none else own_bytes)

    def _add(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = storage._cdata
        with _lock:
            # tensors of a forked child are on no device
            if key in _counted or storage.device.type == "meta" or gate.process != self.device.process:
                return
            if num_bytes:
                self._charge(num_bytes)
            _counted[key] = weakref.ref(storage, lambda _: _forget(key)), self, num_bytes

    def _charge(self, num_bytes: int) -> None:
        device = self.device
        if device.is_virtual and device.live_bytes + num_bytes > device.budget_bytes:
            raise no_room(
                f"{format_bytes(device.live_bytes + num_bytes - self._others_bytes, up=True)} as it is cut",
                f"{device.name} holds {format_bytes(device.live_bytes)} and was asked for {format_bytes(num_bytes)} "
                f"more, but its budget is {format_bytes(device.budget_bytes)}. {_ADVICE}",
            )
        self.trial_bytes += num_bytes
        self.window_peak = max(self.window_peak, self.trial_bytes)
        if self._is_outside:
            self._outside_peak = max(self._outside_peak, self.trial_bytes)
        device.live_bytes += num_bytes  # read anew: garbage collection may have lowered it since the check above
        device.most_live_bytes = max(device.most_live_bytes, device.live_bytes)

    def disown(self, tensor: torch.Tensor) -> None:
        """Stop counting a tensor: from here on it belongs to host memory."""
        for storage in storages_of(tensor):
            _forget(storage._cdata)

    def move(self, to: Device) -> None:
        """The trial's home changes to another device. All its bytes count there."""
        with _lock:
            self.device.live_bytes -= self.trial_bytes
            self.device = to
            to.live_bytes += self.trial_bytes
            to.most_live_bytes = max(to.most_live_bytes, to.live_bytes)

    # ---- asked at each operator ----

    def makes_on_device(self, inputs: list[torch.Tensor]) -> bool:
        """Whether an operator with these inputs makes its outputs on the device, and not in host memory."""
        if not any(map(is_counted, inputs)):
            return not inputs and self.inside > 0
        if self.pilot() is not None:
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) or (None,)
            self.within_checkpoint |= getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
        return True

    def out_of_memory_error(self, error: torch.OutOfMemoryError) -> Exception:
        """The error to raise for an operator that ran out of memory.

        In a visit it is the same error: the visit may be made another way. Between the visits of a pilot there is no
        other way, so it is a `BudgetError`, which ends the trial. Then counting ends, too. The mode is still on the
        thread's stack, and a script that catches the error may never call this model again.
        """
        pilot = self.pilot()
        if pilot is None or self.inside:
            return error
        pilot.failed, self.counting = True, self.always
        return self.refusal(error)

    def refusal(self, error: torch.OutOfMemoryError) -> BudgetError:
        """The error that ends a pilot which has no room beside its blocks."""
        helps = LARGER, SMALLER_STEP, "keeping fewer tensors between layers, such as hidden states"
        refusal = does_not_fit("a step, with what it keeps between its blocks,", needs(error), self.room, helps)
        return refusal if (pilot := self.pilot()) is None else pilot.note_refusal(refusal)

    @property
    def room(self) -> str:
        """For a refusal: what a pilot has on the device."""
        others = f", of which other trials hold {format_bytes(self._others_bytes)}" if self._others_bytes else ""
        return f"the budget of {self.device.name} is {format_bytes(self.device.budget_bytes)}{others}"

    @property
    def _others_bytes(self) -> int:
        """What other trials hold on the device while this one's pilot has the rest."""
        pilot = self.pilot()
        return 0 if pilot is None else self.device.budget_bytes - pilot.free_bytes

    def watch_outside(self) -> None:
        """Begin to measure between visits: the trial's highest bytes, beyond those it has now."""
        self._outside_start = self._outside_peak = self.trial_bytes
        self._is_outside = True

    def outside_ends(self) -> None:
        """A visit begins."""
        if self._is_outside:
            self._outside_peak = max(self._outside_peak, self.trial_bytes)
        self._is_outside = False

    def outside_starts(self, *, later: bool = False) -> None:
        """A visit has ended. With `later`, tensors of the visit are still to be freed: the bytes of now do not count,
        but those at the next allocation do, or those at the end."""
        self._is_outside = True
        if not later:
            self._outside_peak = max(self._outside_peak, self.trial_bytes)

    def outside_peak(self) -> int:
        """The most bytes between visits since `watch_outside`, beyond those of then."""
        self.outside_ends()
        return self._outside_peak - self._outside_start


@dataclass
class Used:
    """The most bytes beyond those there at the start, those that are left, and seconds."""

    num_bytes: int = 0
    left_bytes: int = 0
    seconds: float = 0.0


@contextmanager
def measured(meter: TrialMeter) -> Iterator[Used]:
    """What is used within; known at the end."""
    used, device = Used(), meter.device
    device.synchronize()
    meter.window_peak = before = meter.trial_bytes
    start_s = time.perf_counter()
    yield used
    device.synchronize()
    used.seconds = time.perf_counter() - start_s
    used.num_bytes, used.left_bytes = meter.window_peak - before, max(0, meter.trial_bytes - before)


class CountingPaused:
    """A context manager for copies between device and host. Operators inside are not counted, as no mode sees them, and
    have no gradients. Their host tensors must not count as the device's.

    Use an instance once. A task enters several of these, so that entering has to be cheap. A fork waits until it ends.
    """

    __slots__ = ("_grad", "_outermost", "_without")

    def __enter__(self) -> None:
        self._outermost = gate.enter()
        self._without: list[AbstractContextManager[None]] = []
        if torch.is_inference_mode_enabled():  # copies outlive it, and must not be inference tensors
            self._without.append(torch.inference_mode(False))
        if torch._C._len_torch_dispatch_stack():
            self._without.append(torch._C._DisableTorchDispatch())
        for context in self._without:
            context.__enter__()
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        torch._C._set_grad_enabled(self._grad)
        for context in self._without:
            context.__exit__(*error)
        if self._outermost:
            gate.leave()


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The tensor's storage; of a sparse tensor, the storages of its indices and values."""
    return [part.untyped_storage() for part in parts_of(tensor)]


def is_counted(tensor: torch.Tensor) -> bool:
    """Whether the tensor is known to lie on a device."""
    return any(storage._cdata in _counted for storage in storages_of(tensor)[-1:])


def _forget(key: int) -> None:
    with _lock:
        found = _counted.pop(key, None)
        if found is not None:
            _, owner, num_bytes = found
            owner.trial_bytes -= num_bytes
            owner.device.live_bytes -= num_bytes


def end_trial(trial: int, devices: Container[Device]) -> None:
    """Stop counting the trial's storages on these devices. Those that live on belong to the user's host memory now."""
    with _lock:
        for key, (_, owner, _) in _counted.copy().items():  # a copy: garbage collection may remove entries meanwhile
            if owner.trial == trial and owner.device in devices:
                _forget(key)
