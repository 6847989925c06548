"""What a pool's trials have shown of their architectures, so that a trial alike needs no pilot of its own.

A search trains one architecture many times. What its first trial has measured holds for all others: they reuse its
numbers and its plan, and are refused by its words.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from hydra_tune.errors import BudgetError
from hydra_tune.planning.step_kind import StepKind, StepMeasure
from hydra_tune.schedule.plan import TrialPlan

_MOST_KNOWN = 256  # architectures


@dataclass
class KnownArchitecture:
    """What trials of one architecture have shown in a pool."""

    plan: TrialPlan | None = None  # the latest
    measures: list[StepMeasure] = field(default_factory=list)
    refusals: dict[StepKind, BudgetError] = field(default_factory=dict)  # of pilots that had the whole device
    too_large: bool = False  # one has run out of memory with all of it on the device

    def add(self, measure: StepMeasure) -> None:
        shared = replace(measure, kinds=tuple(kind.of_any for kind in measure.kinds))
        self.measures = shared.put_among(self.measures)


class KnownArchitectures:
    """Of one pool, whose lock it is given; the latest architectures are remembered."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self.by_key: dict[bytes, KnownArchitecture] = {}  # by `fingerprint.plan_key`, the latest last

    def of(self, key: bytes) -> KnownArchitecture:
        with self._lock:
            self.by_key[key] = known = self.by_key.pop(key, None) or KnownArchitecture()
            if len(self.by_key) > _MOST_KNOWN:
                del self.by_key[next(iter(self.by_key))]
            return known
