"""One search: asks the study for a trial when there is a place for one, and tells it what came of each.

Optuna's `Study.optimize` asks for the next trial as soon as a thread is free. A study that is asked too early knows
less, and more trials live than host memory holds. So a search runs the study's own `optimize` on a stand-in whose `ask`
waits for a place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from hydra_tune.integrations.frameworks import guards
from hydra_tune.integrations.optuna_runner.attempt import Attempts
from hydra_tune.integrations.optuna_runner.concurrency import Places
from hydra_tune.integrations.optuna_runner.live_trials import LiveTrials
from hydra_tune.integrations.optuna_runner.outcome import Outcome, value_to_tell
from hydra_tune.integrations.optuna_runner.search_progress import SearchProgress
from hydra_tune.pool.shard_pool import ShardPool

if TYPE_CHECKING:
    import optuna

    from hydra_tune.integrations.optuna_runner.search_checkpoints import SearchCheckpoints

    StudyCallback = Callable[[optuna.Study, optuna.trial.FrozenTrial], None]

logger = logging.getLogger("hydra_tune")
BY_HAND = "it was stopped by hand"


class Search:
    """One `optimize`, or one trial that was asked for by hand."""

    def __init__(
        self,
        pool: ShardPool,
        study: optuna.Study,
        places: Places,
        caught: tuple[type[Exception], ...] = (),
        checkpoints: SearchCheckpoints | None = None,
        n_trials: int | None = None,
    ) -> None:
        guards.install()
        self.places = places
        self.running = LiveTrials()
        self.progress = SearchProgress(pool, study, self.running, n_trials)
        self.attempts = Attempts(pool, study, places, self.running, caught, checkpoints)
        self.error: BaseException | None = None  # the first that `Study.optimize` is to raise, and may lose
        self._study = study
        self._stock_ask: Callable[..., optuna.Trial] = study.ask
        self._caught = caught
        self._checkpoints = checkpoints

    # ---- asking ----

    def asking(self) -> optuna.Study:
        """The study, by another name under which its `ask` waits for a place."""
        kind: Any = type(self._study)
        asking: Any = object.__new__(_asking_kind(kind))
        asking.__dict__ = self._study.__dict__
        asking.ask = self._ask
        return asking  # type: ignore[no-any-return]

    def _ask(self, *args: Any, **kwargs: Any) -> optuna.Trial:
        self.places.take()
        try:
            if self._checkpoints is None:
                return self._ask_for_new(*args, **kwargs)
            trial: optuna.Trial = self._checkpoints.folder.ask(partial(self._ask_for_new, *args, **kwargs))
            return trial
        except BaseException:
            self.places.give_back()
            raise

    def _ask_for_new(self, *args: Any, **kwargs: Any) -> optuna.Trial:
        trial = self._stock_ask(*args, **kwargs)
        while not self.running.begins(trial.number):
            trial = self._stock_ask(*args, **kwargs)
        return trial

    # ---- one trial ----

    def run(self, objective: Callable[[optuna.Trial], Any], trial: optuna.Trial) -> Any:
        """What the study is to be told.

        Raises:
            optuna.TrialPruned: that it is pruned.
            BaseException: of the objective, or of an interruption.
        """
        outcomes: list[Outcome] = []
        try:
            value = self._run(objective, trial, outcomes)
            self.progress.trial_ends(trial.number, outcomes[-1], None)
            return value
        except BaseException as error:
            import optuna

            self.progress.trial_ends(trial.number, outcomes[-1] if outcomes else None, error)
            if not isinstance(error, (*self._caught, optuna.TrialPruned)):
                if not self.running.interrupted:
                    self.error = self.error or error
                self.places.end()
            raise
        finally:
            self.places.trial_ends()

    def _run(
        self,
        objective: Callable[[optuna.Trial], Any],
        trial: optuna.Trial,
        outcomes: list[Outcome],
        *,
        alone: bool = False,
    ) -> Any:
        """With `alone`, for the second time: its first attempt has run out of memory where no room could be made.
        `outcomes` gets that of each attempt."""
        with self.attempts.attempt(trial, alone=alone) as outcome:
            outcomes.append(outcome)
            outcome.context.stop.check()
            outcome.value = objective(trial)
        if outcome.ran_out_of_memory and not alone:
            logger.warning("trial %d: %s It runs again, spilled and alone on its device.", trial.number, outcome.reason)
            return self._run(objective, trial, outcomes, alone=True)
        return value_to_tell(outcome, self._study)

    def clone(self, number: int, changed: dict[str, Any]) -> None:
        context = self.running.context(number)
        assert context is not None and self._checkpoints is not None
        self._checkpoints.clone(number, context, changed)

    # ---- after a trial, and after all ----

    def callbacks(self, users: Iterable[StudyCallback]) -> list[StudyCallback]:
        """Of `Study.optimize`: the users' come last, and get the study that they know."""
        study, own = self._study, [] if self._checkpoints is None else [self._checkpoints.folder.has_ended]
        if self.places.are_counted:
            own.append(lambda *_: self.places.give_back())

        def called(user: StudyCallback, trial: optuna.trial.FrozenTrial) -> None:
            try:
                user(study, trial)
            except BaseException as error:
                self.error = self.error or error
                raise

        return [*own, *(lambda _, trial, user=user: called(user, trial) for user in users)]

    def refuse_untold(self) -> None:
        """At the end of a search whose trials ran together, where Optuna drops errors of the last ones.

        Raises:
            RuntimeError: some are running still, for the study.
        """
        import optuna

        running = self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
        untold = [trial.number for trial in running if self.running.has_begun(trial.number)]
        if untold:
            raise RuntimeError(
                f"Optuna could not take what the objective gave for trials {untold}, which are still running for the "
                "study: an objective returns a number, or one for each direction. Optuna's log says more."
            )

    def close(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.folder.close()
            self._checkpoints.folder.tidy(self._study)


@cache
def _asking_kind(kind: Any) -> Any:
    """What a search puts in place of its study, with the study's own attributes: several threads may search one study
    at once, so that none may change it."""
    methods = {
        "__slots__": ("ask",),
        "__reduce__": lambda study: (object.__new__, (kind,), study.__getstate__()),  # a copy is plain
    }
    return type("Study", (kind,), methods)
