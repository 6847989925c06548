"""Where a model is cut, and how a pilot's findings change it.

A block that cannot be run apart is opened: its children become blocks, and what made trouble between them (an
operator in place, a hook, a loss kept aside) runs between blocks, in the outer graph, as in plain PyTorch. One
without children is kept: it stays on the device and runs as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from hydra_tune.block import Block
from hydra_tune.partition import find_blocks, has_children
from hydra_tune.pilot import Findings
from hydra_tune.probe import hooked_inside
from hydra_tune.shard import TOO_LARGE, BlockProfile, Cut


def blocks_of(model: nn.Module, limit_bytes: int, cut: Cut, profiles: Iterable[BlockProfile] = ()) -> list[Block]:
    """The model's blocks, in order of registration; in the order of `profiles`, and by what these tell, if given."""
    modules = dict(find_blocks(model, limit_bytes, opened=dict(cut.opened), kept=dict(cut.kept)))
    by_name = dict(model.named_parameters(remove_duplicate=False))
    held = {by_name[name] for name, _ in cut.held}
    held |= _outside(model, modules.values())
    borrowed = dict(cut.borrowed)
    known = {profile.name: profile for profile in profiles}
    blocks = []
    for name in known or modules:
        module = modules[name]
        block = Block(
            name,
            module,
            held=held.intersection(module.parameters()),
            borrowed=[by_name[n] for n in borrowed.get(name, ())],
        )
        if known:
            profile = known[name]
            block.edges, block.keeps_clones = profile.edges, profile.keeps_clones
            block.reentrant, block.rewritten, block.draws = profile.reentrant, profile.rewritten, profile.draws
            block.shares_memory = profile.shares_memory
        blocks.append(block)
    return blocks


def _outside(model: nn.Module, modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Parameters that are registered outside of all blocks, perhaps in one as well."""
    inside = {m for module in modules for m in module.modules()}
    return {p for m in model.modules() if m not in inside for p in m._parameters.values() if p is not None}


def recut(model: nn.Module, cut: Cut, findings: Findings) -> Cut:
    """The cut that these findings ask for; always another one."""
    names = {p: name for name, p in model.named_parameters()}
    opened, kept, held, borrowed = dict(cut.opened), dict(cut.kept), dict(cut.held), dict(cut.borrowed)
    uncuttable = dict(findings.uncuttable)
    for block, parameters in findings.borrowed.items():
        strangers = [p for p in parameters if p not in names]
        if strangers:
            uncuttable[block] = f"{block.name} uses a weight that the model does not have"
            continue
        borrowed[block.name] = (*borrowed.get(block.name, ()), *(names[p] for p in parameters))
        held.update({names[p]: f"used by {block.name} without being given to it" for p in parameters})
    for block, reason in uncuttable.items():
        opens = has_children(block.module) and not block.differentiates
        (opened if opens else kept)[block.name] = reason
    held.update({names[p]: reason for p, reason in findings.held.items()})
    found = Cut(tuple(opened.items()), tuple(kept.items()), tuple(held.items()), tuple(borrowed.items()))
    assert found != cut, findings
    return found


def open_too_large(model: nn.Module, cut: Cut, name: str) -> Cut | None:
    """The cut with a block opened that does not fit; None if nothing is left to open."""
    if not has_children(model.get_submodule(name)):
        return None
    return replace(cut, opened=(*cut.opened, (name, TOO_LARGE)))


def cut_at_hooks(model: nn.Module, limit_bytes: int, cut: Cut) -> Cut:
    """Open what has a user's hook within, until each hook is on a block itself or outside of all."""
    while True:
        findings = Findings()
        for block, name in hooked_inside(blocks_of(model, limit_bytes, cut)):
            findings.uncuttable[block] = f"{name} in it has a hook, which would fire again when it is recomputed"
        if not findings:
            return cut
        cut = recut(model, cut, findings)
