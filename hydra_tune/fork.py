"""Forks while no trial is inside an operator.

A forked child, a loader's worker, inherits every lock as it is at that moment, also those that another
thread holds: PyTorch's and the C library's own, which the first call of an operator takes. The child
would wait for them for ever. So a fork waits until no trial's thread is inside an operator, and keeps
them out meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_ON_THE_WAY_S = 0.005  # for threads between PyTorch's binding and the trial's mode to arrive there


class ForkGate:
    """Open but while a thread forks. Threads pass it on their way into an operator."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._inside: set[int] = set()
        self._users = 0  # trials whose operators pass here
        self._lock = threading.Lock()  # of the count, and of the one thread that forks
        # Held by who starts a loader's workers: libraries (filelock) refuse a fork while another one waits here.
        self.one_at_a_time = threading.RLock()

    def join(self) -> None:
        with self._lock:
            self._users += 1

    def part(self) -> None:
        with self._lock:
            self._users -= 1

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
        """From within an operator, to wait for other trials: these may fork meanwhile."""
        inside = threading.get_ident() in self._inside
        self.leave()
        try:
            yield
        finally:
            if inside:
                self.enter()

    def close(self) -> None:
        self._lock.acquire()
        self._open.clear()
        if self._users:
            time.sleep(_ON_THE_WAY_S)
            while self._inside - {threading.get_ident()}:
                time.sleep(_ON_THE_WAY_S / 10)

    def open(self) -> None:
        self._open.set()
        self._lock.release()

    def open_in_child(self) -> None:
        self._inside.clear()
        self.one_at_a_time = threading.RLock()
        self._users = 0
        self.open()


gate = ForkGate()
os.register_at_fork(before=gate.close, after_in_parent=gate.open, after_in_child=gate.open_in_child)
