"""Cuts a model: modules into blocks before the first batch, blocks into shards after the pilot.

Cut by module, not by graph: no tracing, so control flow, masks in kwargs and skip connections work
unchanged. Packing follows Hydra's pilot partitioning (arXiv 2110.08633, section 4.1): with the
double-buffer reserve set aside, extend a shard block by block until the next would not fit.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from hydra_tune.config import format_bytes
from hydra_tune.errors import BlockTooLargeError, BudgetError
from hydra_tune.shard import BlockProfile, Cut, Shard, TrialPlan
from hydra_tune.tree import flatten, tensors_in

_STACKS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(
    root: nn.Module, limit_bytes: int, *, opened: Container[str] = (), kept: Container[str] = ()
) -> list[tuple[str, nn.Module]]:
    """Names and modules of the blocks of `root`, in order of registration.

    The root is always opened, and so is whatever contains a stack of layers, or is named among `opened`. An
    element of a stack is a block, unless its weights and gradients pass `limit_bytes`; then its children are.
    What is `kept` has no blocks.
    """
    blocks: dict[nn.Module, str] = {}

    def walk(name: str, module: nn.Module, *, in_stack: bool) -> Iterator[tuple[str, nn.Module]]:
        size = sum(t.numel() * t.element_size() for t in [*module.parameters(), *module.buffers()])
        if size == 0 or name in kept:
            return
        stack = isinstance(module, _STACKS)
        opens = stack or name in opened or 2 * size > limit_bytes or (not in_stack and _contains_stack(module))
        children = children_of(module) if opens else []
        if not children:
            yield name, module
        for child_name, child in children:
            yield from walk(f"{name}.{child_name}", child, in_stack=in_stack or stack)

    for name, child in root.named_children():
        for found_name, module in walk(name, child, in_stack=isinstance(root, _STACKS)):
            blocks.setdefault(module, found_name)
    return [(name, module) for module, name in blocks.items()]


def children_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that this one calls; what computes its parametrized weights is part of itself."""
    return [] if is_parametrized(module) else list(module.named_children())


def _contains_stack(module: nn.Module) -> bool:
    """A stack of layers, not of parametrizations."""
    return any(isinstance(m, _STACKS) for n, m in module.named_modules() if "parametrizations" not in n.split("."))


def make_plan(
    profiles: Sequence[BlockProfile],
    *,
    budget_bytes: int,
    loose_bytes: int,
    resident_bytes: int,
    step_bytes: int,
    may_be_resident: bool = True,
    cut: Cut = Cut(),  # noqa: B008
) -> TrialPlan:
    """The plan for blocks in the order in which they run.

    `loose_bytes`     parameters outside every block, with gradients and optimizer state
    `resident_bytes`  all parameters, with gradients and optimizer state
    `step_bytes`      boundary tensors, operators between blocks and the loss

    Raises:
        BudgetError: some block does not fit alone; names it, its need and the budget.
    """
    every = tuple(range(len(profiles)))
    forward = max((p.forward_work_bytes for p in profiles), default=0)
    backward = max((p.backward_work_bytes for p in profiles), default=0)
    saved = sum(p.saved_bytes for p in profiles)
    blocks = tuple(profiles)
    resident = TrialPlan(True, (Shard(every, 0, forward, backward),), blocks, resident_bytes, step_bytes + saved, cut)
    if may_be_resident and resident.need_bytes <= budget_bytes:
        return resident
    if not profiles:
        raise BudgetError(
            f"the model has no block that could be spilled and needs {format_bytes(resident.need_bytes)}, but the "
            f"budget is {format_bytes(budget_bytes)}. Raise ShardPool(memory=...), lower the batch size, or split "
            "the model into child modules."
        )
    for p in profiles:
        need = loose_bytes + step_bytes + p.weight_bytes + max(p.forward_work_bytes, p.backward_work_bytes)
        if need > budget_bytes:
            raise BlockTooLargeError(
                p.name,
                f"block {p.name} needs {format_bytes(need)}: {format_bytes(p.weight_bytes)} of weights, "
                f"{format_bytes(max(p.forward_work_bytes, p.backward_work_bytes))} to compute, "
                f"{format_bytes(loose_bytes + step_bytes)} held by its trial and step; but the budget is "
                f"{format_bytes(budget_bytes)}. Raise ShardPool(memory=...), lower the batch size, or split "
                "the module into smaller children.",
            )
    reserve = (budget_bytes - loose_bytes - step_bytes - max(forward, backward)) // 2
    shards = tuple(pack_shards(profiles, reserve))
    return TrialPlan(False, shards, blocks, loose_bytes, step_bytes, cut)


