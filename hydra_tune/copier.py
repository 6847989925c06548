"""A device's copy thread: promotes shards ahead of their tasks, one after another, while trials' threads compute."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch

logger = logging.getLogger("hydra_tune")
_Jobs = SimpleQueue[Callable[[], None] | None]


class Copier:
    """Its thread ends when nobody has it any more, be its pool closed or not."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._jobs: _Jobs = SimpleQueue()
        work = (self._jobs, num_threads)
        self._thread = threading.Thread(target=_work, args=work, name=f"copies of {name}", daemon=True)
        weakref.finalize(self, self._jobs.put, None)

    def start(self) -> None:
        """Before the first job; more often than once does no harm."""
        if self._thread.ident is None:
            self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)


def _work(jobs: _Jobs, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException:  # its task copies itself, and will meet it, too
            logger.debug("a copy has failed; its task makes it", exc_info=True)
        del job  # it knows its pool
