"""Records what some code draws, so that it can be run again with the same numbers.

    record = DrawRecord()
    with noting_draws(record):      # costs two assignments where nothing is drawn
        y = block(x)
    ...
    with drawing_again(record):     # the thread's own generator is left alone
        y = block(x)

Code that reads, seeds or sets the generator counts as code that draws: what it restores later is to be the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hydra_tune.randomness import kernels
from hydra_tune.randomness.sources import DEFAULT, Source, default, thread
from hydra_tune.randomness.trial_state import generator_states, set_generator_states


class DrawRecord:
    """state          of the thread's CPU generator before the first draw; None as long as nothing was drawn
    later          the states that later draws have found, by number, where other threads draw in between from the same
                   generator; the first draw has number 0
    device_states  of the generators of GPUs, as they were at the beginning
    drew_anew      the repetition has drawn, and the first run had not"""

    __slots__ = ("device_states", "drew_anew", "later", "state")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.state: torch.Tensor | None = None
        self.later: dict[int, torch.Tensor] = {}
        self.device_states: Sequence[torch.Tensor] = ()
        self.drew_anew = False


def _beneath(outer: Source | None) -> torch.Generator:
    return DEFAULT if outer is None else outer.peek()


class noting_draws(Source):
    """A context manager: what this thread draws inside is noted, in the records of those around it, too. Entered with a
    record that was used, it begins anew.

    Args:
        generators: those of GPUs that the code may draw from.
    """

    __slots__ = ("_generators", "_number", "_outer", "_record", "_stamp", "shares")

    def __init__(self, record: DrawRecord, generators: Sequence[torch.Generator] = ()) -> None:
        self._record = record
        self._generators = generators

    def __enter__(self) -> DrawRecord:
        if kernels.installed is None:
            kernels.install()
        record = self._record
        if record.state is not None:
            record.clear()
        if self._generators:
            record.device_states = generator_states(self._generators)
        self._outer = outer = thread.source
        self.shares = outer is None or outer.shares
        self._number = self._stamp = 0
        thread.source = self
        return record

    def __exit__(self, *error: object) -> None:
        thread.source = self._outer

    def draw(self) -> torch.Generator:
        outer, record = self._outer, self._record
        if outer is None:
            default.stamp += 1
            generator = DEFAULT
        else:
            generator = outer.draw()
        if record.state is None:
            record.state = generator.get_state()
        elif self.shares and default.stamp != self._stamp + 1:
            record.later[self._number] = generator.get_state()
        self._stamp = default.stamp
        self._number += 1
        return generator

    def peek(self) -> torch.Generator:
        return _beneath(self._outer)


class _Apart(Source):
    """A context manager: this thread draws from a generator that is made at the first draw, and gone at the end. Those
    of GPUs, `generators`, are put back then."""

    __slots__ = ("_device_states", "_generator", "_generators", "_outer")
    shares = False

    def __init__(self, generators: Sequence[torch.Generator] = ()) -> None:
        self._generators = [g for g in generators if g is not DEFAULT]  # in which others' draws shall stay drawn
        self._generator: torch.Generator | None = None

    def __enter__(self) -> None:
        if kernels.installed is None:
            kernels.install()
        self._outer = thread.source
        self._device_states = generator_states(self._generators) if self._generators else ()
        thread.source = self

    def __exit__(self, *error: object) -> None:
        thread.source = self._outer
        if self._device_states:
            set_generator_states(self._generators, self._device_states)

    def draw(self) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator()
            self._generator.set_state(self._first_state())
        return self._generator

    def peek(self) -> torch.Generator:
        return _beneath(self._outer) if self._generator is None else self._generator

    def _first_state(self) -> torch.Tensor:
        return _beneath(self._outer).get_state()


class state_kept(_Apart):
    """A context manager: whatever this thread draws inside is as if it had not been drawn."""

    __slots__ = ("_before",)

    def _first_state(self) -> torch.Tensor:
        self._before = super()._first_state()
        return self._before


class drawing_again(_Apart):
    """A context manager: inside, this thread draws the numbers of the code whose `record` it is. Where that has drawn
    nothing, draws inside are as if they had not been, and `record.drew_anew` tells of them."""

    __slots__ = ("_number", "_record")

    def __init__(self, record: DrawRecord, generators: Sequence[torch.Generator] = ()) -> None:
        super().__init__(generators)
        self._record = record
        self._number = 0

    def __enter__(self) -> None:
        super().__enter__()
        if self._generators:
            set_generator_states(self._generators, self._record.device_states)

    def draw(self) -> torch.Generator:
        generator = super().draw()
        state = self._record.later.get(self._number)
        if state is not None:
            generator.set_state(state)
        self._number += 1
        return generator

    def peek(self) -> torch.Generator:
        return super().peek() if self._record.state is None else super().draw()

    def _first_state(self) -> torch.Tensor:
        if self._record.state is None:
            self._record.drew_anew = True
            return super()._first_state()
        return self._record.state


def rewind(record: DrawRecord, generators: Sequence[torch.Generator] = ()) -> None:
    """This thread's generators are where they were before the code whose `record` it is: it will run once more."""
    if record.state is not None:
        with default.lock:
            default.stamp += 1
            _beneath(thread.source).set_state(record.state)
    if record.device_states:
        set_generator_states(generators, record.device_states)
