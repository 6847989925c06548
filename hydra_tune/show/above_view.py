"""What an objective prints while a table is drawn comes above the table: each line whole, once.

A progress bar draws itself again and again after a carriage return. It is printed once its line has ended. tqdm draws a
bar below another one so, for which it leaves the line of the other, and comes back:

    "\\n"   "\\rsteps 3/9"   "\\x1b[A"

So a line feed after a bar does not tell whether it is done. What its thread writes next does: if that draws twice in
the line below, or is no bar, the cursor does not come back. Nor does it if nothing follows for a frame.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from io import TextIOBase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_UP = re.compile(r"\x1b\[(\d*)A")
_PARTS = re.compile(r"(\n|\x1b\[\d*A)")


class AboveView(TextIOBase):
    """Takes the place of stdout or stderr while a table is drawn. Bars that are not done are not printed, nor are empty
    lines that are written alone, for so bars below each other are drawn."""

    def __init__(self, console: Console, stream: Any) -> None:
        self._console = console
        self._stream = stream
        self._lock = threading.Lock()
        self._written: defaultdict[int, _Written] = defaultdict(_Written)  # by thread
        self._has_ended = False

    def write(self, text: str) -> int:
        if self._has_ended:
            return int(self._stream.write(text))
        with self._lock:
            lines = self._written[threading.get_ident()].add(text)
        self._print(lines)
        return len(text)

    def settle(self) -> None:
        """Called at each frame: bars that a thread left before the last one are done."""
        with self._lock:
            lines = [line for written in self._written.values() for line in written.settle()]
        self._print(lines)

    def end(self) -> None:
        """Print what is left, and pass on what comes."""
        self.pass_on()
        with self._lock:
            lines = [line for written in self._written.values() for line in written.end()]
        self._print(lines)

    def pass_on(self) -> None:
        """From here on what is written goes where it went before the view."""
        self._has_ended = True

    def _print(self, lines: list[str]) -> None:
        from rich.text import Text

        if lines:
            self._console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(self._stream.fileno())

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(self._stream.encoding)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Written:
    """What one thread has written, and is not printed yet: the row where its cursor is, and rows above it, which it has
    left by a line feed, and may come back to."""

    def __init__(self) -> None:
        self._above: list[str] = []
        self._row = ""
        self._is_bar = False  # the row
        self._is_quiet = False  # since the last frame

    def add(self, text: str) -> list[str]:
        """Returns lines that are done."""
        self._is_quiet = False
        text = text.replace("\r\n", "\n")
        comes_back = _UP.search(text) is not None
        is_bar = comes_back or text.startswith("\r") or not text.strip("\n")
        done = [] if comes_back or (is_bar and not self._row.strip()) else self._left()
        if self._is_bar and not is_bar:
            self._row, self._is_bar = "", False
        for part in _PARTS.split(text):
            if part == "\n":
                is_line = not self._is_bar and (not is_bar or self._row.strip())
                (done if is_line else self._above).append(self._row)
                self._row, self._is_bar = "", False
            elif move := _UP.fullmatch(part):
                for _ in range(int(move[1] or 1)):
                    self._row = self._above.pop() if self._above else ""
                self._is_bar = True
            else:
                self._is_bar |= "\r" in part
                self._row = (self._row + part).rstrip("\r").rpartition("\r")[2]
        return done

    def settle(self) -> list[str]:
        """Called at each frame."""
        was_quiet, self._is_quiet = self._is_quiet, True
        return self._left() if was_quiet else []

    def end(self) -> list[str]:
        return [*self._left(), *([self._row] if self._row.strip() and not self._is_bar else [])]

    def _left(self) -> list[str]:
        left, self._above = [row for row in self._above if row.strip()], []
        return left
