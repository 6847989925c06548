"""The trials of a pool: the live trials, the lease of each, and a summary of each trial, ended ones included.

A model owns its trial. So the table holds live trials by weak references. A trial that is garbage collected with its
model is only noted here. The collector may run in any thread and within any lock, so ending the trial there could
deadlock; a thread ends it later.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from hydra_tune.pool.lease import Lease

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial


class TrialTable:
    """The trials of one pool, by their numbers."""

    def __init__(self) -> None:
        self.numbers = itertools.count()  # for trials to come
        self.live: weakref.WeakValueDictionary[int, Trial] = weakref.WeakValueDictionary()
        self.leases: dict[int, Lease] = {}  # of the trials that the machine knows
        self.summaries: dict[int, dict[str, Any]] = {}  # of all trials, ended ones included
        self.abandoned: deque[int] = deque()  # garbage collected with their models, and not ended yet

    def enter(self, trial: Trial) -> None:
        self.live[trial.id] = trial
        self.summaries[trial.id] = trial.summary
        weakref.finalize(trial, self.abandoned.append, trial.id).atexit = False

    def take_abandoned(self) -> list[int]:
        """Those so far. Who ends one of them may call this again."""
        return [self.abandoned.popleft() for _ in range(len(self.abandoned))]
