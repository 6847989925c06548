"""How far a trial has gone through one of its loaders, and how another process gets there again.

A loader is gone through anew from the random state in which its iteration began: the batches are the same ones, and
those that were trained are skipped. No loader has to know of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from hydra_tune.randomness import RandomState


class LoaderProgress:
    """Of one loader, in its trial's thread. A checkpoint holds random states and a number; on resuming, batches that
    were trained are drawn again and dropped, which costs their loading."""

    def __init__(self, loader: Any, random_state: RandomState) -> None:
        self.drawn = 0  # batches, in all iterations
        self._loader = loader
        self._random_state = random_state
        self._iteration: Callable[[], object] = lambda: None  # weakly: who drops it will not go on with it
        self._batches = 0  # of this iteration
        self._ended = False
        self._before = self._first = self.now()  # when the iteration began, and when it gave its first batch
        self._left: dict[str, Any] | None = None  # the iteration that is to go on
        self.is_iterator = hasattr(type(loader), "__next__")  # which began before
        if self.is_iterator:
            self._iteration = weakref.ref(self)

    @property
    def description(self) -> str:
        """What has to be the same when it goes on."""
        loader = self._loader
        length = len(loader) if _has_length(loader) else "unknown"
        return f"{type(loader).__name__} of {length} batches of {getattr(loader, 'batch_size', None)}"

    def now(self) -> dict[str, Any]:
        """States of all that the loader draws from."""
        generators = [generator.get_state() for generator in self._generators()]
        return {"random": self._random_state.states(), "generators": generators}

    def _generators(self) -> list[torch.Generator]:
        """That it was given, for itself or its sampler."""
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        owners = (self._loader, getattr(self._loader, "sampler", None), getattr(batch_sampler, "sampler", None))
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def _set(self, states: dict[str, Any]) -> None:
        self._random_state.set_states(states["random"])
        for generator, state in zip(self._generators(), states["generators"], strict=True):
            generator.set_state(state)

    def iterate(self) -> Iterator[Any]:
        """Begin an iteration; the first time, the one that was left, at the batch that comes next."""
        left, self._left = self._left, None
        self._ended = False
        batches: Iterator[Any]
        if left is None:
            self._before = self._first = self.now()
            self._batches = 0
            batches = iter(self._loader)
            return batches
        random = self._random_state.states()
        self._before, self._first, self._batches = left["before"], left["first"], left["batches"]
        self._set(self._before)
        batches = iter(self._loader)
        if self._batches:  # by then another one may have drawn
            self._set(self._first)
        self._skip(batches, self._batches)
        self._set({"random": random, "generators": left["generators"]})
        return batches

    def _skip(self, batches: Iterator[Any], number: int) -> None:
        for _ in islice(batches, number):
            pass

    def follow(self, iteration: object) -> None:
        if not self.is_iterator:  # which may be gone on with, whatever became of a loop over it
            self._iteration = weakref.ref(iteration)

    @property
    def is_under_way(self) -> bool:
        """Whether an iteration has given a batch and may give more."""
        return self._iteration() is not None and self._batches > 0

    @property
    def was_left(self) -> bool:
        """Whether the last iteration was not gone through to its end."""
        return self._batches > 0 and not self._ended

    def is_asked(self) -> None:
        """For the next batch."""
        if self._batches == 0:
            self._first = self.now()

    def has_given(self) -> None:
        self.drawn += 1
        self._batches += 1

    def has_ended(self) -> None:
        self._iteration = lambda: None
        self._ended = True

    def state(self, generators: list[torch.Tensor]) -> dict[str, Any]:
        """For a checkpoint; its generators have these states."""
        left = {"before": self._before, "first": self._first, "batches": self._batches, "generators": generators}
        goes_on = self._iteration() is not None and not self._has_given_all
        return {"drawn": self.drawn, "generators": generators, "left": left if goes_on else None}

    @property
    def _has_given_all(self) -> bool:
        """Though nobody has asked for one more yet."""
        return _has_length(self._loader) and self._batches == len(self._loader)

    def restore(self, state: dict[str, Any]) -> None:
        self.drawn, self._left = state["drawn"], state["left"]
        for generator, value in zip(self._generators(), state["generators"], strict=True):
            generator.set_state(value)
        if self._left is not None and self.is_iterator:
            self.iterate()
            self._iteration = weakref.ref(self)


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except TypeError:  # of an iterable data set
        return False
    return True
