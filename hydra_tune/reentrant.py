"""Reentrant checkpoints within blocks: in a backward each repeats its forward, and runs a backward of its own.

a block's backward      y --op--> [ checkpoint ] --op--> x
within it                          z --op--> w            plain PyTorch adds this to `w.grad` at once, and fires
                                                          w's hooks, whatever other gradients w will have
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hydra_tune.graph import nodes_of
from hydra_tune.process_state import is_in_autocast

_CHECKPOINT = "CheckpointFunctionBackward"


def are_behind(outputs: Iterable[torch.Tensor]) -> bool:
    """Whether the graph behind these has such checkpoints. It refuses `torch.autograd.grad`."""
    return any(_nodes(outputs))


def is_refused(error: RuntimeError) -> bool:
    """Whether it is theirs, for they were met by `torch.autograd.grad`, or by a backward with `inputs=`."""
    return "torch.utils.checkpoint is incompatible with .grad()" in str(error)


def _nodes(outputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    return (node for node in nodes_of(outputs) if node.name() == _CHECKPOINT)


def gradients_of(
    outputs: Sequence[torch.Tensor],
    grad_outputs: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    needed: Sequence[bool],
    first_weight: int,
) -> tuple[list[torch.Tensor | None], list[tuple[int, torch.Tensor]]]:
    """As `graph.gradients_of`; and what weights (leaves from `first_weight` on) get from backwards within this one,
    each with its leaf's number, in the order in which they were made."""
    sums: dict[int, torch.Tensor] = {}
    within: list[tuple[int, torch.Tensor]] = []
    own: list[int] = []  # the number of this backward, once a node has told it; nothing runs within it before
    before = [leaf.grad for leaf in leaves]

    def begin(_: Any) -> None:
        own.append(torch._C._current_graph_task_id())

    def note(i: int, _: Any, grads: Sequence[torch.Tensor]) -> None:
        if i >= first_weight and own and own[0] != torch._C._current_graph_task_id():
            within.append((i, grads[0]))
        else:
            sums[i] = sums[i] + grads[0] if i in sums else grads[0]

    def forget(leaf: torch.Tensor) -> None:
        leaf.grad = None

    handles: list[RemovableHandle] = []
    nodes: list[Any] = []
    with torch._C.DisableTorchFunction():  # a pilot ignores the hooks that users put on activations
        for i, leaf in enumerate(leaves):
            if leaf.requires_grad:
                node = torch.autograd.graph.get_gradient_edge(leaf).node
                nodes.append(node)  # kept: what a checkpoint repeats finds it
                handles.append(node.register_hook(partial(note, i)))  # torch 2.6 may forget those on leaves
                handles.append(leaf.register_post_accumulate_grad_hook(forget))
        handles += [x.grad_fn.register_prehook(begin) for x in outputs if x.grad_fn is not None]
    try:
        torch.autograd.backward(outputs, grad_outputs)
    finally:
        for handle in handles:
            handle.remove()
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad
    return [sums.get(i) if n else None for i, n in enumerate(needed)], within


def add_to_grad(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    """By a backward of its own."""
    with torch.enable_grad():
        use = weight.expand_as(weight)
    torch.autograd.backward(use, gradient)


@contextmanager
def casts_remembered(outputs: Iterable[torch.Tensor]) -> Iterator[None]:
    """Checkpoints behind these, when they repeat their forwards within: a weight that such a one casts is cast once in
    it, though the block's forward was told to remember no casts. Afterwards no such cast is left."""
    _let_remember_casts(outputs)
    try:
        yield
    finally:
        if is_in_autocast():  # who leaves the outermost context does so
            torch.clear_autocast_cache()


def _let_remember_casts(outputs: Iterable[torch.Tensor]) -> None:
    for node in _nodes(outputs):
        for autocast in (node.device_autocast_kwargs, node.cpu_autocast_kwargs):
            if autocast is not None:
                autocast["cache_enabled"] = True
