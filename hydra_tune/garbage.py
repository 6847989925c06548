"""Garbage in cycles, for whose end somebody waits."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

_MOST_TRIES = 1_000
_PAUSE_S = 1e-3


def collect_until(enough: Callable[[], bool]) -> bool:
    """Collect garbage, once, unless there is `enough` already; whether there is then.

    CPython's collector is not reentrant: asked while another thread collects, it returns at once and has done nothing.
    So it is asked again until it has.
    """
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
