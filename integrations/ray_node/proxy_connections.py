"""The pool's end of its proxies' lines: a socket of the node, on which each trial's proxy has a connection.

Messages of one trial take microseconds so, where a call of an actor takes milliseconds; and a proxy that dies is known
at once, for its connection ends.
"""

from __future__ import annotations

import secrets
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Listener, wait
from typing import Any

from ray import cloudpickle

from hydra_tune.integrations.ray_node.messages import Raised

WAITING = 64  # proxies that connect at a time


class Line:
    """One proxy's."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def say(self, message: Any) -> None:
        """To a proxy that has died, nothing."""
        data = cloudpickle.dumps(message)
        with self._lock, suppress(OSError):
            self.connection.send_bytes(data)

    def hear(self) -> bytes | None:
        """A pickled message; None once the proxy has gone."""
        try:
            data: bytes = self.connection.recv_bytes()
        except (EOFError, OSError):
            return None
        return data


class Lines:
    """`hears` is called with a line and what came on it, or None once its proxy has gone; in one thread for all."""

    def __init__(self, hears: Callable[[Line, Any], None]) -> None:
        self.key = secrets.token_bytes(32)
        self._listener = Listener(backlog=WAITING, authkey=self.key)
        self._hears = hears
        self._lines: dict[Any, Line] = {}  # by connection
        self._woken, self._waking = Pipe(duplex=False)
        for work in (self._accept, self._read):
            threading.Thread(target=work, name=f"hydra_tune {work.__name__}", daemon=True).start()

    @property
    def address(self) -> Any:
        return self._listener.address

    def _accept(self) -> None:
        while True:
            with suppress(OSError, EOFError, AuthenticationError):  # one that is not ours, or has gone again
                connection = self._listener.accept()
                self._lines[connection] = Line(connection)
                self._waking.send_bytes(b"")

    def _read(self) -> None:
        while True:
            for connection in wait([self._woken, *list(self._lines)]):
                if connection is self._woken:
                    self._woken.recv_bytes()
                    continue
                line = self._lines[connection]
                data = line.hear()
                if data is None:
                    del self._lines[connection]
                try:
                    self._hears(line, None if data is None else cloudpickle.loads(data))
                except Exception as error:  # what a user's config needs may not be there; other lines go on
                    line.say(Raised.of(error, traceback.format_exc()))
                if data is None:
                    line.connection.close()
