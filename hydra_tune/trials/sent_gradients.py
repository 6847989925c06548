"""Gradients of a block's weights, on their way from the device to host memory, where the weights are.

Autograd adds a gradient to `.grad` as soon as it gets it: then it must have arrived. But where `.grad` is None and no
hook looks, autograd takes the tensor without reading it. There the next block computes while the gradient is copied
(*late*), and the end of the backward waits for all. Whether a weight's gradient is taken so is known from the last
backward, and checked after each.

    compute   | block 3 | block 2 | block 1 |
    to host             | of 3    | of 2    | of 1 |
                                                   ^ the end of the backward waits
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from hydra_tune.blocks.block import has_hooks
from hydra_tune.blocks.call import Call
from hydra_tune.devices.meter import CountingPaused
from hydra_tune.errors import PrepareError
from hydra_tune.planning.planner import Planner
from hydra_tune.trials.residency import Residency
from hydra_tune.trials.steps import Steps

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial


class _Sent(NamedTuple):
    """A gradient in host memory, which only autograd holds."""

    parameter: nn.Parameter
    place: int
    version: int
    block: str
    late: bool


class SentGradients:
    def __init__(self, trial: Trial, *, planner: Planner, steps: Steps, residency: Residency) -> None:
        self._trial: Trial = weakref.proxy(trial)
        self._planner = planner
        self._steps = steps
        self._residency = residency
        self._sent: list[_Sent] = []  # in the backward under way
        self._taken = set[int]()  # weights, by id, whose gradients autograd has taken as they were sent, the last time

    def send(self, call: Call, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Gradients of a call's weights, to host memory, unless these are on the device by now. The visit ends."""
        trial, residency = self._trial, self._residency
        trial.backwards.enter(call.forward_pass)
        parameters = call.promoted
        if any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in gradients):
            raise PrepareError(
                f"{trial.name}: a prepared model's gradients are computed one by one, but backward was called with "
                "is_grads_batched=True. Call torch.autograd.grad once for each gradient of the output."
            )
        is_resident = not residency.spilled and self._planner.pilot is None
        if torch.is_grad_enabled() or is_resident:  # gradients of gradients follow; or the weights are there by now
            sent = [None if g is None else g.to(p.device, p.dtype) for g, p in zip(gradients, parameters, strict=True)]
        elif call.casts:  # converted there: exactly, and the device has no room for both
            sent = residency.spill_gradients(parameters, gradients, late=False)
            with CountingPaused():
                sent = [None if g is None else g.to(p.dtype) for g, p in zip(sent, parameters, strict=True)]
        else:
            sent = self._late_or_not(call, gradients)
        call.forget()
        trial.tasks.backward.end()
        return sent

    def _late_or_not(self, call: Call, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        parameters = call.promoted
        alone = (
            self._residency.device.spills_behind
            and call.forward_pass.calls.get(call.block.name, 0) == 1
            and self._steps.has_one_forward
            # nor does autograd, or a hook, read what it adds to `.grad`
            and not any(self._planner.cut.uses[id(p)] > 1 or p.grad is not None or has_hooks(p) for p in parameters)
        )
        late = alone and all(id(p) in self._taken and _is_accumulated(p) for p in parameters)
        sent = self._residency.spill_gradients(parameters, gradients, late=late)
        if alone:
            self._sent += [
                _Sent(p, g.data_ptr(), g._version, call.block.name, late)
                for p, g in zip(parameters, sent, strict=True)
                if g is not None
            ]
        return sent

    def forget(self) -> None:
        """The backward has failed."""
        self._sent = []

    def check_taken(self) -> None:
        """What was sent late must have been taken as it is: who adds something to it reads it before it is there."""
        if not self._sent:
            return
        summed, sent, self._sent = "", self._sent, []
        for p, place, version, block, late in sent:
            gradient = p.grad
            if gradient is not None and (gradient.data_ptr(), gradient._version) == (place, version):
                self._taken.add(id(p))
            else:
                self._taken.discard(id(p))
                summed = block if late else summed
        if summed:
            raise PrepareError(
                f"a weight of block {summed} has another use in this backward, as a penalty has it, and had none "
                "before, so that its gradient was on its way while it was added up. From here on it is awaited: "
                "set the gradients to None, and repeat the forward."
            )


def _is_accumulated(parameter: torch.Tensor) -> bool:
    """By the backward under way, and not what `torch.autograd.grad` returns."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError:
        return False
