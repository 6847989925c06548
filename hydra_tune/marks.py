"""Hooks and attributes that a block's forward puts on its weights, inputs and modules: its repetition would put them
there again, and copies of weights take theirs with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hydra_tune.block import Block, has_attributes_of
from hydra_tune.errors import UncuttableError

HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_of(modules: Iterable[nn.Module]) -> list[list[int]]:
    """The keys of all hooks on these modules."""
    return [list(vars(module).get(kind, ())) for module in modules for kind in HOOKS_OF_MODULES]


def refuse_marks(
    block: Block,
    leaves: Sequence[torch.Tensor],
    stand_for: Sequence[torch.Tensor],
    hooks: list[list[int]],
    hooked: Sequence[torch.Tensor],
) -> None:
    """After a pilot's forward on `leaves`, which `stand_for` its inputs and weights, and before which `hooks` were on
    the block's modules.

    Raises:
        UncuttableError: it has put a hook on a module, or a hook or an attribute on a weight or an input, or has told
            one of these whether to require a gradient.
    """
    marked = any(x is not p and not has_attributes_of(x, p) for x, p in zip(leaves, stand_for, strict=True)) or any(
        x is leaf for x in hooked for leaf in leaves
    )
    if marked or hooks_of(block.modules) != hooks:
        raise UncuttableError(
            f"a block's forward may be repeated, on copies of its weights and inputs, but that of {block.name} puts a "
            "hook or an attribute on these, or a hook on its modules, or sets what requires a gradient. "
            "Do so outside of forward, or keep it on the module."
        )


def next_hook() -> int:
    """The number of the next hook that is put on a tensor or module."""
    return RemovableHandle.next_id


def refuse_late_marks(block: Block, leaves: Sequence[nn.Parameter], first: int, *, repeats: bool) -> None:
    """After a later forward on these `leaves`, before which the next hook's number was `first`; and which `repeats`.

    Raises:
        UncuttableError: it has put a hook or an attribute on a weight, or a hook on a module.
    """
    parameters = block.own_parameters
    own = leaves[: len(parameters)]  # borrowed ones are no copies
    marked = (any(map(vars, own)) or any(map(vars, parameters))) and not all(map(has_attributes_of, own, parameters))
    if not marked and RemovableHandle.next_id != first:
        kinds = [getattr(leaf, kind) for leaf in own for kind in _HOOKS_OF_TENSORS]
        if repeats:
            kinds += [vars(module).get(kind) for module in block.modules for kind in HOOKS_OF_MODULES]
        marked = any(key >= first for key in chain.from_iterable(kind for kind in kinds if kind))
    if marked:
        raise UncuttableError(
            f"a block's forward may be repeated, on copies of its weights, but that of {block.name} puts a hook or an "
            "attribute on one, or a hook on a module, where the first batch did not, or it would stay on the device. "
            "Do so outside of forward, or keep it on the module."
        )
