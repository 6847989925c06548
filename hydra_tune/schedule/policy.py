"""The order in which ready tasks get devices. A policy sees plain data and keeps no state.

A task is ranked once, when it becomes ready: the smallest rank goes first, of equal ones the one that was ready first.
A task of a trial that is at home on another device is taken only if that gains more than `slack`: it has bytes to move.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf, isnan

from hydra_tune.errors import ConfigError
from hydra_tune.schedule.plan import Direction, Task
from hydra_tune.schedule.progress import Neighbours, Progress


class Policy(ABC):
    """Ranks tasks by how far their trials are. Where all trials of a device are resident nothing is gained by turns of
    a task: one has the device for `quantum_s` seconds, before another one of those that wait may."""

    quantum_s: float = 0.5

    @abstractmethod
    def rank(self, task: Task, progress: Progress) -> float:
        """Smallest first."""

    def slack(self, progress: Progress) -> float:
        """The least that a rank must be smaller, to be worth a move to another device."""
        return 0.0

    def leaves_home(self, task_s: float, num_bytes: int, bytes_per_s: float) -> bool:
        """Whether a task, which computes for `task_s`, goes to another device that is free: `num_bytes` move there or
        back for it, so fast."""
        return num_bytes <= task_s * bytes_per_s


@dataclass(frozen=True, kw_only=True)
class _Timed(Policy):
    """
    Raises:
        ConfigError: a quantum that is no number of seconds.
    """

    quantum_s: float = 0.5

    def __post_init__(self) -> None:
        _check_quantum(self)


@dataclass(frozen=True)
class ShardedLRTF(_Timed):
    """Longest remaining time first, which makes the whole search end soonest: Hydra, arXiv 2110.08633, section 4."""

    def rank(self, task: Task, progress: Progress) -> float:
        return -progress.remaining_s

    def slack(self, progress: Progress) -> float:
        return progress.step_s


@dataclass(frozen=True)
class Fifo(_Timed):
    """First come, first served."""

    def rank(self, task: Task, progress: Progress) -> float:
        return 0.0


@dataclass(frozen=True)
class FairShare(_Timed):
    """Whose trial has had the least device time."""

    def rank(self, task: Task, progress: Progress) -> float:
        return progress.device_s


@dataclass(frozen=True)
class BestFirst(_Timed):
    """Whose trial has reported the best objective so far; at first those that have reported none."""

    direction: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.direction not in ("minimize", "maximize", None):
            raise ConfigError(
                'the direction of an objective is "minimize", "maximize", or None for that of its search; '
                f"got {self.direction!r}."
            )

    def rank(self, task: Task, progress: Progress) -> float:
        if progress.value is None or progress.value != progress.value:
            return -inf if progress.value is None else inf
        maximizes = progress.maximizes if self.direction is None else self.direction == "maximize"
        return -progress.value if maximizes else progress.value


@dataclass(frozen=True)
class RungSynchronous(_Timed):
    """Whose trial has made the fewest steps, so that trials reach a pruner's rungs level with each other."""

    def rank(self, task: Task, progress: Progress) -> float:
        return progress.steps_done


@dataclass(frozen=True)
class OldestFirst(_Timed):
    """Whose trial came first; the others fill its gaps. A search that prunes learns from each trial as early as if they
    ran one by one, while a policy that favours trials just begun keeps those from ending that nobody stops."""

    def rank(self, task: Task, progress: Progress) -> float:
        return task.trial


@dataclass(frozen=True)
class Shuffled(_Timed):
    """In a random order, the same for the same seed."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"a seed is an int, got {self.seed!r}.")

    def rank(self, task: Task, progress: Progress) -> float:
        return hash((self.seed, task.trial, task.step, task.shard, task.direction is Direction.FORWARD))


_BY_NAME: dict[str, type[Policy]] = {
    "sharded-lrtf": ShardedLRTF,
    "fifo": Fifo,
    "fair-share": FairShare,
    "best-first": BestFirst,
    "rung-synchronous": RungSynchronous,
    "oldest-first": OldestFirst,
    "shuffled": Shuffled,
}


def _check_quantum(policy: Policy) -> None:
    quantum_s = policy.quantum_s
    if isinstance(quantum_s, bool) or not isinstance(quantum_s, (int, float)) or not 0 <= quantum_s < inf:
        raise ConfigError(
            f"quantum_s is for how many seconds a resident trial has a device, 0 or more; got {quantum_s!r}. "
            f"Write {type(policy).__name__}(quantum_s=0.5), or leave it out."
        )


def policy_named(policy: Policy | str) -> Policy:
    """The policy itself, or the one of this name.

    Raises:
        ConfigError: there is none, it ranks a trial's first task by something else than a number, or its quantum is
            none.
    """
    if isinstance(policy, Policy):
        _check_quantum(policy)
        rank = policy.rank(Task(0, 1, 0, Direction.FORWARD), Progress(0, Neighbours()))
        if not isinstance(rank, (int, float)) or isnan(rank):
            raise ConfigError(
                f"a rank is a number, the smallest goes first; {policy!r} gave {rank!r} for a trial's first task. "
                "Return a float from rank()."
            )
        return policy
    if isinstance(policy, type) and issubclass(policy, Policy):
        raise ConfigError(f"policy is a Policy, got the class of one. Write {policy.__name__}().")
    if not isinstance(policy, str) or policy not in _BY_NAME:
        raise ConfigError(f"policy is a Policy or one of {', '.join(_BY_NAME)}; got {policy!r}.")
    return _BY_NAME[policy]()
