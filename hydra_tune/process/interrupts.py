"""What others ask of a trial, from any thread, and Ctrl-C: both wait for a boundary of the library's own work.

PyTorch goes on after a KeyboardInterrupt, and so does a prepared model. But raised between the pool's answer and the
line that notes it, it would leave the two in disagreement. So a handler of ours looks where the main thread is: in
the script, a loader or a model's own forward it raises at once, as ever; in the library's own frames at the next
boundary (the end of a forward, a backward or an optimizer's step, a wait). A second Ctrl-C is raised at once. It
stands in for Python's own handler alone: with one of the user's, which may raise anywhere, nothing is promised.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TypeVar

from hydra_tune.errors import TrialStopped

_LOOK_AROUND_S = 0.5
# Of trials; in what prepares a model, and in its loaders, Ctrl-C is raised at once.
_TRIALS = "backwards block_calls context forwards residency sent_gradients steps tasks trial visits"
_DEVICES = "counting_mode meter"
_OURS = frozenset(
    f"hydra_tune.{folder}.{name}"
    for folder, names in (("trials", _TRIALS), ("devices", _DEVICES), ("process", "fork"))
    for name in names.split()
)
_FOLDERS_OF_OURS = ("hydra_tune.blocks.", "hydra_tune.planning.", "hydra_tune.pool.", "hydra_tune.randomness.")
_runs_users_code = set[CodeType]()

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def interruptible(function: FunctionT) -> FunctionT:
    """It does nothing but call the user's code."""
    _runs_users_code.add(function.__code__)
    return function


class Interrupts:
    """Of the process."""

    pending = False  # a Ctrl-C, until it is raised

    def install(self) -> None:
        """In place of Python's handler, if this is the main thread: no other may."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        """Called in the main thread."""
        self.pending = not self.pending and _is_ours(frame)
        if not self.pending:
            raise KeyboardInterrupt

    def check(self) -> None:
        """A boundary: raises what is pending, in the main thread."""
        if self.pending and threading.current_thread() is threading.main_thread():
            self.pending = False
            raise KeyboardInterrupt


def _is_ours(frame: FrameType | None) -> bool:
    """Whether the innermost frame that tells is one of the library's own."""
    while frame is not None:
        if frame.f_code in _runs_users_code:
            return False
        name = frame.f_globals.get("__name__", "")
        if name in _OURS or name.startswith(_FOLDERS_OF_OURS):
            return True
        frame = frame.f_back
    return False


interrupts = Interrupts()


class Stop:
    """Of one trial: called with a reason, it has the trial's thread raise `TrialStopped` where it next checks."""

    def __init__(self) -> None:
        self.reason = ""
        self.goes_on = threading.Event()  # cleared, it holds the trial where that next is between two steps
        self.goes_on.set()
        self.asked: list[Callable[[], None]] = []  # what its thread is to call where it next is between two steps

    def __call__(self, reason: str) -> None:
        self.reason = reason
        self.goes_on.set()

    @property
    def is_paused(self) -> bool:
        return not (self.reason or self.goes_on.is_set())

    @property
    def is_quiet(self) -> bool:
        """There is nothing for `check_between_steps` to do."""
        return not (self.reason or self.asked or self.is_paused)

    def check(self) -> None:
        """Raises `TrialStopped` if the trial is to end."""
        if self.reason:
            raise TrialStopped(self.reason)

    def check_between_steps(self) -> None:
        """As `check`; what was asked is done, and the trial waits while it is paused."""
        while self.asked:
            self.asked.pop(0)()
        while self.is_paused and not self.goes_on.wait(_LOOK_AROUND_S):
            interrupts.check()
        self.check()
