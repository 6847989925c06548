"""Whether a trial's operators are counted: in its first steps, and under checks."""

from __future__ import annotations

import threading

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from hydra_tune.meter import TrialMeter
from hydra_tune.mode import TrialMode


class Counting:
    """A dispatch mode on the stack of the trial's thread from a first step's begin to its end, so that a backward sees
    it: the engine runs nodes with the modes that were there when it was called."""

    def __init__(self, meter: TrialMeter) -> None:
        self._meter = meter
        self._mode: TrialMode | None = None
        self._thread = 0

    def install(self) -> None:
        if self._mode is None or self._thread != threading.get_ident():
            self.remove()
            self._mode, self._thread = TrialMode(meter=self._meter), threading.get_ident()
            self._mode.__enter__()

    def remove(self) -> None:
        mode, self._mode = self._mode, None
        if mode is None:
            return
        mode.meter = None  # wherever it is still on a stack it does nothing
        stack = _get_current_dispatch_mode_stack()
        if mode in stack:
            for _ in stack:
                _pop_mode()
            for other in stack:
                if other is not mode:
                    _push_mode(other)
