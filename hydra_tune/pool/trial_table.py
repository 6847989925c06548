"""Who is in a pool: the live trials, the lease of each, and what each trial, ended ones included, says of itself.

A model owns its trial. So the table holds live trials weakly, and only notes that one was collected with its model:
the collector may run in any thread, within any lock, so that another thread ends such a trial later.
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
    """Of one pool, all by the trials' numbers."""

    def __init__(self) -> None:
        self.numbers = itertools.count()  # of trials to come
        self.live: weakref.WeakValueDictionary[int, Trial] = weakref.WeakValueDictionary()
        self.leases: dict[int, Lease] = {}  # of those that the machine knows
        self.summaries: dict[int, dict[str, Any]] = {}  # of all trials, ended ones included
        self.abandoned: deque[int] = deque()  # collected with their models, and not ended yet

    def enter(self, trial: Trial) -> None:
        self.live[trial.id] = trial
        self.summaries[trial.id] = trial.summary
        weakref.finalize(trial, self.abandoned.append, trial.id).atexit = False
