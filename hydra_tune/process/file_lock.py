"""Locks on files, by which processes that share a folder know of each other.

A note in a file would stay when its process dies. A lock does not: the system takes it back, however the process ends.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FileLock:
    """On a file, for this process; the system takes it back however the process ends."""

    def __init__(self, path: Path) -> None:
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        _open.add(self)

    def take(self, *, shared: bool = False) -> None:
        assert self._file is not None
        fcntl.flock(self._file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)

    def try_take(self) -> bool:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


_open: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child, a loader's worker, would keep the locks of a parent that was killed."""
    for lock in list(_open):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.take(shared=shared)
        yield
    finally:
        lock.close()
