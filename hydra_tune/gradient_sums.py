"""Gradients of weights that several forwards use before one backward, added use by use as plain PyTorch adds them.

plain PyTorch   w <-- u4 + u3 + u2 + u1           the uses of the later forward, then those of the earlier
here            w <-- node 1 <-- (total) node 2   a node hands on nothing while others of the weight are to come
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch


class GradientSums:
    """Of one trial. A weight is a host master; a node is that of an edge, for one call of a block. Nodes are PyTorch's
    own, and older than the block's: they keep no graph."""

    def __init__(self) -> None:
        self._nodes: list[tuple[Any, int]] = []  # each with the id of its weight
        self._to_come: dict[int, dict[int, set[Any]]] = {}  # in a backward, for a weight
        self._totals: dict[tuple[int, int], torch.Tensor] = {}  # in a backward, of a weight

    def edge(self, source: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """What stands for the weight, or its gate, as the source of one call."""
        with torch.enable_grad():
            edge = source.expand_as(source)
        self._nodes.append((edge.grad_fn, id(weight)))
        return edge

    def forget(self) -> None:
        """All graphs are gone."""
        self._nodes.clear()
        self._to_come.clear()
        self._totals.clear()

    def is_shared(self, weights: Iterable[torch.Tensor]) -> bool:
        """Whether one of these, a block's that runs its backward, has other nodes in this backward."""
        coming = self._coming()
        return any(len(coming[id(weight)]) > 1 or self.total(weight) is not None for weight in weights)

    def total(self, weight: torch.Tensor) -> torch.Tensor | None:
        """What came before in this backward."""
        return self._totals.get((torch._C._current_graph_task_id(), id(weight)))

    def hand_on(self, node: Any, weight: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor | None:
        """The total with what this node adds, if it is the last; None where it adds nothing keeps what there is."""
        others, key = self._coming()[id(weight)], (torch._C._current_graph_task_id(), id(weight))
        others.discard(node)
        if total is not None:
            self._totals[key] = total
        return None if others else self._totals.pop(key, None)

    def _coming(self) -> dict[int, set[Any]]:
        backward = torch._C._current_graph_task_id()
        if backward not in self._to_come:
            coming = self._to_come[backward] = defaultdict(set)
            for node, weight in self._nodes:
                if torch._C._will_engine_execute_node(node):
                    coming[weight].add(node)
        return self._to_come[backward]
