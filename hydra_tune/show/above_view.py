"""What an objective prints while a table is drawn comes above the table."""

from __future__ import annotations

import re
import threading
from io import TextIOBase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_MOVE = re.compile(r"\x1b\[\d*[A-H]")  # of the cursor, as tqdm makes after a bar that will change


class AboveView(TextIOBase):
    """Takes the place of stdout or stderr while a table is drawn: each whole line is printed above it.

    A progress bar draws itself again and again after a carriage return. Its last state is printed once its line ends.
    Bars below each other go down by line feeds, and up again: these lines are dropped, and all empty ones.
    """

    def __init__(self, console: Console, stream: Any) -> None:
        self._console = console
        self._stream = stream
        self._begun = threading.local()  # a line that a thread has begun

    def write(self, text: str) -> int:
        *lines, begun = (getattr(self._begun, "text", "") + text).split("\n")
        self._begun.text = begun.rpartition("\r")[2] if begun.count("\r") > 1 else begun
        for line in lines:
            shown = line.rstrip("\r").rpartition("\r")[2]
            if shown.strip() and not _MOVE.search(shown):
                self._print(shown)
        return len(text)

    def _print(self, line: str) -> None:
        from rich.text import Text

        self._console.print(Text.from_ansi(line), soft_wrap=True)

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
