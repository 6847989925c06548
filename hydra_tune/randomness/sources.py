"""What the calling thread draws from on the CPU in place of PyTorch's default generator.

A thread has at most one source. One that is entered inside another keeps it as its `outer`:

    None                 the process's default generator
    Own                  a trial's generator
    noting_draws         its outer's; notes the state before the first draw     (draw_record.py)
    drawing_again        a new generator, set to a record's state               (draw_record.py)
    state_kept           a new generator, set to its outer's state              (draw_record.py)
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod

import torch

from hydra_tune.fork import gate, new_in_child

DEFAULT: torch.Generator = torch.default_generator  # the object itself, whatever stands in its place later


class Source(ABC):
    """`shares` says that what it gives is the default generator, from which other threads draw as well: such draws are
    made while holding `default.lock`."""

    __slots__ = ()
    shares: bool

    @abstractmethod
    def draw(self) -> torch.Generator:
        """The generator, which is about to be drawn from, read or set."""

    @abstractmethod
    def peek(self) -> torch.Generator:
        """The generator, which is left as it is."""


class Own(Source):
    """A trial's."""

    __slots__ = ("_generator",)
    shares = False

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def draw(self) -> torch.Generator:
        return self._generator

    peek = draw


class _Thread(threading.local):
    """`source` is None too while a kernel draws: kernels that it calls in turn are part of the same draw."""

    source: Source | None = None


class _Default:
    """Draws of all threads from the default generator, one after another. `stamp` counts them."""

    __slots__ = ("lock", "stamp")

    def __init__(self) -> None:
        self.lock = new_in_child(threading.RLock())
        self.stamp = 0


thread = _Thread()
default = _Default()
gate.guard(default.lock)  # a fork waits for the draw under way, which has the generator's own lock, too
os.register_at_fork(after_in_child=lambda: thread.__dict__.clear())  # a loader's worker is no trial


def generator_now() -> torch.Generator:
    """What the calling thread draws from now, to be read or set."""
    source = thread.source
    return DEFAULT if source is None else source.draw()
