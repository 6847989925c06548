"""Garbage in cycles, for whose end somebody waits."""

from __future__ import annotations

import gc
import time

_MOST_TRIES = 1_000
_PAUSE_S = 1e-3


def collect() -> None:
    """Collect garbage, once.

    CPython's collector is not reentrant: asked while another thread collects, it returns at once and has done nothing.
    So it is asked again until it has.
    """
    for _ in range(_MOST_TRIES):
        before = gc.get_stats()[2]["collections"]  # those that have come to their end
        gc.collect()
        if gc.get_stats()[2]["collections"] > before:
            break
        time.sleep(_PAUSE_S)
