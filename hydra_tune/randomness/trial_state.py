"""Gives each trial its own random state, though PyTorch's generators are shared by the process.

On the CPU a trial's thread has a generator of its own, which operators are given (operators.py). A GPU's operators
always draw from the device's default generator. There a trial holds that generator: it has the trial's state for as
long as nobody else comes to hold it.

    thread of trial 1   | hold | draws ... |                       | hold | draws ...
    thread of trial 2                      | hold | draws ... |
    the generator has     state of 1         state of 2              state of 1

Forked loader workers seed the process's generator, as in plain PyTorch; GPUs can't be used there. Python's `random` and
NumPy's global state are not isolated.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hydra_tune.process.fork import new_in_child
from hydra_tune.randomness.operators import DEFAULT, thread


class RandomState:
    """One trial's stand-ins for the default generators (the CPU's and each GPU's), seeded alike; each is made when it
    is first asked for."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._of: dict[int, torch.Generator] = {}  # by the id of the default generator it stands in for
        self.users: list[torch.Generator] = []  # of the objective's own

    def stand_in(self, of: torch.Generator) -> torch.Generator:
        if id(of) not in self._of:
            self._of[id(of)] = torch.Generator(device=of.device).manual_seed(self._seed)
        return self._of[id(of)]

    def generator(self, of: torch.Generator) -> torch.Generator:
        """That has the trial's state now: the default one itself, while the trial holds it."""
        return of if _holder(of) is self else self.stand_in(of)

    def states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._all()]

    def set_states(self, states: Sequence[torch.Tensor]) -> None:
        """As `states` gave them; of devices that are not here any more, none."""
        for generator, state in zip(self._all(), states, strict=False):
            generator.set_state(state)

    def _all(self) -> list[torch.Generator]:
        return [*self.users, self.stand_in(DEFAULT), *map(self.generator, gpu_generators())]


def generator_states(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    """The states of these default generators of GPUs, as the calling thread sees them."""
    return [_of_thread(generator).get_state() for generator in generators]


def set_generator_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        _of_thread(generator).set_state(state)


# ---- generators of GPUs, which one trial at a time holds -----------------------------------------------

_process = RandomState(0)  # of generators that no trial holds; its stand-ins are there for the states meanwhile
_holding = new_in_child(threading.RLock())
_holders: dict[int, RandomState] = {}  # by the id of the default generator
_real: tuple[torch.Generator, ...] = ()  # since others stand in their place


def gpu_generators() -> tuple[torch.Generator, ...]:
    """PyTorch's own; none before it has begun to use GPUs."""
    return _real or (torch.cuda.default_generators if torch.cuda.is_initialized() else ())


def hold(generators: Iterable[torch.Generator], state: RandomState | None) -> None:
    """From here on these default generators have the states of this trial, or of the process where it is None. Who held
    one before has its state back. Costs a comparison where it is the same trial.

    To be called at the beginning of a lease, with the generators of its device: draws on a GPU are right as long as
    their trial has the lease. Only a GPU can show that they are.
    """
    state = state or _process
    for generator in generators:
        if _holder(generator) is not state:
            with _holding:
                _holder(generator).stand_in(generator).set_state(generator.get_state())
                generator.set_state(state.stand_in(generator).get_state())
                _holders[id(generator)] = state


def _holder(of: torch.Generator) -> RandomState:
    return _holders.get(id(of), _process)


def _pass_on(holder: RandomState, to: RandomState) -> None:
    with _holding:
        hold([generator for generator in gpu_generators() if _holder(generator) is holder], to)


def _of_thread(of: torch.Generator) -> torch.Generator:
    """What the calling thread is to read or set in place of this default generator."""
    return of if thread.trial_state is None else thread.trial_state.generator(of)


class _DeviceStandIn:
    """For a GPU's default generator, in PyTorch's functions that seed, read and set it: no operator takes one."""

    def __init__(self, of: torch.Generator) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        return getattr(_of_thread(self._of), name)


@contextmanager
def drawing_from(state: RandomState) -> Iterator[None]:
    """Around an objective: its thread draws from this state, on GPUs while it has their lease or nobody else holds
    their generators. So a trial that runs alone draws from its own state throughout."""
    global _real
    outer = thread.generator, thread.trial_state
    with _holding:
        if torch.cuda.default_generators and not _real:  # GPUs may have come since the last objective
            _real = tuple(torch.cuda.default_generators)
            torch.cuda.default_generators = tuple(map(_DeviceStandIn, _real))  # type: ignore[assignment]
    thread.generator, thread.trial_state = state.stand_in(DEFAULT), state
    _pass_on(_process, state)
    try:
        yield
    finally:
        _pass_on(state, _process)
        thread.generator, thread.trial_state = outer
