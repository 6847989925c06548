"""A LightningModule's step as the forward that a pool sees.

A step may call any part of its module, but the pool has a block's weights on the device in the forward of the prepared
model alone. So what is prepared is a stand-in with the module's weights and layers, whose forward is the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
import torchmetrics
from torch import nn

from hydra_tune.blocks.root import RootApply
from hydra_tune.blocks.tree import tensors_in

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial


class StepForward:
    """Stands in a module's forward while its layers are prepared: its steps, and calls between steps, run within the
    forward of `root`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.root = StepRoot(module)
        self._own = vars(module).get("forward")
        self._is_running = False
        module.forward = self

    def guard(self, trial: Trial) -> None:
        """The module stays where it is, as any that is prepared."""
        self.module._apply = RootApply(self.module, trial)  # type: ignore[method-assign]

    def run(self, step: Callable[[], Any], name: str, tensors: Sequence[torch.Tensor]) -> Any:
        """`name` and `tensors` tell the pool which steps need the same room. No hook on the module is called: in plain
        Lightning its step calls them, where it calls the module."""
        self.root.follow(self.module)
        self.root.runs.step, self._is_running = step, True
        try:
            return self.root.forward(name, *tensors)
        finally:
            self._is_running = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = type(self.module).forward.__get__(self.module) if self._own is None else self._own
        if self._is_running:
            return original(*args, **kwargs)
        return self.run(functools.partial(original, *args, **kwargs), "forward", tensors_in((args, kwargs)))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module is plain."""
        return (getattr, (self.module, "forward")) if self._own is None else (itemgetter(0), ((self._own,),))

    def give_back(self) -> None:
        if isinstance(guard := vars(self.module).get("_apply"), RootApply):
            guard.give_back()
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self._own is not None:
                self.module.forward = self._own


class StepRoot(nn.Module):
    """The model that is prepared: weights and layers of a LightningModule, under their names.

    Not the module itself: Lightning and its metrics set attributes of the module in each step, by which it would be a
    new model each time, whose memory the pool measures anew."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.runs = self.forward = _Runs()
        self.follow(module)

    def follow(self, module: nn.Module) -> None:
        own = vars(self)
        own["training"], own["_parameters"], own["_buffers"] = module.training, module._parameters, module._buffers
        own["_modules"] = {name: child for name, child in module._modules.items() if not _is_metric(child)}


class _Runs:
    """`step`, once. The same to whoever looks for what tells two models apart."""

    __slots__ = ("step",)
    step: Callable[[], Any]

    def __call__(self, *_: Any) -> Any:
        step = self.step
        del self.step
        return step()

    def __reduce__(self) -> str:
        return "_Runs"


def _is_metric(module: nn.Module | None) -> bool:
    """Of torchmetrics, or several, without weights."""
    if module is None or next(module.parameters(), None) is not None:
        return False
    return any(isinstance(each, torchmetrics.Metric) for each in module.modules())
