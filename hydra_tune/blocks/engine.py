"""Tells trials when a backward begins and ends: the object through which all of PyTorch asks its engine for one.

A visit in a backward notes in `here.backward` that its trial takes part. A resident model has no visits: its trial is
asked first, if it awaits a backward in this thread; a hook on its output would cost more than many of its operators.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

from hydra_tune.process.interrupts import interruptible, interrupts

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

_PyTorchs = type(Variable._execution_engine)


@dataclass(eq=False)
class ForwardPass:
    """Lives as long as the graph of one forward of the root module; done once that graph was used up.

    `ended_by` is what a block raised to end it: a model may catch all exceptions, and would go on without the block.
    `calls` counts the calls of each block, by its name. A forward `has_trained` that has run a backward itself.
    """

    trains: bool = False
    has_trained: bool = False
    done: bool = False
    ended_by: Exception | None = None
    calls: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))


@dataclass(eq=False, slots=True)
class Backward:
    """One that is under way; `passes` are the forwards that it has come through so far, of each trial."""

    keeps_graph: bool
    passes: dict[Trial, set[ForwardPass]] = field(default_factory=dict)


class _EngineThread(threading.local):
    """`trial` is a weak reference to the one that has run a forward in this thread last."""

    backward: Backward | None = None  # the innermost
    trial: Callable[[], Trial | None] | None = None


here = _EngineThread()
os.register_at_fork(after_in_child=lambda: here.__dict__.clear())


class Engine(_PyTorchs):  # type: ignore[misc, valid-type]
    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        keeps_graph = args[2] if len(args) > 2 else kwargs.get("keep_graph", False)
        outer, backward, failed = here.backward, Backward(keeps_graph), True
        here.backward = backward
        try:
            trial = None if here.trial is None else here.trial()
            if trial is None or not trial.forwards.awaits_backward:
                result = _run(self, args, kwargs)
            else:
                result = trial.forwards.run_backward(_run, (self, args, kwargs), keeps_graph=keeps_graph)
            failed = False
        finally:
            here.backward = outer
            for each in backward.passes:
                each.backwards.end(backward, failed=failed)
        if interrupts.pending:
            interrupts.check()
        return result


@interruptible
def _run(engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All of it in this thread: else each GPU has one of its own, which knows of no trial."""
    elsewhere = here.trial is not None and torch._C._is_multithreading_enabled()
    if elsewhere:
        torch._C._set_multithreading_enabled(False)
    try:
        return _PyTorchs.run_backward(engine, *args, **kwargs)
    finally:
        if elsewhere:
            torch._C._set_multithreading_enabled(True)


Variable._execution_engine = Engine()  # for good
