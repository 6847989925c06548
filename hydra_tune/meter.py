"""Counts the bytes that tensors really occupy on a device, storage by storage.

A ledger tells what was reserved; a meter tells what was used. The pilot measures blocks with it, and
with ``HYDRA_TUNE_CHECKS=1`` it watches every operator of every trial, so that a virtual device raises
out of memory where a GPU would. On a virtual device all tensors say ``cpu``, so a storage counts as the
device's when an operator made it from one that already does, or inside a model's forward or backward.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from hydra_tune.config import format_bytes


class DeviceOutOfMemoryError(torch.OutOfMemoryError):
    """A virtual device holds more bytes than its budget. What a GPU raises is its base class."""


class Meter:
    """Live storages of one device, by trial. Thread-safe; a storage is forgotten when it is freed."""

    def __init__(self, name: str, budget_bytes: int, *, enforce: bool) -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self.enforce = enforce
        self.live_bytes = 0
        self.peak_bytes = 0
        self._trial_bytes: defaultdict[int, int] = defaultdict(int)
        self._window_peak: dict[int, int] = {}
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant: a storage may be freed while this thread adds one

    def knows(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def add(self, trial: int, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of `tensors` that are not counted yet.

        Raises:
            DeviceOutOfMemoryError: a virtual device holds more than its budget.
        """
        with self._lock:
            for tensor in tensors:
                storage = tensor.untyped_storage()
                key, num_bytes = storage._cdata, storage.nbytes()
                if key in self._storages or num_bytes == 0 or tensor.device.type == "meta":
                    continue
                if self.enforce and self.live_bytes + num_bytes > self.budget_bytes:
                    raise self._out_of_memory(num_bytes)
                ref = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]
                self._storages[key] = (ref, trial, num_bytes)
                self._count(trial, num_bytes)

    def _out_of_memory(self, num_bytes: int) -> DeviceOutOfMemoryError:
        return DeviceOutOfMemoryError(
            f"{self.name} holds {format_bytes(self.live_bytes)} and was asked for {format_bytes(num_bytes)} more, but "
            f"its budget is {format_bytes(self.budget_bytes)}. The trial kept more than its reservation: lower the "
            "batch size, keep fewer tensors, or raise ShardPool(memory=...)."
        )

    def _forget(self, key: int) -> None:
        if os.getpid() != self._pid:
            return  # a forked child frees its copy; the lock may have been taken when it was forked
        with self._lock:
            if key in self._storages:
                _, trial, num_bytes = self._storages.pop(key)
                self._count(trial, -num_bytes)

    def _count(self, trial: int, num_bytes: int) -> None:
        self.live_bytes += num_bytes
        self._trial_bytes[trial] += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if trial in self._window_peak:
            self._window_peak[trial] = max(self._window_peak[trial], self._trial_bytes[trial])

    def trial_bytes(self, trial: int) -> int:
        return self._trial_bytes[trial]

    def start_window(self, trial: int) -> int:
        """Start to note the trial's highest bytes from here on; its bytes now."""
        with self._lock:
            self._window_peak[trial] = self._trial_bytes[trial]
            return self._trial_bytes[trial]

    def window_peak(self, trial: int) -> int:
        return self._window_peak[trial]

    def end_trial(self, trial: int) -> None:
        """Forget the trial's storages; those that live on belong to the user's host memory from here on."""
        with self._lock:
            for key in [k for k, (_, owner, _) in self._storages.items() if owner == trial]:
                _, _, num_bytes = self._storages.pop(key)
                self._count(trial, -num_bytes)
            self._window_peak.pop(trial, None)


class TrialMeter:
    """One trial's view of its device's meter: where it stands, and whether operators are counted."""

    def __init__(self, meter: Meter, trial: int, *, always: bool) -> None:
        self.meter = meter
        self.trial = trial
        self.always = always  # the checks of HYDRA_TUNE_CHECKS
        self.counting = always
        self._outside_start: int | None = None
        self._outside_peak = 0
        self.watched = False  # a dispatch mode of the trial's own is installed
        self.inside = 0  # > 0 within a prepared model's forward or a block's backward

    def observe(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Count what one operator made: the device's if any input is, or if it has none and runs inside."""
        if any(self.meter.knows(t) for t in inputs) or (self.inside and not inputs):
            self.meter.add(self.trial, outputs)

    @property
    def trial_bytes(self) -> int:
        return self.meter.trial_bytes(self.trial)

    def start_window(self) -> int:
        """Start to note the highest `trial_bytes` from here on; what it is now."""
        return self.meter.start_window(self.trial)

    @property
    def window_peak(self) -> int:
        return self.meter.window_peak(self.trial)

    # ---- what a step has outside of its visits to shards ----

    def watch_outside(self) -> None:
        """Start to note the highest bytes beyond those there now, while no block runs."""
        self._outside_start = self._outside_peak = self.start_window()

    def outside_ends(self) -> None:
        if self._outside_start is not None:
            self._outside_peak = max(self._outside_peak, self.window_peak)

    def outside_starts(self) -> None:
        if self._outside_start is not None:
            self.start_window()

    def outside_peak(self) -> int:
        """The figure since `watch_outside`, which ends here."""
        self.outside_ends()
        start, self._outside_start = self._outside_start, None
        assert start is not None
        return self._outside_peak - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Not counted: copies between device and host, whose other side is no device storage."""
        counting, self.counting = self.counting, False
        try:
            yield
        finally:
            self.counting = counting

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that arrived on the device by a copy, not by an operator."""
        self.meter.add(self.trial, tensors)
