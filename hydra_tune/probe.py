"""Finds in a pilot's graph what cannot be cut as it stands, and keeps a model's own state out of the pilot's way."""

from __future__ import annotations

import copy
import gc
import random
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hydra_tune.block import Block
from hydra_tune.errors import UncuttableError
from hydra_tune.graph import leaf_of, nodes_of
from hydra_tune.host_buffer import storage_bytes
from hydra_tune.node import BlockCall
from hydra_tune.shard import Edges

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSORS_AND_CHILDREN = ("_parameters", "_buffers", "_modules", "forward")
_LIBRARIES = ("torch.", "transformers.")  # whose hooks compute weights, or collect outputs


# ---- hooks -------------------------------------------------------------------------------------------


def user_hooks(module: nn.Module) -> bool:
    """Whether the user has put a hook on this module."""
    own = vars(module)
    return any(_is_users(hook) for kind in _HOOKS if own.get(kind) for hook in own[kind].values())


def _is_users(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)  # functools.partial
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return not origin.startswith(_LIBRARIES)


def hooked_inside(blocks: Iterable[Block]) -> Iterator[tuple[Block, str]]:
    """Blocks with a user's hook on a module within, and that module's name.

    Repeating the forward would fire it again. On the block itself it fires once, as in plain PyTorch.
    """
    for block in blocks:
        for name, module in block.module.named_modules(prefix=block.name):
            if module is not block.module and user_hooks(module):
                yield block, name
                break


# ---- what a pilot must leave as it was ---------------------------------------------------------------


@contextmanager
def attributes_kept(model: nn.Module, *, fires_hooks: bool) -> Iterator[None]:
    """Put every module's attributes back, contents of lists, sets and dicts included; users' hooks may not fire."""
    before = [(module, _attributes(module)) for module in model.modules()]
    try:
        for module in () if fires_hooks else model.modules():
            for kind in _HOOKS:
                hooks = module.__dict__.get(kind, {})
                for key in [k for k, hook in hooks.items() if _is_users(hook)]:
                    del hooks[key]
        yield
    finally:
        for module, attributes in before:
            for name in [n for n in vars(module) if n not in attributes and n not in _TENSORS_AND_CHILDREN]:
                del module.__dict__[name]
            for name, (value, contents) in attributes.items():
                module.__dict__[name] = _refilled(value, contents)


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    return {
        name: (value, copy.copy(value) if isinstance(value, (list, dict, set, deque)) else None)
        for name, value in vars(module).items()
        if name not in _TENSORS_AND_CHILDREN
    }


def _refilled(value: Any, contents: Any) -> Any:
    if isinstance(value, list):
        value[:] = contents
    elif contents is not None:
        value.clear()
        (value.extend if isinstance(value, deque) else value.update)(contents)
    return value


