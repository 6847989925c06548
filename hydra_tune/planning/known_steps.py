"""Which kinds of step are known, and what they need: of one trial's model, and of architectures in a pool.

A forward is known if the trial has measured its like. One that trains, on larger inputs, or with something else
switched on may need other bytes: it is of another kind, and unknown until a pilot has measured it.

A search trains one architecture many times. What its first trial has measured holds for all others: they reuse its
numbers and its plan, and are refused by its words.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hydra_tune.blocks.ambient_settings import autocast_mode
from hydra_tune.errors import BudgetError
from hydra_tune.planning import partition
from hydra_tune.planning.fingerprint import model_state
from hydra_tune.planning.step_kind import StepKind, StepMeasure
from hydra_tune.schedule.plan import TrialPlan

_MOST_SWITCHES = 8  # which modules train, or what is switched on, may be drawn anew in each step
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


class KnownSteps:
    """`measures` are of forwards that this model has made, or takes over from its `architecture`."""

    def __init__(self) -> None:
        self.measures: list[StepMeasure] = []
        self.key = b""  # of the architecture
        self.architecture = KnownArchitecture()
        self._switches: set[Hashable] = set()

    def forget(self) -> None:
        """There is another model."""
        self._switches.clear()
        self.key, self.measures = b"", []

    def take_architecture(self, key: bytes, architecture: KnownArchitecture) -> None:
        """The model is, or has become, one of these: what was measured of another holds no more."""
        self.key, self.architecture, self.measures = key, architecture, []

    def kind_of(self, model: nn.Module, number: int, args: Sequence[Any], kwargs: dict[str, Any]) -> StepKind:
        """Of a forward of the model with this number, of those that `model` has."""
        state, inputs = model_state(model), (args, kwargs)
        if len(self._switches) < _MOST_SWITCHES:
            self._switches.add(state.switches)
        setting = (
            state.buffers, partition.flags_of(inputs),
            autocast_mode(), state.switches if state.switches in self._switches else None, number,
        )  # fmt: skip
        return StepKind(torch.is_grad_enabled(), setting, partition.input_signature(inputs), state.parameters)

    def covers(self, kind: StepKind) -> bool:
        return any(measure.covers(kind) for measure in self.measures)
