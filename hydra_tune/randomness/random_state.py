"""Gives each trial its own random state, though PyTorch's generators are shared by the process.

On the CPU a trial's thread has a generator of its own, and `operators.py` gives it to the operators that draw. On a
GPU operators always draw from the device's default generator. So a trial *holds* that generator: it has the trial's
state until another trial holds it.

    thread of trial 1   | hold | draws ... |                       | hold | draws ...
    thread of trial 2                      | hold | draws ... |
    the generator has     state of 1         state of 2              state of 1

Forked loader workers seed the process's generator, as in plain PyTorch; they cannot use GPUs. The global states of
Python's `random` and of NumPy are not isolated.
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
    """One trial's own generators, one for the CPU's default generator and one for each GPU's.

    Each is made, with the same seed, when it is first asked for. `users` are generators that the objective has made
    itself and wants in its checkpoints.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._stand_ins: dict[int, torch.Generator] = {}  # by the id of the default generator that each stands in for
        self.users: list[torch.Generator] = []

    def stand_in(self, of: torch.Generator) -> torch.Generator:
        """The trial's own generator for this default generator."""
        if id(of) not in self._stand_ins:
            self._stand_ins[id(of)] = torch.Generator(device=of.device).manual_seed(self._seed)
        return self._stand_ins[id(of)]

    def generator(self, of: torch.Generator) -> torch.Generator:
        """The generator that has the trial's state now: the default one while the trial holds it, else the stand-in."""
        return of if _holder(of) is self else self.stand_in(of)

    def states(self) -> list[torch.Tensor]:
        """A uint8 tensor for each of its generators: the objective's own, the CPU's, each GPU's."""
        return [generator.get_state() for generator in self._all()]

    def set_states(self, states: Sequence[torch.Tensor]) -> None:
        """Set what `states` has returned. States of GPUs that this machine does not have are left out."""
        for generator, state in zip(self._all(), states, strict=False):
            generator.set_state(state)

    def _all(self) -> list[torch.Generator]:
        return [*self.users, self.stand_in(DEFAULT), *map(self.generator, gpu_generators())]


def generator_states(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    """The states that the calling thread's trial has for these default generators of GPUs."""
    return [_for_this_thread(generator).get_state() for generator in generators]


def set_generator_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        _for_this_thread(generator).set_state(state)


# ---- generators of GPUs, which one trial at a time holds -----------------------------------------------

_process_state = RandomState(0)  # holds what no trial holds; while a trial does, it has the process's own state
_holders_lock = new_in_child(threading.RLock())
_holders: dict[int, RandomState] = {}  # by the id of the default generator
_gpu_generators: tuple[torch.Generator, ...] = ()  # PyTorch's own generators, once stand-ins have taken their place


def gpu_generators() -> tuple[torch.Generator, ...]:
    """PyTorch's own default generators of GPUs; none before CUDA is initialised."""
    return _gpu_generators or (torch.cuda.default_generators if torch.cuda.is_initialized() else ())


def hold(generators: Iterable[torch.Generator], state: RandomState | None) -> None:
    """Give these default generators the states of this trial; of the process, if it is None.

    The state of the former holder is saved in its stand-in. If the trial is the holder already, this costs one
    comparison. Call it at the beginning of a lease with the generators of the device: the trial's draws on a GPU are
    right as long as it has the lease. Only a test on a GPU can check that.
    """
    state = state or _process_state
    for generator in generators:
        if _holder(generator) is not state:
            with _holders_lock:
                _holder(generator).stand_in(generator).set_state(generator.get_state())
                generator.set_state(state.stand_in(generator).get_state())
                _holders[id(generator)] = state


def _holder(of: torch.Generator) -> RandomState:
    return _holders.get(id(of), _process_state)


def _hand_over(holder: RandomState, to: RandomState) -> None:
    """Let `to` hold all generators of GPUs that `holder` holds."""
    with _holders_lock:
        hold([generator for generator in gpu_generators() if _holder(generator) is holder], to)


def _for_this_thread(of: torch.Generator) -> torch.Generator:
    """The generator that the calling thread reads or sets in place of this default generator."""
    return of if thread.trial_state is None else thread.trial_state.generator(of)


class _DeviceStandIn:
    """Stands in for a GPU's default generator, in PyTorch's functions that seed, read and set it. Operators do not take
    it as an argument, so that it need not be a Generator."""

    def __init__(self, of: torch.Generator) -> None:
        self._default = of

    def __getattr__(self, name: str) -> Any:
        return getattr(_for_this_thread(self._default), name)


@contextmanager
def drawing_from(state: RandomState) -> Iterator[None]:
    """A context in which the calling thread, a trial's objective, draws from this state.

    On GPUs it does so while the trial has the lease, or while no other trial holds their generators. So a trial that
    runs alone always draws from its own state.
    """
    global _gpu_generators
    outer = thread.generator, thread.trial_state
    with _holders_lock:
        # PyTorch may have initialised CUDA since the last objective
        if torch.cuda.default_generators and not _gpu_generators:
            _gpu_generators = tuple(torch.cuda.default_generators)
            torch.cuda.default_generators = tuple(map(_DeviceStandIn, _gpu_generators))  # type: ignore[assignment]
    thread.generator, thread.trial_state = state.stand_in(DEFAULT), state
    _hand_over(_process_state, state)
    try:
        yield
    finally:
        _hand_over(state, _process_state)
        thread.generator, thread.trial_state = outer
