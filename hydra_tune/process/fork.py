"""Forks while no trial visits a block.

A forked child, a loader's worker, inherits every lock as it is at that moment, also those that another thread holds:
PyTorch's and the C library's own, which the first call of an operator takes. The child would wait for them for ever.
So a fork waits until no trial's thread is in a visit to a block or copies between device and host, and keeps them out
meanwhile. Then it takes the pools' locks, under which nobody waits at the gate, and the lock of those who draw random
numbers. Operators outside of models run meanwhile, as in plain PyTorch.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

_LOOK_AGAIN_S = 0.0005
LockT = TypeVar("LockT", threading.Lock, threading.RLock)


def new_in_child(lock: LockT) -> LockT:
    """The same lock, free in a forked child, whoever had it: as CPython's own modules do with theirs."""
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


class ForkGate:
    """Open but while a thread forks. Threads pass it on their way into a visit."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._open = threading.Event()
        self._open.set()
        self._inside: set[int] = set()
        self._lock = threading.RLock()  # of the one thread that forks
        self._guarded: list[threading.RLock] = []
        self._taken = ExitStack()  # those, during a fork
        # Held by who starts a loader's workers: libraries (filelock) refuse a fork while another one waits here.
        self.one_at_a_time = new_in_child(threading.RLock())

    def enter(self) -> bool:
        """Wait while a thread forks. False if this thread is inside already: then it need not leave."""
        thread = threading.get_ident()
        if thread in self._inside:
            return False
        self._inside.add(thread)
        while not self._open.is_set():
            self._inside.discard(thread)
            self._open.wait()
            self._inside.add(thread)
        return True

    def leave(self) -> None:
        self._inside.discard(threading.get_ident())

    @contextmanager
    def stepped_out(self) -> Iterator[None]:
        """From within a visit, to wait for other trials: these may fork meanwhile."""
        inside = threading.get_ident() in self._inside
        self.leave()
        try:
            yield
        finally:
            if inside:
                self.enter()

    def guard(self, lock: threading.RLock) -> None:
        """Let no fork happen while another thread has this lock, under which nobody may come to the gate."""
        with self._lock:
            self._guarded.append(lock)

    def close(self) -> None:
        self._lock.acquire()
        self._open.clear()
        while self._inside - {threading.get_ident()}:
            time.sleep(_LOOK_AGAIN_S)
        for lock in self._guarded:
            self._taken.enter_context(lock)

    def open(self) -> None:
        self._taken.close()
        self._open.set()
        self._lock.release()

    def open_in_child(self) -> None:
        self.process = os.getpid()
        self._inside.clear()
        self._open = threading.Event()  # the other one's own lock a thread that came to wait there may have had
        self.open()


gate = ForkGate()
os.register_at_fork(before=gate.close, after_in_parent=gate.open, after_in_child=gate.open_in_child)
