"""One autocast context of a thread, as a trial's forwards in it see it: a weight is cast once, for all of them.

    with torch.autocast("cuda"):         w ---> cast ---> loss_a     the gradients of both are added in the lower
        loss = a(model) + b(model)                 `----> loss_b     precision, and cast back together

PyTorch forgets the casts where the outermost context is left. Until then it does not see that a weight has changed.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from hydra_tune.casts import context_number
from hydra_tune.errors import PrepareError
from hydra_tune.graph import Cast
from hydra_tune.host_buffer import version_of
from hydra_tune.process_state import remembers_casts


class AutocastContext:
    """The one that this thread is in, or none."""

    def __init__(self) -> None:
        self._number = context_number() if remembers_casts() else None
        self._versions: dict[int, int] = {}  # of weights, by their ids, when they were cast
        self._casts: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}  # by weight, dtype, and a context within
        self._num_forwards = 0
        self._nodes: list[weakref.ref[Any]] = []
        self._to_come: dict[int, dict[int, set[int]]] = {}  # in a backward, for a weight: nodes, by their ids
        self._sums: dict[tuple[int, int], torch.Tensor] = {}  # likewise

    @property
    def goes_on(self) -> bool:
        return self._number is not None and remembers_casts() and self._number == context_number()

    def forget_graphs(self) -> None:
        """Of forwards that are done with; but the casts stay, for autograd has their nodes run after newer ones."""
        for kept in (self._nodes, self._to_come, self._sums):
            kept.clear()

    @property
    def is_shared(self) -> bool:
        """By several forwards."""
        return self._num_forwards > 1

    def begin_forward(self, weights: Iterable[torch.Tensor], name: str) -> None:
        """One that casts these.

        Raises:
            PrepareError: another one in this context has cast them, and they have changed since.
        """
        self._num_forwards += 1
        if any(self._versions.setdefault(id(weight), version_of(weight)) != version_of(weight) for weight in weights):
            raise PrepareError(
                f"within one autocast context weights stay as they are, but those of {name} were changed, by an "
                "optimizer perhaps, between two forwards in it: PyTorch would go on with the casts of their old "
                "values, which are not kept here. Leave torch.autocast before the optimizer's step, or give it "
                "cache_enabled=False."
            )

    # ---- a weight that one forward casts for several uses ----

    def cast_of(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What stands for it in the outer graph."""
        key = id(weight), dtype, context_number()
        if key not in self._casts:
            with torch.enable_grad():
                self._casts[key] = Cast.apply(weight, dtype)  # type: ignore[no-untyped-call]
        return self._casts[key]

    # ---- a weight that each forward casts for one use ----

    def watch(self, node: Any) -> None:
        """A node of the outer graph that has a `call`, with such weights."""
        self._nodes.append(weakref.ref(node))

    def added(
        self, node: Any, weight: torch.Tensor, dtype: torch.dtype, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """What this node hands on of its weight's gradient: the last one of this backward hands on the sum of all."""
        backward = torch._C._current_graph_task_id()
        if backward not in self._to_come:
            self._to_come[backward] = self._nodes_to_come()
        others, key = self._to_come[backward][id(weight)], (backward, id(weight))
        others.discard(id(node))
        if gradient is not None and (others or key in self._sums):
            lower = gradient.to(dtype)
            self._sums[key] = self._sums[key] + lower if key in self._sums else lower
        if others:
            return None
        total = self._sums.pop(key, None)
        return gradient if total is None else total.to(weight.dtype)

    def _nodes_to_come(self) -> dict[int, set[int]]:
        found = defaultdict[int, set[int]](set)
        for node in [node for ref in self._nodes if (node := ref()) is not None and node.call is not None]:
            if torch._C._will_engine_execute_node(node):
                for i in node.call.cast_once:
                    found[id(node.call.block.parameters[i])].add(id(node))
        return found
