"""Which process runs which trial of a study, and what becomes of a trial whose process has died.

A storage says that a trial runs, but not whether its process lives. A trial of a dead process would run for ever for
the study, and its work would be lost. So each process holds a lock on a file of each trial that it runs, which the
system takes back however the process ends. The next search gives such trials back to the study.

<checkpoint_dir>/lock                 held while a study's folder is named
                 <study>/asking       held by all who ask for a trial; alone, by who looks for the dead
                        /asks/<id>    there while a process is between asking for a trial and claiming it
                        /trial-00003/claim                  locked by the process that runs it
                                    /000-000000120/...      its checkpoints
"""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from optuna.trial import FrozenTrial, TrialState

from hydra_tune.checkpoints.checkpoint_folder import CheckpointFolder
from hydra_tune.errors import ConfigError
from hydra_tune.integrations.frameworks.trial_attributes import CLONE, CONTINUES, INTERRUPTED
from hydra_tune.process.file_lock import FileLock, locked

if TYPE_CHECKING:
    from optuna.study import Study

logger = logging.getLogger("hydra_tune")
FOLDER = "hydra_tune: checkpoints"  # of a study's `user_attrs`
MOST_DEATHS = 10  # of one trial's processes, without a new checkpoint
_CLOCK_S = 1.0  # between a file's time and a storage's


class StudyFolder:
    """The checkpoints of one study's trials, for the processes that share `checkpoint_dir`."""

    def __init__(self, checkpoint_dir: Path, study: Study) -> None:
        try:
            checkpoint_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"checkpoint_dir is a folder that can be made, got {str(checkpoint_dir)!r}: {error}."
            ) from None
        with locked(checkpoint_dir / "lock"):
            if FOLDER not in study.user_attrs:
                readable = re.sub(r"[^\w.-]+", "_", study.study_name)[:60]
                study.set_user_attr(FOLDER, f"{readable}-{uuid.uuid4().hex[:8]}")
            self.path = checkpoint_dir / study.user_attrs[FOLDER]
        (self.path / "asks").mkdir(parents=True, exist_ok=True)
        self._claims: dict[int, FileLock] = {}

    def of(self, number: int) -> CheckpointFolder:
        return CheckpointFolder(self.path / f"trial-{number:05d}")

    def clones(self, name: str) -> CheckpointFolder:
        """Weights that a new trial starts from."""
        return CheckpointFolder(self.path / "clones" / name)

    # ---- beginning and ending trials ----

    def ask(self, ask: Callable[[], optuna.Trial]) -> optuna.Trial:
        """A trial that is claimed by this process. Dying in between leaves a file that says so."""
        note = self.path / "asks" / uuid.uuid4().hex
        with locked(self.path / "asking", shared=True):
            note.touch()
            trial = ask()
            while not self._claim(trial.number):  # on SQLite two may get the same waiting trial
                trial = ask()
            note.unlink()
        return trial

    def _claim(self, number: int) -> bool:
        """Whether it is this caller's now, and nobody else's."""
        folder = self.of(number).path
        folder.mkdir(exist_ok=True)
        lock = FileLock(folder / "claim")
        if not lock.try_take():
            lock.close()
            return False
        self._claims[number] = lock
        return True

    def has_ended(self, _: Study, trial: FrozenTrial) -> None:
        """A callback of `Study.optimize`: what nobody will go on from is removed."""
        self._unclaim(trial.number)
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
            for number in (trial.number, *predecessors(trial)):
                shutil.rmtree(self.of(number).path, ignore_errors=True)
            if CLONE in trial.user_attrs:
                shutil.rmtree(self.clones(trial.user_attrs[CLONE]).path, ignore_errors=True)

    def _unclaim(self, number: int) -> None:
        lock = self._claims.pop(number, None)
        if lock is not None:
            lock.close()

    def close(self) -> None:
        """No trial is this process's any more."""
        for number in list(self._claims):
            self._unclaim(number)

    def tidy(self, study: Study) -> None:
        """Remove the checkpoints that nobody will go on from."""
        with locked(self.path / "asking"):
            self._remove_what_is_over(study)

    # ---- after a process has died ----

    def recover(self, study: Study) -> None:
        """Trials of processes that died wait again, under their number; those that were interrupted, as a retry."""
        with locked(self.path / "asking"):
            asks = list((self.path / "asks").iterdir())
            asked_s = min((note.stat().st_mtime for note in asks), default=None)
            trials = study.get_trials(deepcopy=False)
            for trial in trials:
                if trial.state is TrialState.RUNNING and self._is_dead(trial, asked_s):
                    if self._has_died_often(trial.number):
                        _give_up(study, trial)
                    else:
                        _give_back(study, trial)
                elif trial.state is TrialState.RUNNING and not self.of(trial.number).path.is_dir():
                    logger.warning(
                        "trial %d runs, but has left nothing in %s: it is left alone", trial.number, self.path
                    )
            continued = {number for trial in trials for number in predecessors(trial)}
            for trial in trials:
                if _is_interrupted(trial) and trial.number not in continued and self.of(trial.number).path.is_dir():
                    _enqueue_again(study, trial)
            for note in asks:
                note.unlink()
            self._remove_what_is_over(study)

    def _is_dead(self, trial: FrozenTrial, asked_s: float | None) -> bool:
        """Whether the process that ran it is."""
        folder = self.of(trial.number).path
        if not folder.is_dir():  # another's, without a folder; or killed before it could make one
            if trial.params or trial.intermediate_values or trial.datetime_start is None or asked_s is None:
                return False
            return trial.datetime_start.timestamp() > asked_s - _CLOCK_S
        lock = FileLock(folder / "claim")
        try:
            return bool(lock.try_take())
        finally:
            lock.close()

    def _has_died_often(self, number: int) -> bool:
        """At the same place: a trial that takes its process with it would do so for ever."""
        note, place = self.of(number).path / "deaths", self.of(number).last_position
        before, times = note.read_text().split() if note.exists() else (place, "0")
        deaths = int(times) + 1 if before == place else 1
        note.parent.mkdir(exist_ok=True)
        unfinished = note.with_name("deaths-unfinished")  # this process may be killed, too
        unfinished.write_text(f"{place} {deaths}")
        unfinished.replace(note)
        return deaths >= MOST_DEATHS

    def _remove_what_is_over(self, study: Study) -> None:
        trials = study.get_trials(deepcopy=False)
        continued = {number for trial in trials for number in predecessors(trial)}
        open_trials = [trial for trial in trials if not trial.state.is_finished()]
        open_trials += [trial for trial in trials if _is_interrupted(trial) and trial.number not in continued]
        needed = {number for trial in open_trials for number in (trial.number, *predecessors(trial))}
        for trial in trials:
            if trial.number not in needed:
                shutil.rmtree(self.of(trial.number).path, ignore_errors=True)


