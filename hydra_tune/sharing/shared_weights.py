"""Knows the frozen weights of a pool's trials, and which of them several trials have.

Trials that search over adapters have the same frozen base. Its weights should be in host memory once, on a device once,
and move once. So each frozen weight has a number; Parameters of several trials that lie in the same memory have the
same. The machine counts bytes and gives slots by these numbers.

    shared     another trial has the weight, too, or it comes from `hydra_tune.share`
    lone       only one trial has it; nothing is different from a trained weight, but that it is not stepped

A lone weight may be written in place, as an average of a model is. So where a second trial comes to have it, and the
first has moved it since, the bits are compared. A shared weight must not be written.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hydra_tune.devices.host_weights import HostWeights
from hydra_tune.devices.tensor_bytes import parts_of, same_bits, storage_bytes, tensor_bytes, with_parts
from hydra_tune.schedule.ledger import HeldWeights
from hydra_tune.sharing.base_storages import base_of, is_base

HOST = -1  # the place of a weight in host memory; on a device the place is the device's number
PINNED = -2  # in host memory that a GPU copies from fast


@dataclass(eq=False)
class _Located:
    """A Parameter with a frozen weight, its place, and the memory there. If the Parameter lies elsewhere by now, it was
    given other values."""

    parameter: weakref.ref[torch.Tensor]
    place: int
    memory: Hashable


@dataclass(eq=False)
class FrozenWeight:
    """One weight, and all Parameters that have it, by their ids. `users` are the numbers of trials."""

    number: int
    num_bytes: int
    is_base: bool
    users: set[int] = field(default_factory=set)
    _pinned_in: weakref.ref[HostWeights] | None = None
    located: dict[int, _Located] = field(default_factory=dict)

    @property
    def is_shared(self) -> bool:
        return self.is_base or len(self.users) > 1

    @property
    def pinned(self) -> HostWeights | None:
        """The pinned buffer that it is in, for as long as a trial has that."""
        return None if self._pinned_in is None else self._pinned_in()

    def pin_in(self, buffer: HostWeights) -> None:
        self._pinned_in = weakref.ref(buffer)

    def at(self, place: int) -> torch.Tensor | None:
        """The weight's values at this place; None if they are not there."""
        for located in list(self.located.values()):
            parameter = located.parameter()
            if parameter is not None and located.place == place and memory_of(parameter) == located.memory:
                return parameter.data
        return None

    def put(self, parameter: torch.Tensor, place: int) -> None:
        """Note where a Parameter has the weight."""
        key, located = id(parameter), self.located
        reference = weakref.ref(parameter, lambda _: located.pop(key, None))
        located[key] = _Located(reference, place, memory_of(parameter))


def memory_of(tensor: torch.Tensor) -> Hashable:
    """Equal for two tensors with the same elements in the same memory."""
    return tuple(
        (part.untyped_storage()._cdata, part.storage_offset(), part.size(), part.stride(), part.dtype)
        for part in parts_of(tensor)
    )


