"""Reads autograd's graphs: their nodes, who uses a tensor, and what each single use gives to its gradient.

Floating-point sums depend on their order. Plain PyTorch adds a tensor's gradient use by use, the latest use
first; where a block and something outside of it use the same tensor, the block must hand out its uses one by
one, or the last bit may differ: (a + b) + c is not a + (b + c).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

REENTRANT = "CheckpointFunctionBackward"
CAST = "ToCopyBackward0"  # what autocast makes of a float32 weight


def nodes_of(outputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Every node of the graph behind `outputs`."""
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)


def leaf_of(node: Any) -> torch.Tensor | None:
    """The leaf for which this node accumulates; None for other nodes."""
    leaf: torch.Tensor | None = getattr(node, "variable", None)
    return leaf


def forget_interrupted_backward() -> None:
    """After an exception in a backward PyTorch may keep the rest of its graph until the thread's next backward."""
    with torch.enable_grad():
        torch.ones((), requires_grad=True).backward()


class Uses:
    """The uses of some leaves in the graph behind `outputs`, apart where autocast first casts the leaf.

    After a backward `direct[i]` and `cast[i]` are the gradients of leaf `i` by each use of itself and of its
    cast, in the order in which they were made, where `record` was called before. `cast_once` are the leaves of
    which autocast keeps one copy: weights.
    """

    def __init__(
        self, outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], *, cast_once: Collection[int]
    ) -> None:
        nodes = list(nodes_of(outputs))  # kept: a node's Python object must stay the same one
        self.reentrant = any(node.name() == REENTRANT for node in nodes)
        index = {id(leaf): i for i, leaf in enumerate(leaves)}
        cast_of: dict[Any, int] = {}
        self._edges: list[tuple[Any, int, int, bool]] = []  # node, position of the edge, leaf, by a cast
        for node in nodes:
            for position, (child, _) in enumerate(node.next_functions):
                i = index.get(id(leaf_of(child)))
                if i is None:
                    continue
                if i in cast_once and node.name() == CAST:
                    cast_of[node] = i
                else:
                    self._edges.append((node, position, i, False))
        if cast_of:
            for node in nodes:
                for position, (child, _) in enumerate(node.next_functions):
                    if child in cast_of:
                        self._edges.append((node, position, cast_of[child], True))
        self.direct: list[list[torch.Tensor]] = [[] for _ in leaves]
        self.cast: list[list[torch.Tensor]] = [[] for _ in leaves]

    def count(self, leaf: int, *, cast: bool) -> int:
        return sum(i == leaf and by_cast == cast for _, _, i, by_cast in self._edges)

    def record(self, wanted: Iterable[int]) -> None:
        """Note the gradients of these leaves in the backward that follows."""
        chosen = set(wanted)
        sinks: dict[Any, list[tuple[int, list[torch.Tensor]]]] = {}
        for node, position, i, by_cast in self._edges:
            if i in chosen:
                sinks.setdefault(node, []).append((position, (self.cast if by_cast else self.direct)[i]))
        for node, places in sinks.items():
            node.register_hook(_noting(places))


def _noting(places: Sequence[tuple[int, list[torch.Tensor]]]) -> Callable[[Any, Any], None]:
    def note(grad_inputs: Sequence[torch.Tensor | None], _: Any) -> None:
        for position, sink in places:
            gradient = grad_inputs[position]
            if gradient is not None:
                sink.append(gradient)

    return note


class Cast(torch.autograd.Function):
    """Stands for autocast's copy of a weight in a trial's outer graph: empty, but with a gradient.

    Plain PyTorch casts a weight once a context and adds the gradients of all its uses in the lower precision
    before they are cast back. Blocks cast their device copies, each visit anew, and hand their gradients here.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return torch.zeros((), dtype=dtype, device=weight.device).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.dtype), None
