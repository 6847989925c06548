"""The backward of a block's repeated forward: what its edges in the outer graph get, use by use or as sums."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import torch

from hydra_tune import reentrant
from hydra_tune.gradient_sums import WeightSum
from hydra_tune.graph import Uses, gradients_of
from hydra_tune.mode import hide_from_backward

Rows = list[list[torch.Tensor | None]]


@dataclass
class LocalBackward:
    """Once. Leaves are known by their numbers: inputs first, then weights.

    leaves      of the repeated forward
    first       weight among them
    needed      whether the gradient of each is
    num_edges   of each leaf in the outer graph, then of each copy among `recast`
    apart       leaves whose uses have a gradient each, as far as they have edges
    recast      weights whose autocast copy has edges of its own, and its dtype
    castable    weights that may be cast and have no edge for it, and the dtype
    made_before castable weights whose copy an earlier call has made, if there is one
    sums        what later calls have given to weights that this one shares with others; those that the uses here were
                added to are taken out
    reentrant   whether there are such checkpoints
    within      what weights get from their backwards, as `reentrant.gradients_of` gives it
    """

    leaves: Sequence[torch.Tensor]
    first: int
    needed: Sequence[bool]
    num_edges: Sequence[int]
    apart: Sequence[bool]
    recast: Mapping[int, torch.dtype]
    castable: Mapping[int, torch.dtype]
    made_before: Container[int]
    sums: Mapping[int, WeightSum]
    reentrant: bool
    within: Sequence[tuple[int, torch.Tensor]] = ()

    def run(
        self,
        made: list[torch.Tensor],
        grad_outputs: Sequence[torch.Tensor | None],
        received: Callable[[torch.Tensor], torch.Tensor],
    ) -> Rows:
        """A list of gradients for each source, one an edge; behind them one for each of the `sums`, of uses of its
        copy. Uses up what was `made`; `received` brings a gradient to where the leaves are."""
        pairs = [(o, g) for o, g in zip(made, grad_outputs, strict=True) if g is not None and o.requires_grad]
        made.clear()
        if not pairs:
            return [[None] * n for n in (*self.num_edges, *(1 for _ in self.sums))]
        split = [i for i in range(len(self.leaves)) if self.needed[i] and self._is_split(i)]
        by_cast = {**self.castable, **self.recast}
        uses = Uses([o for o, _ in pairs], self.leaves, cast_once=by_cast) if split or self.castable else None
        casts = {i: uses.count(i, cast=True) for i in self.castable if uses and self.needed[i]}
        here = {i: WeightSum() for i in casts if uses and self._is_added_here(i, uses)}
        shared = {i: total for i, total in self.sums.items() if self.needed[i]}
        for i, total in shared.items():
            if i in here:
                here[i].direct, here[i].cast = (t if t is None else received(t) for t in (total.direct, total.cast))
                total.direct = total.cast = None
            elif not casts.get(i):
                if i in self.castable and i not in self.made_before:
                    total.join()
                if total.direct is not None:  # first: the engine adds the uses to it
                    pairs.append((self.leaves[i], received(total.direct)))
                    total.direct = None
        if uses:
            uses.record([i for i in split if i not in here])
            uses.add_to(here, [i for i in here if i not in self.made_before])
        outs, grads_in = zip(*pairs, strict=True)
        del pairs
        hide_from_backward()
        if self.reentrant:
            gradients, self.within = reentrant.gradients_of(outs, grads_in, self.leaves, self.needed, self.first)
        else:
            gradients = gradients_of(outs, grads_in, self.leaves, self.needed)
        rows: Rows = []
        of_casts: dict[int, torch.Tensor | None] = {}  # to be handed on
        for i, gradient in enumerate(gradients):
            parts = [gradient]
            if i in here:
                if i not in shared or i not in self.made_before:
                    here[i].join()
                parts, of_casts[i] = [here[i].direct], here[i].cast
            elif i in shared and casts.get(i):  # by that alone
                parts, of_casts[i] = [], gradient
            elif uses and i in split:
                parts = [*uses.direct[i]]
            rows.append(_spread([x for x in parts if x is not None], self.num_edges[i]))
        for i, count in zip(self.recast, self.num_edges[len(self.leaves) :], strict=True):
            rows.append(_spread(uses.cast[i] if uses else [], count))
        return [*rows, *([of_casts.get(i)] for i in self.sums)]

    def _is_split(self, i: int) -> bool:
        return (self.num_edges[i] > 1 and self.apart[i]) or i in self.recast

    def _is_added_here(self, i: int, uses: Uses) -> bool:
        """Of a castable weight: its uses are several, one of them by a cast, whose gradient is not to be lost."""
        num_casts = uses.count(i, cast=True)
        return num_casts > 0 and (num_casts + uses.count(i, cast=False) > 1 or self.num_edges[i] > 1)


def _spread(parts: Sequence[torch.Tensor], num_edges: int) -> list[torch.Tensor | None]:
    """The gradients of a source's uses on its edges; uses beyond the pilot's count are summed on the last."""
    if num_edges == 0:
        return []
    spread: list[torch.Tensor | None] = [*parts[:num_edges], *[None] * (num_edges - len(parts))]
    for extra in parts[num_edges:]:
        last = spread[-1]
        assert last is not None
        spread[-1] = last + extra
    return spread
