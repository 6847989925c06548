"""What `ray.tune.report`, `get_checkpoint`, `get_context` and `print` mean in a trial's thread.

Tune keeps one session a process, but a pool's process runs many trials. So one session stands for all of them, and asks
in whose thread it is.

A report goes from here through the trial's thread (`trial_thread.py`) and its socket (`proxy_connections.py`) to the
trial's proxy in Tune's process (`ray_tune/pool_connection.py`), which reports it to Tune (`ray_tune/trainable.py`).
"""

from __future__ import annotations

import copy
import os
import sys
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO
from weakref import WeakValueDictionary

import torch
from ray.train._internal import session as tune_session

from hydra_tune.blocks.tree import map_tensors, tensors_in
from hydra_tune.integrations.ray_node import working_directory
from hydra_tune.integrations.ray_node.messages import Printed
from hydra_tune.integrations.ray_node.trial_thread import TrialThread

_writers: WeakValueDictionary[str, TrialThread] = WeakValueDictionary()  # of checkpoints, by their folders
_current: ContextVar[TrialSession | None] = ContextVar("hydra_tune trial", default=None)


class TrialSession:
    """Of one trial, with what Tune's own session has for a function: see `ray.tune.TuneContext`."""

    world_rank = local_rank = node_rank = local_world_size = world_size = None

    def __init__(self, attempt: TrialThread) -> None:
        self._attempt = attempt
        self.loaded_checkpoint: Any = None
        self.storage: Any = None
        self.has_working_directory = False
        self.__dict__.update(attempt.order.tune_context)

    def report(self, metrics: dict[str, Any], checkpoint: Any = None) -> None:
        metrics = plain(metrics)
        if tensors_in(metrics):
            raise ValueError(
                "metrics are plain numbers, but a torch.Tensor was reported. Write .item(), or put it in a checkpoint."
            )
        persisted = self._attempt.report(metrics, None if checkpoint is None else self._its_own(checkpoint))
        if persisted is not None:
            self.loaded_checkpoint = persisted

    def _its_own(self, checkpoint: Any) -> Any:
        """With an absolute path, for the proxy, which persists it, has another working directory.

        Raises:
            RuntimeError: another live trial has reported one from the same folder.
        """
        if checkpoint.filesystem.type_name != "local":
            return checkpoint
        absolute = copy.copy(checkpoint)
        absolute.path = str(Path(checkpoint.path).absolute())
        other = _writers.get(absolute.path)
        if other is not None and other.is_alive and other.order.trial_id != self._attempt.order.trial_id:
            raise RuntimeError(
                f"a checkpoint's folder is written by one trial, but that at {absolute.path} was reported by "
                f"{other.order.trial_name}, too: the files in it may be of either. Write to a folder below "
                "tune.get_context().get_trial_dir(), or to a temporary one."
            )
        _writers[absolute.path] = self._attempt
        return absolute

    def print(self, stream: str, text: str) -> None:
        self._attempt.proxy.say(Printed(stream, text))

    def make_current(self) -> None:
        """In the calling thread, in the trial's working directory."""
        _current.set(self)
        self.enter(self.storage)

    def enter(self, storage: Any) -> None:
        """The working directory that is the trial's under stock Tune, unless `RAY_CHDIR_TO_TRIAL_DIR=0`."""
        if self.has_working_directory:
            working_directory.enter(storage.trial_working_directory)


def plain(metrics: Any) -> Any:
    """With zero-dimensional tensors as numbers: a proxy has no torch, and no GPU."""
    return map_tensors(_number, metrics) if tensors_in(metrics) else metrics


def _number(tensor: torch.Tensor) -> Any:
    return tensor if tensor.dim() else tensor.item()


class _Session:
    """The one of the process: none, where no trial's thread asks."""

    def __getattr__(self, name: str) -> Any:
        session = _current.get()
        if session is None:
            raise AttributeError(f"no trial runs in this thread, so there is no {name}.")
        return getattr(session, name)

    def __bool__(self) -> bool:
        return _current.get() is not None


class _Stream:
    """Text that a trial's thread writes goes to its proxy, which prints it as stock Tune's trials do."""

    def __init__(self, name: str, inner: TextIO) -> None:
        self._name = name
        self._inner = inner

    def write(self, text: str) -> int:
        session = _current.get()
        if session is None:
            return self._inner.write(text)
        session.print(self._name, text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def install() -> None:
    """In a pool's process, once."""
    os.environ.setdefault("TUNE_ORIG_WORKING_DIR", str(Path.cwd()))  # as stock Tune does before it leaves it
    of_process: Any = tune_session
    of_process._session = _Session()
    streams: Any = sys
    streams.stdout, streams.stderr = _Stream("stdout", sys.stdout), _Stream("stderr", sys.stderr)
