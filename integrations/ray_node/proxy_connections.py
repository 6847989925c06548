"""The pool's connections to its trials' proxies, by a socket of the node.

A call of a Ray actor takes milliseconds, and nobody tells an actor that its caller has died. A message over a local
socket takes microseconds, and a proxy that dies is known at once, for its connection ends.
"""

from __future__ import annotations

import secrets
import sys
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


class ProxyConnection:
    """To one trial's proxy."""

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


class ProxyConnections:
    """Accepts and reads all of them. `hears` is called with a connection and what came by it, or None once its proxy
    has gone; in one thread for all."""

    def __init__(self, hears: Callable[[ProxyConnection, Any], None]) -> None:
        self.key = secrets.token_bytes(32)
        # A name in no folder, where there are such: a pool that is killed would leave a file behind.
        address = f"\0hydra_tune {secrets.token_hex(8)}" if sys.platform == "linux" else None
        self._listener = Listener(address, backlog=WAITING, authkey=self.key)
        self._hears = hears
        self._proxies: dict[Any, ProxyConnection] = {}  # by its socket
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
                self._proxies[connection] = ProxyConnection(connection)
                self._waking.send_bytes(b"")

    def _read(self) -> None:
        while True:
            for connection in wait([self._woken, *list(self._proxies)]):
                if connection is self._woken:
                    self._woken.recv_bytes()
                    continue
                proxy = self._proxies[connection]
                data = proxy.hear()
                if data is None:
                    del self._proxies[connection]
                try:
                    self._hears(proxy, None if data is None else cloudpickle.loads(data))
                except Exception as error:  # what a user's config needs may not be there; other proxies go on
                    proxy.say(Raised.of(error, traceback.format_exc()))
                if data is None:
                    proxy.connection.close()