class SharedWeights:
    """One pool's. `changes` counts how often a weight has become shared, or lone again."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock  # the pool's
        self.moving = threading.Lock()  # held while a shared weight is copied to where all its trials will have it
        self.changes = 0
        self.base_numbers: set[int] = set()  # of weights that come from `hydra_tune.share`
        self.has_dropped = False  # whether one of the next was dropped for want of room, of which a warning was given
        self.kept_bases: dict[object, None] = {}  # what `hydra_tune.share` has built, kept for trials to come
        self._searches = 0
        self._numbers = itertools.count()
        self._at_memory: dict[Hashable, FrozenWeight] = {}
        self._of_parameter: dict[int, tuple[weakref.ref[torch.Tensor], FrozenWeight]] = {}
        self._of_trial: dict[int, set[FrozenWeight]] = {}
        self._shards: dict[tuple[int, ...], int] = {}  # numbers of shards, by those of their weights

    @contextmanager
    def bases_kept(self) -> Iterator[None]:
        """A search: bases are kept until it ends, and others that go on meanwhile."""
        with self._lock:
            self._searches += 1
        try:
            yield
        finally:
            with self._lock:
                self._searches -= 1
                if not self._searches:
                    self.kept_bases.clear()

    # ---- whose they are ----

    def numbered(self, parameters: Iterable[torch.Tensor]) -> HeldWeights:
        """For each weight its number, and its bytes in host memory."""
        with self._lock:
            weights = [(self._weight_of(p), tensor_bytes(p)) for p in with_parts(parameters)]
            found = {weight.number: num_bytes for weight, num_bytes in weights}
            return tuple(found.items())

    def enter(self, trial: int, parameters: Iterable[torch.Tensor]) -> None:
        """The trial has these Parameters from here on. Trained ones do not count."""
        with self._lock:
            own = self._of_trial.setdefault(trial, set())
            for p in with_parts(parameters):
                if not p.requires_grad and (weight := self._weight_of(p)) not in own:
                    was_shared = weight.is_shared
                    weight.users.add(trial)
                    own.add(weight)
                    self.changes += weight.is_shared != was_shared

    def leave(self, trial: int) -> None:
        """The trial has ended."""
        with self._lock:
            for weight in self._of_trial.pop(trial, ()):
                was_shared = weight.is_shared
                weight.users.discard(trial)
                self.changes += weight.is_shared != was_shared

    def note_change(self) -> None:
        """A trial has given other values to a weight: what it shares is to be looked at anew."""
        with self._lock:
            self.changes += 1

    def _weight_of(self, parameter: torch.Tensor) -> FrozenWeight:
        """Under the lock: the weight of a Parameter, which becomes known if it was not."""
        reference, weight = self._of_parameter.get(id(parameter), (None, None))
        memory = memory_of(parameter)
        if reference is not None and weight is not None and reference() is parameter:
            if weight.located[id(parameter)].memory == memory:
                return weight
            weight.located.pop(id(parameter))  # it was given other values since
        weight = self._at_memory.get(memory)
        if weight is None or not self._is_same(weight, parameter):
            base = base_of(parameter)
            weight = FrozenWeight(next(self._numbers), storage_bytes(parameter), is_base(parameter))
            self._note_memory(parameter, weight)
            if weight.is_base:
                self.base_numbers.add(weight.number)
            if base is not None:
                weight.put(base, HOST)
        self._note(parameter, weight, HOST)
        return weight

    def _note_memory(self, tensor: torch.Tensor, weight: FrozenWeight) -> None:
        """Parameters that lie in this memory have this weight, for as long as the memory lives."""
        memory = memory_of(tensor)
        self._at_memory[memory] = weight
        for part in parts_of(tensor):
            weakref.finalize(part.untyped_storage(), self._at_memory.pop, memory, None).atexit = False

    def _is_same(self, weight: FrozenWeight, parameter: torch.Tensor) -> bool:
        """Whether the weight still has the values that lie in the Parameter's memory. A trial that was alone with it
        may have moved and then changed it."""
        if weight.is_base:
            return True
        others = [located for located in weight.located.values() if located.place != HOST]
        moved = [p for located in others if (p := located.parameter()) is not None]
        return all(same_bits(parameter.data, p.data) for p in moved)

    def _note(self, parameter: torch.Tensor, weight: FrozenWeight, place: int) -> None:
        weight.put(parameter, place)
        key, known = id(parameter), self._of_parameter
        known[key] = weakref.ref(parameter, lambda _: known.pop(key, None)), weight

    # ---- where they are ----

    def shared(self, parameter: torch.Tensor) -> FrozenWeight | None:
        """The weight of a frozen Parameter if it is shared, else None."""
        if parameter.requires_grad or not (id(parameter) in self._of_parameter or is_base(parameter)):
            return None
        with self._lock:
            weight = self._weight_of(parameter)
            return weight if weight.is_shared else None

    def is_at(self, parameter: torch.Tensor, place: int) -> bool:
        """Whether this Parameter has its weight at this place."""
        with self._lock:
            located = self._weight_of(parameter).located.get(id(parameter))
            return located is not None and located.place == place

    def has_moved(self, parameter: torch.Tensor, place: int) -> None:
        """We have moved a Parameter. Nothing happens if its weight is not known."""
        with self._lock:
            reference, weight = self._of_parameter.get(id(parameter), (None, None))
            if reference is not None and weight is not None and reference() is parameter:
                weight.put(parameter, place)

    def is_pinned(self, parameter: torch.Tensor, base: torch.Tensor | None, buffer: HostWeights) -> None:
        """We have moved a Parameter into this pinned buffer, and what `base_of` had returned for it, too."""
        with self._lock:
            _, weight = self._of_parameter[id(parameter)]
            weight.put(parameter, PINNED)
            weight.pin_in(buffer)
            self._note_memory(parameter, weight)
            if base is not None:
                weight.put(base, PINNED)

    # ---- on devices ----

    def held(self, parameters: Iterable[torch.Tensor]) -> HeldWeights:
        """For each weight its number, and its bytes on a device."""
        with self._lock:
            weights = map(self._weight_of, parameters)
            return tuple({weight.number: weight.num_bytes for weight in weights}.items())

    def number_of_shard(self, parameters: Sequence[torch.Tensor]) -> int | None:
        """The number of a shard with these weights; None unless all of them are frozen and shared."""
        if not parameters or any(p.requires_grad for p in parameters):
            return None
        with self._lock:
            weights = list(map(self._weight_of, parameters))
            if not all(weight.is_shared for weight in weights):
                return None
            return self._shards.setdefault(tuple(weight.number for weight in weights), len(self._shards))
