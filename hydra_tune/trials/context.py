"""Which trial the calling thread works for: set by a runner around an objective, else one a thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hydra_tune.blocks.ambient_settings import thread_settings_kept
from hydra_tune.checkpoints.resumption import Resumption
from hydra_tune.errors import clear_frames
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.process.garbage import collect
from hydra_tune.process.interrupts import Stop
from hydra_tune.randomness import RandomState, drawing_from
from hydra_tune.trials.trial import Trial

_local = threading.local()


@dataclass(slots=True)
class Context:
    """`random_state` is the runner's, from which the objective draws, and so is `resumption`, if it keeps checkpoints;
    None in a plain script."""

    pool: ShardPool | None = None
    name: str | None = None
    random_state: RandomState | None = None
    trials: list[Trial] = field(default_factory=list)  # a runner ends them; a plain script's end with their model
    stop: Stop = field(default_factory=Stop)
    resumption: Resumption | None = None
    notes_memory: bool = False  # as a constraint, for the sampler
    alone: bool = False  # it has run out of memory beside others
    begun: threading.Event = field(default_factory=threading.Event)  # it has prepared a model, or ended
    _last: Callable[[], Trial | None] = lambda: None

    def register(self, trial: Trial) -> None:
        self._last = weakref.ref(trial)
        self.begun.set()
        trial.random_state = self.random_state
        trial.of_runner, trial.alone = self.random_state is not None, self.alone
        if trial.of_runner:
            self.trials.append(trial)

    def live_trial(self, pool: ShardPool) -> Trial | None:
        """The one of this thread in this pool, beside whose models another one is prepared: they reserve jointly, for
        two trials of one thread could wait for each other for ever."""
        its_pool = getattr(self._last(), "pool", pool)  # may be garbage with its trial
        if (live := self._last()) is not None and not live.ended and live.models:
            del live
            collect()
        its_pool.events.end_abandoned()  # what it has counted lives on: a table that a library keeps for all models
        live = self._last()
        if live is not None and not live.ended and not live.models:
            live.end()  # its owner has dropped it; a loss or an optimizer that nobody has rebound yet keeps the trial
        return None if live is None or live.ended or live.pool is not pool else live


def current_context() -> Context:
    context: Context | None = getattr(_local, "context", None)
    if context is None:
        context = _local.context = Context()
    return context


@contextmanager
def trial_context(
    pool: ShardPool, number: int, seed_number: int | None = None, *, name: str | None = None, alone: bool = False
) -> Iterator[Context]:
    """The surroundings of one objective: its random state, that of trial `seed_number` where it continues one, its
    thread's settings, which the next one finds as this one did, and the trial's end."""
    state = pool.random_state(number if seed_number is None else seed_number)
    context = Context(pool, name or f"trial {number}", state, alone=alone)
    outer, _local.context = getattr(_local, "context", None), context
    try:
        with thread_settings_kept(), drawing_from(state):
            torch.set_num_threads(pool.num_threads)
            try:
                yield context
            finally:
                for trial in context.trials:
                    trial.stop_counting()
    except BaseException as error:
        clear_frames(error)
        if isinstance(error, torch.OutOfMemoryError):
            for trial in context.trials:
                trial.planner.note_out_of_memory()
        raise
    finally:
        context.begun.set()
        _local.context = outer
        if context.trials:  # after an exception in a backward PyTorch may keep the rest of its graph until the next one
            with torch.enable_grad():
                torch.ones((), requires_grad=True).backward()
        for trial in context.trials:
            trial.end()
        context.trials.clear()
        context.resumption = None
