"""Runs the garbage collector to its end, for those who need the memory of reference cycles now."""

from __future__ import annotations

import gc
import time

_MAX_TRIES = 1_000
_PAUSE_S = 1e-3


def collect() -> None:
    """Collect all garbage once.

    CPython's `gc.collect` returns at once, and has done nothing, while another thread collects. So this asks again
    until a collection has ended.
    """
    for _ in range(_MAX_TRIES):
        before = gc.get_stats()[2]["collections"]  # full collections that have ended
        gc.collect()
        if gc.get_stats()[2]["collections"] > before:
            break
        time.sleep(_PAUSE_S)
