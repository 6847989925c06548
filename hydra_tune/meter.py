"""Counts the bytes that tensors really occupy on a device, storage by storage.

A ledger tells what was reserved; a meter tells what was used. The pilot measures blocks with it, and
with ``HYDRA_TUNE_CHECKS=1`` it watches every operator of every trial, so that a virtual device raises
out of memory where a GPU would. On a virtual device all tensors say ``cpu``, so a storage counts as the
device's when an operator made it from one that already does, or inside a model's forward or backward.
For the same reason it is the meter that refuses an operator on tensors of two virtual devices.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hydra_tune.config import format_bytes
from hydra_tune.errors import BudgetError, MixedDevicesError
from hydra_tune.fork import gate, new_in_child
from hydra_tune.host_buffer import parts_of

if TYPE_CHECKING:
    from hydra_tune.planning.first_step import FirstStep

_COPIES_INTO = (torch.ops.aten.copy_, torch.ops.aten._foreach_copy_)
_COPY_TO = torch.ops.aten._to_copy

# A finalizer may run within any meter's work: reentrant, and one for all, lest two meters' threads wait for each other.
_lock = new_in_child(threading.RLock())
_meters_of: dict[int, tuple[Meter, ...]] = {}  # by storage; several where trials share a batch that each copied


os.register_at_fork(after_in_child=_meters_of.clear)  # nothing that the child inherits is on a device


class DeviceOutOfMemoryError(torch.OutOfMemoryError):
    """A virtual device holds more bytes than its budget. What a GPU raises is its base class."""


class Counted(NamedTuple):
    """A storage that lives: what of it counts, and how large it is, in bytes."""

    ref: weakref.ref[torch.UntypedStorage]
    trial: int
    num_bytes: int
    storage_bytes: int


class Meter:
    """Live storages of one device, by trial. Thread-safe; a storage is forgotten when it is freed."""

    def __init__(self, name: str, budget_bytes: int, *, enforce: bool) -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self.enforce = enforce
        self.peak_bytes = 0
        self.trial_bytes: defaultdict[int, int] = defaultdict(int)
        self.window_peak: dict[int, int] = {}  # of trials, the highest bytes since one has asked for it
        self.limits: dict[int, int] = {}  # of trials: others need the rest
        self._storages: dict[int, Counted] = {}
        self._pid = os.getpid()

    @property
    def live_bytes(self) -> int:
        return sum(self.trial_bytes.values())

    def add(self, trial: int, tensors: Iterable[torch.Tensor], *, as_copies: bool = False) -> None:
        """Count the storages of `tensors` that are not counted yet, and what others have grown by. `as_copies` of what
        a GPU would have a copy of: the bytes of a batch, not of the data set it views.

        Raises:
            DeviceOutOfMemoryError: a virtual device holds more than its budget.
        """
        for tensor in tensors:
            for storage in storages_of(tensor) if tensor.numel() or not as_copies else ():
                most = tensor.numel() * tensor.element_size() if as_copies else storage.nbytes()
                self._add(trial, storage, min(storage.nbytes(), most))

    def _add(self, trial: int, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key, storage_bytes = storage._cdata, storage.nbytes()
        with _lock:
            if storage.device.type == "meta" or self._is_forked:
                return
            counted = self._storages.get(key)
            if counted is not None:
                trial, num_bytes = counted.trial, storage_bytes - counted.storage_bytes
            if num_bytes <= 0 and counted is not None:
                return
            too_many = self.enforce and self.live_bytes + num_bytes > self.budget_bytes
            if num_bytes and (too_many or self.trial_bytes[trial] + num_bytes > self.limits.get(trial, inf)):
                raise self._out_of_memory(num_bytes)
            if counted is None:
                self._enter(key, storage, trial, num_bytes)
            else:
                self._storages[key] = counted._replace(
                    num_bytes=counted.num_bytes + num_bytes, storage_bytes=storage_bytes
                )
                self._count(trial, num_bytes)

    def _enter(self, key: int, storage: torch.UntypedStorage, trial: int, num_bytes: int) -> None:
        if key not in self._storages:
            ref = weakref.ref(storage, lambda _: self._forget(key))
            _meters_of[key] = (*_meters_of.get(key, ()), self)
            self._storages[key] = Counted(ref, trial, num_bytes, storage.nbytes())
            self._count(trial, num_bytes)

    def remove(self, tensor: torch.Tensor) -> None:
        """Count a tensor no longer, which belongs to host memory from here on."""
        for storage in storages_of(tensor):
            self._forget(storage._cdata)

    def _out_of_memory(self, num_bytes: int) -> DeviceOutOfMemoryError:
        return DeviceOutOfMemoryError(
            f"{self.name} holds {format_bytes(self.live_bytes)} and was asked for {format_bytes(num_bytes)} more, but "
            f"its budget is {format_bytes(self.budget_bytes)}. Lower the batch size, keep fewer tensors, or raise "
            "the pool's memory=."
        )

    @property
    def _is_forked(self) -> bool:
        """Whether this is a child's copy, where nothing is on the device."""
        return os.getpid() != self._pid

    def _forget(self, key: int) -> None:
        if self._is_forked:
            return
        with _lock:
            counted = self._storages.pop(key, None)
            if counted is not None:
                others = tuple(meter for meter in _meters_of.pop(key, ()) if meter is not self)
                if others:
                    _meters_of[key] = others
                self._count(counted.trial, -counted.num_bytes)

    def _count(self, trial: int, num_bytes: int) -> None:
        self.trial_bytes[trial] += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if trial in self.window_peak:
            self.window_peak[trial] = max(self.window_peak[trial], self.trial_bytes[trial])

    def end_trial(self, trial: int) -> None:
        """Forget the trial's storages; those that live on belong to the user's host memory from here on. Who was
        interrupted may have counted wrongly."""
        with _lock:
            for key, counted in self._storages.copy().items():  # which shrinks where garbage is collected
                if counted.trial == trial or counted.ref() is None:
                    self._forget(key)
            self.trial_bytes.clear()
            for counted in self._storages.copy().values():
                self.trial_bytes[counted.trial] += counted.num_bytes
            for of_trials in (self.window_peak, self.limits):
                of_trials.pop(trial, None)

    def hand_over(self, trial: int, to: Meter) -> None:
        """The trial's storages are that device's from here on."""
        with _lock:
            for key, counted in self._storages.copy().items():
                storage = counted.ref()
                if counted.trial == trial and storage is not None:
                    self._forget(key)
                    to._enter(key, storage, trial, counted.num_bytes)


