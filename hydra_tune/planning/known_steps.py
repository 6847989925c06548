"""Remembers which kinds of step were measured, and what they need: for one trial's model, and for a pool's
architectures.

Two forwards of one model are of different kinds if their inputs or switches may make them need different bytes.
A forward that trains, has larger inputs, or runs with another switch on may need other bytes. It is of another kind,
which is unknown until a pilot has measured it.

A search trains one architecture many times. The numbers of its first trial hold for all others. So these reuse its
numbers and its plan, and if it was refused, they are refused with the same error. A first step that found no room was
not measured: a `RefusedStep` refers to what a rehearsal needs to measure it later.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from operator import ge
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from hydra_tune.blocks.ambient_settings import autocast_mode
from hydra_tune.blocks.tree import PLAIN, Structure, flatten_call, unflatten
from hydra_tune.errors import BudgetError
from hydra_tune.planning import partition
from hydra_tune.planning.fingerprint import model_state
from hydra_tune.planning.partition import Signature
from hydra_tune.schedule.plan import BlockProfile, Cut, TrialPlan

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

# How many settings of a model's switches are told apart. A script may draw at random, in each step, which modules train
# or what is switched on. Later settings count as one kind, so that not every step of such a script is a pilot.
_MOST_SWITCHES = 8
_MOST_KNOWN = 256  # architectures that a pool remembers


@dataclass(frozen=True)
class StepKind:
    """The kind of a forward.

    `trains`       gradients are on
    `setting`      all that must be equal: switches, flags among the inputs, autocast, buffers
    `signature`    shapes and dtypes of the inputs; what is measured for some sizes holds for smaller ones
    `parameters`   the identities of one model's parameters; None for any model of the architecture
    """

    trains: bool
    setting: Hashable
    signature: Signature
    parameters: tuple[tuple[int, str, bool, int], ...] | None = None  # as in `fingerprint.ModelState`

    def covers(self, other: StepKind) -> bool:
        """Whether what was measured for this kind holds for the other."""
        same = (self.trains, self.setting, self.parameters) == (other.trains, other.setting, other.parameters)
        return (
            same and len(self.signature) == len(other.signature) and all(map(_bounds, self.signature, other.signature))
        )

    @property
    def of_any(self) -> StepKind:
        """The same kind for any model of the architecture."""
        return replace(self, parameters=None)


@dataclass(frozen=True)
class StepMeasure:
    """What a pilot has measured of a step with forwards of these kinds. `blocks` is in the order in which they ran."""

    kinds: tuple[StepKind, ...]
    cut: Cut
    blocks: dict[str, BlockProfile]
    step_bytes: int
    kept_bytes: int = 0  # what a training loop keeps from one step to the next: batches and outputs

    @property
    def trains(self) -> bool:
        return any(kind.trains for kind in self.kinds)

    def covers(self, kind: StepKind) -> bool:
        return any(own.covers(kind) for own in self.kinds)

    def put_among(self, measures: list[StepMeasure]) -> list[StepMeasure]:
        """The list with this measure at its end, without those of another cut and those that this one covers."""
        same_cut = [m for m in measures if m.cut == self.cut]
        return [*(m for m in same_cut if m.trains != self.trains or not all(map(self.covers, m.kinds))), self]


def _bounds(a: Any, b: Any) -> bool:
    (sizes, dtype), (others, other) = a, b
    return dtype == other and len(sizes) == len(others) and all(map(ge, sizes, others))


def larger_of(a: BlockProfile, b: BlockProfile) -> BlockProfile:
    """A profile that is enough for both: the larger of each figure."""
    figures = {k: max(v, getattr(b, k)) for k, v in vars(a).items() if isinstance(v, (int, float))}
    casts, counts = a.casts | b.casts, a.saved_counts | b.saved_counts
    return replace(a, **figures, keeps=a.keeps or b.keeps, casts=casts, saved_counts=counts)


@dataclass
class KnownArchitecture:
    """What trials of one architecture have measured in a pool."""

    plan: TrialPlan | None = None  # the latest one
    measures: list[StepMeasure] = field(default_factory=list)
    refusals: dict[StepKind, BudgetError] = field(default_factory=dict)  # from pilots that had the whole device
    logged: set[bool] = field(default_factory=set)  # whether a resident, or a spilled plan, was logged
    too_large: bool = False  # a resident trial has run out of memory: do not make another one resident

    def add(self, measure: StepMeasure) -> None:
        shared = replace(measure, kinds=tuple(kind.of_any for kind in measure.kinds))
        self.measures = shared.put_among(self.measures)


class KnownArchitectures:
    """A pool's architectures, guarded by the pool's lock. Only the most recently used ones are remembered."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self.by_key: dict[bytes, KnownArchitecture] = {}  # by `fingerprint.plan_key`, most recently used last

    def of(self, key: bytes) -> KnownArchitecture:
        with self._lock:
            self.by_key[key] = known = self.by_key.pop(key, None) or KnownArchitecture()
            if len(self.by_key) > _MOST_KNOWN:
                del self.by_key[next(iter(self.by_key))]
            return known


