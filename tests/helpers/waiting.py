"""Waiting for what other threads and processes do, though not for ever."""

import time

WAIT_S = 120.0  # for what a machine under load does late


def wait_until(holds, what="it", within_s=WAIT_S):
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, f"{what} within {within_s} s"
        time.sleep(0.01)
