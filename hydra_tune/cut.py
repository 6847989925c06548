"""Where a model is cut, and how what its first step shows changes that.

A block that cannot be run apart is opened: its children become blocks, and what made trouble between them runs between
blocks, as in plain PyTorch. One without children is kept: it stays on the device as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from hydra_tune.blocks.block import Block
from hydra_tune.partition import find_blocks, has_children
from hydra_tune.root import SeveralModels
from hydra_tune.shard import BlockProfile, Cut

UNMEASURED = "no first step has called it"


def blocks_of(model: nn.Module, limit_bytes: int, cut: Cut, profiles: Iterable[BlockProfile] = ()) -> list[Block]:
    """The model's blocks, in order of registration; in the order of `profiles`, and by what these tell, if given."""
    opened, kept = set(dict(cut.opened)), set(dict(cut.kept))
    if isinstance(model, SeveralModels):
        opened |= {name for name, child in model.named_children() if has_children(child)}
        kept |= {name for name, child in model.named_children() if not has_children(child)}
    modules = dict(find_blocks(model, limit_bytes, opened=opened, kept=kept))
    by_name = dict(model.named_parameters(remove_duplicate=False))
    held = {by_name[name] for name, _ in cut.held} | _outside(model, modules.values())
    known = {profile.name: profile for profile in profiles if profile.name in modules}
    blocks = []
    for name in [*known, *(name for name in modules if name not in known)]:
        module = modules[name]
        block = Block(name, module, held=[*held.intersection(module.parameters())])
        if name in known:
            profile = known[name]
            block.keeps, block.clones, block.writes_buffers = profile.keeps, profile.clones, profile.writes_buffers
            block.casts, block.saved_counts = profile.casts, profile.saved_counts
            if not profile.visits:
                block.keeps = UNMEASURED
        blocks.append(block)
    return blocks


def _outside(model: nn.Module, modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Parameters that are registered outside of all blocks, perhaps in one as well."""
    inside = {m for module in modules for m in module.modules()}
    return {p for m in model.modules() if m not in inside for p in m._parameters.values() if p is not None}


def opened(cut: Cut, block: Block, reason: str) -> Cut | None:
    """The cut with the block's children in its place; None if it has none."""
    if not has_children(block.module):
        return None
    return replace(cut, opened=(*cut.opened, (block.name, reason)))


def kept(cut: Cut, block: Block, reason: str) -> Cut:
    """The cut with the block on the device as a whole."""
    return replace(cut, kept=(*cut.kept, (block.name, reason)))


def held(cut: Cut, name: str, reason: str) -> Cut:
    """The cut with this weight on the device, while the rest of its block is spilled."""
    return cut if name in dict(cut.held) else replace(cut, held=(*cut.held, (name, reason)))
