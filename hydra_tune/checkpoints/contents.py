"""What a checkpoint holds of a trial, and how it is put back. When one is written, `resumption.py` decides.

A checkpoint of another model, loader or kind of optimizer would load in part and train on with wrong numbers. So a
checkpoint says what it was made of, and is refused before anything is changed, with the first line that differs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from hydra_tune.checkpoints.checkpoint_folder import CheckpointFolder, Position
from hydra_tune.checkpoints.hyperparameters import Hyperparameters
from hydra_tune.checkpoints.loader_progress import LoaderProgress
from hydra_tune.errors import PrepareError
from hydra_tune.planning.optimizer_memory import load_exactly


class OtherStateError(Exception):
    """The checkpoint is not of what it is to be put into; says what differs."""


@dataclass(frozen=True)
class Contents:
    """What a checkpoint of one prepared model holds besides the model and its optimizer. Those two are handed in each
    time, so that nobody keeps them for longer than their trial does."""

    loaders: Sequence[LoaderProgress]
    extra: Sequence[Any]
    given: Hyperparameters  # that the objective has set, which a perturbed trial keeps

    def state(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        loader_states: Sequence[dict[str, Any]],
        random_states: Sequence[torch.Tensor],
    ) -> dict[str, Any]:
        """For a checkpoint; the tensors are the trial's own."""
        return {
            **state_of(model),
            "made_of": _made_of(model, optimizer, self.loaders),
            "given": self.given.plain(),
            "optimizer": None if optimizer is None else optimizer.state_dict(),
            "extra_state": [each.state_dict() for each in self.extra],
            "loaders": [p.state(now["generators"]) for p, now in zip(self.loaders, loader_states, strict=True)],
            "random": random_states,
        }

    def put_back(
        self, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None, *, perturbed: bool
    ) -> None:
        """All but the random state.

        Args:
            perturbed: the checkpoint may be another trial's, or of another configuration: settings of layers may
                differ, and the hyperparameters stay those of this trial.

        Raises:
            OtherStateError: the checkpoint is another's; neither model nor optimizer has changed.
        """
        _refuse_changed(state, _made_of(model, optimizer, self.loaders), but_model=perturbed)
        restore(state, model, optimizer, self.loaders, self.extra)
        if perturbed:
            self.given.stay(state["given"], optimizer, self.extra)


# ---- what is written ----


def write_weights(folder: CheckpointFolder, model: nn.Module) -> None:
    """For a trial that is to start from them: `Resumption(weights=folder)`."""
    folder.write(Position(0, 0), {**state_of(model), "gradients": {}})


def state_of(model: nn.Module) -> dict[str, Any]:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    extra = {name: module.get_extra_state() for name, module in _with_extra_state(model)}
    tensors = {"parameters": dict(model.named_parameters()), "buffers": dict(model.named_buffers())}
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    return {**tensors, "trained": trained, "gradients": gradients, "module_state": extra}


def _with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]


def _made_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, loaders: Sequence[LoaderProgress]
) -> dict[str, str]:
    """By which a changed objective is known, as far as it can be."""
    return {
        "model": re.sub(r" at 0x[0-9a-f]+", "", repr(model)),
        "optimizer": "none" if optimizer is None else type(optimizer).__qualname__,
        "loaders": ", ".join(loader.description for loader in loaders) or "none",
    }


# ---- what is refused ----


def _refuse_changed(state: dict[str, Any], now: dict[str, str], *, but_model: bool) -> None:
    """`but_model`: settings of its layers, such as a dropout's rate, may have changed."""
    for kind, description in now.items():
        if kind != "model" or not but_model:
            _refuse_other(kind, state["made_of"][kind], description)


def _refuse_other(what: str, then: str, now: str) -> None:
    if then != now:
        lines = zip_longest(then.splitlines(), now.splitlines(), fillvalue="nothing")
        before, after = next((a, b) for a, b in lines if a != b)
        raise OtherStateError(f"its {what} had {before.strip()!r} where it has {after.strip()!r} now")


def _refuse_other_model(state: dict[str, Any], model: nn.Module) -> None:
    for kind, now in (("parameters", model.named_parameters()), ("buffers", model.named_buffers())):
        both = state[kind].items(), now
        _refuse_other(kind, *["\n".join(f"{n} {tuple(t.shape)} {t.dtype}" for n, t in each) for each in both])


# ---- what is put back ----


def restore(
    state: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loaders: Sequence[LoaderProgress],
    extra: Sequence[Any],
) -> None:
    """
    Raises:
        OtherStateError: the state is another's; neither model nor optimizer has changed.
    """
    _refuse_other("number of extra states", str(len(state["extra_state"])), str(len(extra)))
    _refuse_other_model(state, model)  # all that may be refused comes before the first change
    if optimizer is not None:
        _restore_optimizer(state["optimizer"], optimizer)
    _restore_model(state, model)
    for each, value in zip(extra, state["extra_state"], strict=True):
        each.load_state_dict(value)
    for loader, value in zip(loaders, state["loaders"], strict=True):
        loader.restore(value)


def read_weights(folder: CheckpointFolder, model: nn.Module, name: str) -> None:
    """Those that `write_weights` has left there, into the model of the trial of this name.

    Raises:
        PrepareError: there are none.
        OtherStateError: they are another model's; nothing has changed.
    """
    copied = folder.newest()
    if copied is None:
        raise PrepareError(f"{name} starts from another's weights, but {folder.path} has none.")
    _restore_model(copied[1], model)


@torch.no_grad()
def _restore_model(state: dict[str, Any], model: nn.Module) -> None:
    _refuse_other_model(state, model)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for kind, now in (("parameters", parameters), ("buffers", buffers)):
        for name, tensor in now.items():
            tensor.copy_(state[kind][name])
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in state["trained"])
        parameter.grad = state["gradients"].get(name)
    for name, module in _with_extra_state(model):
        module.set_extra_state(state["module_state"][name])


def _restore_optimizer(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    try:
        load_exactly(optimizer, state)
    except (ValueError, KeyError) as error:
        raise OtherStateError(f"the optimizer's state is another's: {error}") from None
