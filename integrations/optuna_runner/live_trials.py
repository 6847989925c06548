"""The trials of one search that run now, and how Ctrl-C or a call from another thread stops them.

Optuna's loop waits on Ctrl-C until all its trials have ended by themselves. So the search's loop has a thread of its
own: the main thread only waits, and tells the trials to stop at their next task boundary.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING

from hydra_tune.process.fork import gate
from hydra_tune.trials.context import Context

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger("hydra_tune")
LOOK_AROUND_S = 0.2


class LiveTrials:
    """Their contexts, by number."""

    def __init__(self) -> None:
        self.interrupted = ""  # why, if it was
        self._stopped = ""  # likewise, by that or by hand
        self._removal = threading.Lock()
        self._contexts: dict[int, Context] = {}  # by the trial's number
        self._trials: dict[int, optuna.Trial] = {}  # likewise
        self._begun: dict[int, object] = {}

    def wait_for(self, optimize: Callable[[], None], stop_asking: Callable[[], None]) -> None:
        """Run `optimize` in a thread of its own; on Ctrl-C call `stop_asking`, and stop those that live."""
        gate.leave()  # this thread only waits from here on; an interruption may have left it inside an operator
        error: list[BaseException] = []
        begins = threading.Lock()  # taken by the search, or by who was interrupted before
        ended = threading.Event()  # a join that is interrupted takes its thread for ended, before Python 3.13

        def run() -> None:
            if not begins.acquire(blocking=False):
                return
            try:
                optimize()
            except BaseException as raised:
                error.append(raised)
            finally:
                ended.set()

        executor = ThreadPoolExecutor(1, "hydra_tune search")  # for whose threads the interpreter's exit waits
        try:
            executor.submit(copy_context().run, run)
            _wait(ended)
        except BaseException:
            logger.warning("interrupted: %d trials stop at their next task boundary", len(self._contexts))
            stop_asking()
            self._interrupt("the search was interrupted")
            if not begins.acquire(blocking=False):
                ended.wait()
            raise
        finally:
            executor.shutdown(wait=ended.is_set())
        if error:
            raise error[0]

    def _interrupt(self, reason: str) -> None:
        self.interrupted = reason
        self.stop_all(reason)

    def stop_all(self, reason: str) -> None:
        self._stopped = reason  # first: who comes after that sees it
        for context in list(self._contexts.values()):
            context.stop(reason)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Once all are to stop, Optuna may begin none in a process that exits: its error says no more than that."""
        try:
            yield
        except RuntimeError:
            if not (self._stopped and process_exits()):
                raise

    def begins(self, number: int) -> bool:
        """Whether it has not begun before: on SQLite two threads may get the same waiting trial."""
        mine = object()
        return self._begun.setdefault(number, mine) is mine

    def has_begun(self, number: int) -> bool:
        return number in self._begun

    def add(self, trial: optuna.Trial, context: Context) -> None:
        self._trials[trial.number] = trial
        self._contexts[trial.number] = context
        if self._stopped:
            context.stop(self._stopped)

    def remove(self, number: int) -> None:
        with self._removal:
            self._contexts.pop(number, None)
            self._trials.pop(number, None)

    @contextmanager
    def kept(self, number: int) -> Iterator[bool]:
        """Within, the trial is not removed. Yields whether it has not been before."""
        with self._removal:
            yield number in self._contexts

    @property
    def all(self) -> list[tuple[optuna.Trial, Context]]:
        contexts = list(self._contexts.items())
        return [(trial, context) for number, context in contexts if (trial := self._trials.get(number)) is not None]

    def context(self, number: int) -> Context | None:
        return self._contexts.get(number)

    @property
    def numbers(self) -> list[int]:
        return sorted(self._contexts)


def process_exits() -> bool:
    """Whether the main thread has ended, and the interpreter waits for others."""
    return getattr(threading, "_SHUTTING_DOWN", not threading.main_thread().is_alive())  # no public way to ask


def _wait(ended: threading.Event) -> None:
    """Ctrl-C is raised in the main thread: here, if this is it; else that one ends, and the process waits for us. For
    a thread that is a daemon it is not to wait, however it ends."""
    if threading.current_thread() is threading.main_thread():
        ended.wait()
    while not ended.wait(LOOK_AROUND_S):
        interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
        if process_exits() and (interrupted or threading.current_thread().daemon):
            raise KeyboardInterrupt("in the main thread" if interrupted else "the process ends")