class TrialMeter:
    """One trial's view of the meter of its home: where it stands, and whether operators are counted."""

    def __init__(self, meter: Meter, trial: int, *, always: bool) -> None:
        self.meter = meter
        self.trial = trial
        self.always = always  # the checks of HYDRA_TUNE_CHECKS
        self.counting = always
        self._outside_start: int | None = None
        self._outside_peak = 0
        self._starts_later = False
        self._first: weakref.ref[FirstStep] | None = None  # a mode on the thread's stack keeps this meter
        self.within_checkpoint = False  # one that is not reentrant, since this was said to be False
        self.inside = 0  # > 0 within a prepared model's forward or a block's backward

    @property
    def first(self) -> FirstStep | None:
        """Under way: is told what is written, and makes room."""
        return None if self._first is None else self._first()

    @first.setter
    def first(self, first: FirstStep | None) -> None:
        self._first = None if first is None else weakref.ref(first)

    # ---- for each operator ----

    def device_of(self, operator: Any, inputs: list[torch.Tensor]) -> Meter | None:
        """Where an operator on these inputs makes its outputs; None: in host memory, or nowhere new.

        Raises:
            MixedDevicesError: under checks, no device has all of `inputs`. Allowed, as in PyTorch, are copies
                and tensors without dimensions (of which nobody can tell whether they were moved to the host).
        """
        packet = getattr(operator, "overloadpacket", None)
        if packet in _COPIES_INTO:
            return None
        found = [(t, meters) for t in inputs if (meters := _known(t))]
        if not found:
            return self.meter if self.inside and not inputs else None
        if self.first is not None:
            hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False) or (None,)
            self.within_checkpoint |= getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
        sets = [meters for t, meters in found if t.dim() and t.numel()] or [found[0][1]]
        common = set(sets[0]).intersection(*sets)
        if packet is _COPY_TO or self.meter in common or not (common or self.always):
            return self.meter
        if common:
            return next(meter for meter in sets[0] if meter in common)
        first = sets[0][0]
        second = next(meters for meters in sets if first not in meters)[0]
        where = " of another pool" if second.name == first.name else ""
        raise MixedDevicesError(
            f"Expected all tensors to be on the same device, but found at least two devices, {first.name} and "
            f"{second.name}{where}! (in {operator}, of trial {self.trial}) Give other trials numbers (.item(), "
            ".tolist()), or copy a tensor into the trial that uses it (.to(device, copy=True))."
        )

    def refusal_of(self, error: torch.OutOfMemoryError) -> Exception:
        """What ends the trial: outside of visits a first step cannot run an operator otherwise. Nothing is counted from
        here on: who catches that may not come back, and the mode that counts is still on the thread's stack."""
        if self.first is None or self.inside:
            return error
        self.first.failed, self.counting = True, self.always
        return BudgetError(f"a first step has no room on {self.meter.name}: {error}")

    def observe(self, device: Meter | None, made: list[torch.Tensor], written: Iterable[torch.Tensor] = ()) -> None:
        """Count what an operator made there, and what it has enlarged of others."""
        for tensor in written:
            for meter in _known(tensor):
                meter.add(self.trial, [tensor])
        if self._starts_later:
            self._starts_later = False
            self.outside_starts()
        if device is not None:
            device.add(self.trial, made)

    # ---- figures ----

    @property
    def trial_bytes(self) -> int:
        return self.meter.trial_bytes[self.trial]

    def start_window(self) -> int:
        """Start to note the highest `trial_bytes` from here on; what it is now."""
        with _lock:
            self.meter.window_peak[self.trial] = self.trial_bytes
            return self.trial_bytes

    @property
    def window_peak(self) -> int:
        return self.meter.window_peak[self.trial]

    def limit(self, num_bytes: int | None) -> None:
        """Raise where the trial would have more than these bytes at home, for others need the rest."""
        with _lock:
            self.meter.limits.pop(self.trial, None)
            if num_bytes is not None:
                self.meter.limits[self.trial] = num_bytes

    # ---- what a step has outside of its visits to shards ----

    def watch_outside(self) -> None:
        """Start to note the highest bytes beyond those there now, while no block runs."""
        self._outside_start = self._outside_peak = self.start_window()

    def outside_ends(self) -> None:
        if self._starts_later:  # no operator has run: what is there now the step has kept from visit to visit
            self._starts_later = False
            self._outside_peak = max(self._outside_peak, self.trial_bytes)
        elif self._outside_start is not None:
            self._outside_peak = max(self._outside_peak, self.window_peak)

    def outside_starts(self) -> None:
        if self._outside_start is not None:
            self.start_window()

    def outside_starts_later(self) -> None:
        """With the next operator: what the visit has made is about to be freed."""
        self._starts_later = self._outside_start is not None

    def outside_peak(self) -> int:
        """The figure since `watch_outside`, which ends here."""
        self.outside_ends()
        start, self._outside_start = self._outside_start, None
        assert start is not None
        return self._outside_peak - start

    def paused(self) -> Paused:
        """Not counted, nor seen by any mode, without gradients: copies between device and host, whose other side
        is no device storage."""
        return Paused(self)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that arrived on the device by a copy, not by an operator."""
        self.meter.add(self.trial, tensors, as_copies=True)

    def move(self, to: Meter) -> None:
        """The trial's home is another one, and so is that of all it has."""
        self.meter.hand_over(self.trial, to)
        self.meter = to

    def disown(self, tensor: torch.Tensor) -> None:
        """Count a tensor no longer that left the device without a copy."""
        self.meter.remove(tensor)


class Paused:
    """A context manager, once; several are entered for each task."""

    __slots__ = ("_counting", "_grad", "_inference", "_meter", "_modes", "_outermost")

    def __init__(self, meter: TrialMeter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._counting, self._meter.counting = self._meter.counting, False
        self._outermost = gate.enter()
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:  # copies outlive it
            self._inference.__enter__()
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._modes = torch._C._DisableTorchDispatch()
        self._modes.__enter__()

    def __exit__(self, *error: object) -> None:
        self._modes.__exit__(*error)
        torch._C._set_grad_enabled(self._grad)
        if self._inference is not None:
            self._inference.__exit__(*error)
        if self._outermost:
            gate.leave()
        self._meter.counting = self._counting


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """One, but of a sparse tensor those of its indices and values."""
    return [part.untyped_storage() for part in parts_of(tensor)]


def _known(tensor: torch.Tensor) -> tuple[Meter, ...]:
    storages = storages_of(tensor)
    return _meters_of.get(storages[-1]._cdata, ()) if storages else ()


def is_counted(tensor: torch.Tensor) -> bool:
    """Whether it lies on any device, by what has been counted."""
    return bool(_known(tensor))
