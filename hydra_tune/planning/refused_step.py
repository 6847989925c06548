"""A first step that found no room, so that its needs were not measured. A rehearsal can tell them later."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from hydra_tune.blocks.tree import PLAIN, Structure, flatten_call, unflatten

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial


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
