"""Sends the gradients of a block's weights from the device to host memory, where the weights are.

Autograd adds a gradient to `.grad` as soon as it gets it, so that the copy must be complete by then, and the device
would stand still meanwhile. But where `.grad` is None and no hook reads the gradient, autograd takes the tensor without
reading it. There the next block computes while the gradient is copied (*late*): the next block's gradients, or the end
of the backward, wait for that copy. Whether autograd takes a weight's gradient without reading it is known from the
last backward, and checked after each one.

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
    """A gradient in host memory that was given to autograd. Its `address` shows in the end whether it is `.grad`. The
    tensor itself is not kept here: autograd takes a tensor without reading it only if nobody else refers to it."""

    parameter: nn.Parameter
    address: int
    version: int
    block: str
    late: bool


class SentGradients:
    """Sends the gradients of one trial."""

    def __init__(self, trial: Trial, *, planner: Planner, steps: Steps, residency: Residency) -> None:
        self._trial: Trial = weakref.proxy(trial)
        self._planner = planner
        self._steps = steps
        self._residency = residency
        self._sent: list[_Sent] = []  # in the backward under way
        self._taken_unread = set[int]()  # ids of weights whose last gradient autograd has taken without reading it

    def send(self, call: Call, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """End the backward of a call: send the gradients of its weights to where the weights are, which is host memory
        for a spilled trial. Returns the tensors to give to autograd; None where there is no gradient."""
        trial, residency = self._trial, self._residency
        trial.backwards.enter(call.forward_pass)
        parameters = call.promoted
        if any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in gradients):
            raise PrepareError(
                f"{trial.name}: a prepared model's gradients are computed one by one, but backward was called with "
                "is_grads_batched=True. Call torch.autograd.grad once for each gradient of the output."
            )
        is_resident = not residency.spilled and self._planner.pilot is None
        # gradients of gradients may follow, whose graph these operators are in; or the weights are on the device by now
        if torch.is_grad_enabled() or is_resident:
            sent = [None if g is None else g.to(p.device, p.dtype) for g, p in zip(gradients, parameters, strict=True)]
        elif call.casts:  # converted on the host, which is exact: the device has no room for both dtypes
            sent = residency.spill_gradients(parameters, gradients, late=False)
            with CountingPaused():
                sent = [None if g is None else g.to(p.dtype) for g, p in zip(sent, parameters, strict=True)]
        else:
            sent = self._send_late_if_unread(call, gradients)
        call.forget()
        trial.tasks.backward.end()
        return sent

    def _send_late_if_unread(self, call: Call, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Send gradients, late if autograd will not read them."""
        parameters = call.promoted
        only_use = (
            self._residency.device.spills_behind
            and call.forward_pass.calls.get(call.block.name, 0) == 1
            and self._steps.has_one_forward
            # autograd reads a gradient that it adds to another one, and so does a hook
            and not any(self._planner.cut.uses[id(p)] > 1 or p.grad is not None or has_hooks(p) for p in parameters)
        )
        late = only_use and all(id(p) in self._taken_unread and _is_accumulated(p) for p in parameters)
        sent = self._residency.spill_gradients(parameters, gradients, late=late)
        if only_use:
            self._sent += [
                _Sent(p, g.data_ptr(), g._version, call.block.name, late)
                for p, g in zip(parameters, sent, strict=True)
                if g is not None
            ]
        return sent

    def forget(self) -> None:
        """Called after a backward that has failed: nothing can be learnt from it."""
        self._sent = []

    def check_taken(self) -> None:
        """After a backward: check that autograd has taken each late gradient as it was. If it was added to another one,
        it was read before it was complete.

        Raises:
            PrepareError: a late gradient was read.
        """
        if not self._sent:
            return
        read_late, sent, self._sent = "", self._sent, []
        for p, address, version, block, late in sent:
            gradient = p.grad
            if gradient is not None and (gradient.data_ptr(), gradient._version) == (address, version):
                self._taken_unread.add(id(p))
            else:
                self._taken_unread.discard(id(p))
                read_late = block if late else read_late
        if read_late:
            raise PrepareError(
                f"a weight of block {read_late} has another use in this backward, such as a penalty on weights, and "
                "had none in earlier ones, so that its gradient was still being copied when it was added to the other "
                "one. From here on the backward waits for it: set the gradients to None, and repeat the forward."
            )


def _is_accumulated(parameter: torch.Tensor) -> bool:
    """Whether the backward under way adds to the parameter's `.grad`. `torch.autograd.grad` does not."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError:
        return False
