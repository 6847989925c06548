"""Policies: the order in which ready tasks get devices. A policy sees plain data and keeps no state.

A task is ranked once, when it becomes ready. The smallest rank goes first; of equal ranks the task that came first.
`machine.py` asks for ranks and decides: a task that has waited for too long goes first whatever its rank is
(`STARVATION_LIMIT`), and admissions, steps and pilots are first come, first served.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf, isnan

from hydra_tune.errors import ConfigError
from hydra_tune.schedule.plan import Direction, Task
from hydra_tune.schedule.progress import EndedTrials, Progress


class Policy(ABC):
    """Ranks tasks by the progress of their trials.

    Trials may share frozen weights (`hydra_tune.share`). With `gathers`, a ready task whose shared shard is on the
    device goes before one that ranks first, unless that ranks before it by more than the slack. So all trials visit a
    shard while it is there, and it is promoted once for all of them.

    Where all trials of a device are resident, a change of trial after each task would gain nothing. There a trial keeps
    the device for `quantum_s` seconds before the policy may give it to another one that waits.
    """

    quantum_s: float = 0.5
    gathers: bool = True  # tasks whose shared shard is on the device go before others, within the slack

    @abstractmethod
    def rank(self, task: Task, progress: Progress) -> float:
        """A number; the task with the smallest one goes first."""

    def slack(self, progress: Progress) -> float:
        """How much smaller a rank must be to be worth a copy.

        A task goes before one whose shard is on the device already, and a task from another home before those at home
        on the device, only if its rank is smaller by more than this."""
        return 0.0

    def gather_slack(self, progress: Progress) -> float:
        """The same for tasks at shared weights, with `gathers`: by how much smaller ranks count as equal."""
        return self.slack(progress)

    def leaves_home(self, task_s: float, num_bytes: int, bytes_per_s: float) -> bool:
        """Whether a task of `task_s` seconds is worth running on a free device that is not its home. That moves
        `num_bytes`, there and back together, at `bytes_per_s`."""
        return num_bytes <= task_s * bytes_per_s


@dataclass(frozen=True, kw_only=True)
class _WithQuantum(Policy):
    """A policy that takes its quantum, and whether it gathers, as arguments.

    Raises:
        ConfigError: the quantum is not a finite number of seconds.
    """

    quantum_s: float = 0.5
    gathers: bool = True

    def __post_init__(self) -> None:
        _check_quantum(self)


@dataclass(frozen=True)
class ShardedLRTF(_WithQuantum):
    """The longest remaining time first, so that the whole search ends early: Hydra, arXiv 2110.08633, section 4."""

    def rank(self, task: Task, progress: Progress) -> float:
        return -progress.remaining_s

    def slack(self, progress: Progress) -> float:
        return progress.step_s

    def gather_slack(self, progress: Progress) -> float:
        """All count as equal. The search ends no later: a device computes what it has to in any order, and trials that
        did not go together would wait for the link."""
        return inf


@dataclass(frozen=True)
class Fifo(_WithQuantum):
    """First come, first served."""

    def rank(self, task: Task, progress: Progress) -> float:
        return 0.0


@dataclass(frozen=True)
class FairShare(_WithQuantum):
    """The trial that has had the least device time first."""

    def rank(self, task: Task, progress: Progress) -> float:
        return progress.device_s

    def slack(self, progress: Progress) -> float:
        return progress.step_s


@dataclass(frozen=True)
class BestFirst(_WithQuantum):
    """The trial with the best reported objective first; before all, trials that have reported none; last of all, NaN.

    `direction` is "minimize", "maximize", or None for the direction of the trial's search.
    """

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
class RungSynchronous(_WithQuantum):
    """The trial with the fewest steps first, so that all trials reach a pruner's rungs together."""

    def rank(self, task: Task, progress: Progress) -> float:
        return progress.steps_done


@dataclass(frozen=True)
class OldestFirst(_WithQuantum):
    """The trial that came first goes first; others run while it can't.

    For a search that prunes. It learns from each trial as early as if trials ran one by one. A policy that prefers new
    trials would instead delay the end of every trial that is not pruned.
    """

    def rank(self, task: Task, progress: Progress) -> float:
        return task.trial


@dataclass(frozen=True)
class Shuffled(_WithQuantum):
    """A random order, the same for the same seed."""

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
    """Return the policy that this names; a policy itself is checked and returned.

    Raises:
        ConfigError: no policy has this name; or its quantum, or its rank for a trial's first task, is not a number.
    """
    if isinstance(policy, Policy):
        _check_quantum(policy)
        rank = policy.rank(Task(0, 1, 0, Direction.FORWARD), Progress(0, EndedTrials()))
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
