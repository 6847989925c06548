"""The prepared model as a whole: the stand-ins for its `forward` and its `_apply`, and how both are put back."""

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
    """The models of one trial as children of one module, which is never called."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self._modules = {str(i): model for i, model in enumerate(models)}


class RootForward(StandIn):
    """Stands in for the prepared model's `forward`: leads each call to the trial."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the forward of a prepared model has no {name}. For torch.export and torch.jit.script, which read its "
            "code, call hydra_tune.release(model) first."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:  # bound to the model, as `Accelerator.unwrap_model` leaves it
            args = args[1:]
        trial = self.trial
        if trial.is_plain:  # the trial has ended, but a wrapper of the user's still calls this
            return self.original(*args, **kwargs)
        trial.acquire()
        if trial.base.open():
            trial.pool.shared_weights.note_change()
        try:
            outputs = trial.forwards.run(self, args, kwargs)
        finally:
            trial.base.close()
            trial.busy.release()
        interrupts.check()
        return outputs


class RootApply(StandIn):
    """Stands in for the prepared model's `_apply`, which `.to`, `.half` and others call: refuses to move or convert.

    `configs` are the model's copies of its Hugging Face configs, with `use_cache` switched off.
    """

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
                    f"the pool decides on which device a prepared model's weights are, and their dtypes stay as they "
                    f"are after the first batch, but {name} was to go from {tensor.dtype} on {tensor.device} to "
                    f"{wanted.dtype} on {wanted.device}. Convert the model before prepare, or call "
                    "hydra_tune.release(model) first."
                )
        return self.original(function, recurse)  # type: ignore[no-any-return]


def trial_of(model: nn.Module) -> Trial | None:
    """The trial that the model is prepared for; None if there is none. Looks at `_apply`, as users may have wrapped the
    stand-in in `forward`."""
    stand_in = vars(model).get("_apply")
    return stand_in.trial if isinstance(stand_in, RootApply) and not stand_in.trial.is_plain else None


def give_back(model: nn.Module, trial: Trial) -> None:
    """Put back the model's own attributes in place of this trial's stand-ins. If a user has wrapped a stand-in since,
    the wrapper stays, and calls the model's own attribute through it."""
    for attribute in ("forward", "_apply"):
        present: Any = vars(model).get(attribute)
        stand_in = getattr(present, "__func__", present)
        if isinstance(stand_in, StandIn) and stand_in.trial is trial:
            stand_in.give_back()


def use_no_cache(model: nn.Module) -> list[Any]:
    """Switch off `use_cache` in the model's Hugging Face configs.

    Each layer appends to the cache, and would append twice where its forward is repeated. Several models may share a
    config. So this model gets copies of its own, which are returned.
    """
    owners = [m for m in model.modules() if getattr(vars(m).get("config"), "use_cache", False) is True]
    copies: dict[int, Any] = {}  # the memo of deepcopy: a config within another one is copied once, for both
    for module in owners:
        module.config = config = deepcopy(vars(module)["config"], copies)
        config.use_cache = False
    return [module.config for module in owners]