@contextmanager
def inputs_kept(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put back the values of the user's tensors, should a forward change them in place."""
    versions, values = [t._version for t in tensors], [t.detach().clone() for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, value in zip(tensors, versions, values, strict=True):
                if tensor._version != version:
                    tensor.copy_(value)


# ---- one block's own graph ---------------------------------------------------------------------------


def borrowed_by(
    block: Block, outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], first_node: int
) -> list[nn.Parameter]:
    """Weights that a block's forward reaches, but not through its own modules and arguments.

    `first_node` is autograd's sequence number when the block's forward began.

    Raises:
        UncuttableError: it reaches an activation so.
    """
    known = {id(leaf) for leaf in leaves}
    found: dict[int, nn.Parameter] = {}
    for node in nodes_of(outputs):
        leaf = leaf_of(node)
        if leaf is None and node._sequence_nr() < first_node:
            raise UncuttableError(
                f"a block reaches activations through its arguments, but {block.name} uses one that another module "
                "has made. Pass it as an argument."
            )
        if leaf is not None and id(leaf) not in known:
            if not isinstance(leaf, nn.Parameter):
                raise UncuttableError(
                    f"a block reaches tensors through its own modules and arguments, but {block.name} uses one of "
                    f"shape {tuple(leaf.shape)} beside them that requires a gradient. Pass it as an argument."
                )
            found[id(leaf)] = leaf
    return list(found.values())


def draws_of_others() -> tuple[object, ...]:
    """The state of Python's and NumPy's random numbers; equal to another one if nothing was drawn between."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return (random.getstate(),)
    name, keys, *rest = numpy_random.get_state()
    return random.getstate(), name, keys.tobytes(), *rest


def refuse_draws_of_others(block: Block, before: tuple[object, ...]) -> None:
    """
    Raises:
        UncuttableError: the block has drawn from Python's or NumPy's random numbers, and would draw others again.
    """
    if before != draws_of_others():
        raise UncuttableError(
            f"a block's forward may be repeated, but {block.name} draws from Python's or NumPy's random numbers, and "
            "would draw others then. Draw from torch's."
        )


def refuse_side_channel(block: Block, leaves: Sequence[weakref.ref[torch.Tensor]]) -> None:
    """After a forward and backward of the block has been forgotten: does anyone still hold its graph?

    Raises:
        UncuttableError: a hook, an attribute, a list or a cache does.
    """
    if any(leaf() is not None for leaf in leaves):
        gc.collect(1)  # a cycle of just now; all of the heap would take long
    if any(leaf() is not None for leaf in leaves):
        raise UncuttableError(
            f"a block hands activations on through its outputs, but one of {block.name} is kept beside them (by a "
            "hook, an attribute, a list or a cache), where its gradient would be lost. Return it, or detach it."
        )


def attributes_of(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Every attribute within the module, by its name in it, with the contents of lists, sets and dicts."""
    return {
        f"{prefix}.{name}".lstrip("."): entry
        for prefix, m in module.named_modules()
        for name, entry in _attributes(m).items()
        if name not in _HOOKS
    }


def refuse_changing_attributes(block: Block, before: dict[str, tuple[Any, Any]]) -> None:
    """`before` are the block's attributes between two equal calls: what a cache fills at the first stays equal.

    Raises:
        UncuttableError: a counter, a running value, a list that grows.
    """
    for name, entry in attributes_of(block.module).items():
        if name not in before or not _same(before[name], entry):
            raise UncuttableError(
                f"a block's forward may be repeated, but that of {block.name} changes its attribute {name} each time. "
                "Make it a buffer, or change it outside of forward."
            )


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    return bool(a == b) if isinstance(a, (int, float, complex, str, set, frozenset)) else True


# ---- the whole model's graph -------------------------------------------------------------------------


class OuterGraph:
    """The graph behind a pilot's outputs, in which each call of a block is one node."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self._outputs = [(t.grad_fn, t.output_nr) for t in outputs if t.grad_fn is not None]
        self._nodes = list(nodes_of(outputs))
        self.calls = [(node, node.call) for node in self._nodes if isinstance(getattr(node, "call", None), BlockCall)]

    def used_outside(self, blocks: Sequence[Block]) -> list[nn.Parameter]:
        """Weights of blocks that something uses without calling the block."""
        owned = {id(p): p for block in blocks for p in block.slot_parameters}
        call_nodes = {node for node, _ in self.calls}
        children = [leaf_of(c) for node in self._nodes if node not in call_nodes for c, _ in node.next_functions]
        return list(dict.fromkeys(owned[id(leaf)] for leaf in children if id(leaf) in owned))

    def changed_later(self) -> Iterator[Block]:
        """Blocks whose inputs were changed in place after their forward; a backward would repeat it on others."""
        for node, call in self.calls:
            try:
                _ = node.saved_tensors
            except RuntimeError:
                yield call.block

    def edges(self) -> Iterator[tuple[Block, Edges, int]]:
        """For each call: sources that other operators use too have an edge for each use in the block; and the
        bytes of the gradients that are apart then."""
        users = Counter(self._outputs)  # the loss uses these
        users.update(child for node in self._nodes for child in node.next_functions if child[0] is not None)
        casts: Counter[int] = Counter()
        for _, call in self.calls:
            casts.update({id(p): n for p, (_, n) in zip(call.block.parameters, call.parameter_uses, strict=True)})
        for node, call in self.calls:
            children, num_tensors = node.next_functions, len(call.tensor_uses)
            tensors = [
                direct if users[child] > 1 else 1
                for child, (direct, _) in zip(children, call.tensor_uses, strict=False)
            ]
            recast = [
                n if casts[id(p)] > 1 else 0
                for p, (_, n) in zip(call.block.parameters, call.parameter_uses, strict=True)
            ]
            parameters = [
                direct if users[child] > 1 or again else 1
                for child, (direct, _), again in zip(children[num_tensors:], call.parameter_uses, recast, strict=True)
            ]
            sources = zip(
                (*call.source_bytes, *map(storage_bytes, call.block.parameters)), (*tensors, *parameters), strict=True
            )
            apart = sum(size * n for size, n in sources if n > 1)
            apart += sum(storage_bytes(p) * n // 2 for p, n in zip(call.block.parameters, recast, strict=True))
            yield call.block, Edges(tuple(tensors), tuple(parameters), tuple(recast)), apart
