"""Puts back what a model's forward has changed beside its outputs, so that it can run once more as if for the first
time: after a pilot, and after a forward that came upon a block that no pilot has met."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn

from hydra_tune.errors import PrepareError, UncuttableError
from hydra_tune.host_buffer import once, same_bits, version_of
from hydra_tune.leaves import Leaves
from hydra_tune.meter import TrialMeter
from hydra_tune.randomness.trial_state import generator_states, set_generator_states
from hydra_tune.snapshot import MOST_ELEMENTS, Snapshot
from hydra_tune.tree import tensors_in


class Rewind:
    """Random state, buffers, gradients, arguments and attributes of a model as they are now; of its weights which
    tensors they are and what is on them. `tensors` are those that a forward may write into. Their values are kept
    where they are few, weights' only if `keep` is told so."""

    def __init__(
        self,
        model: nn.Module,
        arguments: tuple[Sequence[Any], dict[str, Any]],
        meter: TrialMeter,
        generators: Sequence[torch.Generator],
    ) -> None:
        self._meter = meter
        self._buffers = [(name, b, b.requires_grad, b.detach().clone()) for name, b in model.named_buffers()]
        self._weights = [(p, p.data, version_of(p), dict(p.__dict__)) for p in model.parameters()]
        self._parts = [(m, kind, dict(kind)) for m in model.modules() for kind in (m._parameters, m._modules)]
        with meter.paused():
            self._arguments = Snapshot({"its arguments": arguments}, model)
            self._attributes = Snapshot.of_modules(model.named_modules(), model)
        found = (*self._arguments.tensors, *self._attributes.tensors)
        self._nodes = [(t, t.grad_fn) for t in (*tensors_in(arguments), *found)]
        leaves = [t for t in found if t.is_leaf and t.requires_grad]
        self.leaves = Leaves((*model.parameters(), *leaves))  # a forward may run a backward
        self.tensors = (*found, *self.leaves.gradients)
        self._values: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.keep(t for t in found if t.numel() <= MOST_ELEMENTS and not t.is_meta)  # .data and NumPy write unseen
        self._generators, self._states = generators, generator_states(generators)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """The values of these, too."""
        with self._meter.paused():
            self._values += [(t, t.data, once(t.data).clone()) for t in tensors if t.layout is torch.strided]

    def restore(self) -> None:
        """Put all of it back.

        Raises:
            UncuttableError: an argument has become part of the forward's graph.
            PrepareError: the forward has made weights or modules, which is undone; or a buffer is part of a graph.
        """
        set_generator_states(self._generators, self._states)
        self._arguments.restore()
        self._attributes.restore()
        self.leaves.restore()
        for weight, data, _, marks in self._weights:
            if weight.data_ptr() != data.data_ptr():
                weight.data = data
            if weight.__dict__ or marks:
                weight.__dict__.clear()
                weight.__dict__.update(marks)
        recorded = [name for name, buffer, *_ in self._buffers if buffer.requires_grad]
        with torch.no_grad():
            for _, buffer, was_recorded, value in self._buffers:
                if buffer.requires_grad and not (was_recorded or buffer._is_view()):
                    buffer.detach_()
                if buffer.requires_grad:
                    buffer.data.copy_(value)
                else:
                    buffer.resize_(value.shape).copy_(value)
        with self._meter.paused():
            for tensor, data, value in self._values:
                if not same_bits(once(data), value):
                    once(data).copy_(value)
                if (tensor.data_ptr(), tensor.shape, tensor.stride()) != (data.data_ptr(), data.shape, data.stride()):
                    tensor.data = data
        for tensor, node in self._nodes:
            _take_out(tensor, node)
        _refuse_new_parts(self._parts)
        if recorded:
            raise PrepareError(
                f"a buffer has no history, but {recorded[0]} is part of a graph: what was written into it, or assigned "
                "to it, requires a gradient. Detach that, or give it to the model as an argument."
            )

    def refuse_other_writes(self) -> None:
        """Of weights whose values were not kept.

        Raises:
            PrepareError: one was written.
        """
        kept = {id(tensor) for tensor, *_ in self._values}
        if any(version_of(weight) != version for weight, _, version, _ in self._weights if id(weight) not in kept):
            raise PrepareError(
                "a forward that first calls a block in a later step runs twice then, but this one has written into "
                "weights before, which it did not in the first step. Call all blocks in the first step, or change "
                "weights outside of the forward."
            )


def _take_out(tensor: torch.Tensor, node: Any) -> None:
    """Of the graph of a forward that is forgotten, which the model may have put it into by writing it in place; before
    it was in `node`'s."""
    if tensor.grad_fn is node:
        return
    if node is not None or tensor._is_view():
        raise UncuttableError(
            f"a model's first forward runs twice, but it writes in place a tensor of shape {tuple(tensor.shape)} that "
            f"{'requires a gradient' if node is not None else 'is a view of another'}. Give it a copy (.clone())."
        )
    tensor.detach_()


def _refuse_new_parts(parts: Sequence[tuple[nn.Module, dict[str, Any], dict[str, Any]]]) -> None:
    """`parts` are modules, with their weights or children as they are now and as they were."""
    changed = []
    for module, now, then in parts:
        if now.keys() != then.keys() or not all(map(is_, now.values(), then.values())):
            changed += [(module, name) for name in now if now[name] is not then.get(name)]
            now.clear()
            now.update(then)
    for module, name in changed[:1]:
        raise PrepareError(
            f"a model has its weights and modules before it is prepared, but a {type(module).__name__} makes its "
            f"{name!r} in forward. Call the model once on a batch, then make its optimizer and prepare it."
        )
