"""The weights of one call of a block: their edges in the outer graph, and what calls hand on of their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from hydra_tune.block import Block, grad_dtype_of
from hydra_tune.casts import context_number
from hydra_tune.forward_pass import ForwardPass, castable_by
from hydra_tune.gradient_sums import Cast, GradientSums, WeightSum, plus
from hydra_tune.graph import Uses, autocasts_copy

_numbers = itertools.count()


class CallWeights:
    """Known by their numbers in the block. Their edges come first, then those of autocast's copies.

    num_edges  of each, and of each of the copies
    casts      in the outer graph, of those that have edges of their own
    castable   those that may be cast and have no such edges, whose uses the call adds itself
    shared     those whose gradients are added to what later calls give
    """

    def __init__(self, block: Block, forward_pass: ForwardPass, *, within_backward: bool) -> None:
        """Within a backward, of a reentrant checkpoint around the block, whose forward no pilot has seen with
        gradients, whoever uses a weight beside the block shares autocast's own copy."""
        edges = block.edges
        self._block, self._forward_pass = block, forward_pass
        self._number = next(_numbers)
        self.casts = forward_pass.casts_of(block)
        self.castable = castable_by(block)
        if within_backward:
            self._take_own_copies()
        of_casts = [edges.weights[i].by_cast or edges.weights[i].num_casts for i in self.casts]
        self.num_edges = [*(edges.counts or [1] * len(block.parameters)), *of_casts]
        self.shared: dict[int, Any] = {}  # with their nodes
        self.cast_elsewhere: set[int] = set()  # those of `shared` whose copy another call has made
        self._counted: dict[int, tuple[int, int]] = {}  # uses of mixed weights in the forward, direct and by a cast

    def _take_own_copies(self) -> None:
        for i, dtype in list(self.castable.items()):
            if self._block.edges.weights[i].num_casts:
                copy = autocasts_copy(self._block.parameters[i])
                if copy is not None and copy.dtype == dtype:
                    self.casts[i] = copy
                    del self.castable[i]

    # ---- forward ----

    def count_uses(self, made: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], first: int) -> None:
        """Of weights of which that is to be seen in each call; they are the `leaves` from the `first` on."""
        mixed = [i for i in self._watched() if self._block.edges.weights[i].is_mixed]
        if mixed:
            uses = Uses(made, leaves, cast_once={first + i: dtype for i, dtype in self.castable.items()})
            counts = [(uses.count(first + i, cast=False), uses.count(first + i, cast=True)) for i in mixed]
            self._counted = dict(zip(mixed, counts, strict=True))

    def cut_unused(self, unused: Container[int]) -> None:
        """They have no edges."""
        self.castable = {i: dtype for i, dtype in self.castable.items() if i not in unused}
        numbers = (*range(len(self._block.parameters)), *self.casts)
        self.num_edges = [0 if i in unused else n for i, n in zip(numbers, self.num_edges, strict=True)]

    def sources(self, late: Mapping[int, torch.Tensor], sums: GradientSums) -> list[torch.Tensor]:
        """What stands for each in the outer graph; a gate for those of `late`, by their ids."""
        weights = [late.get(id(p), p) for p in self._block.parameters]
        for i in self._watched():
            p = self._block.parameters[i]
            if weights[i].requires_grad and grad_dtype_of(p) == p.dtype:  # the engine casts to an edge's dtype
                cast = self._cast(i, p)
                if cast is not None and cast.made_by != self._number:
                    self.cast_elsewhere.add(i)
                weights[i] = sums.edge(
                    weights[i], p, cast, number=self._number, several=self._has_several(i), graph=self._forward_pass
                )
                self.shared[i] = weights[i].grad_fn
        return [*weights, *self.casts.values()]

    def _watched(self) -> list[int]:
        return [i for i in self._block.edges.watched if self.num_edges[i] == 1]

    def _cast(self, i: int, weight: torch.Tensor) -> Cast | None:
        if i not in self.castable or (i in self._counted and not self._counted[i][1]):
            return None
        made_by = self._forward_pass.autocast.made_by(weight, self.castable[i], self._number)
        return Cast(context_number(), self.castable[i], made_by)

    def _has_several(self, i: int) -> bool:
        """Whether this call's uses of a weight are several terms of a sum, as far as anybody knows."""
        if i in self._counted:
            direct, by_cast = self._counted[i]
            return direct + (by_cast > 0) > 1
        return self._block.edges.weights[i].has_several and i not in self.castable

    # ---- backward ----

    def sums_before(self, sums: GradientSums) -> dict[int, WeightSum]:
        """What later calls have given, where others beside this one give something in this backward."""
        weights = self._block.parameters
        if not sums.is_shared(weights[i] for i in self.shared):
            return {}
        return {i: sums.before(node, weights[i]) for i, node in self.shared.items()}

    def hand_on(
        self,
        before: Mapping[int, WeightSum],
        rows: Sequence[list[torch.Tensor | None]],
        of_casts: Sequence[torch.Tensor | None],
        sums: GradientSums,
    ) -> None:
        """Turns `rows`, what this call gives to each weight, into what it hands on of that and of the sums `before`;
        `of_casts`, one for each of these, is what uses of casts give, as it was spilled."""
        for (i, total), cast in zip(before.items(), of_casts, strict=True):
            lower = None if cast is None else cast.to(self.castable[i])
            total.direct, total.cast = plus(total.direct, rows[i][0]), plus(total.cast, lower)
            if i not in self.cast_elsewhere:
                total.join()
            rows[i][0] = sums.hand_on(self.shared[i], self._block.parameters[i], total)


def note_casts(block: Block, forward_pass: ForwardPass) -> None:
    """Those that a call without gradients is likely to make, with their graph, for calls that have some."""
    number = next(_numbers)
    forward_pass.casts_of(block)
    for i, dtype in castable_by(block).items():
        if block.edges.weights[i].num_casts:
            forward_pass.autocast.made_by(block.parameters[i], dtype, number)
