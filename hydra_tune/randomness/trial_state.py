"""Gives each trial its own random state, though PyTorch's generators are shared by the process.

On the CPU a trial's thread has a generator of its own, which operators are given (kernels.py). A GPU's operators always
draw from the device's default generator. There a trial holds that generator: it has the trial's state for as long as
nobody else comes to hold it.

    thread of trial 1   | hold | draws ... |                       | hold | draws ...
    thread of trial 2                      | hold | draws ... |
    the generator has     state of 1         state of 2              state of 1

Forked loader workers drop all of it and seed as in plain PyTorch. Python's `random` and NumPy's global state are not
isolated.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hydra_tune.fork import new_in_child
from hydra_tune.randomness.kernels import install
from hydra_tune.randomness.proxies import device_proxies
from hydra_tune.randomness.sources import DEFAULT, Own, generator_now, thread


class RandomState:
    """One trial's stand-ins for the default generators (the CPU's and each GPU's), seeded alike; each is made when it
    is first asked for."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._of: dict[int, torch.Generator] = {}  # by the id of the default generator it stands in for
        self.users: list[torch.Generator] = []  # of the objective's own

    def stand_in(self, of: torch.Generator) -> torch.Generator:
        own = self._of.get(id(of))
        if own is None:
            own = self._of[id(of)] = torch.Generator(device=of.device).manual_seed(self._seed)
        return own

    def generator(self, of: torch.Generator) -> torch.Generator:
        """That has the trial's state now: the default one itself, while the trial holds it."""
        return of if _holders.get(id(of)) is self else self.stand_in(of)

    def states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._all()]

    def set_states(self, states: Sequence[torch.Tensor]) -> None:
        """As `states` gave them; of devices that are not here any more, none."""
        for generator, state in zip(self._all(), states, strict=False):
            generator.set_state(state)

    def _all(self) -> list[torch.Generator]:
        return [*self.users, *map(self.generator, _default_generators())]


class _ThreadsTrial(threading.local):
    state: RandomState | None = None


_current = _ThreadsTrial()


def make_current(state: RandomState | None) -> RandomState | None:
    """The calling thread's from here on; None for the process's own. What it was before."""
    before = _current.state
    if state is not None:
        install()
    _current.state = state
    thread.source = None if state is None else Own(state.stand_in(DEFAULT))
    return before


def current_state() -> RandomState | None:
    """The calling thread's own, if it has one."""
    return _current.state


def has_own_state() -> bool:
    """Whether the calling thread draws from a generator that no other thread draws from."""
    source = thread.source
    return source is not None and not source.shares


def _default_generators() -> list[torch.Generator]:
    return [DEFAULT, *device_proxies.real()]


def _standing_for(of: torch.Generator) -> torch.Generator:
    """What the calling thread is to read or set in place of this default generator."""
    if of is DEFAULT:
        return generator_now()
    state = _current.state
    return of if state is None else state.generator(of)


# ---- generators of GPUs, which one trial at a time holds -----------------------------------------------

_holding = new_in_child(threading.RLock())
_holders: dict[int, RandomState] = {}  # by the id of the default generator
_set_aside: dict[int, torch.Tensor] = {}  # the process's own states meanwhile


def hold(generators: Iterable[torch.Generator], state: RandomState | None) -> None:
    """From here on these default generators have the states of this trial, or of the process where it is None. Who held
    one before has its state back. Costs a comparison where it is the same trial.

    To be called at the beginning of a lease, with the generators of its device: draws on a GPU are right as long as
    their trial has the lease. Only a GPU can show that they are.
    """
    for generator in generators:
        if generator is not DEFAULT and _holders.get(id(generator)) is not state:
            with _holding:
                _hand_over(generator, state)


def hold_unheld(state: RandomState) -> None:
    """At the beginning of an objective, before it has any lease: those of GPUs that no other trial holds. So a trial
    that runs alone draws from its own state throughout."""
    with _holding:
        hold((g for g in device_proxies.real() if id(g) not in _holders), state)


def let_go(state: RandomState) -> None:
    """At the end of an objective: the process has those back that this trial holds."""
    with _holding:
        hold((g for g in device_proxies.real() if _holders.get(id(g)) is state), None)


def _hand_over(generator: torch.Generator, state: RandomState | None) -> None:
    key, now = id(generator), generator.get_state()
    before = _holders.pop(key, None)
    if before is None:
        _set_aside[key] = now
    else:
        before.stand_in(generator).set_state(now)
    if state is None:
        generator.set_state(_set_aside.pop(key))
    else:
        generator.set_state(state.stand_in(generator).get_state())
        _holders[key] = state


@contextmanager
def own_devices() -> Iterator[None]:
    """While one objective after another, or several, have random states of their own: seeds that they set on GPUs are
    theirs, whoever holds the generators."""
    device_proxies.join(_standing_for)
    try:
        yield
    finally:
        device_proxies.part()


def _after_fork_in_child() -> None:
    _current.__dict__.clear()
    _holders.clear()
    _set_aside.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


# ---- states of several generators ----------------------------------------------------------------------


def generator_states(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    """The states of these default generators as the calling thread sees them."""
    return [_standing_for(generator).get_state() for generator in generators]


def set_generator_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        _standing_for(generator).set_state(state)
