"""Which trial the calling thread works for: set by a runner around an objective, else one a thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from hydra_tune.config import checks_enabled
from hydra_tune.errors import clear_frames
from hydra_tune.events import Reported
from hydra_tune.garbage import collect_until
from hydra_tune.graph import forget_interrupted_backward
from hydra_tune.interrupts import Stop
from hydra_tune.mode import TrialMode
from hydra_tune.pool import ShardPool
from hydra_tune.process_state import ThreadSettings
from hydra_tune.randomness import RandomState, hold_unheld, let_go, make_current, own_devices
from hydra_tune.resumption import Resumption
from hydra_tune.trial import Trial

_local = threading.local()


@dataclass(slots=True)
class Context:
    """`random_state` is the runner's, from which the objective draws, and so is `resumption`, if it keeps checkpoints;
    None in a plain script. `mode` counts the objective's operators, under checks."""

    pool: ShardPool | None = None
    name: str | None = None
    random_state: RandomState | None = None
    mode: TrialMode | None = None
    trials: list[Trial] = field(default_factory=list)  # a runner ends them; a plain script's end with their model
    stop: Stop = field(default_factory=Stop)
    resumption: Resumption | None = None
    notes_memory: bool = False  # as a constraint, for the sampler
    alone: bool = False  # it has run out of memory beside others
    _last: weakref.ref[Trial] | None = None

    def register(self, trial: Trial) -> None:
        self._last = weakref.ref(trial)
        trial.random_state, trial.mode = self.random_state, self.mode
        trial.of_runner, trial.alone = self.random_state is not None, self.alone
        if self.mode is not None:
            self.mode.meter = trial.meter
        if trial.of_runner:
            self.trials.append(trial)

    def note_objective(self, value: float, *, maximizes: bool) -> None:
        """What the objective has reported so far, for policies that go by it."""
        for trial in self.trials:
            if not trial.ended:
                trial.pool.tell(Reported(trial.id, value, maximizes))

    def live_trial(self, pool: ShardPool) -> Trial | None:
        """The one of this thread in this pool, beside whose models another one is prepared: they reserve jointly, for
        two trials of one thread could wait for each other for ever."""
        is_dropped = self._last is not None and self._collect(self._last)
        live = self._last() if self._last else None  # not before: its blocks may refer to their model
        if live is None or live.ended:
            return None
        if is_dropped:
            live.end()  # its owner has dropped it; a loss or an optimizer that nobody has rebound yet keeps the trial
            return None
        return live if live.pool is pool else None

    @staticmethod
    def _collect(last: weakref.ref[Trial]) -> bool:
        """Whether its model is dropped then. Its pool may be garbage, too, and what it has counted lives on: a table
        that a library keeps for all models."""
        trial = last()
        pool = None if trial is None else trial.pool
        del trial
        is_dropped = collect_until(partial(_is_dropped, last))
        if pool is not None:
            pool.end_abandoned()
        return is_dropped


def _is_dropped(reference: weakref.ref[Trial]) -> bool:
    trial = reference()
    return trial is None or trial.ended or not trial.has_model


def current_context() -> Context:
    context: Context | None = getattr(_local, "context", None)
    if context is None:
        context = _local.context = Context()
    return context


@contextmanager
def trials_to_come() -> Iterator[None]:
    """Around one trial after another: what the first sets for the process stays until the last has ended."""
    with own_devices():
        yield


class TrialContext:
    """The surroundings of one objective: its random state, that of trial `seed_number` where it continues one, its
    thread's settings, which the next one finds as this one did, and the trial's end."""

    __slots__ = ("_context", "_devices", "_outer", "_outer_state", "_settings", "_state")

    def __init__(
        self,
        pool: ShardPool,
        number: int,
        seed_number: int | None = None,
        *,
        name: str | None = None,
        alone: bool = False,
    ) -> None:
        self._state = pool.random_state(number if seed_number is None else seed_number)
        mode = TrialMode(stays=True) if checks_enabled() else None
        self._context = Context(pool, name or f"trial {number}", self._state, mode, alone=alone)

    def __enter__(self) -> Context:
        pool = self._context.pool
        assert pool is not None
        self._outer, _local.context = getattr(_local, "context", None), self._context
        self._settings = ThreadSettings()
        torch.set_num_threads(pool.num_threads)
        self._devices = own_devices()
        self._devices.__enter__()
        self._outer_state = make_current(self._state)
        hold_unheld(self._state)
        if self._context.mode is not None:
            self._context.mode.__enter__()
        return self._context

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        context = self._context
        try:
            for trial in context.trials:
                trial.unwatch()
            if context.mode is not None:
                context.mode.__exit__(kind, error, trace)
            let_go(self._state)
            make_current(self._outer_state)
            self._devices.__exit__(None, None, None)
            self._settings.restore()
            if error is not None:
                clear_frames(error)
        finally:
            _local.context = self._outer
            if context.trials:
                forget_interrupted_backward()
            for trial in context.trials:
                if isinstance(error, torch.OutOfMemoryError):
                    trial.planner.note_out_of_memory()
                trial.end()
            context.trials.clear()
            context.resumption = None
