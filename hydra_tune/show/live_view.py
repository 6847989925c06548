"""Shows a pool's snapshots while it works: a table in place in a terminal or a notebook, a line now and then elsewhere.

    terminal    prints, logs and tqdm's finished bars scroll by above the table      rich, on stderr
    notebook    one output, which is drawn anew                                      rich's HTML
    elsewhere   a line every 30 s                                                    logging

A view never stops a search. If it cannot draw, it ends with one warning. Its own thread draws, and takes at most
0.4% of one core: a frame that takes long is followed by a longer pause.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from importlib import import_module
from io import StringIO
from types import TracebackType
from typing import Any

from hydra_tune.show.above_view import AboveView
from hydra_tune.show.live_table import MOST_ROWS, LiveTable, plain_line
from hydra_tune.show.snapshot import PoolSnapshot

logger = logging.getLogger("hydra_tune")
FRAME_S, LINE_S = 0.25, 30.0
MOST_OF_A_CORE = 0.004
NOTEBOOK_COLUMNS = 116
_one_view = threading.Lock()  # held by the view that has the terminal or the notebook


class LiveView:
    """While it is entered, what `read` returns is shown. `wanted` is as `show_progress_bar`: False shows nothing."""

    def __init__(self, read: Callable[[], PoolSnapshot], wanted: bool | None = None) -> None:
        self._read = read
        self._screen = None if wanted is False else _screen_here(wanted=wanted is True)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> LiveView:
        if self._screen is not None and self._draw(self._screen.open):
            context = copy_context()  # a notebook finds its cell by it
            self._thread = threading.Thread(target=context.run, args=(self._run,), name="hydra_tune view", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            if self._screen is not None and self._screen.shows_end:
                self._draw(self._show)
        if self._screen is not None:
            self._draw(self._screen.close)

    def _run(self) -> None:
        pause_s = 0.0
        while self._screen is not None and not self._ended.wait(max(pause_s, self._screen.pause_s)):
            start_s = time.thread_time()
            if not self._draw(self._show):
                return
            pause_s = (time.thread_time() - start_s) / MOST_OF_A_CORE

    def _show(self) -> None:
        if self._screen is not None:
            self._screen.show(self._read())

    def _draw(self, how: Callable[[], None]) -> bool:
        """Returns whether it could draw. If not, there is no view from here on."""
        try:
            how()
            return True
        except Exception as error:
            screen, self._screen = self._screen, None
            if screen is not None:
                screen.give_up()
            logger.warning("the live view has ended, for it could not be drawn (%s); the search goes on", error)
            return False


class Screen(ABC):
    """Where a view is shown. `pause_s` is the least time between two frames; `shows_end` whether there is a last one at
    the end."""

    pause_s = FRAME_S
    shows_end = True

    def open(self) -> None: ...

    @abstractmethod
    def show(self, snapshot: PoolSnapshot) -> None: ...

    def close(self) -> None: ...

    def give_up(self) -> None:
        """After an error: whatever `open` has changed is as before."""


def _screen_here(*, wanted: bool) -> Screen:
    if _in_notebook() and _one_view.acquire(blocking=False):
        return NotebookScreen()
    is_terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if is_terminal and _one_view.acquire(blocking=False):
        return TerminalScreen()
    return LogScreen(shows_end=wanted)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


class LogScreen(Screen):
    """At its end a search says more by its summary, so a last line is shown only where progress was asked for."""

    pause_s = LINE_S

    def __init__(self, *, shows_end: bool) -> None:
        self.shows_end = shows_end

    def show(self, snapshot: PoolSnapshot) -> None:
        logger.info("%s", plain_line(snapshot))


class NotebookScreen(Screen):
    def open(self) -> None:
        ipython: Any = import_module("IPython.display")
        self._html = ipython.HTML
        self._handle = ipython.display(ipython.HTML(""), display_id=True)

    def show(self, snapshot: PoolSnapshot) -> None:
        from rich.console import Console

        # without force_jupyter rich displays in a notebook what it prints: each frame would be an output
        console = Console(
            file=StringIO(), record=True, force_terminal=True, force_jupyter=False, width=NOTEBOOK_COLUMNS
        )
        console.print(LiveTable(snapshot))
        code = console.export_html(inline_styles=True, code_format="{code}")
        self._handle.update(self._html(f'<pre style="line-height:1.25">{code}</pre>'))

    def close(self) -> None:
        _one_view.release()

    give_up = close


class TerminalScreen(Screen):
    """`open` puts writers in place of stdout, stderr and the streams of log handlers, which print above the table."""

    def open(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=sys.stderr)
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._streams = sys.stdout, sys.stderr
        self._above = {id(stream): AboveView(console, stream) for stream in self._streams if _is_terminal(stream)}
        self._handlers = [(h, h.stream) for h in _stream_handlers() if id(h.stream) in self._above]
        self._live.start()
        sys.stdout, sys.stderr = (self._above.get(id(stream), stream) for stream in self._streams)
        for handler, stream in self._handlers:
            handler.setStream(self._above[id(stream)])
        _open_screens.add(self)

    def show(self, snapshot: PoolSnapshot) -> None:
        for above in self._above.values():
            above.settle()
        most_rows = self._live.console.height // 2 - 4  # the other half of the terminal is for what is printed
        self._live.update(LiveTable(snapshot, most_rows=max(4, min(MOST_ROWS, most_rows))), refresh=True)

    def close(self) -> None:
        for above in self._above.values():
            above.end()
        self.restore_streams()
        self._live.stop()
        _one_view.release()

    def give_up(self) -> None:
        self.restore_streams()
        with suppress(Exception):
            self._live.stop()
        _one_view.release()

    def restore_streams(self) -> None:
        """But not if somebody has replaced them since."""
        _open_screens.discard(self)
        for above in self._above.values():
            above.pass_on()
        for name, stream in zip(("stdout", "stderr"), self._streams, strict=True):
            if isinstance(getattr(sys, name), AboveView):
                setattr(sys, name, stream)
        for handler, stream in self._handlers:
            if isinstance(handler.stream, AboveView):
                handler.stream = stream  # not by setStream, which flushes, and may fail as the terminal did


_open_screens: weakref.WeakSet[TerminalScreen] = weakref.WeakSet()


def _in_child() -> None:
    """A forked child, such as a loader's worker, prints by itself: a lock of the view may be held for ever there."""
    for screen in list(_open_screens):
        screen.restore_streams()


os.register_at_fork(after_in_child=_in_child)


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


def _stream_handlers() -> list[logging.StreamHandler[Any]]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [handler for each in loggers if isinstance(each, logging.Logger) for handler in each.handlers]
    return [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]
