"""A working directory for one thread.

Under Tune each trial has its own, where it writes to relative paths, but a process has one for all its threads. On
Linux a thread may leave the file system attributes of its process, `unshare(2)` with CLONE_FS; what it starts later,
processes and threads, begins with its own. `os.unshare` is in Python 3.12, libc's everywhere.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from pathlib import Path

logger = logging.getLogger("hydra_tune")
_CLONE_FS = 0x00000200  # <sched.h>


def enter(directory: str) -> None:
    """From here on the calling thread's working directory, which is made if need be; where threads can have none of
    their own, the process's stays, and a warning says so."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    error = _unshare()
    if error:
        _warn(error)
    else:
        os.chdir(directory)


def _unshare() -> str:
    """Why it cannot be; of a thread that has left its process before, nothing."""
    if sys.platform != "linux":
        return f"{sys.platform} has no unshare(2)"
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_FS):
        return f"unshare(2) fails: {os.strerror(ctypes.get_errno())}"
    return ""


@functools.cache
def _warn(error: str) -> None:
    logger.warning(
        "trials share the working directory %s, for a thread can have none of its own here (%s): what two trials write "
        "to the same relative path is one file. Write to tune.get_context().get_trial_dir().",
        Path.cwd(),
        error,
    )
