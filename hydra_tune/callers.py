"""Which thread calls a prepared model: one at a time, told by what is on the threads' stacks."""

from __future__ import annotations

import gc
import sys
import threading

from hydra_tune.engine import calls_backward
from hydra_tune.errors import PrepareError
from hydra_tune.fork import new_in_child

_one_asks = new_in_child(threading.Lock())
_FORWARDS = ("run_root", "run_block")  # of the model's trial


class Callers:
    """Of one trial's model."""

    def __init__(self) -> None:
        self._last = 0
        self._lock = threading.Lock()

    @property
    def is_last(self) -> bool:
        """The calling thread."""
        return self._last == threading.get_ident()

    def enter(self, trial: object, name: str, *, in_backward: bool) -> None:
        """The calling thread has the model from here on, as soon as the one before it has come to an end.

        Raises:
            PrepareError: that is still in a forward of the trial, or in a backward while the trial is in its own.
        """
        if self.is_last:
            return
        with self._lock:
            if not _is_called_by(self._last, trial, in_backward=in_backward):
                self._last = threading.get_ident()
                return
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        raise PrepareError(
            f"one thread at a time calls a prepared model, but {threading.current_thread().name} called that of "
            f"{name} while {names.get(self._last)} was in its forward or backward. Let a lock be held around each "
            "step and each evaluation, or evaluate a copy.deepcopy(model), which is a plain model."
        )


def _is_called_by(thread: int, trial: object, *, in_backward: bool) -> bool:
    """By what is on its stack: a call that has raised is over, though nothing may have told so."""
    with _one_asks:
        collects = gc.isenabled()
        try:
            gc.disable()  # before Python 3.12, garbage collected here may wait for ever (python/cpython#106883)
            frame = sys._current_frames().get(thread)
        finally:
            if collects:
                gc.enable()
    if in_backward and calls_backward(frame):
        return True
    while frame is not None:
        if frame.f_code.co_name in _FORWARDS and frame.f_locals.get("self") is trial:
            return True
        frame = frame.f_back
    return False
