"""Gradients of weights that several calls use before one backward, added use by use as plain PyTorch adds them.

plain PyTorch   w <-- u4 + u3 + u2 + u1             the uses of the later call, then those of the earlier
here            w <-- node 1 <-- (total) node 2     a node hands on nothing while others with several uses are to come

    with torch.autocast("cuda"):         w <-- cast <-- c4 + c3 + c2 + c1     the weight is cast once for all calls;
        loss = a(model) + b(model)                                            gradients are added in the lower precision

A cast's sum joins the others where the call that has made it is done, between the uses after the cast and those before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

MOST_BACKWARDS = 100  # one within another; those that have ended are forgotten when all graphs are gone

_EDGE = "edge of a weight into a block"


def is_edge(node: Any) -> bool:
    """Whether it stands for a weight, as the source of one call."""
    return _EDGE in node.metadata


def plus(total: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient if total is None else total if gradient is None else total + gradient


@dataclass
class WeightSum:
    """Of one weight: what its uses give in its own precision, and those of its cast in the lower one, until they are
    joined."""

    direct: torch.Tensor | None = None
    cast: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor, *, by_cast: bool, joins: bool) -> None:
        """A use's; `joins`: the cast was made after it, and all that the cast gives is there."""
        if by_cast:
            self.cast = plus(self.cast, gradient)
            return
        if joins:
            self.join()
        self.direct = plus(self.direct, gradient)

    def join(self) -> None:
        if self.cast is not None:
            self.direct, self.cast = plus(self.direct, self.cast.to(torch.float32)), None


class Cast(NamedTuple):
    """Of a weight, one for all calls in a context; the one that has made it is the first of them."""

    context: int
    dtype: torch.dtype
    made_by: int


class _Uses(NamedTuple):
    """Of a weight in one call: of which cast, and whether they are several terms. Later calls have higher numbers."""

    number: int = 0
    cast: Cast | None = None
    several: bool = False


@dataclass
class _Backward:
    """Of one weight in one backward: nodes to come, and what came before and is not handed on."""

    to_come: dict[Any, _Uses] = field(default_factory=dict)
    direct: torch.Tensor | None = None
    casts: dict[Cast, torch.Tensor] = field(default_factory=dict)
    joins_between: bool = False  # a cast that was made by a call that has no node here

    @property
    def is_held(self) -> bool:
        """There are terms to add to it one by one: of several uses, or of one use and then of a cast."""
        return any(uses.several for uses in self.to_come.values()) or (self.joins_between and bool(self.to_come))

    def join_older(self) -> None:
        """Casts that were made after all calls to come."""
        last = max((uses.number for uses in self.to_come.values()), default=-1)
        for cast in [cast for cast in self.casts if cast.made_by > last]:
            self.direct = plus(self.direct, self.casts.pop(cast).to(torch.float32))


class GradientSums:
    """Of one trial. A weight is a host master; a node is that of an edge, for one call of a block. Nodes are PyTorch's
    own, and older than the block's: they keep no graph."""

    def __init__(self) -> None:
        # by what lives as long as their graph; each with the id of its weight, and its cast
        self._nodes: WeakKeyDictionary[object, list[tuple[Any, int, _Uses]]] = WeakKeyDictionary()
        self._backwards: dict[int, dict[int, _Backward]] = {}  # the last one used is last

    def edge(
        self,
        source: torch.Tensor,
        weight: torch.Tensor,
        cast: Cast | None,
        *,
        number: int,
        several: bool,
        graph: object,
    ) -> torch.Tensor:
        """What stands for the weight, or its gate, as the source of the call with this number, in a graph that goes
        when `graph` goes. `several` terms are to be added one by one; but those of its `cast` are one.
        """
        with torch.enable_grad():
            edge = source.expand_as(source)
        node: Any = edge.grad_fn
        if node is not None:
            node.metadata[_EDGE] = True
            self._nodes.setdefault(graph, []).append((node, id(weight), _Uses(number, cast, several)))
        return edge

    def forget(self) -> None:
        """All graphs are gone."""
        if self._nodes:  # seldom, and to clear what is weak is slow
            self._nodes.clear()
        self._backwards.clear()

    def is_shared(self, weights: Iterable[torch.Tensor]) -> bool:
        """Whether one of these, a block's that runs its backward, has other nodes in this backward."""
        backward = self._backward()
        found = [backward[id(weight)] for weight in weights]
        return any(len(w.to_come) > 1 or w.direct is not None or w.casts for w in found)

    def before(self, node: Any, weight: torch.Tensor) -> WeightSum:
        """What the calls after this node's have given in this backward."""
        found = self._backward()[id(weight)]
        cast = found.to_come.get(node, _Uses()).cast
        return WeightSum(found.direct, None if cast is None else found.casts.get(cast))

    def hand_on(self, node: Any, weight: torch.Tensor, now: WeightSum) -> torch.Tensor | None:
        """Of what its call and those before have given `now`: all, if no node to come has several terms to add to
        it."""
        backward = self._backward()
        found = backward[id(weight)]
        cast = found.to_come.pop(node, _Uses()).cast
        found.direct = now.direct
        if cast is not None:
            found.casts.pop(cast, None)
            if now.cast is not None:
                found.casts[cast] = now.cast
        found.join_older()
        if found.is_held:
            return None
        total, found.direct = found.direct, None
        if not found.to_come:
            del backward[id(weight)]
        return total

    def _backward(self) -> dict[int, _Backward]:
        number = torch._C._current_graph_task_id()
        found = self._backwards.pop(number, None)
        if found is None:
            found = defaultdict[int, _Backward](_Backward)
            for node, weight, uses in chain.from_iterable(self._nodes.values()):
                if torch._C._will_engine_execute_node(node):
                    found[weight].to_come[node] = uses
            for one in found.values():
                calls = {uses.number for uses in one.to_come.values()}
                one.joins_between = any(uses.cast and uses.cast.made_by not in calls for uses in one.to_come.values())
            if len(self._backwards) >= MOST_BACKWARDS:
                del self._backwards[next(iter(self._backwards))]
        self._backwards[number] = found
        return found
