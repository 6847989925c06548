"""Cuts a model: modules into blocks before the first batch, blocks into shards after the pilot.

Cut by module, not by graph: no tracing, so control flow, masks in kwargs and skip connections work
unchanged. Packing follows Hydra's pilot partitioning (arXiv 2110.08633, section 4.1), with the
double-buffer reserve set aside, and adds an objective (`pack_shards`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from hydra_tune.blocks.block import Block
from hydra_tune.blocks.root import SeveralModels
from hydra_tune.blocks.tree import flatten, tensors_in
from hydra_tune.config import format_bytes
from hydra_tune.devices.tensor_bytes import tensor_bytes
from hydra_tune.errors import FINER, SMALLER_STEP, does_not_fit
from hydra_tune.schedule.ledger import HeldWeights
from hydra_tune.schedule.plan import BlockProfile, Cut, Shard, TrialPlan

# Such a slot takes 5 ms to copy on the fastest links, ten times what a task costs the host. Larger ones would gain
# little and take room from others.
MOST_SLOT_BYTES = 1 << 28
FROZEN_SHARDS = 16  # frozen blocks share a shard if it is no larger than this part of the budget
UNMEASURED = "no first step has called it"
Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]
_STACKS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(
    root: nn.Module, limit_bytes: int, *, opened: Container[str] = (), kept: Container[str] = ()
) -> dict[str, nn.Module]:
    """The blocks of `root` by name, in order of registration.

    The root is always opened, and so is a module that contains a stack of layers, or is named in `opened`. An
    element of a stack is a block, unless its weights and gradients pass `limit_bytes`; then its children are.
    A module named in `kept` is no block, and its children are none either.
    """
    blocks: dict[nn.Module, str] = {}

    def walk(name: str, module: nn.Module, *, in_stack: bool) -> Iterator[tuple[str, nn.Module]]:
        size = sum(map(tensor_bytes, [*module.parameters(), *module.buffers()]))
        if size == 0 or name in kept:
            return
        stack = isinstance(module, _STACKS)
        size += sum(tensor_bytes(p) for p in module.parameters() if p.requires_grad)
        opens = stack or name in opened or size > limit_bytes or (not in_stack and _contains_stack(module))
        children = children_of(module) if opens or not name else []
        if name and not children:
            yield name, module
        for child_name, child in children:
            yield from walk(f"{name}.{child_name}".lstrip("."), child, in_stack=in_stack or stack)

    # `walk` is a reference cycle: it refers to itself. So it must not refer to the modules.
    for found_name, module in walk("", root, in_stack=False):
        blocks.setdefault(module, found_name)
    return {name: module for module, name in blocks.items()}


def children_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The module's named children. None if its weights are parametrized: its parametrizations are a part of itself."""
    return [] if is_parametrized(module) else list(module.named_children())


def has_children(module: nn.Module) -> bool:
    """Whether opening this module makes other blocks of it."""
    return any(True for _, child in children_of(module) for _ in child.parameters())


def _contains_stack(module: nn.Module) -> bool:
    """Whether the module contains a stack of layers. A list of parametrizations is none."""
    return any(isinstance(m, _STACKS) for n, m in module.named_modules() if "parametrizations" not in n.split("."))


def blocks_of(
    model: nn.Module, limit_bytes: int, cut: Cut, profiles: Iterable[BlockProfile], before: Iterable[Block]
) -> list[Block]:
    """The model's blocks, in order of registration, or in the order of `profiles` if these are given. Blocks also take
    what their profiles say (`keeps`, `casts` ..). A block that is cut as one of `before` is the same object, since a
    graph may refer to it."""
    opened, kept = set(cut.opened), set(cut.kept)
    if isinstance(model, SeveralModels):
        for name, child in model.named_children():
            (opened if has_children(child) else kept).add(name)
    modules = find_blocks(model, limit_bytes, opened=opened, kept=kept)
    inside = {m for module in modules.values() for m in module.modules()}
    outside: set[torch.Tensor] = {
        p for m in model.modules() if m not in inside for p in m._parameters.values() if p is not None
    }
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    held: set[torch.Tensor] = {*outside, *(p for name, p in named if name in cut.held)}
    known = {profile.name: profile for profile in profiles if profile.name in modules}
    old = {block.name: block for block in before}
    blocks = []
    for name in dict.fromkeys((*known, *modules)):
        own = (*modules[name].parameters(), *modules[name].buffers())
        block = Block(name, modules[name], held=[*held.intersection(own)])
        if (former := old.get(name)) is not None and _what_runs(former) == _what_runs(block):
            block = former
        profile = known.get(name, BlockProfile(name, 0))
        block.keeps = (profile.keeps if profile.visits else UNMEASURED) or block.keeps
        block.clones, block.writes_buffers = profile.clones or block.clones, profile.writes_buffers
        block.casts, block.saved_counts = profile.casts | block.casts, profile.saved_counts | block.saved_counts
        blocks.append(block)
    return blocks


