"""Waiting for what other threads and processes do, though not for ever."""

import threading
import time
from contextlib import contextmanager

WAIT_S = 120.0  # for what a machine under load does late


def wait_until(holds, what="it", within_s=WAIT_S):
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, f"{what} within {within_s} s"
        time.sleep(0.01)


@contextmanager
def repeating(work):
    """Meanwhile another thread does this again and again; it has done it once before."""
    began, ends = threading.Event(), threading.Event()

    def repeat():
        while not ends.is_set():
            work()
            began.set()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        assert began.wait(WAIT_S)
        yield
    finally:
        ends.set()
        thread.join(WAIT_S)
