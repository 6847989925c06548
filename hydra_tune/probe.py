"""Finds in a pilot's graph what cannot be cut as it stands, and keeps a model's own state out of the pilot's way."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from hydra_tune.block import Block
from hydra_tune.call import BlockCall
from hydra_tune.errors import UncuttableError
from hydra_tune.graph import leaf_of, nodes_of
from hydra_tune.host_buffer import storage_bytes
from hydra_tune.shard import Edges

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
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
def user_hooks_removed(model: nn.Module) -> Iterator[None]:
    """Users' hooks on modules do not fire; the snapshot of the modules' attributes puts them back."""
    for module in model.modules():
        for kind in _HOOKS:
            hooks = module.__dict__.get(kind, {})
            for key in [k for k, hook in hooks.items() if _is_users(hook)]:
                del hooks[key]
    yield


class TensorHooksOff(TorchFunctionMode):
    """Hooks that a forward puts on its activations would see a pilot's gradients."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.register_hook:
            return RemovableHandle(OrderedDict())
        return func(*args, **(kwargs or {}))


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


def refuse_changes(block: Block, changes: Sequence[str], *, repeats: bool) -> None:
    """`changes` between two equal calls, of which the second gave the same or not: what a cache fills at the first
    stays equal.

    Raises:
        UncuttableError: a counter, a running value, a list that grows, a generator of its own.
    """
    if changes:
        raise UncuttableError(
            f"a block's forward may be repeated, but that of {block.name} changes {changes[0]} each time. "
            "Make it a buffer, or change it outside of forward."
        )
    if not repeats:
        raise UncuttableError(
            f"a block's forward may be repeated, but that of {block.name} gives something else the second time: it "
            "depends on a state that it changes."
        )


def shares_memory(made: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    """Whether what a block made is a view of what it was given, or of something else that it made."""
    storages = [x.untyped_storage()._cdata for x in (*inputs, *made) if x.layout is torch.strided]
    return len(set(storages)) < len(set(map(id, (*inputs, *made))))


# ---- the whole model's graph -------------------------------------------------------------------------


class OuterGraph:
    """The graph behind a pilot's outputs, in which each call of a block is one node."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        """Behind them may also be calls of an earlier forward, which gave the inputs of this one."""
        self._outputs = [(t.grad_fn, t.output_nr) for t in outputs if t.grad_fn is not None]
        self._nodes = list(nodes_of(outputs))
        calls = [(node, getattr(node, "call", None)) for node in self._nodes]
        self.calls = [(node, call) for node, call in calls if isinstance(call, BlockCall) and call.measured]

    def used_outside(self, blocks: Sequence[Block]) -> list[nn.Parameter]:
        """Weights of blocks that something uses without calling the block."""
        owned = {id(p): p for block in blocks for p in block.slot_parameters}
        call_nodes = {node for node in self._nodes if isinstance(getattr(node, "call", None), BlockCall)}
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
