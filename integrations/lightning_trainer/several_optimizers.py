"""Several optimizers of one model, as the one that `prepare` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


class SeveralOptimizers(torch.optim.Optimizer):
    """A LightningModule may have several, but a trial is bound to one, whose state moves with the weights and whose
    steps the pool hears of. This one has the states and groups of all of them, and hears of each one's steps. It is
    never stepped itself."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.each = optimizers
        self._optimizer_step_pre_hooks = {}  # it takes hooks

    @classmethod
    def of(cls, optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
        return cls(optimizers) if len(optimizers) > 1 else next(iter(optimizers), None)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.each for group in each.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return {p: values for each in self.each for p, values in each.state.items()}

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return {key: value for each in self.each for key, value in each.defaults.items()}

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError("several are stepped one by one")

    def state_dict(self) -> dict[str, Any]:
        return {str(i): each.state_dict() for i, each in enumerate(self.each)}

    def register_step_pre_hook(self, hook: Any) -> Any:
        return _Handles([each.register_step_pre_hook(hook) for each in self.each])

    def register_step_post_hook(self, hook: Any) -> Any:
        return _Handles([each.register_step_post_hook(hook) for each in self.each])


@dataclass
class _Handles:
    each: Sequence[Any]

    def remove(self) -> None:
        for handle in self.each:
            handle.remove()
