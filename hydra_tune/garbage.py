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


def collect_until(enough: Callable[[], bool], generation: int = 2) -> bool:
    """Collect garbage, once, unless there is `enough` already; whether there is then.

    CPython's collector is not reentrant: asked while another thread collects, it returns at once and has done nothing.
    So it is asked again until it has.
    """
    with _one_collects:
        for _ in range(_MOST_TRIES):
            if enough():
                return True
            before = _collections(generation)
            gc.collect(generation)
            if _collections(generation) > before:
                return enough()
            time.sleep(_PAUSE_S)
    return enough()


def _collections(generation: int) -> int:
    """How many have come to their end."""
    number: int = gc.get_stats()[generation]["collections"]
    return number


def collect_beside() -> None:
    """In a thread of its own: the caller may hold locks, and what ends with the garbage may want them."""
    threading.Thread(target=collect_until, args=(lambda: False,), name="hydra_tune garbage").start()
