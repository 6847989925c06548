"""What a pool and a search do at one moment, as plain data: what the live view draws and other processes read.

`PoolSnapshot.to_dict` and `from_dict` take it through JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class DeviceSnapshot:
    """`computes` and `promotes` name trials: whose task runs, and whose shard is on its way; "" for none. `busy_s` is
    how long it has computed, `stalled_by` how long it has not although it had trials, by cause."""

    name: str
    budget_bytes: int
    used_bytes: int
    peak_bytes: int
    computes: str = ""
    promotes: str = ""
    busy_s: float = 0.0
    stalled_by: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialSnapshot:
    """One trial.

    `state`         before prepare, starts, measuring, waits for .., resident, spilled, paused; complete, pruned,
                    did not fit or failed once it has ended
    `steps`         mini-batches that have ended; `total_steps` is None if the trial has not said how many there are
    `step_s`        seconds of one, with waits and the script's own time; None before the second
    `value`         the last one that was reported, or the final one
    `device_bytes`  on all devices now, `host_bytes` of host memory, both without what it shares with other trials
    `shards`        how many its model is cut into, 0 before its first step was measured
    `waits_s`       how long it has waited for memory, or for a first step to end, if it does now
    `device_share`  the part of the time since it began that a device has computed for it, from 0 to 1
    """

    name: str
    state: str
    steps: int = 0
    total_steps: int | None = None
    step_s: float | None = None
    value: float | None = None
    device_bytes: int = 0
    host_bytes: int = 0
    device_share: float = 0.0
    waits_s: float | None = None
    shards: int = 0

    @property
    def left_s(self) -> float | None:
        """Seconds until it has made all its steps, at its pace so far; None if unknown."""
        if self.step_s is None or self.total_steps is None:
            return None
        return max(0, self.total_steps - self.steps) * self.step_s

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


ENDED = ("complete", "pruned", "did not fit", "failed")


@dataclass(frozen=True)
class SearchSnapshot:
    """A search: how many trials have ended in each way, how many run, and how many there will be (None if unknown).
    `best` is the best value so far of trial number `best_trial`. `ended` are the last trials that have ended."""

    name: str
    complete: int = 0
    pruned: int = 0
    did_not_fit: int = 0
    failed: int = 0
    running: int = 0
    n_trials: int | None = None
    best: float | None = None
    best_trial: int | None = None
    elapsed_s: float = 0.0
    ended: tuple[TrialSnapshot, ...] = ()

    @property
    def done(self) -> int:
        return self.complete + self.pruned + self.did_not_fit + self.failed

    def left_s(self, live: Sequence[TrialSnapshot]) -> float | None:
        """Seconds until its end, at its pace so far, and not before the end of a `live` trial; None if unknown."""
        if self.n_trials is None or not self.done:
            return None
        at_pace_s = max(0, self.n_trials - self.done) * self.elapsed_s / self.done
        return max([at_pace_s, *(trial.left_s or 0.0 for trial in live)])


@dataclass(frozen=True)
class PoolSnapshot:
    """`trials` are live ones, in order of their numbers."""

    elapsed_s: float
    devices: tuple[DeviceSnapshot, ...]
    trials: tuple[TrialSnapshot, ...] = ()
    host_used_bytes: int = 0
    host_budget_bytes: int = 0
    search: SearchSnapshot | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PoolSnapshot:
        search = data["search"]
        if search is not None:
            ended = tuple(TrialSnapshot(**trial) for trial in search["ended"])
            search = SearchSnapshot(**{**search, "ended": ended})
        devices = tuple(DeviceSnapshot(**device) for device in data["devices"])
        trials = tuple(TrialSnapshot(**trial) for trial in data["trials"])
        return cls(**{**data, "devices": devices, "trials": trials, "search": search})