def pack_shards(profiles: Sequence[BlockProfile], limit_bytes: int) -> Iterator[Shard]:
    """Consecutive blocks, as many a shard as `limit_bytes` holds, at least one."""
    start = 0
    while start < len(profiles):
        end, size = start + 1, profiles[start].weight_bytes
        while end < len(profiles) and size + profiles[end].weight_bytes <= limit_bytes:
            size += profiles[end].weight_bytes
            end += 1
        part = profiles[start:end]
        yield Shard(
            tuple(range(start, end)),
            size,
            max(p.forward_work_bytes for p in part),
            max(p.backward_work_bytes for p in part),
        )
        start = end


# ---- which trials share a plan -----------------------------------------------------------------------


def plan_key(root: nn.Module, optimizer: torch.optim.Optimizer | None, inputs: object) -> Hashable:
    """Equal for trials of one architecture, batch shape and dtype, whatever their learning rates.

    Of a module's plain attributes numbers count as zero or not (dropout keeps a mask or it doesn't).
    """
    modules = tuple((name, *_module_key(module)) for name, module in root.named_modules())
    order = {id(p): i for i, p in enumerate(root.parameters())}  # equal numbers are tied
    parameters = tuple(
        (name, order[id(p)], tuple(p.shape), p.dtype, p.requires_grad)
        for name, p in root.named_parameters(remove_duplicate=False)
    )
    state = None if optimizer is None else (type(optimizer), _plain(optimizer.defaults))
    return modules, parameters, state, input_signature(inputs)


def _module_key(module: nn.Module) -> tuple[type, Hashable]:
    own = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
    config = own.pop("config", None)
    if hasattr(config, "to_dict"):
        own.update(config.to_dict())
    return type(module), _plain(own)


def _plain(values: dict[str, Any]) -> tuple[tuple[str, Hashable], ...]:
    return tuple((k, _coarse(v)) for k, v in sorted(values.items()))


def _coarse(value: Any) -> Hashable:
    if not isinstance(value, (int, float, str, tuple)):
        return getattr(value, "__qualname__", type(value).__qualname__)  # an activation function, say
    if isinstance(value, tuple):
        return tuple(_coarse(v) for v in value)
    return value != 0 if isinstance(value, float) else value


def input_signature(inputs: object) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    return tuple((tuple(t.shape), t.dtype) for t in tensors_in(inputs))


def gradient_flags(root: nn.Module, inputs: object) -> tuple[bool, ...]:
    """What requires a gradient: each parameter, each tensor among the inputs."""
    return tuple(t.requires_grad for t in (*root.parameters(), *tensors_in(inputs)))


def switches(inputs: object) -> tuple[object, ...]:
    """What else among the inputs decides what a forward computes: flags, names and absent tensors."""
    return tuple(x for x in flatten(inputs)[0] if x is None or isinstance(x, (bool, str)))


def covers(
    measured: Sequence[tuple[tuple[int, ...], torch.dtype]], now: Sequence[tuple[tuple[int, ...], torch.dtype]]
) -> bool:
    """Whether a pilot on inputs of signature `measured` bounds the bytes of a step on those of `now`."""
    return len(measured) == len(now) and all(
        m_dtype == n_dtype and len(m) == len(n) and all(a >= b for a, b in zip(m, n, strict=True))
        for (m, m_dtype), (n, n_dtype) in zip(measured, now, strict=True)
    )
