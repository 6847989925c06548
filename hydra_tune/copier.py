"""A device's copy thread: promotes shards ahead of their tasks, one after another, while trials' threads compute."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from hydra_tune.fork import gate

_Jobs = SimpleQueue[Callable[[], None] | None]


class Copier:
    """Its thread begins with the first job, and ends when nobody has it any more, be its pool closed or not."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._jobs: _Jobs = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        if self._thread is None or not self._thread.is_alive():  # it stays behind where a process forks
            self._jobs = SimpleQueue()
            arguments = (self._jobs, self._num_threads)
            self._thread = threading.Thread(target=_work, args=arguments, name=f"copies of {self._name}", daemon=True)
            weakref.finalize(self, self._jobs.put, None)
            self._thread.start()
        self._jobs.put(job)


def _work(jobs: _Jobs, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    for job in iter(jobs.get, None):
        job()
        del job  # it knows its pool


@contextmanager
def copying() -> Iterator[None]:
    """Around operators of this thread, in no visit: a fork waits for their end."""
    gate.enter()
    try:
        with torch.no_grad():
            yield
    finally:
        gate.leave()
