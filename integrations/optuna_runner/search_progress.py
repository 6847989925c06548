"""Counts what has become of a search's trials: for the live view, the study's attributes, and the closing summary."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hydra_tune.config import format_bytes
from hydra_tune.integrations.optuna_runner.live_trials import LiveTrials
from hydra_tune.integrations.optuna_runner.outcome import Outcome
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.preview.unmeasured import least_bytes
from hydra_tune.show.live_table import MOST_ROWS, format_seconds
from hydra_tune.show.snapshot import PoolSnapshot, SearchSnapshot, TrialSnapshot

if TYPE_CHECKING:
    import optuna

    from hydra_tune.planning.known_steps import RefusedStep
    from hydra_tune.preview.rehearsal import Script

_MOST_REHEARSED = 8  # refused first steps, after a search; each is kept with its inputs until then
_REHEARSALS_S = 15.0  # the last one begins before

_CAUSES = {
    "pilot": "measuring first steps",
    "memory": "waiting for memory",
    "no ready task": "without a ready task",
    "launch": "waiting for the host",
}


@dataclass
class _Lacking:
    """Trials that did not fit for want of the same memory. `need_bytes` would hold those whose need is `known`.
    `unmeasured`: how many were refused in the same first step, for each, and what a rehearsal of it needs."""

    number: int = 0
    known: int = 0
    need_bytes: int = 0
    unmeasured: dict[RefusedStep, tuple[int, Script]] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.number += 1
        if outcome.need_bytes is not None:
            self.know(1, outcome.need_bytes)
        elif outcome.step is not None:
            number, script = self.unmeasured.get(outcome.step, (0, outcome.script))
            if script is not None and (number or len(self.unmeasured) < _MOST_REHEARSED):
                self.unmeasured[outcome.step] = number + 1, script

    def know(self, number: int, need_bytes: int) -> None:
        self.known += number
        self.need_bytes = max(self.need_bytes, need_bytes)


class SearchProgress:
    """One search's. Trials' threads tell how they end."""

    def __init__(self, pool: ShardPool, study: optuna.Study, running: LiveTrials, n_trials: int | None) -> None:
        self._pool = pool
        self._study = study
        self.running = running
        self._n_trials = n_trials
        self._lock = threading.Lock()
        self._start_s = time.monotonic()
        self._before = pool.snapshot()  # devices may have worked for others
        self._ended: Counter[str] = Counter()
        self._last: deque[TrialSnapshot] = deque(maxlen=MOST_ROWS)
        self._lacking: dict[str, _Lacking] = {}  # by the argument of `ShardPool`
        self._best: tuple[float, int] | None = None  # value, and the trial's number

    # ---- what it is told ----

    def trial_ends(self, number: int, outcome: Outcome | None, error: BaseException | None) -> None:
        """A trial has ended, with what its objective raised, or `TrialPruned`; `outcome` is None if it never began."""
        state, value = self._state(outcome, error), None if outcome is None or error is not None else outcome.value
        value = float(value) if isinstance(value, (int, float)) else None
        with self._lock:
            self._ended[state] += 1
            self._last.append(TrialSnapshot(f"trial {number}", state, value=value))
            if state == "did not fit" and outcome is not None:
                self._lacking.setdefault(outcome.argument, _Lacking()).add(outcome)
            if state == "complete" and value is not None and self._is_better(value):
                self._best = value, number

    def _state(self, outcome: Outcome | None, error: BaseException | None) -> str:
        if outcome is not None and outcome.did_not_fit:
            return "did not fit"
        if error is None:
            return "complete"
        import optuna

        return "pruned" if isinstance(error, optuna.TrialPruned) else "failed"

    def _is_better(self, value: float) -> bool:
        import optuna

        if self._best is None or len(self._study.directions) > 1:
            return len(self._study.directions) == 1
        larger = self._study.direction is optuna.study.StudyDirection.MAXIMIZE
        return value > self._best[0] if larger else value < self._best[0]

    # ---- what it tells ----

    def snapshot(self) -> PoolSnapshot:
        """The pool's, with this search, and with its trials that have prepared no model yet."""
        pool, running = self._pool.snapshot(), self.running.numbers
        prepared = {trial.name for trial in pool.trials}
        waiting = [f"trial {number}" for number in running if f"trial {number}" not in prepared]
        early = tuple(TrialSnapshot(name, "before prepare") for name in waiting)
        return replace(pool, trials=pool.trials + early, search=self.search())

    def search(self) -> SearchSnapshot:
        running = len(self.running.numbers)
        with self._lock:
            best, best_trial = self._best or (None, None)
            return SearchSnapshot(
                name=self._study.study_name,
                complete=self._ended["complete"],
                pruned=self._ended["pruned"],
                did_not_fit=self._ended["did not fit"],
                failed=self._ended["failed"],
                running=running,
                n_trials=self._n_trials,
                best=best,
                best_trial=best_trial,
                elapsed_s=time.monotonic() - self._start_s,
                ended=tuple(self._last),
            )

    def attributes(self) -> dict[str, Any]:
        """Of the study: flat, so that a dashboard shows and sorts them; None for what is not known yet."""
        search, devices = self.search(), self._pool.snapshot().devices
        busy, stalled = self._shares()
        return {
            "hydra/devices": ", ".join(device.name for device in devices),
            "hydra/budget_mib": _mib(sum(device.budget_bytes for device in devices)),
            "hydra/peak_mib": _mib(sum(device.peak_bytes for device in devices)) or None,
            "hydra/busy_pct": round(100 * busy, 1) or None,
            "hydra/stalled_pct": round(100 * sum(stalled.values()), 1),
            "hydra/did_not_fit": search.did_not_fit,
        }

    def measure_refused(self) -> None:
        """Rehearse first steps that found no room, for the summary: after the search, if the pool has no other trial,
        since a rehearsal uses the process's random state."""
        until_s = time.monotonic() + _REHEARSALS_S
        for lacking in self._lacking.values():
            while lacking.unmeasured and not self._pool.snapshot().trials:
                _, (number, script) = lacking.unmeasured.popitem()
                if (need_bytes := least_bytes(script, until_s)) is not None:
                    lacking.know(number, need_bytes)

    def summary(self) -> str:
        """What has come of the search, and how its devices spent the time, in a few lines."""
        search = self.search()
        counts = [(search.complete, "complete"), (search.pruned, "pruned"), (search.failed, "failed")]
        told = ", ".join(f"{number} {word}" for number, word in counts if number)
        trials = "1 trial" if search.done == 1 else f"{search.done} trials"
        lines = [f"{trials} in {format_seconds(search.elapsed_s)}: {told or 'none complete'}"]
        if search.best is not None:
            lines[0] += f"; best {search.best:.6g} (trial {search.best_trial})"
        lines += [self._of_lacking(argument, lacking) for argument, lacking in sorted(self._lacking.items())]
        busy, stalled = self._shares()
        causes = [*sorted(stalled.items(), key=lambda item: -item[1])]
        causes.append(("without trials", 1.0 - busy - sum(stalled.values())))
        waits = ", ".join(f"{share:.0%} {_CAUSES.get(cause, cause)}" for cause, share in causes if share >= 0.005)
        lines.append(f"devices computed {busy:.0%} of the time" + (f"; else: {waits}" if waits else ""))
        if self._pool.record is not None:
            lines.append(f"report: hydra-tune report {self._pool.record}")
        return "\n".join(lines)

    def _of_lacking(self, argument: str, lacking: _Lacking) -> str:
        of = "host memory" if argument == "host_memory" else "device memory"
        enough = f'{argument}="{format_bytes(lacking.need_bytes, up=True)}" would hold'
        if lacking.known == lacking.number:
            told = f"{enough} each"
        elif lacking.known:
            told = f"{enough} {lacking.known}, and hydra_tune.plan says what would hold the others"
        else:
            told = "hydra_tune.plan says what would hold each"
        return f"{lacking.number} did not fit {of}; {told}. Raise {argument}=, lower the batch size, or split modules."

    def _shares(self) -> tuple[float, dict[str, float]]:
        """Of the devices' time since the search began: computing, and stalled by cause."""
        now, before = self._pool.snapshot(), self._before
        whole_s = (now.elapsed_s - before.elapsed_s) * len(now.devices) or 1.0
        busy_s = 0.0
        stalled_s: defaultdict[str, float] = defaultdict(float)
        for late, early in zip(now.devices, before.devices, strict=True):
            busy_s += late.busy_s - early.busy_s
            for cause, seconds in late.stalled_by.items():
                stalled_s[cause] += seconds - early.stalled_by.get(cause, 0.0)
        return busy_s / whole_s, {cause: seconds / whole_s for cause, seconds in stalled_s.items()}


def _mib(num_bytes: int) -> float:
    return round(num_bytes / 2**20, 2)
