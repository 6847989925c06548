"""How many edges of the outer graph a block takes for what it is given and for its weights; more than one keep a sum's
order: see `graph`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

# how a block is given its arguments, by name and nesting; of each the number of its tensor, -1 for none; and whether
# that requires a gradient
Places: TypeAlias = tuple[Hashable, tuple[int, ...], tuple[bool, ...]]


class TensorEdges(NamedTuple):
    """Of all tensors that are given in one way; a mask that is left out gives all behind it another number. Gradients
    are `apart` always, or only in steps in which others use the tensor, too."""

    places: Places
    counts: tuple[int, ...]
    apart: tuple[bool, ...]

    @property
    def num_edges(self) -> list[int]:
        return [n or 1 for n in self.counts]

    @property
    def are_unsure(self) -> bool:
        """One that requires a gradient was not used, as where a block returns it as it is: others may use it."""
        *_, require_gradients = self.places
        return any(n == 0 and requires for n, requires in zip(self.counts, require_gradients, strict=True))

    def __or__(self, other: TensorEdges) -> TensorEdges:
        """Enough for both; `places` are the same."""
        return TensorEdges(
            self.places,
            tuple(map(max, zip_longest(self.counts, other.counts, fillvalue=0))),
            tuple(map(any, zip_longest(self.apart, other.apart, fillvalue=False))),
        )


class WeightEdges(NamedTuple):
    """Of one weight, by what pilots saw of it.

    direct, by_cast    edges of its own, and of autocast's copy
    casts_to           by which dtype of the autocast around the block it is cast to which, where it is another one
    num_casts          uses by autocast's copy
    is_cast_outside    of blocks, by what has an operator's copy from autocast, too
    may_be_cast        it is used by no others than blocks, and nobody casts it by hand: calls add the gradients of its
                       uses, by a copy or not
    is_watched         and those of other calls, too
    is_mixed           what a call makes of it is to be seen in each
    has_several        uses in a call, where that is known beforehand, not counting those of a copy
    """

    direct: int = 1
    by_cast: int = 0
    casts_to: frozenset[tuple[Any, Any]] = frozenset()
    num_casts: int = 0
    is_cast_outside: bool = False
    may_be_cast: bool = False
    is_watched: bool = False
    is_mixed: bool = False
    has_several: bool = False

    def __or__(self, other: WeightEdges) -> WeightEdges:
        """Enough for both."""
        return WeightEdges(
            max(self.direct, other.direct),
            max(self.by_cast, other.by_cast),
            self.casts_to | other.casts_to,
            max(self.num_casts, other.num_casts),
            *map(any, zip(self[4:], other[4:], strict=True)),
        )


@dataclass(frozen=True)
class Edges:
    """Where nothing is said of a tensor or a weight it has one, and autocast's copy none."""

    tensors: tuple[TensorEdges, ...] = ()
    weights: tuple[WeightEdges, ...] = ()

    def of_tensors(self, places: Places) -> TensorEdges | None:
        """Where a call can rely on them."""
        for given in self._sure:
            if given.places == places:
                return given
        return None

    @cached_property
    def _sure(self) -> tuple[TensorEdges, ...]:
        return tuple([given for given in self.tensors if not given.are_unsure])

    def of_weight(self, number: int) -> WeightEdges:
        return self.weights[number] if number < len(self.weights) else WeightEdges()

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Of weights."""
        return tuple([weight.direct for weight in self.weights])

    @cached_property
    def watched(self) -> tuple[int, ...]:
        """Numbers of weights."""
        return tuple([i for i, weight in enumerate(self.weights) if weight.is_watched])

    @cached_property
    def recast(self) -> tuple[int, ...]:
        """Numbers of weights whose copies by autocast have edges."""
        return tuple([i for i, weight in enumerate(self.weights) if weight.by_cast])

    @cached_property
    def castable(self) -> tuple[int, ...]:
        """Numbers of weights that may be cast and have no edges for it."""
        return tuple([i for i, weight in enumerate(self.weights) if weight.may_be_cast and not weight.by_cast])

    def __or__(self, other: Edges) -> Edges:
        """Enough for both of two calls."""
        tensors = {given.places: given for given in self.tensors}
        for given in other.tensors:
            tensors[given.places] = tensors.get(given.places, given) | given
        weights = zip_longest(self.weights, other.weights, fillvalue=WeightEdges())
        return Edges(tuple(tensors.values()), tuple([a | b for a, b in weights]))
