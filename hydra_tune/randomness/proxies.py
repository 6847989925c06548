"""Stand for the default generators in PyTorch's functions that seed, read and set them.

`torch.manual_seed`, `get_rng_state`, `fork_rng` and their kin are no operators: they call methods of
`torch.random.default_generator`, and of `torch.cuda.default_generators`. What stands there acts on the generator that
the calling thread draws from.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from hydra_tune.fork import new_in_child
from hydra_tune.randomness.sources import DEFAULT, default, generator_now, thread


class _CpuProxy(torch.Generator):
    """May be given to operators, too: they take it for the default generator."""

    def get_state(self) -> torch.Tensor:
        with default.lock:
            return generator_now().get_state()

    def set_state(self, new_state: torch.Tensor) -> torch.Generator:
        with default.lock:
            self._will_be_set().set_state(new_state)
        return self

    def manual_seed(self, seed: int) -> torch.Generator:
        with default.lock:
            self._will_be_set().manual_seed(seed)
        return self

    def seed(self) -> int:
        with default.lock:
            return self._will_be_set().seed()

    def initial_seed(self) -> int:
        source = thread.source
        return (DEFAULT if source is None else source.peek()).initial_seed()

    def clone_state(self) -> torch.Generator:
        with default.lock:
            return generator_now().clone_state()

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state: torch.Generator) -> torch.Generator:
        return self.set_state(state.get_state())

    def __reduce__(self) -> Any:
        return generator_now().__reduce__()

    @staticmethod
    def _will_be_set() -> torch.Generator:
        if thread.source is None:
            default.stamp += 1
        return generator_now()


class _DeviceProxy:
    """Of a device whose generator is the process's, or is held by one trial at a time."""

    def __init__(self, real: torch.Generator, standing_for: Callable[[torch.Generator], torch.Generator]) -> None:
        self._real = real
        self._standing_for = standing_for

    def __getattr__(self, name: str) -> Any:
        return getattr(self._standing_for(self._real), name)


_cpu_proxy = _CpuProxy()
# Operators see a new wrapper of the same generator.
STAND_FOR_DEFAULT = frozenset(each._cdata for each in (DEFAULT, _cpu_proxy))  # type: ignore[attr-defined]


def install() -> None:
    """The CPU's, for life."""
    torch.random.default_generator = _cpu_proxy  # type: ignore[attr-defined]


class DeviceProxies:
    """Those of GPUs, there while a trial with a random state of its own lives: no operator takes one."""

    def __init__(self) -> None:
        self._lock = new_in_child(threading.RLock())
        self._users = 0
        self._real: tuple[torch.Generator, ...] = ()

    def real(self) -> tuple[torch.Generator, ...]:
        """PyTorch's own; none before it has begun to use GPUs."""
        return self._real or (torch.cuda.default_generators if torch.cuda.is_initialized() else ())

    def join(self, standing_for: Callable[[torch.Generator], torch.Generator]) -> None:
        """GPUs may have come since the last one."""
        with self._lock:
            self._users += 1
            if torch.cuda.default_generators and not self._real:
                self._real = tuple(torch.cuda.default_generators)
                torch.cuda.default_generators = tuple(  # type: ignore[assignment]
                    _DeviceProxy(g, standing_for) for g in self._real
                )

    def part(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._remove()

    def _remove(self) -> None:
        if self._real:
            torch.cuda.default_generators = self._real  # type: ignore[assignment]
        self._real = ()

    def drop_in_child(self) -> None:
        self._users = 0
        self._remove()


device_proxies = DeviceProxies()
os.register_at_fork(after_in_child=device_proxies.drop_in_child)
