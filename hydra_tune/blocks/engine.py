"""Tells trials when a backward begins and ends. It replaces the object through which PyTorch calls its engine.

A visit in a backward notes in `here.backward` that its trial takes part. A resident model has no visits. So before each
backward its trial is asked whether it awaits one in this thread. A hook on the model's output would tell the same, but
costs more time than many of the model's operators.
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

_TorchEngine = type(Variable._execution_engine)


@dataclass(eq=False)
class ForwardPass:
    """One forward of the prepared model. Lives as long as its graph.

    trains       it runs with gradients on
    has_trained  it has run a backward within itself
    done         its graph was used up by a backward, or there is none
    ended_by     the error that a block raised to end it. A model may catch all exceptions; it must not go on
                 without the block
    calls        the number of calls of each block, by the block's name
    """

    trains: bool = False
    has_trained: bool = False
    done: bool = False
    ended_by: Exception | None = None
    calls: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))


@dataclass(eq=False, slots=True)
class Backward:
    """A backward that is under way. `passes` are, for each trial, the forwards whose graphs it has reached so far."""

    keeps_graph: bool
    passes: dict[Trial, set[ForwardPass]] = field(default_factory=dict)


class _EngineThread(threading.local):
    """State of the calling thread. `trial` is a weak reference to the trial that last ran a forward in it."""

    backward: Backward | None = None  # the innermost
    trial: Callable[[], Trial | None] | None = None


here = _EngineThread()
os.register_at_fork(after_in_child=lambda: here.__dict__.clear())


class Engine(_TorchEngine):  # type: ignore[misc, valid-type]
    """PyTorch's engine, with a `Backward` for each call."""

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
    """Run the backward, all of it in this thread. Otherwise the engine uses one thread for each GPU, and those threads
    work for no trial."""
    turns_threads_off = here.trial is not None and torch._C._is_multithreading_enabled()
    if turns_threads_off:
        torch._C._set_multithreading_enabled(False)
    try:
        return _TorchEngine.run_backward(engine, *args, **kwargs)
    finally:
        if turns_threads_off:
            torch._C._set_multithreading_enabled(True)


Variable._execution_engine = Engine()  # never put back
