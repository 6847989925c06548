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
    """Start a copy thread. Returns a function that gives the thread a job. The thread ends once its owner is garbage
    collected; the owner need not be closed for that."""
    jobs: SimpleQueue[_Job] = SimpleQueue()
    threading.Thread(target=_work, args=(jobs, num_threads), name=f"copies of {name}", daemon=True).start()
    weakref.finalize(owner, jobs.put, None)
    return jobs.put


def _work(jobs: SimpleQueue[_Job], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException:  # the task will make the copy itself, and meet the same error
            logger.debug("a copy has failed; its task makes it", exc_info=True)
        del job  # a job refers to its pool, which must not be kept while this thread waits
