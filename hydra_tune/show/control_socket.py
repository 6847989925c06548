"""Lets `hydra-tune top` of another process look at this one, and pause or stop its trials.

Each process has one Unix socket, in a folder of the user's own (mode 0700), which nobody else may open (mode 0600).
A request and its answer are one line of JSON each:

    {"do": "look"}                                   -> {"pools": [a snapshot, ..]}
    {"do": "pause", "pool": 0, "trial": "trial 3"}   -> {"done": "..."} or {"error": "..."}

A thread answers one request after another. Where there are no Unix sockets, or the folder cannot be made, nobody can
look, and nothing else changes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import stat
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any, Protocol

from hydra_tune.errors import ConfigError
from hydra_tune.show.snapshot import PoolSnapshot

logger = logging.getLogger("hydra_tune")
COMMANDS = ("pause", "resume", "stop", "clone")
_PATIENCE_S = 5.0  # with a client, or a process, that says nothing
_MOST_BYTES = 1 << 24  # of a line


class ShownSource(Protocol):
    """What is shown and commanded: a pool, or a search over one."""

    def snapshot(self) -> PoolSnapshot: ...

    def command(self, command: str, trial: str) -> str:
        """Carry out one of `COMMANDS` for the trial of this name. Returns what was done.

        Raises:
            ConfigError: there is no such trial, or it cannot be commanded so.
        """


# ---- the process that is looked at ----


class ControlServer:
    """One process's. Sources are shown for as long as they live."""

    def __init__(self) -> None:
        self._sources: list[weakref.ref[ShownSource]] = []
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._path = Path()
        self._thread: threading.Thread | None = None

    def show(self, source: ShownSource) -> None:
        """Show this one before the others. The first call opens the socket."""
        with self._lock:
            self._sources = [weakref.ref(source), *(ref for ref in self._sources if ref() not in (None, source))]
            if self._listener is not None or not hasattr(socket, "AF_UNIX"):
                return
            try:
                try:
                    self._open()
                except FileNotFoundError:  # another process has just removed the folder with its socket
                    self._open()
            except OSError as error:
                logger.debug("hydra-tune top cannot see this process (%s)", error)

    def hide(self, source: ShownSource) -> None:
        """With the last one the socket is closed."""
        with self._lock:
            self._sources = [ref for ref in self._sources if ref() not in (None, source)]
            if not self._sources:
                self.close()

    def _open(self) -> None:
        processes()  # removes what killed ones have left behind
        self._path = _folder() / f"{os.getpid()}.sock"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._path))  # in a folder that nobody else may open
            self._path.chmod(0o600)
            listener.listen()
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="hydra_tune control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is None or self._thread is None:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(self._path))  # so that the thread sees that it is to end
        self._thread.join()
        listener.close()
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other processes have sockets there
            self._path.parent.rmdir()

    def _serve(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError, ValueError):
                if self._listener is not listener:
                    return
                client.settimeout(_PATIENCE_S)
                answer = self.answer(json.loads(_line_from(client)))
                client.sendall(json.dumps(answer).encode() + b"\n")

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        sources = [source for ref in self._sources if (source := ref()) is not None]
        try:
            if request.get("do") == "look":
                return {"pools": [source.snapshot().to_dict() for source in sources]}
            if request.get("do") not in COMMANDS or not 0 <= request.get("pool", 0) < len(sources):
                raise ConfigError(f"a request is to look, or one of {', '.join(COMMANDS)}; got {request}.")
            return {"done": sources[request.get("pool", 0)].command(request["do"], request["trial"])}
        except Exception as error:
            return {"error": str(error) or type(error).__name__}

    def forget(self) -> None:
        """In a forked child, which has no thread that serves, and must not keep the socket open."""
        self._lock = threading.Lock()
        self._sources.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


control_server = ControlServer()
atexit.register(control_server.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=control_server.forget)


# ---- the process that looks ----


def ask(pid: int, request: dict[str, Any]) -> dict[str, Any]:
    """The answer of this process.

    Raises:
        ConfigError: it has ended, it does not answer, or it refuses.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_PATIENCE_S)
        try:
            client.connect(str(_folder() / f"{pid}.sock"))
            client.sendall(json.dumps(request).encode() + b"\n")
            answer: dict[str, Any] = json.loads(_line_from(client))
        except (OSError, ValueError) as error:
            raise ConfigError(f"process {pid} does not answer ({error}). It may have ended.") from None
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer


def processes() -> list[int]:
    """This user's processes that can be looked at, newest first. Sockets that others have left behind are removed."""
    found = []
    for path in sorted(_folder().glob("*.sock"), key=lambda path: -path.stat().st_mtime):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(_PATIENCE_S)
            try:
                client.connect(str(path))
                found.append(int(path.stem))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except (OSError, ValueError):
                continue
    return found


def _folder() -> Path:
    """This user's folder of sockets, made if there is none.

    Raises:
        OSError: it is another user's, or others may open it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "hydra_tune" if runtime else Path(tempfile.gettempdir()) / f"hydra_tune-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = folder.lstat()
    if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.getuid() or known.st_mode & 0o077:
        raise PermissionError(f"{folder} is to be a folder that only this user may open")
    return folder


def _line_from(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(1 << 16)
        if not part or len(line) > _MOST_BYTES:
            raise OSError("a line was cut off")
        line += part
    return line
