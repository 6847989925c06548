"""How a block's forward, its repetition and its backward draw, where their thread has no random state of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hydra_tune.fork import new_in_child
from hydra_tune.randomness.draw_record import state_kept
from hydra_tune.randomness.proxies import device_proxies

_drawing = new_in_child(threading.RLock())


@contextmanager
def drawing_apart() -> Iterator[None]:
    """In a thread that draws from the process's generators, as scripts' do: what is drawn inside can be drawn again,
    whatever other threads draw meanwhile. Those that do so here take turns."""
    with _drawing:
        devices = device_proxies.real()
        before = [generator.get_state() for generator in devices]
        kept = state_kept()
        try:
            with kept:
                yield
        except torch.OutOfMemoryError:  # it may run again, as if it had not
            for generator, state in zip(devices, before, strict=True):
                generator.set_state(state)
            raise
        except BaseException:
            kept.go_on_from_here()
            raise
        kept.go_on_from_here()


@contextmanager
def drawing_again() -> Iterator[None]:
    """The process's generator is left alone: inside, the thread has one of its own, at first a copy of that."""
    with state_kept():
        yield


@contextmanager
def drawing_for_nothing() -> Iterator[None]:
    """As `drawing_again`; but where what was drawn has not been undone at the end, it is drawn from the process's
    generator too: as by a backward with noise, or a pilot that the model's own exception ends, which has run as far
    as plain PyTorch."""
    kept = state_kept()
    with kept:
        try:
            yield
        finally:
            kept.go_on_from_here()