class KnownSteps:
    """The measured steps of one trial's model. `measures` are its own, and those taken over from its
    `architecture`."""

    def __init__(self) -> None:
        self.measures: list[StepMeasure] = []
        self.key = b""  # the architecture's
        self.architecture = KnownArchitecture()
        self._switches: set[Hashable] = set()

    def forget(self) -> None:
        """Forget all: the trial has another model now."""
        self._switches.clear()
        self.key, self.measures = b"", []

    def take_architecture(self, key: bytes, architecture: KnownArchitecture) -> None:
        """Set the architecture of the model. Numbers that were measured under another architecture are dropped."""
        self.key, self.architecture, self.measures = key, architecture, []

    def kind_of(self, model: nn.Module, number: int, args: Sequence[Any], kwargs: dict[str, Any]) -> StepKind:
        """The kind of a forward with these arguments. `number` says which of the trial's prepared models is called."""
        state, inputs = model_state(model), (args, kwargs)
        if len(self._switches) < _MOST_SWITCHES:
            self._switches.add(state.switches)
        setting = (
            state.buffers, partition.flags_of(inputs),
            autocast_mode(), state.switches if state.switches in self._switches else None, number,
        )  # fmt: skip
        return StepKind(torch.is_grad_enabled(), setting, partition.input_signature(inputs), state.parameters)

    def trained(self, model: nn.Module) -> set[int]:
        """The ids of the model's parameters that require a gradient now, or did in a step that was measured."""
        kinds = [kind for measure in self.measures for kind in measure.kinds]
        now = {id(p) for p in model.parameters() if p.requires_grad}
        return now.union(key for kind in kinds for _, _, flag, key in kind.parameters or () if flag)

    def covers(self, kind: StepKind) -> bool:
        return any(measure.covers(kind) for measure in self.measures)


class Alive(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False)
class RefusedStep:
    """Its model, optimizer and inputs, by weak references: it keeps none of them in memory. `trains`: has gradients."""

    trains: bool
    counts_as_gpu: bool
    _model: Callable[[], nn.Module | None]
    _optimizers: Sequence[Callable[[], torch.optim.Optimizer | None]]
    _leaves: Sequence[Any]  # of the forward's arguments: plain values, and references to tensors
    _structure: Structure

    @classmethod
    def of(cls, trial: Trial, args: Sequence[Any], kwargs: dict[str, Any]) -> RefusedStep | None:
        """The step that begins with this forward. None if it has more than a rehearsal knows: several models or
        optimizers, or arguments with other objects than tensors and plain values."""
        leaves, structure = flatten_call(args, kwargs)
        if len(trial.models) != 1 or len(trial.optimizers) > 1:
            return None
        if not all(isinstance(leaf, torch.Tensor) or type(leaf) in PLAIN for leaf in leaves):
            return None
        kept = [weakref.ref(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        optimizers = [weakref.ref(optimizer) for optimizer in trial.optimizers]
        gpu = trial.device.counts_as_gpu
        return cls(torch.is_grad_enabled(), gpu, weakref.ref(trial.models[0]), optimizers, kept, structure)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """In another process it refers to nothing, so that its error can travel."""
        return type(None), ()

    def alive(self) -> Alive | None:
        """All of it, while all of it lives."""
        model, optimizer = self._model(), next((reference() for reference in self._optimizers), None)
        leaves = [leaf() if isinstance(leaf, weakref.ref) else leaf for leaf in self._leaves]
        was_dropped = any(now is None and then is not None for now, then in zip(leaves, self._leaves, strict=True))
        if model is None or (self._optimizers and optimizer is None) or was_dropped:
            return None
        args, kwargs = unflatten(leaves, self._structure)
        return Alive(model, optimizer, args, kwargs)
