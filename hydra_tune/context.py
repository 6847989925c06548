"""Which trial the calling thread works for: set by a runner around an objective, else one a thread."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hydra_tune import random_state
from hydra_tune.errors import PrepareError, clear_frames
from hydra_tune.graph import forget_interrupted_backward
from hydra_tune.mode import TrialMode
from hydra_tune.pool import ShardPool
from hydra_tune.resumption import Resumption
from hydra_tune.stop import Stop
from hydra_tune.trial import Trial

_local = threading.local()


@dataclass
class Context:
    """`mode` is the runner's, in which operators of the objective run, and so is `resumption`, if it keeps checkpoints;
    None in a plain script."""

    pool: ShardPool | None = None
    name: str | None = None
    mode: TrialMode | None = None
    trials: list[Trial] = field(default_factory=list)  # a runner ends them; a plain script's end with their model
    stop: Stop = field(default_factory=Stop)
    resumption: Resumption | None = None
    notes_memory: bool = False  # as a constraint, for the sampler
    _last: weakref.ref[Trial] | None = None

    def register(self, trial: Trial) -> None:
        self._last = weakref.ref(trial)
        trial.mode = self.mode
        if self.mode is not None:
            self.mode.meter = trial.meter
            self.trials.append(trial)

    def note_objective(self, value: float, *, maximizes: bool) -> None:
        """What the objective has reported so far, for policies that go by it."""
        for trial in self.trials:
            if not trial.ended:
                trial.pool.note_objective(trial, value, maximizes=maximizes)

    def refuse_second_model(self, pool: ShardPool) -> None:
        """Two models of one thread in one pool could wait for each other for ever."""
        live = self._last() if self._last else None
        if live is not None and not live.ended:
            gc.collect()  # a model that its owner has dropped may wait for the collector
            if not live.has_model:
                live.end()  # kept by a loss or a loader that nobody has rebound yet
        if live is not None and not live.ended and live.pool is pool:
            raise PrepareError(
                f"one model at a time is prepared in a trial, or by a thread in one pool; {live.name} still is. "
                "Call hydra_tune.release(model) on the first one."
            )


def current_context() -> Context:
    context: Context | None = getattr(_local, "context", None)
    if context is None:
        context = _local.context = Context()
    return context


@contextmanager
def trial_context(pool: ShardPool, number: int, seed_number: int | None = None) -> Iterator[Context]:
    """The surroundings of one objective: its random state, that of trial `seed_number` where it continues one, its
    thread's settings, and the trial's end."""
    own = pool.random_state(number if seed_number is None else seed_number)
    mode = TrialMode(own)
    context = Context(pool, f"trial {number}", mode)
    outer, _local.context = getattr(_local, "context", None), context
    torch.set_num_threads(pool.num_threads)
    before = random_state.begin()  # `active` in parts: what a trial costs counts here
    try:
        own.make_current()
        with torch.autograd.set_multithreading_enabled(False), mode:
            yield context
    except BaseException as error:
        clear_frames(error)
        raise
    finally:
        random_state.end(before)
        _local.context = outer
        if context.trials:
            forget_interrupted_backward()
        for trial in context.trials:
            trial.end()
        context.trials.clear()
        context.resumption = None
