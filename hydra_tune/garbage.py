"""Garbage in cycles, for whose end somebody waits."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

from hydra_tune.fork import new_in_child

_one_collects = new_in_child(threading.RLock())
_MOST_TRIES = 1_000
_PAUSE_S = 1e-3
COLLECT_S, SELDOM_COLLECT_S = 1.0, 60.0  # more than once: autograd's nodes hide what they refer to until they are gone
WARN_S = 60.0  # without a task that begins in the pool


def collect_until(enough: Callable[[], bool]) -> bool:
    """Collect garbage, once, unless there is `enough` already; whether there is then.

    CPython's collector is not reentrant: asked while another thread collects, it returns at once and has done nothing.
    So it is asked again until it has.
    """
    with _one_collects:
        for _ in range(_MOST_TRIES):
            if enough():
                return True
            before = gc.get_stats()[2]["collections"]  # those that have come to their end
            gc.collect()
            if gc.get_stats()[2]["collections"] > before:
                break
            time.sleep(_PAUSE_S)
    return enough()


def collect_beside() -> None:
    """In a thread of its own: the caller may hold locks, and what ends with the garbage may want them."""
    threading.Thread(target=collect_until, args=(lambda: False,), name="hydra_tune garbage").start()


class Wait:
    """Of a trial: when to look whether what it waits for is garbage, and when to say whom it waits for; each ever more
    seldom."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._collect_s = COLLECT_S
        self._num_tasks = -1

    def shall_collect(self) -> bool:
        if time.monotonic() - self._start_s < self._collect_s:
            return False
        self._collect_s += min(self._collect_s, SELDOM_COLLECT_S)
        return True

    def shall_warn(self, num_tasks: int) -> bool:
        """So many have begun so far."""
        now_s = time.monotonic()
        if num_tasks != self._num_tasks:
            self._num_tasks, self._idle_start_s, self._warn_s = num_tasks, now_s, WARN_S
        if now_s - self._idle_start_s < self._warn_s:
            return False
        self._warn_s *= 2
        return True
