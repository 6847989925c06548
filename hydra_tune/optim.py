"""What an optimizer will keep for some parameters, found by stepping one like it on no memory at all."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

logger = logging.getLogger("hydra_tune")


def optimizer_state_bytes(optimizer: torch.optim.Optimizer | None, parameters: Sequence[nn.Parameter]) -> int:
    """Bytes of optimizer state for `parameters`, where `optimizer` keeps it beside them.

    Steps a copy of the optimizer on meta tensors. Two values a parameter, as Adam keeps, are assumed
    where there is no optimizer yet or it can't be copied so.
    """
    trainable = [p for p in parameters if p.requires_grad]
    assumed = 2 * sum(p.numel() * p.element_size() for p in trainable)
    if optimizer is None or not trainable:
        return assumed
    try:
        return _state_bytes_on_meta(optimizer, trainable)
    except Exception as error:  # any optimizer class may come, with any constructor
        logger.info("cannot size the state of %s (%s); assuming Adam's", type(optimizer).__name__, error)
        return assumed


def training_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Weights, gradients and optimizer state; without an optimizer, none of its state."""
    parameters = list(model.parameters())
    weights = sum(p.numel() * p.element_size() for p in parameters)
    gradients = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    return weights + gradients + (0 if optimizer is None else optimizer_state_bytes(optimizer, parameters))


def _state_bytes_on_meta(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> int:
    wanted = set(parameters)
    groups = []
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k != "params" and k in optimizer.defaults}
        twins = [nn.Parameter(torch.empty_like(p, device="meta")) for p in group["params"] if p in wanted]
        for twin in twins:
            twin.grad = torch.empty_like(twin)
        if twins:
            groups.append({"params": twins, **options, **({"fused": None} if "fused" in options else {})})
    if not groups:
        return 0
    like = type(optimizer)(groups)  # type: ignore[call-arg]
    like.step()
    states = [v for state in like.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return sum(v.numel() * v.element_size() for v in states)


def step_scratch_bytes(
    optimizer: torch.optim.Optimizer | None, parameters: Sequence[nn.Parameter], *, foreach_by_default: bool
) -> int:
    """Temporaries of one step on the device: `foreach` makes up to two values of every parameter, the
    loop two of one."""
    sizes = [p.numel() * p.element_size() for p in parameters if p.requires_grad]
    defaults = getattr(optimizer, "defaults", {})
    if defaults.get("fused"):
        return 0
    foreach = defaults.get("foreach")
    foreach = foreach_by_default if foreach is None else foreach
    return 2 * (sum(sizes) if foreach else max(sizes, default=0))
