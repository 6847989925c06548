"""Records what some code draws, so that it can be run again with the same numbers.

    record = DrawRecord()
    with record:                    # costs two assignments where nothing is drawn
        y = block(x)
    ...
    with drawing_again(record):     # the thread's own generator is left alone
        y = block(x)

Code that reads, seeds or sets the generator counts as code that draws: it may restore the state that it has read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hydra_tune.randomness.operators import DEFAULT, Note, thread
from hydra_tune.randomness.random_state import generator_states, set_generator_states


class DrawRecord:
    """A context manager that notes the draws of this thread. Records around it note them, too. Entered again, it begins
    anew.

    states         of the thread's CPU generator, before draws. Of a trial's generator the first state is enough. Of
                   the default generator every state is noted, for other threads may draw from it in between
    generators     of the GPUs that the code may draw from
    device_states  of `generators` at the beginning, noted in any case
    """

    __slots__ = ("_outer", "device_states", "generators", "states")

    def __init__(self, generators: Sequence[torch.Generator] = ()) -> None:
        self.states: list[torch.Tensor] = []
        self.generators = generators
        self.device_states: Sequence[torch.Tensor] = ()
        self._outer: tuple[Note, ...] = ()

    def note(self, generator: torch.Generator) -> None:
        if generator is DEFAULT or not self.states:
            self.states.append(generator.get_state())

    def __enter__(self) -> DrawRecord:
        if self.states:
            self.states = []
        if self.generators:
            self.device_states = generator_states(self.generators)
        self._outer = thread.notes
        thread.notes = (*self._outer, self.note)
        return self

    def __exit__(self, *error: object) -> None:
        thread.notes, self._outer = self._outer, ()

    def rewind(self) -> None:
        """Set this thread's generators back to where they were before the code, so that it can run once more."""
        if self.states:
            thread.generator.set_state(self.states[0])
        if self.device_states:
            set_generator_states(self.generators, self.device_states)


class drawing_again:
    """A context manager in which this thread draws the numbers of the code that `record` was made of.

    They come from a generator made for this context, and records around do not note them. If the recorded code has
    drawn nothing, draws inside leave no trace.
    """

    __slots__ = ("_device_states", "_outer", "_record")

    def __init__(self, record: DrawRecord) -> None:
        self._record = record

    def __enter__(self) -> None:
        record = self._record
        self._outer = thread.generator, thread.notes
        if record.generators:
            self._device_states = generator_states(record.generators)
            set_generator_states(record.generators, record.device_states)
        generator, states = torch.Generator(), iter(record.states)

        def set_next(generator: torch.Generator) -> None:
            if (state := next(states, None)) is not None:
                generator.set_state(state)

        thread.generator, thread.notes = generator, (set_next,)

    def __exit__(self, *error: object) -> None:
        thread.generator, thread.notes = self._outer
        if self._record.generators:
            set_generator_states(self._record.generators, self._device_states)
