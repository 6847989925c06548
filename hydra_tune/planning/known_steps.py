"""Which kinds of step are known of one trial's model, and what they need.

A forward is known if the trial has measured its like, or a trial of the same architecture has. One that trains, on
larger inputs, or with something else switched on may need other bytes: it is of another kind, and unknown until a pilot
has measured it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import nn

from hydra_tune.blocks.ambient_settings import autocast_mode
from hydra_tune.planning import partition
from hydra_tune.planning.fingerprint import model_state
from hydra_tune.planning.known_architectures import KnownArchitecture
from hydra_tune.planning.step_kind import StepKind, StepMeasure

_MOST_SWITCHES = 8  # which modules train, or what is switched on, may be drawn anew in each step


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