def _what_runs(block: Block) -> list[int]:
    """Equal for two blocks that promote the same parameters for the same forward."""
    return [*map(id, (block.module, block.own_forward, *block.slot_parameters))]


def make_plan(
    profiles: Sequence[BlockProfile],
    *,
    budget_bytes: int,
    loose_bytes: int,
    resident_bytes: int,
    step_bytes: int,
    late_bytes: int = 0,
    loose_weights: HeldWeights = (),
    resident_weights: HeldWeights = (),
    may_be_resident: bool = True,
    cut: Cut = Cut(),  # noqa: B008
) -> TrialPlan:
    """The plan for blocks, given in the order in which they run.

    `loose_bytes`     parameters outside every block, with gradients and optimizer state
    `resident_bytes`  all parameters, with gradients and optimizer state
    `step_bytes`      boundary tensors, operators between blocks and the loss
    `..._weights`     frozen parameters, beside the bytes of the same name: number and bytes of each
    `late_bytes`      in a spilled step: gradients of one block that go to the host while the next one computes

    Raises:
        BudgetError: a block does not fit even alone. The error names it, its need and the budget.
    """
    blocks, saved = tuple(profiles), sum(p.saved_bytes for p in profiles)
    whole = replace(_shard_of(range(len(blocks)), blocks), slot_bytes=0, boundary_bytes=0)
    resident = TrialPlan(True, (whole,), blocks, resident_bytes, step_bytes + saved, cut, resident_weights)
    if may_be_resident and resident.need_bytes <= budget_bytes:
        return resident
    if not profiles:
        need = format_bytes(resident.need_bytes, up=True)
        helps = f'memory="{need}"', SMALLER_STEP, "layers that are modules of their own, which can be spilled"
        what, there_is = "the model, in which no block can be spilled,", f"the budget is {format_bytes(budget_bytes)}"
        refusal = does_not_fit(what, need, there_is, helps, beside=cut.staying())
        raise refusal.lacking(resident.need_bytes, budget_bytes)
    step_bytes += late_bytes
    largest = sorted(profiles, key=lambda p: p.weight_bytes + p.work_bytes, reverse=True)
    held_bytes = loose_bytes + sum(num_bytes for _, num_bytes in loose_weights)
    p, room_bytes = largest[0], budget_bytes - held_bytes - step_bytes
    need_bytes = held_bytes + step_bytes + p.weight_bytes + p.work_bytes
    if need_bytes > budget_bytes:
        need, rest = format_bytes(need_bytes, up=True), held_bytes + step_bytes
        weights, work, rest_told = map(format_bytes, (p.weight_bytes, p.work_bytes, rest))
        parts = f"{weights} of weights, {work} to compute, {rest_told} held by its trial and step"
        helps, there_is = (f'memory="{need}"', SMALLER_STEP, FINER), f"the budget is {format_bytes(budget_bytes)}"
        refusal = does_not_fit(f"block {p.name}", f"{need} ({parts})", there_is, helps, beside=cut.staying())
        too_large = [p.name for p in largest if p.weight_bytes + p.work_bytes > room_bytes]
        raise refusal.lacking(need_bytes, budget_bytes, too_large)
    shards = pack_shards(profiles, room_bytes, budget_bytes // FROZEN_SHARDS)
    return TrialPlan(False, shards, blocks, loose_bytes, step_bytes, cut, loose_weights)


def pack_shards(
    profiles: Sequence[BlockProfile], room_bytes: int, frozen_bytes: int = MOST_SLOT_BYTES
) -> tuple[Shard, ...]:
    """Consecutive blocks, for a trial with `room_bytes` for slots and work. In O(blocks * log(room_bytes)).

    Two shards fit beside the largest work of any block, and none is larger than `MOST_SLOT_BYTES`, except a block
    that is larger by itself. Of these cuts, take the one that promotes the fewest bytes a step; if several do, the
    one with the fewest shards; if several have, the one whose largest shard is smallest:

        forward    | promoted | promoted | promoted | promoted |
        backward   | promoted | promoted | kept since forward  |

    Frozen blocks have shards of their own, of at most `frozen_bytes`, unless one is larger by itself. So trials over
    one base cut it alike, whatever room each has, and share its slots.

    1. Only the first kept block decides the bytes. With one block a shard this block comes earliest: a longer
       shard needs all its blocks on the device while the one with the largest work computes.
    2. Shards are filled one after another. This gives the fewest, since a part of a shard that fits does fit. A
       shard ends where the kept blocks begin and where `visits` changes: no block is promoted for another's visit.
    3. The limit of a shard's bytes is the least one for which as few shards suffice. So the largest is smallest.

    Known slack: with blocks that have no backward there may be one shard too many.
    """
    most = min((room_bytes - max((p.work_bytes for p in profiles), default=0)) // 2, MOST_SLOT_BYTES)
    kept = _first_kept(profiles, room_bytes)

    def filled(limit: int) -> list[list[int]]:
        parts: list[list[int]] = []
        size = work = kept_bytes = 0
        for i, p in enumerate(profiles):
            size, work = size + p.weight_bytes, max(work, p.work_bytes)
            kept_bytes += p.weight_bytes if i >= kept else 0
            before = profiles[i - 1]
            if p.is_frozen and i and before.is_frozen:
                begins = size > min(limit, frozen_bytes)
            else:
                begins = i in (0, kept) or p.is_frozen != before.is_frozen
                begins = begins or (i < kept and p.visits != before.visits)
            if begins or size > limit or kept_bytes + work > room_bytes:
                parts.append([])
                size, work = p.weight_bytes, p.work_bytes
            parts[-1].append(i)
        return parts

    fewest = len(filled(most))
    least = bisect_left(range(most + 1), True, key=lambda limit: len(filled(limit)) <= fewest)
    return tuple(_shard_of(part, profiles) for part in filled(least))


def _shard_of(numbers: Sequence[int], profiles: Sequence[BlockProfile]) -> Shard:
    blocks = [profiles[i] for i in numbers]
    return Shard(
        tuple(numbers),
        sum(p.weight_bytes for p in blocks),
        max((p.forward_work_bytes for p in blocks), default=0),
        max((p.backward_work_bytes for p in blocks), default=0),
        max((p.boundary_bytes for p in blocks), default=0),
    )


def _first_kept(profiles: Sequence[BlockProfile], room_bytes: int) -> int:
    """With one block a shard: the number of the first block that stays on the device from its forward to its backward.
    If none does, the number of blocks.

    A block is kept if there is room for it beside the kept blocks after it, and beside the work of each of them. After
    the backward of a block its copy is the first to be dropped (see `slots.py`). So its room counts no more.
    """
    kept = len(profiles)
    after = 0  # the most bytes that a later block needs: its work, and all slots from this block to it
    for i, p in reversed([*enumerate(profiles)]):
        if p.weight_bytes + after > room_bytes:
            break
        after = p.weight_bytes + max(p.work_bytes, after)
        kept = i if p.visits == 2 else kept
    return kept


def summary_of(plan: TrialPlan) -> dict[str, Any]:
    """The plan as plain data, for a report."""
    return {
        "resident": plan.resident,
        "held_bytes": plan.all_held_bytes,
        "step_bytes": plan.step_bytes,
        "weight_bytes": sum(p.weight_bytes for p in plan.blocks),
        "shards": [{**vars(shard), "blocks": [plan.blocks[i].name for i in shard.blocks]} for shard in plan.shards],
        "cut": {what: {**reasons} for what, reasons in vars(plan.cut).items()},
        "keeps": {p.name: p.keeps for p in plan.blocks if p.keeps},
    }


def input_signature(inputs: object) -> Signature:
    return tuple((shape_of(t), t.dtype) for t in tensors_in(inputs))


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape. Some sizes of a nested tensor are no plain numbers, so its shape is its number of elements."""
    return (tensor.numel(),) if tensor.is_nested else tuple(tensor.shape)


def flags_of(inputs: object) -> tuple[object, ...]:
    """What decides a forward beside shapes: booleans, strings and None among its inputs, and which tensors require a
    gradient."""
    told = (x.requires_grad if isinstance(x, torch.Tensor) else x for x in flatten(inputs)[0])
    return tuple(x for x in told if x is None or isinstance(x, (bool, str)))
