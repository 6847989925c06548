"""How a plan feeds a batch to a model, and makes a loss of what comes out. Works on copies of both.

batch       call               loss, unless the user gives a function for it
mapping     model(**batch)     `.loss` or `["loss"]` of the outputs, if there is one;
tuple, list model(*batch)      else the sum of the means of all outputs in floating point
`Arguments` as they say
other       model(batch)
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hydra_tune.blocks.tree import map_tensors, tensors_in
from hydra_tune.devices.device import CPU
from hydra_tune.errors import ConfigError

Loss = Callable[[nn.Module, Any], torch.Tensor]


class Arguments(NamedTuple):
    """A batch that is fed as ``model(*args, **kwargs)``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def copies_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, weights: Mapping[int, nn.Parameter] | None = None
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """A copy of the model in host memory, and an optimizer of the same options for it, without state. `weights` go in
    place of the model's, by their `id`.

    Raises:
        ConfigError: the model cannot be copied.
    """
    known: dict[int, Any] = dict(weights or {})
    try:
        twin = copy.deepcopy(model, known)
    except Exception as error:
        raise ConfigError(
            f"a plan is made with a copy of the model, but copy.deepcopy of {type(model).__name__} fails: {error}. "
            "Detach tensors that its attributes keep, or plan with a freshly built model."
        ) from error
    twin.to(CPU)
    return twin, None if optimizer is None else _stateless(optimizer, known)


def _stateless(optimizer: torch.optim.Optimizer, known: dict[int, Any]) -> torch.optim.Optimizer:
    """An optimizer as this one, over the copies of its parameters. It is never stepped, so it needs no state."""
    twin = copy.copy(optimizer)
    own = vars(twin)
    own.pop("step", None)  # a learning rate schedule has put its own there
    for name in [name for name in own if name.endswith("_hooks")]:
        own[name] = OrderedDict()
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        return twin  # `prepare` will say what is missing
    own["state"] = defaultdict(dict)
    own["param_groups"] = [
        {**group, "params": [known.get(id(p), p) for p in group["params"]]} for group in optimizer.param_groups
    ]
    return twin


def batch_copy(batch: Any) -> Any:
    """The batch with copies of its tensors in host memory."""
    return map_tensors(lambda x: x.detach().to(CPU, copy=True).requires_grad_(x.requires_grad), batch)


def outputs_of(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Arguments):
        return model(*batch.args, **batch.kwargs)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def refuse_unfeedable(model: nn.Module, batch: Any, name: str, otherwise: str) -> None:
    """Refuse a batch that the model's forward does not take. `name` is of the user's argument, and `otherwise` says
    what to write instead.

    Raises:
        ConfigError: it has more, fewer or other arguments.
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # it has none
        return
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
    try:
        signature.bind(*(args if isinstance(args, (tuple, list)) else (args,)), **kwargs)
    except TypeError as error:
        forward = f"{type(model).__name__}.forward({', '.join(signature.parameters)})"
        raise ConfigError(
            f"{name}= is fed as model(**batch) if it is a mapping, as model(*batch) if it is a tuple or list, else as "
            f"model(batch), but {forward} takes no such call: {error}. {otherwise}"
        ) from None


def loss_of(outputs: Any) -> torch.Tensor:
    """A number to call backward on.

    Raises:
        ConfigError: no output depends on a trained weight.
    """
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    means = [x.mean() for x in tensors_in(outputs) if x.is_floating_point() and x.requires_grad]
    if not means:
        raise ConfigError(
            "a plan calls backward on a loss, but no output of the model requires a gradient. "
            "Write loss=lambda model, batch: ... , or batch=None to plan for evaluation only."
        )
    return torch.stack(means).sum() if len({(m.dtype, m.device) for m in means}) == 1 else sum(means[1:], means[0])


def refuse_no_number(loss: Any) -> None:
    """
    Raises:
        ConfigError: backward cannot be called on it.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        what += "" if getattr(loss, "requires_grad", True) else " that requires no gradient"
        raise ConfigError(
            f"a plan calls backward on a loss, a tensor of one number that requires a gradient; got {what}. Write "
            "loss=lambda model, batch: ... so that it returns one."
        )


def size_of(batch: Any) -> tuple[int, str]:
    """How much a batch has, and of what: tokens if its first tensor holds indices of two or more dimensions, else
    rows."""
    first = next((x for x in tensors_in(batch) if x.dim()), None)
    if first is None:
        return 1, "rows"
    if first.dim() > 1 and first.dtype in (torch.int64, torch.int32):
        return first.numel(), "tokens"
    return int(first.shape[0]), "rows"
