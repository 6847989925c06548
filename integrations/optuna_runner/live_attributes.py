"""Writes figures of running trials, and of the whole pool, into the study's storage, where dashboards look.

Keys are flat (``hydra/state``, ``hydra/step_ms``), so that a dashboard shows and sorts each; what is not known yet is
not written. A storage may be slow, and trials write to it, too. So writing takes at most 0.4% of one core and a
twentieth of the time; half of it is for the figures of trials' first steps, which come as soon as that allows. A
storage that fails costs the live figures alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra_tune.integrations.frameworks.trial_attributes import figures_of
from hydra_tune.integrations.optuna_runner.search_progress import SearchProgress
from hydra_tune.show.control_socket import control_server
from hydra_tune.show.live_view import LiveView
from hydra_tune.show.snapshot import PoolSnapshot

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger("hydra_tune")
FIRST_S, LEAST_PAUSE_S = 0.25, 2.0
MOST_OF_A_CORE, MOST_OF_TIME = 0.004, 0.05


class _Allowance:
    """A share of one core's time from now on. It may be overdrawn once, then it must come in first."""

    def __init__(self, share: float) -> None:
        self._share, self._spent_s, self._start_s = share, 0.0, time.monotonic()

    @property
    def is_left(self) -> bool:
        return self._spent_s <= self._share * (time.monotonic() - self._start_s)

    def spend(self, run: Callable[[], None]) -> None:
        start_s = time.thread_time()
        try:
            run()
        finally:
            self._spent_s += time.thread_time() - start_s


@dataclass(eq=False)
class _ShownSearch:
    """What `hydra-tune top` shows and commands."""

    snapshot: Callable[[], PoolSnapshot]
    command: Callable[[str, str], str]


@contextmanager
def shown(
    progress: SearchProgress, study: optuna.Study, wanted: bool | None, command: Callable[[str, str], str]
) -> Iterator[None]:
    """While it lasts, the search is shown in a view, in the study's attributes and by `hydra-tune top`. At its end a
    summary is logged."""
    attributes, search = LiveAttributes(progress, study), _ShownSearch(progress.snapshot, command)
    control_server.show(search)
    try:
        with attributes, LiveView(progress.snapshot, wanted):
            yield
        progress.measure_refused()
    finally:
        control_server.hide(search)
        attributes.write_last()
        log = logger.warning if progress.search().did_not_fit else logger.info
        log("%s", progress.summary())


class LiveAttributes:
    """One search's, written by a thread of its own while it is entered."""

    def __init__(self, progress: SearchProgress, study: optuna.Study) -> None:
        self._progress = progress
        self._study = study
        self._ended = threading.Event()
        self._written: dict[Any, dict[str, Any]] = {}  # what a trial has by now, by its id; the study's under None
        self._stepping: set[str] = set()  # names of live trials whose first step's figures were written
        self._thread = threading.Thread(target=self._run, name="hydra_tune attributes", daemon=True)

    def __enter__(self) -> LiveAttributes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        first, every = _Allowance(MOST_OF_A_CORE / 2), _Allowance(MOST_OF_A_CORE / 2)
        next_s = 0.0
        while not self._ended.wait(FIRST_S):
            if first.is_left and not self._try(first.spend, self._write_first):
                break
            start_s = time.monotonic()
            if start_s < next_s or not every.is_left:
                continue
            if not self._try(every.spend, self._write_all):
                break
            next_s = start_s + max(LEAST_PAUSE_S, (time.monotonic() - start_s) / MOST_OF_TIME)
        self._study._storage.remove_session()  # this thread's

    def write_last(self) -> None:
        """Of the study; a trial's own thread writes its last figures."""
        self._try(self._write_study)
        self._study._storage.remove_session()

    def _try(self, write: Callable[..., None], *given: Any) -> bool:
        try:
            write(*given)
            return True
        except Exception as error:
            logger.warning("live figures are no longer written to the study's storage (%s)", error)
            return False

    def _write_first(self) -> None:
        contexts = [context for _, context in self._progress.running.all]
        stepping = {trial.name for context in contexts for trial in list(context.trials) if trial.summary["steps"]}
        self._stepping &= stepping
        if new := stepping - self._stepping:
            self._stepping |= self._write_trials(new)

    def _write_all(self) -> None:
        self._write_trials(None)
        self._write_study()

    def _write_trials(self, names: set[str] | None) -> set[str]:
        """Those with these names, or all. Returns the names of those whose steps are known: between a first step and
        the plan for the next one they are not."""
        import optuna

        running, stepping = self._progress.running.all, set[str]()
        for trial, context in running:
            trials = [each for each in context.trials if not each.ended and (names is None or each.name in names)]
            if not trials:
                continue
            try:
                figures = figures_of(trials)
            except KeyError:  # it has just ended
                continue
            if names is not None and not figures["hydra/steps"]:
                continue
            try:
                with self._progress.running.kept(trial.number) as runs:  # once it has ended its own thread writes
                    for key, value in self._changed(trial._trial_id, figures).items() if runs else ():
                        self._study._storage.set_trial_user_attr(trial._trial_id, key, value)
            except optuna.exceptions.UpdateFinishedTrialError:
                continue
            if figures["hydra/steps"]:
                stepping.update(each.name for each in trials)
        for gone in self._written.keys() - {None, *(trial._trial_id for trial, _ in running)}:
            del self._written[gone]
        return stepping

    def _write_study(self) -> None:
        for key, value in self._changed(None, self._progress.attributes()).items():
            self._study.set_user_attr(key, value)

    def _changed(self, whose: Any, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Those that are known, and have other values than were written last."""
        written = self._written.setdefault(whose, {})
        changed = {key: value for key, value in figures.items() if value not in (None, written.get(key))}
        written.update(changed)
        return changed
