"""Which trial the calling thread works for: in an objective, the runner's; in a plain script, one for each thread."""

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
    """What an objective, or a thread of a plain script, works with.

    pool, random_state   the runner's; None in a plain script
    resumption           the runner's, if it writes checkpoints
    trials               those of an objective, which the runner ends; a plain script's trial ends with its model
    notes_memory         whether the sampler is given the trial's memory as a constraint
    alone                whether the trial gets a device for itself: it has run out of memory beside others
    begun                set once the objective has prepared a model, or has ended
    """

    pool: ShardPool | None = None
    name: str | None = None
    random_state: RandomState | None = None
    trials: list[Trial] = field(default_factory=list)
    stop: Stop = field(default_factory=Stop)
    resumption: Resumption | None = None
    notes_memory: bool = False
    alone: bool = False
    begun: threading.Event = field(default_factory=threading.Event)
    _last_trial: Callable[[], Trial | None] = lambda: None  # a weak reference to the trial that was registered last

    def register(self, trial: Trial) -> None:
        self._last_trial = weakref.ref(trial)
        self.begun.set()
        trial.random_state = self.random_state
        trial.of_runner, trial.alone = self.random_state is not None, self.alone
        if trial.of_runner:
            self.trials.append(trial)

    def live_trial(self, pool: ShardPool) -> Trial | None:
        """This thread's trial in this pool, if it is alive. A second model is prepared in the same trial.

        Models of one trial reserve memory together. With two trials in one thread, each could wait for ever for memory
        that the other has.
        """
        its_pool = getattr(self._last_trial(), "pool", pool)  # both may have been garbage collected
        if (live := self._last_trial()) is not None and not live.ended and live.models:
            del live
            collect()
        # the trial's memory may live on and must count no more, such as a table that a library keeps for all models
        its_pool.events.end_abandoned()
        live = self._last_trial()
        if live is not None and not live.ended and not live.models:
            live.end()  # the script has dropped the model; an old loss or optimizer of its still refers to the trial
        return None if live is None or live.ended or live.pool is not pool else live


def current_context() -> Context:
    """The calling thread's context."""
    context: Context | None = getattr(_local, "context", None)
    if context is None:
        context = _local.context = Context()
    return context


@contextmanager
def trial_context(
    pool: ShardPool, number: int, seed_number: int | None = None, *, name: str | None = None, alone: bool = False
) -> Iterator[Context]:
    """A context for one objective.

    The thread draws from the trial's own random state; if the trial continues another one, from that of `seed_number`.
    At the end the objective's trials end, and the thread's settings (grad mode, autocast, default device) are restored
    for the next objective.
    """
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
        # if a backward has raised, PyTorch may keep the rest of its graph until the next backward: run a small one
        if context.trials:
            with torch.enable_grad():
                torch.ones((), requires_grad=True).backward()
        for trial in context.trials:
            trial.end()
        context.trials.clear()
        context.resumption = None
