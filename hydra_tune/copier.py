"""A device's copy thread: promotes shards ahead of their tasks, one after another, while trials' threads compute."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import torch

logger = logging.getLogger("hydra_tune")
_Jobs = deque[Callable[[], None]]


class Copier:
    """Its thread begins with the first job, and ends when nobody has it any more, be its pool closed or not.

    Jobs outlive the thread: it stays behind where a process forks, and may not start where the system has none left.
    Who waits for a job calls `keep_going` now and then. Used by one thread at a time.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name, self._num_threads = name, num_threads
        self._jobs: _Jobs = deque()  # the first one may be under way; one that was broken off is begun anew
        self._wakes: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self.keep_going()
        self._wakes.put(True)

    def keep_going(self) -> None:
        """Where jobs are left and no thread is there to do them, start one."""
        if not self._jobs or (self._thread is not None and self._thread.is_alive()):
            return
        wakes: SimpleQueue[bool] = SimpleQueue()  # in a forked child, the former one's lock may be another thread's
        work = (self._jobs, wakes, self._num_threads)
        self._thread = threading.Thread(target=_work, args=work, name=f"copies of {self._name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            logger.warning("the thread of %s could not be started (%s); it is tried again", self._thread.name, error)
            return
        weakref.finalize(self, wakes.put, False)
        self._wakes = wakes
        wakes.put(True)


def _work(jobs: _Jobs, wakes: SimpleQueue[bool], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    while wakes.get():
        while jobs:
            try:
                jobs[0]()
            except BaseException:  # its task copies itself, and will meet it, too
                logger.debug("a copy has failed; its task makes it", exc_info=True)
            jobs.popleft()  # it knows its pool