def predecessors(trial: FrozenTrial) -> Sequence[int]:
    """The trials that it continues, the first first: of ours, or of Optuna's callback for stale ones."""
    history: Sequence[int] = trial.user_attrs.get(CONTINUES) or trial.system_attrs.get("retry_history") or ()
    return history


def _is_interrupted(trial: FrozenTrial) -> bool:
    return trial.state is TrialState.FAIL and bool(trial.user_attrs.get(INTERRUPTED))


def _give_back(study: Study, trial: FrozenTrial) -> None:
    """To the study's queue, from which the next process takes it."""
    storage = study._storage  # no public way leads back to waiting
    try:
        interval = getattr(storage, "get_heartbeat_interval", lambda: None)()
        if interval is not None:
            storage.record_heartbeat(trial._trial_id)  # type: ignore[attr-defined]  # or it is stale when it begins
        storage.set_trial_state_values(trial._trial_id, state=TrialState.WAITING)
        logger.info("trial %d: its process has died; it goes on", trial.number)
    except Exception as error:
        logger.warning("trial %d cannot go on under its number (%s)", trial.number, error)
        study.tell(trial.number, state=TrialState.FAIL)
        _enqueue_again(study, trial)


def _give_up(study: Study, trial: FrozenTrial) -> None:
    logger.warning(
        "trial %d: its process has died %d times at the same place; it has failed", trial.number, MOST_DEATHS
    )
    study.tell(trial.number, state=TrialState.FAIL)


def _enqueue_again(study: Study, trial: FrozenTrial) -> None:
    history = [*predecessors(trial), trial.number]
    attrs = {key: value for key, value in trial.user_attrs.items() if key != INTERRUPTED}
    study.add_trial(
        optuna.trial.create_trial(
            state=TrialState.WAITING,
            params=trial.params,
            distributions=trial.distributions,
            user_attrs={**attrs, CONTINUES: history},
            system_attrs=trial.system_attrs,  # what its sampler knows of it, as in Optuna's own retries
            intermediate_values=trial.intermediate_values,
        )
    )
    logger.info("trial %d was interrupted; another one goes on from it", trial.number)
