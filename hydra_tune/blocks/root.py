"""The prepared model as a whole: what stands in its `forward`, and what it must be like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hydra_tune.blocks.stand_ins import StandIn
from hydra_tune.errors import PrepareError
from hydra_tune.process.interrupts import interrupts

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial


class SeveralModels(nn.Module):
    """Those of one trial, as one: never called."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self._modules = {str(i): model for i, model in enumerate(models)}


class RootForward(StandIn):
    """Stands in the prepared model's `forward`."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the forward of a prepared model has no {name}. For torch.export and torch.jit.script, which read its "
            "code, call hydra_tune.release(model) first."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:  # bound to the model, as `Accelerator.unwrap_model` leaves it
            args = args[1:]
        trial = self.trial
        if trial.is_plain:  # what somebody has put around this one leads here still
            return self.original(*args, **kwargs)
        trial.hold()
        try:
            outputs = trial.forwards.run(self, args, kwargs)
        finally:
            trial.busy.release()
        interrupts.check()
        return outputs


class RootApply(StandIn):
    """Stands in the prepared model's `_apply`, through which `.to`, `.half` and their kin go; `configs` are its own, in
    which `use_cache` is off."""

    attribute = "_apply"

    def __init__(self, module: nn.Module, trial: Trial) -> None:
        super().__init__(module, trial)
        self.configs = use_no_cache(module)

    def give_back(self) -> None:
        super().give_back()
        for config in self.configs:
            config.use_cache = True

    def __call__(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            wanted = function(tensor.detach().flatten()[:0])
            converts = wanted.dtype != tensor.dtype and self.trial.planner.plan is not None
            if converts or wanted.device != tensor.device:
                raise PrepareError(
                    f"a prepared model stays as it is after its first batch, and where its weights are is the pool's "
                    f"business, but {name} was to go from {tensor.dtype} on {tensor.device} to {wanted.dtype} on "
                    f"{wanted.device}. Convert the model before prepare, or call hydra_tune.release(model) first."
                )
        return self.original(function, recurse)  # type: ignore[no-any-return]


def trial_of(model: nn.Module) -> Trial | None:
    """The one that has prepared it and has not let go of it since, if there is one: also where somebody has put a
    forward around ours."""
    stand_in = vars(model).get("_apply")
    return stand_in.trial if isinstance(stand_in, RootApply) and not stand_in.trial.is_plain else None


def give_back(model: nn.Module, trial: Trial) -> None:
    """What the model had on itself before this trial has prepared it. Who has put something around a stand-in since
    keeps that; it leads there still."""
    for attribute in ("forward", "_apply"):
        present: Any = vars(model).get(attribute)
        stand_in = getattr(present, "__func__", present)
        if isinstance(stand_in, StandIn) and stand_in.trial is trial:
            stand_in.give_back()


def use_no_cache(model: nn.Module) -> list[Any]:
    """Switch off `use_cache` in the Hugging Face configs that say it: a cache that grows in each layer would grow twice
    where a forward is repeated. Several models may share a config, so that this one gets copies of its own, which are
    returned."""
    owners = [m for m in model.modules() if getattr(vars(m).get("config"), "use_cache", False) is True]
    copies: dict[int, Any] = {}  # by id: a config within another one stays the one that a module has
    for module in owners:
        module.config = config = deepcopy(vars(module)["config"], copies)
        config.use_cache = False
    return [module.config for module in owners]
