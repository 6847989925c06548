"""The checkpoints of one search: where a trial leaves its own, from which others it goes on, and clones of a live one.

Only a search with a `checkpoint_dir` has this. Which process runs which trial is decided in `recovery`.
"""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_tune.checkpoints.contents import write_weights
from hydra_tune.checkpoints.interval import Interval
from hydra_tune.checkpoints.resumption import Resumption
from hydra_tune.devices.meter import CountingPaused
from hydra_tune.errors import ConfigError
from hydra_tune.integrations.frameworks.trial_attributes import CLONE, CLONED
from hydra_tune.integrations.optuna_runner.recovery import StudyFolder, predecessors
from hydra_tune.trials.context import Context

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger("hydra_tune")


class SearchCheckpoints:
    """Of a study's trials, for the process that searches."""

    def __init__(self, checkpoint_dir: Path, study: optuna.Study, every: Interval) -> None:
        self.folder = StudyFolder(checkpoint_dir, study)
        self._study = study
        self._every = every

    def as_it_was(self, trial: optuna.Trial) -> optuna.trial.FrozenTrial:
        """In the storage, before its objective is called: a trial that goes on has a past there."""
        import optuna

        running = self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
        return next(each for each in running if each.number == trial.number)

    def first_of(self, before: optuna.trial.FrozenTrial) -> int | None:
        """The first of the trials that this one continues, whose random state it has. None if it continues none."""
        return next(iter(predecessors(before)), None)

    def resumption_of(self, before: optuna.trial.FrozenTrial, context: Context) -> Resumption:
        """From its own checkpoint or one of those that it continues; with a clone's weights."""
        assert context.random_state is not None
        clone = before.user_attrs.get(CLONE)
        return Resumption(
            self.folder.of(before.number),
            [self.folder.of(number) for number in reversed(predecessors(before))],
            self._every,
            context.random_state,
            context.name or "",
            self.folder.clones(clone) if clone else None,
        )

    def clone(self, number: int, context: Context, changed: dict[str, Any]) -> None:
        """Enqueue a trial with the parameters of the live one of this number, but those `changed`, that starts from its
        weights as they are when it next is between two steps.

        Raises:
            ConfigError: the study could not give the clone these parameters.
        """
        frozen = next(t for t in self._study.get_trials(deepcopy=False) if t.number == number)
        params = frozen.params
        if unknown := [name for name in changed if name not in params]:
            raise ConfigError(
                f"a clone changes parameters of its trial, {sorted(params)}; {unknown} are not among them."
            )
        for name, value in changed.items():
            _refuse_outside(name, value, frozen.distributions[name])

        def write_and_enqueue() -> None:
            donor, name = context.trials[-1], uuid.uuid4().hex
            try:
                with CountingPaused():
                    write_weights(self.folder.clones(name), donor.model)
                attrs = {CLONED: number, CLONE: name}
                self._study.enqueue_trial({**params, **changed}, user_attrs=attrs)
            except Exception as error:  # a full disk, a storage out of reach: the trial itself goes on
                logger.warning("trial %d: no clone could be made of it (%s)", number, error)

        context.stop.asked.append(write_and_enqueue)


def _refuse_outside(name: str, value: Any, distribution: Any) -> None:
    """Optuna would only find out when the trial asks."""
    choices = getattr(distribution, "choices", None)
    if choices is not None:
        inside = value in choices
    else:
        inside = isinstance(value, (int, float)) and distribution.low <= value <= distribution.high
    if not inside:
        raise ConfigError(
            f"a clone's parameters lie where its trial's do, but {name} is {value!r}, not in {distribution}."
        )
