"""Tells a trial of the backwards that its thread asks for.

Most of a trial's work in a backward is done by nodes of its own (blocks/promote.py). A resident model has none, and a
hook on its output would cost more than many of its operators: so the object through which all of PyTorch asks its
engine for a backward is one that looks first whether the thread's trial awaits one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch.autograd import Variable

from hydra_tune.interrupts import interruptible

_PyTorchs = type(Variable._execution_engine)


class Trains(Protocol):
    @property
    def awaits_backward(self) -> bool: ...

    def run_backward(self, run: Callable[[], Any], *, keeps_graph: bool) -> Any: ...


class _Thread(threading.local):
    """`trial` is the one that has run a forward in this thread last."""

    trial: Callable[[], Trains | None] | None = None  # a weak reference


here = _Thread()
os.register_at_fork(after_in_child=lambda: here.__dict__.clear())


class Engine(_PyTorchs):  # type: ignore[misc, valid-type]
    @interruptible
    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        trial = None if here.trial is None else here.trial()
        if trial is None or not trial.awaits_backward:
            return _PyTorchs.run_backward(self, *args, **kwargs)
        return trial.run_backward(
            lambda: _PyTorchs.run_backward(self, *args, **kwargs),
            keeps_graph=args[2] if len(args) > 2 else kwargs.get("keep_graph", False),
        )


def install() -> None:
    """Once in a process; never undone."""
    if not isinstance(Variable._execution_engine, Engine):
        Variable._execution_engine = Engine()
