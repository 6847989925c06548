"""A fork waits until no trial visits a block.

A forked child, such as a loader's worker, inherits every lock as it is at that moment. Some locks are held by other
threads: PyTorch's and the C library's own, which the first call of an operator takes. The child would wait for them for
ever. So a gate keeps forks and trials apart:

    trial A     | visit     |                                   | visit ...
    trial B          | copies  | waits at the gate              | visit ...
    the forker        | waits  | takes the guarded locks | fork |

- A fork waits until no trial's thread is in a visit or copies between device and host, and keeps them out meanwhile.
- Then it takes the guarded locks: those of the pools, and the lock for draws of random numbers. Nobody may wait at the
  gate while he holds one of these.
- Operators outside of models run meanwhile, as in plain PyTorch.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

_POLL_S = 0.0005
LockT = TypeVar("LockT", threading.Lock, threading.RLock)


def new_in_child(lock: LockT) -> LockT:
    """The same lock; in a forked child it is free, whoever held it. CPython's own modules do so with their locks."""
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


class ForkGate:
    """Closed while a thread forks. Other threads pass it on their way into a visit."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._open = threading.Event()
        self._open.set()
        self._inside: set[int] = set()
        self._lock = threading.RLock()  # held by the thread that forks
        self._guarded_locks: list[threading.RLock] = []
        self._held_during_fork = ExitStack()  # holds the guarded locks during a fork
        # Held while a loader starts its workers. Some libraries (filelock) refuse to fork while another waits here.
        self.one_at_a_time = new_in_child(threading.RLock())

    def enter(self) -> bool:
        """Wait while a thread forks. Returns False if this thread is inside already; then it must not call `leave`."""
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
        """A context, within a visit, to wait for other trials in: they may fork meanwhile."""
        inside = threading.get_ident() in self._inside
        self.leave()
        try:
            yield
        finally:
            if inside:
                self.enter()

    def guard(self, lock: threading.RLock) -> None:
        """Let no fork happen while another thread holds this lock. A thread that holds it must not call `enter`."""
        with self._lock:
            self._guarded_locks.append(lock)

    def close(self) -> None:
        self._lock.acquire()
        self._open.clear()
        while self._inside - {threading.get_ident()}:
            time.sleep(_POLL_S)
        for lock in self._guarded_locks:
            self._held_during_fork.enter_context(lock)

    def open(self) -> None:
        self._held_during_fork.close()
        self._open.set()
        self._lock.release()

    def open_in_child(self) -> None:
        self.process = os.getpid()
        self._inside.clear()
        self._open = threading.Event()  # a new one: another thread may have held the old event's lock during the fork
        self.open()


gate = ForkGate()
os.register_at_fork(before=gate.close, after_in_parent=gate.open, after_in_child=gate.open_in_child)
