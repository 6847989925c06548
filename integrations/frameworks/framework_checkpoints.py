"""A runner's `checkpoint_dir` for frameworks that write checkpoints of their own.

Hugging Face and Lightning save and restore a training themselves, down to their loaders and schedules; a checkpoint of
ours beside theirs would be of another step. So only theirs is written. The trial's folder says which is the newest
complete one, of which of its trainings, and from there the trial goes on after its process has died.

<checkpoint_dir>/<study>/trial-00003/framework.json     the path of the framework's newest complete checkpoint
"""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

from hydra_tune.checkpoints.interval import CheckpointTimer
from hydra_tune.checkpoints.resumption import Resumption
from hydra_tune.integrations.frameworks.current_trial import current_trial
from hydra_tune.integrations.frameworks.trial_attributes import RESUMED
from hydra_tune.trials.context import current_context

_NAME = "framework.json"
_trainings: weakref.WeakKeyDictionary[Resumption, int] = weakref.WeakKeyDictionary()  # so many has a trial begun


class FrameworkCheckpoints:
    """Of one training of the running trial: its first, or the one of that `number`. `folder` is the trial's."""

    def __init__(self, resumption: Resumption, folder: Path) -> None:
        _trainings[resumption] = self.number = _trainings.get(resumption, 0) + 1
        self.folder = folder
        self._resumption = resumption
        self._timer = CheckpointTimer(resumption.every)
        resumption.leave_to_framework(goes_on=self.newest_of_training() is not None)

    @classmethod
    def of_running_trial(cls) -> FrameworkCheckpoints | None:
        """None where no runner keeps checkpoints."""
        resumption = current_context().resumption
        folder = None if resumption is None else resumption.folder
        return None if resumption is None or folder is None else cls(resumption, folder)

    def newest(self) -> str | None:
        """From which the trial goes on: its own, or that of one that it continues."""
        for folder in self._resumption.folders:
            path = _read(folder).get("path", "")
            if path and Path(path).exists():
                return str(path)
        return None

    def newest_of_training(self) -> str | None:
        """`newest`, unless it is of another training of the trial."""
        return self.newest() if self._training_of_newest == self.number else None

    @property
    def is_behind(self) -> bool:
        """Whether the newest one is of a later training, to which this one leads once more."""
        return self._training_of_newest > self.number

    @property
    def _training_of_newest(self) -> int:
        notes = (note for folder in self._resumption.folders if (note := _read(folder)))
        return int(next(notes, {}).get("training", 0))

    def goes_on_from(self, step: int) -> None:
        trial = current_trial()
        if trial is not None and trial.optuna is not None:
            trial.optuna.set_user_attr(RESUMED, step)
        self._timer.last_step = step

    def is_due(self, step: int) -> bool:
        """After so many mini-batches of this training, if the trial does not have a later one's already."""
        return self._timer.is_due(step) and not self.is_behind

    def note(self, path: str | Path, step: int, *, was_due: bool) -> None:
        """The framework has written one, all of it. The one before, if it was written only because it was due, goes."""
        self._timer.restart(step)
        before = _read(self.folder)
        note = {"path": str(Path(path).absolute()), "step": step, "was_due": was_due, "training": self.number}
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / (_NAME + ".unfinished")
        unfinished.write_text(json.dumps(note))
        unfinished.replace(self.folder / _NAME)
        (self.folder / "deaths").unlink(missing_ok=True)  # it has come further
        if before.get("was_due") and before["path"] != note["path"]:
            _remove(before["path"])

    def end(self) -> None:
        """The training is over: what was written only because it was due is of no use any more."""
        note = _read(self.folder)
        if note.get("was_due") and note.get("training") == self.number:
            (self.folder / _NAME).unlink()
            _remove(note["path"])


def _read(folder: Path) -> dict[str, Any]:
    note = folder / _NAME
    return dict(json.loads(note.read_text())) if note.exists() else {}


def _remove(path: str | Path) -> None:
    """A folder, or a file."""
    if Path(path).is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        Path(path).unlink(missing_ok=True)


def trial_folder() -> str | None:
    """The name of a folder of the running trial's own, as Hugging Face's searches name it; None outside of a search.
    A trial that continues others writes where the first of them did."""
    trial = current_trial()
    if trial is None:
        return None
    if trial.optuna is None:
        return f"run-{_ray_trial_id()}"
    resumption = current_context().resumption
    folders = [] if resumption is None else resumption.folders
    return f"run-{int(folders[-1].name.partition('-')[2]) if folders else trial.optuna.number}"


def _ray_trial_id() -> str:
    from ray import tune

    return str(tune.get_context().get_trial_id())
