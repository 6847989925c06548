"""A device's copy thread: promotes shards ahead of their tasks, one after another, while trials' threads compute."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch

logger = logging.getLogger("hydra_tune")
_Job = Callable[[], None] | None


def start_copier(owner: object, name: str, num_threads: int) -> Callable[[_Job], None]:
    """What takes a new thread's jobs; the thread ends when nobody has its owner any more, be that closed or not."""
    jobs: SimpleQueue[_Job] = SimpleQueue()
    threading.Thread(target=_work, args=(jobs, num_threads), name=f"copies of {name}", daemon=True).start()
    weakref.finalize(owner, jobs.put, None)
    return jobs.put


def _work(jobs: SimpleQueue[_Job], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException:  # its task copies itself, and will meet it, too
            logger.debug("a copy has failed; its task makes it", exc_info=True)
        del job  # it knows its pool
