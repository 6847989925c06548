"""Runs attempts at the trials of one search, each from its random state to its last byte.

with attempts.attempt(trial) as outcome:      the trial's random state, checkpoint and report; what prunes it ends here
    outcome.value = objective(trial)
value_to_tell(outcome, study)                 the value, or why it is pruned

An error holds its frames, and these hold the trial's tensors. So an error that prunes the trial becomes a text in the
outcome, and is raised to Optuna only after every byte was given back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from hydra_tune.errors import BudgetError, PoolClosedError, ResumeError, TrialStopped
from hydra_tune.integrations.frameworks.current_trial import running
from hydra_tune.integrations.frameworks.trial_attributes import INTERRUPTED, RESUMED
from hydra_tune.integrations.optuna_runner.concurrency import Places
from hydra_tune.integrations.optuna_runner.live_trials import LiveTrials
from hydra_tune.integrations.optuna_runner.outcome import Outcome
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.preview.unmeasured import script_of
from hydra_tune.schedule.events import Reported
from hydra_tune.trials.context import Context, trial_context

if TYPE_CHECKING:
    import optuna

    from hydra_tune.integrations.optuna_runner.search_checkpoints import SearchCheckpoints

STAGGER_S = 0.1  # at most, that a trial waits for the model of the one before it


class Attempts:
    """At the trials of one study, in the threads that call it.

    Args:
        places: how many live at a time, for a warning.
        running: hears of each that begins and ends.
        caught: errors that `Study.optimize` is to catch; they pass, though they may be for want of memory.
        checkpoints: None for a search without.
    """

    _latest: threading.Event | None = None  # of the trial that has started last, of all searches: it is prepared

    def __init__(
        self,
        pool: ShardPool,
        study: optuna.Study,
        places: Places,
        running: LiveTrials,
        caught: tuple[type[Exception], ...],
        checkpoints: SearchCheckpoints | None,
    ) -> None:
        self._pool = pool
        self._study = study
        self._places = places
        self._running = running
        self._caught = caught
        self._checkpoints = checkpoints
        self._first_report = threading.Lock()  # taken for good by the first trial that reports

    @contextmanager
    def attempt(self, trial: optuna.Trial, *, alone: bool = False) -> Iterator[Outcome]:
        """Around an objective. Errors that prune its trial end here, when it has given back every byte; others pass.

        Raises:
            KeyboardInterrupt: the search was interrupted.
            PoolClosedError: the pool was closed meanwhile.
            ResumeError: the checkpoint that the trial goes on from is another objective's.
        """
        outcome = Outcome(trial)
        before = None if self._checkpoints is None else self._checkpoints.as_it_was(trial)
        try:
            with self._in_context(outcome, before, alone=alone):
                yield outcome
        except TrialStopped as stop:
            if not outcome.context.stop.reason:
                raise PoolClosedError(f"trial {trial.number} was stopped: {stop}.") from None
            if self._running.interrupted:
                self._note_interruption(trial)
                raise KeyboardInterrupt(f"trial {trial.number} was stopped: {stop}") from None
            outcome.reason = str(stop)
        except KeyboardInterrupt:
            self._note_interruption(trial)
            raise
        except ResumeError:
            self._note_interruption(trial)  # it may go on yet
            raise
        except BudgetError as error:
            if outcome.told:
                raise
            outcome.reason, outcome.lack, outcome.did_not_fit = str(error), error.lack, True
            outcome.need_bytes, outcome.argument = error.need_bytes, error.argument
        except Exception as error:
            prunes = outcome.prepared and not outcome.told and isinstance(error, torch.OutOfMemoryError)
            if not prunes or isinstance(error, self._caught):
                outcome.note_constraint()
                raise
            outcome.reason, outcome.lack = f"it ran out of memory: {error}", 1.0
            outcome.ran_out_of_memory = outcome.did_not_fit = True

    @contextmanager
    def _in_context(self, outcome: Outcome, before: optuna.trial.FrozenTrial | None, *, alone: bool) -> Iterator[None]:
        """The trial's random state, the checkpoint that it goes on from, and a report that is noted."""
        trial, checkpoints = outcome.trial, self._checkpoints
        seed = None if checkpoints is None or before is None else checkpoints.first_of(before)
        with running(trial), trial_context(self._pool, trial.number, seed, alone=alone) as context:
            outcome.context = context
            self._running.add(trial, context)
            try:
                if checkpoints is not None and before is not None:
                    context.resumption = checkpoints.resumption_of(before, context)
                known = () if before is None else before.intermediate_values
                trial.report = self._noted(trial.report, context, known)
                self._await_start(context)
                yield
            except BudgetError as error:
                if error.step is not None:  # whose model and inputs are alive until the context ends
                    for live in context.trials:
                        live.stop_counting()
                    outcome.step, outcome.script = error.step, script_of(error.step)
                raise
            finally:
                vars(trial).pop("report", None)  # or the collector has to come for every trial
                if context.resumption is not None and context.resumption.began_at:
                    trial.set_user_attr(RESUMED, context.resumption.began_at)
                self._running.remove(trial.number)
                outcome.note_figures()

    def _await_start(self, context: Context) -> None:
        """One after another: threads that build models at once spend their time on handing the interpreter on."""
        before, Attempts._latest = Attempts._latest, context.begun
        if before is not None:
            before.wait(STAGGER_S)

    def _noted(self, report: Callable[..., None], context: Context, known: Container[int]) -> Callable[..., None]:
        """`trial.report`, of which the pool's policy learns too, and where an objective that trains nothing may stop.
        What a trial that goes on has reported before is `known`."""

        def report_and_note(value: float, step: int) -> None:
            context.stop.check_between_steps()
            self._warn_at_first_report()
            if step not in known:
                report(value, step)
            if context.resumption is not None:
                context.resumption.note()
            for live in context.trials:
                if not live.ended:
                    live.events.tell(Reported(live.id, float(value), self._maximizes))

        return report_and_note

    @cached_property
    def _maximizes(self) -> bool:
        import optuna

        return self._study.directions[0] is optuna.study.StudyDirection.MAXIMIZE

    def _warn_at_first_report(self) -> None:
        """A study has a pruner, whether its objective reports or not."""
        if self._first_report.acquire(blocking=False):
            from hydra_tune.integrations.optuna_runner.search_warnings import warn_of_pruner

            warn_of_pruner(self._study, self._places.number)

    def _note_interruption(self, trial: optuna.Trial) -> None:
        """By which another may continue it."""
        if self._checkpoints is not None:
            trial.set_user_attr(INTERRUPTED, True)
