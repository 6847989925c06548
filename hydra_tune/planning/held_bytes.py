"""How many bytes parameters take that are held on the device, with what training adds to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from hydra_tune.devices.tensor_bytes import storage_bytes
from hydra_tune.planning.optimizer_memory import stepping_bytes

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial


def held_bytes(trial: Trial, parameters: Sequence[nn.Parameter], *, trains: bool) -> int:
    """Bytes of these parameters; in training also of gradients, optimizer state, and temporaries of an optimizer's
    step. A trial without an optimizer may still get one, so Adam's bytes are assumed for it."""
    total = sum(map(storage_bytes, parameters))
    if not trains:
        return total
    total += sum(storage_bytes(p) for p in parameters if p.requires_grad)
    foreach, left = not trial.device.is_virtual, {id(p): p for p in parameters}
    taken = []
    for optimizer in trial.optimizers:
        own = [left.pop(id(p)) for group in optimizer.param_groups for p in group["params"] if id(p) in left]
        taken.append(stepping_bytes(optimizer, own, foreach_by_default=foreach))
    taken = taken or [stepping_bytes(None, parameters, foreach_by_default=foreach)]
    return total + sum(state for state, _ in taken) + max(scratch for _, scratch in taken)
