"""Counts the bytes that tensors really occupy on a device, storage by storage.

A ledger tells what was reserved; a meter tells what was used. The pilot measures blocks with it, and
with ``HYDRA_TUNE_CHECKS=1`` it watches every operator of every trial, so that a virtual device raises
out of memory where a GPU would. On a virtual device all tensors say ``cpu``, so a storage counts as the
device's when an operator made it from one that already does, or inside a model's forward or backward.
A batch that a script has made takes room on a GPU only: here it is in the script's own memory.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from hydra_tune.config import format_bytes
from hydra_tune.devices.tensor_bytes import parts_of
from hydra_tune.errors import BudgetError
from hydra_tune.process.fork import gate, new_in_child

if TYPE_CHECKING:
    from hydra_tune.devices.device import Device
    from hydra_tune.planning.pilot import Pilot

# A finalizer may run within any meter's work: reentrant, and one for all, lest two meters' threads wait for each other.
_lock = new_in_child(threading.RLock())
# by storage that lives: whose it is, and what of it counts; what trials share is the first one's
_counted: dict[int, tuple[weakref.ref[torch.UntypedStorage], TrialMeter, int]] = {}
ADVICE = "Lower the batch size, keep fewer tensors, or raise the pool's memory=."
os.register_at_fork(after_in_child=_counted.clear)  # nothing that the child inherits is on a device


class TrialMeter:
    """One trial's bytes on its home, and whether its operators are counted. Thread-safe; a storage is forgotten when it
    is freed."""

    def __init__(self, device: Device, trial: int, *, always: bool = False) -> None:
        self.device = device
        self.trial = trial
        self.always = always  # the checks of HYDRA_TUNE_CHECKS
        self.counting = always
        self.trial_bytes = 0
        self.window_peak = 0  # the highest since somebody has set it
        self._outside_start = self._outside_peak = 0
        self._is_outside = False  # no block runs
        # Under way: is told what is written. Weak, for a mode on the thread's stack keeps this meter.
        self.pilot: Callable[[], Pilot | None] = lambda: None
        self.within_checkpoint = False  # one that is not reentrant, since this was said to be False
        self.inside = 0  # > 0 within a prepared model's forward or a block's backward

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count their storages that are not counted yet, as large as they are now."""
        for tensor in tensors:
            for storage in storages_of(tensor):
                self._add(storage, storage.nbytes())

    def adopt(self, tensors: Iterable[torch.Tensor], *, are_a_batch: bool = False) -> None:
        """Count tensors that arrived by a copy, not by an operator: the bytes of a batch, not of the data set that it
        views. What operators make of a batch is on the device; on a virtual one it itself is in the script's own memory
        still, and takes none."""
        takes_none = are_a_batch and self.device.is_virtual
        for tensor in tensors:
            for storage in storages_of(tensor) if tensor.numel() else ():
                own_bytes = min(storage.nbytes(), tensor.numel() * tensor.element_size())
                self._add(storage, 0 if takes_none else own_bytes)

    def _add(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = storage._cdata
        with _lock:
            # what a forked child makes is on no device
            if key in _counted or storage.device.type == "meta" or gate.process != self.device.process:
                return
            if num_bytes:
                self._take(num_bytes)
            _counted[key] = weakref.ref(storage, lambda _: _forget(key)), self, num_bytes

    def _take(self, num_bytes: int) -> None:
        device = self.device
        if device.is_virtual and device.live_bytes + num_bytes > device.budget_bytes:
            raise torch.OutOfMemoryError(
                f"{device.name} holds {format_bytes(device.live_bytes)} and was asked for {format_bytes(num_bytes)} "
                f"more, but its budget is {format_bytes(device.budget_bytes)}. {ADVICE}"
            )
        self.trial_bytes += num_bytes
        self.window_peak = max(self.window_peak, self.trial_bytes)
        if self._is_outside:
            self._outside_peak = max(self._outside_peak, self.trial_bytes)
        device.live_bytes += num_bytes  # garbage that is collected just before has gone from it
        device.most_live_bytes = max(device.most_live_bytes, device.live_bytes)

    def disown(self, tensor: torch.Tensor) -> None:
        """Count a tensor no longer, which belongs to host memory from here on."""
        for storage in storages_of(tensor):
            _forget(storage._cdata)

    def move(self, to: Device) -> None:
        """The trial's home is another one, and so is that of all it has."""
        with _lock:
            self.device.live_bytes -= self.trial_bytes
            self.device = to
            to.live_bytes += self.trial_bytes
            to.most_live_bytes = max(to.most_live_bytes, to.live_bytes)

    # ---- for each operator ----

    def makes_there(self, inputs: list[torch.Tensor]) -> bool:
        """Whether an operator on these makes its outputs on the device; else in host memory."""
        if not any(map(is_counted, inputs)):
            return not inputs and self.inside > 0
        if self.pilot() is not None:
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) or (None,)
            self.within_checkpoint |= getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
        return True

    def refusal_of(self, error: torch.OutOfMemoryError) -> Exception:
        """What ends the trial: outside of visits a first step cannot run an operator otherwise. Nothing is counted from
        here on: who catches that may not come back, and the mode that counts is still on the thread's stack."""
        first = self.pilot()
        if first is None or self.inside:
            return error
        first.failed, self.counting = True, self.always
        return self.no_room(error)

    def no_room(self, error: torch.OutOfMemoryError) -> BudgetError:
        """What ends a first step."""
        return BudgetError(f"a step does not fit the budget, with what it keeps between its blocks: {error}")

    def watch_outside(self) -> None:
        """Start to note the highest bytes beyond those there now, while no block runs."""
        self._outside_start = self._outside_peak = self.trial_bytes
        self._is_outside = True

    def outside_ends(self) -> None:
        if self._is_outside:
            self._outside_peak = max(self._outside_peak, self.trial_bytes)
        self._is_outside = False

    def outside_starts(self, *, later: bool = False) -> None:
        """With `later`, what there is now is about to be freed: what is made next counts, or is left at the end."""
        self._is_outside = True
        if not later:
            self._outside_peak = max(self._outside_peak, self.trial_bytes)

    def outside_peak(self) -> int:
        """The figure since `watch_outside`."""
        self.outside_ends()
        return self._outside_peak - self._outside_start


class CountingPaused:
    """A context manager, once; several are entered for each task. Within, no mode sees an operator, so none is counted,
    and none has a gradient: copies between device and host, whose other side is no device storage."""

    __slots__ = ("_grad", "_outermost", "_without")

    def __enter__(self) -> None:
        self._outermost = gate.enter()
        self._without: list[AbstractContextManager[None]] = []
        if torch.is_inference_mode_enabled():  # copies outlive it
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
    """One, but of a sparse tensor those of its indices and values."""
    return [part.untyped_storage() for part in parts_of(tensor)]


def is_counted(tensor: torch.Tensor) -> bool:
    """Whether it lies on any device, by what has been counted."""
    return any(storage._cdata in _counted for storage in storages_of(tensor)[-1:])


def _forget(key: int) -> None:
    with _lock:
        found = _counted.pop(key, None)
        if found is not None:
            _, owner, num_bytes = found
            owner.trial_bytes -= num_bytes
            owner.device.live_bytes -= num_bytes


def end_trial(trial: int, devices: Container[Device]) -> None:
    """Forget its storages there; those that live on belong to the user's host memory from here on."""
    with _lock:
        for key, (_, owner, _) in _counted.copy().items():  # which shrinks where garbage is collected
            if owner.trial == trial and owner.device in devices:
                _forget(key)
