"""What a trial holds on its device for its life, by kind: embeddings, adapters, buffers, optimizer state .."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from hydra_tune.devices.tensor_bytes import storage_bytes, weights_of
from hydra_tune.planning.adapters import REASON
from hydra_tune.planning.optimizer_memory import stepping_bytes

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

EMBEDDINGS, ADAPTERS, OTHERS = "embeddings", "adapters", "other weights"
BUFFERS, STATE = "buffers", "gradients, optimizer state, kept outputs"


def held_by_what(trial: Trial) -> dict[str, int]:
    """Bytes that the trial's present plan holds, by kind; kinds without bytes are left out."""
    plan, model, cut = trial.planner.plan, trial.model, trial.planner.cut
    if plan is None:
        return {}
    adapters = {name for name, reason in plan.cut.held.items() if reason == REASON}
    names = {id(p): name for name, p in model.named_parameters()}
    tables = {id(p) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for p in m.parameters()}
    weights = weights_of(model)
    found = dict.fromkeys((EMBEDDINGS, ADAPTERS, OTHERS, BUFFERS), 0)
    for p in weights:
        if plan.resident or id(p) not in cut.uses:
            kind = ADAPTERS if names.get(id(p)) in adapters else EMBEDDINGS if id(p) in tables else OTHERS
            found[kind] += storage_bytes(p)
    found[BUFFERS] = sum(map(storage_bytes, set(model.buffers()).difference(weights)))
    found[STATE] = max(0, plan.all_held_bytes - sum(found.values()))
    return {kind: num_bytes for kind, num_bytes in found.items() if num_bytes}


def optimizer_state_bytes(trial: Trial) -> int:
    """Bytes of optimizer state that the trial will have on its device once its optimizer has stepped."""
    plan, cut = trial.planner.plan, trial.planner.cut
    held = [p for p in trial.model.parameters() if plan is not None and (plan.resident or id(p) not in cut.uses)]
    optimizers: list[Any] = [*trial.optimizers] or [None]
    own = [held if each is None else [p for g in each.param_groups for p in g["params"]] for each in optimizers]
    known = set(map(id, held))
    return sum(
        stepping_bytes(each, [p for p in stepped if id(p) in known], foreach_by_default=trial.device.counts_as_gpu)[0]
        for each, stepped in zip(optimizers, own, strict=True)
    )
