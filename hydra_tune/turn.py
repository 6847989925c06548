"""Threads that a forward starts take turns at its blocks."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import _base, thread
from pathlib import Path
from types import CodeType, FrameType

from hydra_tune.callers import top_frame
from hydra_tune.errors import UncuttableError

_PATIENCE_S = 5.0  # with a block that waits itself, perhaps for the thread that waits for its turn
_NEXT_PATIENCE_S = 0.1  # with the next one
_LOOK_S = 0.01
_PACKAGE = str(Path(__file__).parent)
_WAITING = {module.__file__ for module in (threading, queue, _base, thread)}


class Turn:
    """Of one trial. Who runs a block holds `lock`; a block within it has the turn already."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._patience_s = _PATIENCE_S
        self.holder = 0  # a thread, for who waits: after an interruption perhaps one that has gone on

    def wait(self, block: str, runs_block: CodeType) -> None:
        """Until no other thread has the turn; one that has is in a frame of `runs_block`.

        Raises:
            UncuttableError: the block that has it waits for threads of its own, and this may be one of them.
        """
        me = threading.get_ident()
        if self.holder in (0, me):
            return
        since_s, seen = time.monotonic(), (0, 0, 0)
        while self.holder not in (0, me):
            holder = self.holder
            frame = top_frame(holder)
            if not _is_in(frame, runs_block):
                return
            where = (holder, id(frame), frame.f_lasti if frame is not None else 0)
            if where != seen or not _waits(frame):
                since_s, seen = time.monotonic(), where
            elif time.monotonic() - since_s > self._patience_s:
                self._patience_s = _NEXT_PATIENCE_S
                raise UncuttableError(
                    f"one block runs at a time, but {block} was called by a thread while another block waits within "
                    "its forward, for this thread it seems. Start threads around blocks, not within one."
                )
            del frame
            time.sleep(_LOOK_S)


def _is_in(frame: FrameType | None, code: CodeType) -> bool:
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def _waits(frame: FrameType | None) -> bool:
    """In the standard library, for a thread or what one gives, and not for the pool."""
    if frame is None or frame.f_code.co_filename not in _WAITING:
        return False
    while frame is not None and frame.f_code.co_filename in _WAITING:
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE)
