"""Records what some code draws, so that it can be run again with the same numbers.

    record = DrawRecord()
    with noting_draws(record):      # costs two assignments where nothing is drawn
        y = block(x)
    ...
    with drawing_again(record):     # the thread's own generator is left alone
        y = block(x)

Code that reads, seeds or sets the generator counts as code that draws: what it restores later is to be the same.
`generators` are those of GPUs that the code may draw from; their states are always noted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hydra_tune.randomness.operators import DEFAULT, install, thread
from hydra_tune.randomness.trial_state import generator_states, set_generator_states


class DrawRecord:
    """`states` are those that draws have found of the thread's CPU generator: the first one, and each one of the
    default generator, from which other threads may draw in between. `device_states` are those at the beginning."""

    __slots__ = ("device_states", "states")

    def __init__(self) -> None:
        self.states: list[torch.Tensor] = []
        self.device_states: Sequence[torch.Tensor] = ()

    def note(self, generator: torch.Generator) -> None:
        if generator is DEFAULT or not self.states:
            self.states.append(generator.get_state())


class noting_draws:
    """A context manager: what this thread draws inside is noted, in the records of those around it, too. Entered with a
    record that was used, it begins anew."""

    __slots__ = ("_generators", "_outer", "_record")

    def __init__(self, record: DrawRecord, generators: Sequence[torch.Generator] = ()) -> None:
        self._record = record
        self._generators = generators

    def __enter__(self) -> DrawRecord:
        install()
        record = self._record
        if record.states:
            record.states = []
        if self._generators:
            record.device_states = generator_states(self._generators)
        self._outer = thread.notes
        thread.notes = (*self._outer, record.note)
        return record

    def __exit__(self, *error: object) -> None:
        thread.notes = self._outer


class drawing_again:
    """A context manager: inside, this thread draws the numbers of the code whose `record` it is, from a generator that
    is made for it, and unheard by those around. Where that code has drawn nothing, draws inside are as if they had not
    been."""

    __slots__ = ("_device_states", "_generators", "_outer", "_record")

    def __init__(self, record: DrawRecord, generators: Sequence[torch.Generator] = ()) -> None:
        self._record = record
        self._generators = generators

    def __enter__(self) -> None:
        install()
        self._outer = thread.generator, thread.notes
        if self._generators:
            self._device_states = generator_states(self._generators)
            set_generator_states(self._generators, self._record.device_states)
        again, left = torch.Generator(), iter(self._record.states)

        def set_next(generator: torch.Generator) -> None:
            if (state := next(left, None)) is not None:
                generator.set_state(state)

        thread.generator, thread.notes = again, (set_next,)

    def __exit__(self, *error: object) -> None:
        thread.generator, thread.notes = self._outer
        if self._generators:
            set_generator_states(self._generators, self._device_states)


@contextmanager
def state_kept(generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Whatever this thread draws inside is as if it had not been drawn."""
    of_gpus = [generator for generator in generators if generator is not DEFAULT]
    record = DrawRecord()
    record.states, record.device_states = [thread.generator.get_state()], generator_states(of_gpus)
    with drawing_again(record, of_gpus):
        yield


def rewind(record: DrawRecord, generators: Sequence[torch.Generator] = ()) -> None:
    """This thread's generators are where they were before the code whose `record` it is: it will run once more."""
    if record.states:
        thread.generator.set_state(record.states[0])
    if record.device_states:
        set_generator_states(generators, record.device_states)
