"""The file in which a run is recorded as it happens, so that its report can be made after a crash.

    {"hydra_tune_run": 1, "environment": ..}     begins a run; a file that there was is continued
    {"elapsed_s": .., "spans": [..], "memory": [..], "devices": [..], "trials": [..]}     what is new, each second

Each line is one write, so that a process that dies leaves at most one torn line, which is left out. Trials are those
that have changed; spans and samples are lists of values, as in `SPAN_KEYS`.

A thread of its own writes. A trial waits for it only as for any reader of the pool's report. If it cannot write, it
ends with one warning, and the run goes on.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra_tune.config import check_folder
from hydra_tune.errors import ConfigError
from hydra_tune.show.environment import environment
from hydra_tune.show.report_page import RunRecord, checked_page_path, save_page

logger = logging.getLogger("hydra_tune")
EVERY_S = 1.0
MOST_SPANS = 200_000  # that are read back, the last ones
SPAN_KEYS = ("kind", "device", "trial", "shard", "direction", "start_s", "end_s", "cause", "step")
_LAST_WAIT_S = 10.0  # for the last write, when the pool is closed or the process ends


class RunRecorder:
    """Writes what `take` returns, each second until `close`."""

    def __init__(self, path: str | os.PathLike[str], take: Callable[[], dict[str, Any]]) -> None:
        """
        Raises:
            ConfigError: no file can be written there.
        """
        self._path = Path(path)
        check_folder(self._path, "a recording")
        self._take = take
        self._process = os.getpid()  # a forked child has no thread that writes, and must not write either
        self._known: dict[int, str] = {}  # trials as they were written last, by number
        self._ended = threading.Event()
        try:
            self._file = self._path.open("ab", buffering=0)  # unbuffered: a child has nothing to write at its end
            self._write(b"\n" * bool(self._file.tell()))  # the last run may have left a torn line
            self._write(_line({"hydra_tune_run": 1, "environment": environment()}))
        except OSError as error:
            raise ConfigError(
                f"record= is a file to which a run is written, got {str(path)!r} ({error.strerror}). Name a file in a "
                "folder that you may write to."
            ) from None
        self._thread = threading.Thread(target=self._run, name="hydra_tune recorder", daemon=True)
        self._thread.start()
        _open_recorders.add(self)

    def end(self) -> None:
        """Let the thread write what is left, and end. Does not wait: a garbage collector may call it."""
        self._ended.set()

    def close(self) -> None:
        """The same, and wait for it. May be called twice, and in a forked child, where it does nothing."""
        if os.getpid() != self._process:
            return
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LAST_WAIT_S)

    def _run(self) -> None:
        try:
            ended = False
            while not ended:
                ended = self._ended.wait(EVERY_S)
                self._write(_line(self._news()))
        except Exception as error:
            logger.warning("the run is recorded no further in %s (%s); it goes on without", self._path, error)
        finally:
            self._take = dict  # it holds what the pool has noted
            self._file.close()

    def _news(self) -> dict[str, Any]:
        taken = self._take()
        changed = []
        for trial in taken.pop("trials", ()):
            text = json.dumps(trial, default=str)
            if self._known.get(trial["trial"]) != text:
                self._known[trial["trial"]] = text
                changed.append(trial)
        return {**taken, "trials": changed}

    def _write(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            left = left[self._file.write(left) :]


_open_recorders: weakref.WeakSet[RunRecorder] = weakref.WeakSet()


def _close_all() -> None:
    for recorder in list(_open_recorders):
        recorder.close()


atexit.register(_close_all)


def _line(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":"), default=str).encode() + b"\n"


# ---- to read it ----


def report_of_file(path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of the last run that was recorded in this file. Returns the page's path: beside the file and
    named like it if `out` is None.

    Raises:
        ConfigError: no run is recorded there, or a page cannot be saved at `out`.
    """
    if out is not None:
        checked_page_path(out)
    path = Path(path)
    try:
        run = recorded_run(path)
        return save_page(run, path.with_suffix(".html") if out is None else out)
    except ConfigError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} is the recording of a pool, but it is damaged, or of another version of hydra_tune "
            f"({type(error).__name__}: {error}). Make the page with the version that has recorded it."
        ) from error


def recorded_run(path: Path) -> RunRecord:
    """The last run that was recorded in this file."""
    found: dict[str, Any] = {}
    devices, elapsed_s, trials = list[dict[str, Any]](), 0.0, dict[int, dict[str, Any]]()
    spans, memory = deque[list[Any]](maxlen=MOST_SPANS), deque[list[Any]](maxlen=MOST_SPANS)
    for data in _lines(path):
        if "hydra_tune_run" in data:
            found, devices, trials = data, [], {}
            spans.clear()
            memory.clear()
        elif found:
            devices, elapsed_s = data["devices"], data["elapsed_s"]
            trials |= {trial["trial"]: trial for trial in data["trials"]}
            spans.extend(data["spans"])
            memory.extend(data["memory"])
    if not found:
        raise ConfigError(
            f"{str(path)!r} is no recording of a pool. A pool writes one where it is made with "
            f"ShardPool(record={str(path)!r})."
        )
    if not devices:
        raise ConfigError(f"the run in {str(path)!r} ended before anything was recorded, which is after a second.")
    return RunRecord(
        report={"elapsed_s": elapsed_s, "devices": devices, "trials": [trials[number] for number in sorted(trials)]},
        spans=[dict(zip(SPAN_KEYS, span, strict=True)) for span in spans],
        memory=[(device, at_s, used_bytes) for device, at_s, used_bytes in memory],
        environment=found.get("environment", {}),
        title=path.stem,
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Of the file, without those that are torn."""
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    data = json.loads(line)
                except ValueError:
                    continue
                if isinstance(data, dict):
                    yield data
    except OSError as error:
        raise ConfigError(
            f"a run is read from a file that ShardPool(record=...) has written, got {str(path)!r} ({error.strerror})."
        ) from None
