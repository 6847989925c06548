"""Gives each trial its own random state, though PyTorch's generators are shared by the process.

Operators that draw from a default generator carry the tag `nondeterministic_seeded`. In a trial's
thread a dispatch mode (`mode.TrialMode`) runs each of them with the trial's state swapped into the
default generator, under a lock. `torch.manual_seed`, `get_rng_state`, `fork_rng` and their kin are no
operators: they reach the trial's state through proxies that stand in for the default generators while
any trial with its own state lives. Forked loader workers drop all of it and seed as in plain PyTorch.

Python's `random` and NumPy's global state are not isolated.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from hydra_tune.fork import new_in_child
from hydra_tune.shared_random import SharedDraws

T = TypeVar("T")
_swap_lock = new_in_child(threading.RLock())
_local = threading.local()


class RandomState:
    """One trial's stand-ins for the default generators (the CPU's and each GPU's), seeded alike; each is made when it
    is first asked for."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._of: dict[int, torch.Generator] = {}  # by the id of the default generator it stands in for
        self.users: list[torch.Generator] = []  # of the objective's own

    def stand_in(self, default: torch.Generator) -> torch.Generator:
        own = self._of.get(id(default))
        if own is None:
            own = self._of[id(default)] = torch.Generator(device=default.device).manual_seed(self._seed)
        return own

    @classmethod
    def of_defaults(cls) -> RandomState:
        """With the state that the default generators have now."""
        own = cls(0)
        for default in _default_generators():
            own.stand_in(default).set_state(default.get_state())
        return own

    def states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._all()]

    def set_states(self, states: Sequence[torch.Tensor]) -> None:
        """As `states` gave them; of devices that are not here any more, none."""
        for generator, state in zip(self._all(), states, strict=False):
            generator.set_state(state)

    def _all(self) -> list[torch.Generator]:
        return [*self.users, *map(self.stand_in, _default_generators())]

    def give_back(self) -> None:
        """To the default generators, which go on from here."""
        for default in _default_generators():
            default.set_state(self.stand_in(default).get_state())

    def draw(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator that draws. On the CPU its generator is given to it, where it takes one: the default one is
        left alone, from which threads that are no trial's may draw at any time."""
        own = _taking_generator(func, len(args)) if _is_on_cpu(args, kwargs) else None
        if own is None:
            return self.swapped(lambda: func(*args, **kwargs))
        return own(*args, **{**kwargs, "generator": self.stand_in(torch.default_generator)})

    def swapped(self, draw: Callable[[], T]) -> T:
        """Call `draw` with this state in the default generators."""
        with _swap_lock:
            pairs = [(default, self.stand_in(default)) for default in _default_generators()]
            saved = [default.get_state() for default, _ in pairs]
            for default, own in pairs:
                default.set_state(own.get_state())
            try:
                return draw()
            finally:
                for (default, own), state in zip(pairs, saved, strict=True):
                    own.set_state(default.get_state())
                    default.set_state(state)


def make_current(state: RandomState | None) -> RandomState | None:
    """The calling thread's from here on; None for the process's own. What it was before."""
    before = _current_state()
    _local.state = state
    return before


def _current_state() -> RandomState | None:
    return getattr(_local, "state", None)


def has_own_state() -> bool:
    """Whether the calling thread draws from a state of its own."""
    return _current_state() is not None


@functools.cache
def draws(func: Callable[..., Any]) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


@functools.cache
def _taking_generator(func: Any, num_given: int) -> Any:
    """The operator, or its overload, that takes a generator beside so many positional arguments; None if there is
    none."""
    arguments = func._schema.arguments
    places = [i for i, a in enumerate(arguments) if a.name == "generator"]
    if places:
        return func if arguments[places[0]].kwarg_only or num_given <= places[0] else None
    name = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
    if name not in func.overloadpacket.overloads():
        return None
    other = getattr(func.overloadpacket, name)
    others = [(a.name, str(a.type)) for a in other._schema.arguments if a.name != "generator"]
    return other if others == [(a.name, str(a.type)) for a in arguments] else None


def _is_on_cpu(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    device = kwargs.get("device") or (tensors[0].device if tensors else "cpu")
    return torch.device(device).type == "cpu"


def is_default(generator: Any) -> bool:
    """Whether an operator's `generator` argument means the default one."""
    if generator is None:
        return True
    own: list[Any] = _default_generators()  # operators see a new wrapper of the same generator
    return any(generator._cdata == default._cdata for default in own)


# ---- proxies for the default generators --------------------------------------------------------------


class _DefaultGenerator:
    """Looks like a default generator; acts on the calling trial's stand-in where there is one."""

    def __init__(self, default: torch.Generator) -> None:
        self._default = default

    def __getattr__(self, name: str) -> Any:
        state = _current_state()
        return getattr(self._default if state is None else state.stand_in(self._default), name)


_cpu_proxy = _DefaultGenerator(torch.default_generator)
_real_cuda: tuple[torch.Generator, ...] = ()


def _default_generators() -> list[torch.Generator]:
    cuda = _real_cuda or (torch.cuda.default_generators if torch.cuda.is_initialized() else ())
    return [torch.default_generator, *cuda]


def install_proxies() -> None:
    """For a thread with a state of its own. They may be there, and GPUs have come since."""
    global _real_cuda
    torch.random.default_generator = _cpu_proxy  # type: ignore[assignment,attr-defined]
    if torch.cuda.default_generators and not _real_cuda:
        _real_cuda = tuple(torch.cuda.default_generators)
        torch.cuda.default_generators = tuple(_DefaultGenerator(g) for g in _real_cuda)  # type: ignore[assignment]


def remove_proxies() -> None:
    global _real_cuda
    torch.random.default_generator = torch.default_generator  # type: ignore[attr-defined]
    if _real_cuda:
        torch.cuda.default_generators = _real_cuda  # type: ignore[assignment]
    _real_cuda = ()


def _after_fork_in_child() -> None:
    """No operator, so no swap, was under way: see `fork`."""
    remove_proxies()
    _local.__dict__.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)

# ---- what one forward of a model drew ----------------------------------------------------------------


def generator_states(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    """The states of these default generators as the calling trial sees them."""
    state = _current_state()
    return [(g if state is None else state.stand_in(g)).get_state() for g in generators]


def set_generator_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    state = _current_state()
    for generator, value in zip(generators, states, strict=True):
        (generator if state is None else state.stand_in(generator)).set_state(value)


@contextmanager
def lent(generators: Sequence[torch.Generator], to: Sequence[torch.Generator]) -> Iterator[None]:
    """What the thread draws from those of another device is what these would have given, and they go on from there.
    The others are as before."""
    pairs = [(own, other) for own, other in zip(generators, to, strict=True) if own is not other]
    own, others = [own for own, _ in pairs], [other for _, other in pairs]
    states, theirs = generator_states(own), generator_states(others)
    try:
        set_generator_states(others, states)
        yield
    finally:
        drawn = generator_states(others)
        set_generator_states(others, theirs)
        if not all(map(torch.equal, drawn, states)):  # else another thread may have drawn meanwhile
            set_generator_states(own, drawn)


@contextmanager
def random_state_kept(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Whatever the thread draws inside is as if it had not: torch's numbers, Python's and NumPy's."""
    states = generator_states(generators)
    with SharedDraws() as shared:
        try:
            yield
        finally:
            set_generator_states(generators, states)
            shared.take_back()
