"""The order in which ready tasks get a device. A policy sees plain data and keeps no state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hydra_tune.shard import Task


class Policy(Protocol):
    def choose(self, ready: Sequence[Task]) -> Task:
        """One of `ready`, which is never empty and is sorted by the time each became ready."""


@dataclass(frozen=True)
class Fifo:
    """First come, first served."""

    def choose(self, ready: Sequence[Task]) -> Task:
        return ready[0]
