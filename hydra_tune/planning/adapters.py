"""Finds small trained weights beside frozen ones: adapters, as of LoRA.

A block of a frozen base with an adapter must not be promoted as one: its slot would be the trial's own, and trials over
the same base could not share it. But an adapter is small. So a slot has the frozen weights alone, and:

    held     an adapter stays on the device with its gradients and optimizer state, and its optimizer steps there
    rides    if that is too much for the budget: an adapter is promoted for each visit, beside the slot; its gradients
             go to the host, where its optimizer steps
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hydra_tune.blocks.block import Block
from hydra_tune.devices.tensor_bytes import storage_bytes
from hydra_tune.planning.optimizer_memory import held_bytes
from hydra_tune.schedule.plan import BlockProfile

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

REASON = "it is trained beside frozen weights"
# A block is adapted if its trained weights have at most this part of the bytes of its frozen ones ..
_MOST_OF_BLOCK = 1 / 4
# .. and all adapters are held if they, with their gradients and state, take at most this part of the budget. It depends
# on the trial alone, so that company does not change where its optimizer steps.
_MOST_OF_BUDGET = 1 / 16


def adapters_to_hold(trial: Trial, blocks: Sequence[Block]) -> list[str]:
    """Names of the trained weights that are to be held on the device, in the order of the model's parameters."""
    wanted: dict[int, None] = {}
    for block in blocks:
        trained = {id(p) for p in block.slot_parameters if p.requires_grad}
        if _is_adapted(block, trained):
            wanted |= dict.fromkeys(trained)
    found = [(name, p) for name, p in trial.model.named_parameters() if id(p) in wanted]
    num_bytes = held_bytes(trial, [p for _, p in found], trains=True)
    return [name for name, _ in found] if num_bytes <= _MOST_OF_BUDGET * trial.pool.budget_bytes else []


def over_frozen(profile: BlockProfile, block: Block, trained: Container[int]) -> BlockProfile:
    """The profile of a block whose slot has its frozen weights alone, if it is frozen or adapted; else the same.

    `trained` has the ids of parameters that are ever trained. What rides takes room beside the slot during a visit.
    """
    riders = {id(p) for p in block.slot_parameters if id(p) in trained}
    if not riders:
        return replace(profile, is_frozen=True)
    if not _is_adapted(block, riders):
        return profile
    num_bytes = sum(storage_bytes(p) for p in block.slot_parameters if id(p) in riders)
    return replace(
        profile,
        weight_bytes=profile.weight_bytes - num_bytes,
        forward_work_bytes=profile.forward_work_bytes + num_bytes,
        backward_work_bytes=profile.backward_work_bytes + num_bytes,
        is_frozen=True,
        rides=True,
    )


def _is_adapted(block: Block, trained: Container[int]) -> bool:
    """Whether the trained weights in the block's slot are few beside its frozen ones there."""
    sizes = [(storage_bytes(p), id(p) in trained) for p in block.slot_parameters]
    trained_bytes = sum(size for size, is_trained in sizes if is_trained)
    return 0 < trained_bytes <= _MOST_OF_BLOCK * sum(size for size, is_trained in sizes if not is_trained)
