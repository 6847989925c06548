"""A call that may be visited away from its trial's home, on another virtual device; in its backward on a third one.

What autograd saves of it comes back by a repetition, all of it: where the backward is. The repetition is the first
thing there, before any gradient has come, so that one without room may begin anew elsewhere. Gradients of gradients,
which need the graph of what is moved, are computed at home.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hydra_tune.blocks import call
from hydra_tune.blocks.block import Block
from hydra_tune.blocks.move import brought, copies_for_graph, returned
from hydra_tune.device import Device
from hydra_tune.forward_pass import ForwardPass
from hydra_tune.tree import unflatten


class Executor(call.Executor, Protocol):
    """What such a call needs of its trial, too."""

    @property
    def device(self) -> Device: ...

    def received(self, device: Device, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...


class TravellingCall(call.RepeatedCall):
    travels = True

    def __init__(self, block: Block, trial: Executor, forward_pass: ForwardPass, given: call.Given) -> None:
        super().__init__(block, trial, forward_pass, given)
        self._mover = trial
        self._place: Device | None = None  # of the backward under way, unless it is at home
        self._stays = False  # its backward is at home: a graph of gradients may lead into the midst of its own

    def _forward_at(self, device: Device) -> Any:
        with brought(self._mover, device, self._leaves) as leaves:
            args, kwargs = unflatten(leaves, self._structure)
            return self.block.forward(args, kwargs)

    def _returned_from(self, device: Device, outputs: Any) -> Any:
        return returned(self._mover, self, device, self.tensors, outputs)

    # ---- backward ----

    def start_backward(self) -> None:
        self._stays |= torch.is_grad_enabled()
        if self._place is None and not self._stays:
            self.trial.with_room(self.block, self._start_backward, self._rewound)

    def _start_backward(self) -> None:
        self._place = self.trial.visit_backward(self, travels=True).device
        if any(saved is not None and saved.value is None for saved in (r() for r in self._saved)):
            self._repeat()

    def _arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        args, kwargs = unflatten(copies_for_graph(self._mover, self._copy.device, self._leaves), self._structure)
        return args, kwargs

    def received_there(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._place is None or self._place is self._mover.device:
            return gradient
        return self._mover.received(self._place, [gradient])[0]

    def received_home(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._place is None or self._place is self._mover.device:
            return gradient
        return self._mover.received(self._mover.device, [gradient])[0]

    def forget(self) -> None:
        super().forget()
        self._place = None
