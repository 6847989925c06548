"""Ctrl-C, and requests to stop or pause a trial. Both wait for a boundary of the library's own work.

After a KeyboardInterrupt plain PyTorch can go on, and so can a prepared model. But if it were raised between the pool's
answer and the line that notes that answer, pool and trial would disagree. So a handler of ours looks where the main
thread is:

- in the script, a loader or a model's own forward: it raises at once, as Python does;
- in the library's own frames: it raises at the next boundary, which is the end of a forward, a backward or an
  optimizer's step, or a wait. A second Ctrl-C raises at once.

The handler replaces Python's own handler only. A handler of the user's stays. It may raise anywhere; then nothing is
promised.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TypeVar

from hydra_tune.errors import TrialStopped

_POLL_S = 0.5
# Modules of trials/ in which Ctrl-C waits. In the others, `preparation` and `prepared_loader`, it is raised at once.
_TRIAL_MODULES = "backwards block_calls context forwards out_of_memory residency sent_gradients steps tasks trial"
_DEVICE_MODULES = "counting_mode meter"
_LIBRARY_MODULES = frozenset(
    f"hydra_tune.{folder}.{name}"
    for folder, names in (("trials", _TRIAL_MODULES), ("devices", _DEVICE_MODULES), ("process", "fork"))
    for name in names.split()
)
_LIBRARY_FOLDERS = ("hydra_tune.blocks.", "hydra_tune.planning.", "hydra_tune.pool.", "hydra_tune.randomness.")
_calls_user_code = set[CodeType]()

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def interruptible(function: FunctionT) -> FunctionT:
    """Mark a function of the library that does nothing but call the user's code: Ctrl-C within it raises at once."""
    _calls_user_code.add(function.__code__)
    return function


class Interrupts:
    """Handles Ctrl-C for the process."""

    pending = False  # Ctrl-C was pressed, and is not raised yet

    def install(self) -> None:
        """Replace Python's own handler. Does nothing in other threads than the main one, which may not set handlers."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        """Called in the main thread."""
        self.pending = not self.pending and _is_in_library(frame)
        if not self.pending:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Called at a boundary. Raises a pending KeyboardInterrupt, in the main thread."""
        if self.pending and threading.current_thread() is threading.main_thread():
            self.pending = False
            raise KeyboardInterrupt


def _is_in_library(frame: FrameType | None) -> bool:
    """Whether the thread is in the library's own work: decided by the innermost frame that is the library's."""
    while frame is not None:
        if frame.f_code in _calls_user_code:
            return False
        name = frame.f_globals.get("__name__", "")
        if name in _LIBRARY_MODULES or name.startswith(_LIBRARY_FOLDERS):
            return True
        frame = frame.f_back
    return False


interrupts = Interrupts()


class Stop:
    """Requests to one trial, from any thread. Call it with a reason: the trial's thread raises `TrialStopped` at its
    next check.

    goes_on    cleared, it pauses the trial when that is next between two steps
    asked      functions that the trial's thread calls when it is next between two steps
    """

    def __init__(self) -> None:
        self.reason = ""
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.asked: list[Callable[[], None]] = []

    def __call__(self, reason: str) -> None:
        self.reason = reason
        self.goes_on.set()

    @property
    def is_paused(self) -> bool:
        return not (self.reason or self.goes_on.is_set())

    @property
    def is_quiet(self) -> bool:
        """Whether `check_between_steps` has nothing to do."""
        return not (self.reason or self.asked or self.is_paused)

    def check(self) -> None:
        """Raise `TrialStopped` if a stop was requested."""
        if self.reason:
            raise TrialStopped(self.reason)

    def check_between_steps(self) -> None:
        """Call the functions of `asked`, wait while the trial is paused, then `check`."""
        while self.asked:
            self.asked.pop(0)()
        while self.is_paused and not self.goes_on.wait(_POLL_S):
            interrupts.check()
        self.check()
