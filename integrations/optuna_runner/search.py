"""One search: asks for trials when there is a place for one, and runs each from its random state to its last byte.

with search.attempt(trial) as attempt:    the trial's surroundings; an error that prunes it ends here
    attempt.value = objective(trial)
search.end(attempt)                       what the study is told: the value, or why it is pruned
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hydra_tune.checkpoints.contents import write_weights
from hydra_tune.checkpoints.interval import Interval
from hydra_tune.checkpoints.resumption import Resumption
from hydra_tune.devices.meter import CountingPaused
from hydra_tune.errors import BudgetError, ConfigError, PoolClosedError, ResumeError, TrialStopped
from hydra_tune.integrations.frameworks import guards
from hydra_tune.integrations.frameworks.current_trial import running
from hydra_tune.integrations.optuna_runner.concurrency import Places
from hydra_tune.integrations.optuna_runner.live_trials import LiveTrials
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.schedule.events import Reported
from hydra_tune.trials.context import Context, trial_context

if TYPE_CHECKING:
    import optuna

    from hydra_tune.integrations.optuna_runner.recovery import StudyFolder

    StudyCallback = Callable[[optuna.Study, optuna.trial.FrozenTrial], None]

logger = logging.getLogger("hydra_tune")
FIGURES, PRUNED, LACK = "hydra_tune", "hydra_tune: pruned because", "hydra_tune: lacks"  # keys of `user_attrs`
INFEASIBLE = "hydra_tune: infeasible because"
BY_HAND = "it was stopped by hand"
STAGGER_S = 0.1  # at most, that a trial waits for the model of the one before it
RESUMED, CLONED = "hydra_tune: resumed at step", "hydra_tune: cloned from"
INTERRUPTED, CLONE = "hydra_tune: interrupted", "hydra_tune: starts from"


@dataclass(slots=True)
class Attempt:
    """At one trial: what its objective gave, or the `reason` for which it is pruned; `lack` as in `BudgetError`."""

    trial: optuna.Trial
    context: Context = field(init=False)
    prepared: bool = False
    value: Any = None
    reason: str = ""
    lack: float = 0.0
    ran_out_of_memory: bool = False
    told: bool = False  # to the study, which takes nothing more of it

    def note_figures(self) -> None:
        """Of the model that has made the most steps, the last of such: others were prepared to evaluate it."""
        self.prepared = bool(self.context.trials)
        if self.prepared and not self.told:
            longest = max(reversed(self.context.trials), key=lambda each: each.summary["steps"])
            self.trial.set_user_attr(FIGURES, longest.pool.figures(longest))

    def note_constraint(self) -> None:
        """For an objective that has called `memory_constraint`."""
        if self.context.notes_memory and not self.told:
            self.trial.set_constraint(LACK, self.lack)


class Search:
    """One `optimize`, or one trial that was asked for by hand: each from its random state to its last byte."""

    _latest: threading.Event | None = None  # of the trial that has started last, of all searches: it is prepared

    def __init__(
        self,
        pool: ShardPool,
        study: optuna.Study,
        places: Places,
        caught: tuple[type[Exception], ...],
    ) -> None:
        guards.install()
        self.places = places
        self.running = LiveTrials()
        self._pool = pool
        self._study = study
        self._stock_ask: Callable[..., optuna.Trial] = study.ask
        self._caught = caught
        self._folder: StudyFolder | None = None
        self._every = Interval.of(None)
        self.error: BaseException | None = None  # the first that `Study.optimize` is to raise, and may lose
        self._first_report = threading.Lock()  # taken for good by the first trial that reports

    def _warn_at_first_report(self) -> None:
        """A study has a pruner, whether its objective reports or not."""
        if self._first_report.acquire(blocking=False):
            from hydra_tune.integrations.optuna_runner.search_warnings import warn_of_pruner

            warn_of_pruner(self._study, self.places.number)

    def _warn_at_first_lack(self, context: Context) -> None:
        if not context.notes_memory and _is_first(self._study, "lack"):
            from hydra_tune.integrations.optuna_runner.search_warnings import warn_of_unlearned

            warn_of_unlearned(self._study)

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

    def keep_checkpoints(self, checkpoint_dir: Path, every: Interval) -> None:
        from hydra_tune.integrations.optuna_runner.recovery import StudyFolder

        self._every = every
        self._folder = StudyFolder(checkpoint_dir, self._study)
        self._folder.recover(self._study)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder.tidy(self._study)

    def callbacks(self, users: Iterable[StudyCallback]) -> list[StudyCallback]:
        """Of `Study.optimize`: the users' come last, and get the study that they know."""
        study, own = self._study, [] if self._folder is None else [self._folder.has_ended]
        if self.places.are_counted:
            own.append(lambda *_: self.places.give_back())

        def called(user: StudyCallback, trial: optuna.trial.FrozenTrial) -> None:
            try:
                user(study, trial)
            except BaseException as error:
                self.error = self.error or error
                raise

        return [*own, *(lambda _, trial, user=user: called(user, trial) for user in users)]

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
            if self._folder is None:
                return self._ask_for_new(*args, **kwargs)
            trial: optuna.Trial = self._folder.ask(partial(self._ask_for_new, *args, **kwargs))
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
        try:
            return self._run(objective, trial)
        except BaseException as error:
            import optuna

            if not isinstance(error, (*self._caught, optuna.TrialPruned)):
                if not self.running.interrupted:
                    self.error = self.error or error
                self.places.end()
            raise
        finally:
            self.places.trial_ends()

    def _run(self, objective: Callable[[optuna.Trial], Any], trial: optuna.Trial, *, alone: bool = False) -> Any:
        """With `alone`, for the second time: its first attempt has run out of memory where no room could be made."""
        with self.attempt(trial, alone=alone) as attempt:
            attempt.context.stop.check()
            attempt.value = objective(trial)
        if attempt.ran_out_of_memory and not alone:
            logger.warning("trial %d: %s It runs again, spilled and alone on its device.", trial.number, attempt.reason)
            return self._run(objective, trial, alone=True)
        return self.end(attempt)

    @contextmanager
    def attempt(self, trial: optuna.Trial, *, alone: bool = False) -> Iterator[Attempt]:
        """Around an objective. Errors that prune its trial end here, when it has given back every byte; others pass."""
        if logger.isEnabledFor(logging.INFO):
            logger.info("trial %d: starts", trial.number)
        attempt = Attempt(trial)
        before = None if self._folder is None else self._as_it_was(trial)
        history = () if before is None else _predecessors(before)
        try:
            seed = history[0] if history else None
            with running(trial), trial_context(self._pool, trial.number, seed, alone=alone) as context:
                attempt.context = context
                self.running.add(trial.number, context)
                try:
                    if before is not None:
                        self._go_on(trial, context, before)
                    known = () if before is None else before.intermediate_values
                    trial.report = self._noted(trial.report, context, known)  # type: ignore[method-assign]
                    self._await_start(context)
                    yield attempt
                finally:
                    vars(trial).pop("report", None)  # or the collector has to come for every trial
                    if context.resumption is not None and context.resumption.began_at:
                        trial.set_user_attr(RESUMED, context.resumption.began_at)
                    self.running.remove(trial.number)
                    attempt.note_figures()
        except TrialStopped as stop:
            logger.info("trial %d: stopped, %s", trial.number, stop)
            if not context.stop.reason:
                raise PoolClosedError(f"trial {trial.number} was stopped: {stop}.") from None
            if self.running.interrupted:
                self._note_interruption(trial)
                raise KeyboardInterrupt(f"trial {trial.number} was stopped: {stop}") from None
            attempt.reason = str(stop)
        except KeyboardInterrupt:
            self._note_interruption(trial)
            raise
        except ResumeError:
            self._note_interruption(trial)  # it may go on yet
            raise
        except BudgetError as error:
            if attempt.told:
                raise
            attempt.reason, attempt.lack = str(error), error.lack  # `end` raises outside: it shall not keep the frames
        except Exception as error:
            prunes = attempt.prepared and not attempt.told and isinstance(error, torch.OutOfMemoryError)
            if not prunes or isinstance(error, self._caught):
                logger.info("trial %d: ended by %s", trial.number, type(error).__name__)
                attempt.note_constraint()
                raise
            attempt.reason, attempt.lack = f"it ran out of memory: {error}", 1.0
            attempt.ran_out_of_memory = True

    def end(self, attempt: Attempt) -> Any:
        """What the study is to be told: the value, or the worst so far for a trial that broke its constraint.

        Raises:
            optuna.TrialPruned: with the reason.
        """
        trial = attempt.trial
        if attempt.lack:
            trial.set_user_attr(LACK, attempt.lack)
        if _has_nan(attempt.value):
            attempt.reason, attempt.lack = f"its value is {attempt.value}", 1.0
        attempt.note_constraint()
        if attempt.lack and attempt.context.notes_memory and (worst := self._worst_values()):
            logger.warning("trial %d: infeasible, %s", trial.number, attempt.reason)
            trial.set_user_attr(INFEASIBLE, attempt.reason)
            return worst
        if attempt.lack:
            self._warn_at_first_lack(attempt.context)
        if attempt.reason:
            logger.warning("trial %d: pruned, %s", trial.number, attempt.reason)
            trial.set_user_attr(PRUNED, attempt.reason)
            import optuna

            raise optuna.TrialPruned(attempt.reason)
        if not attempt.prepared:
            _warn_of_unprepared(self._study)
        if logger.isEnabledFor(logging.INFO):
            logger.info("trial %d: finished with %s", trial.number, attempt.value)
        return attempt.value

    def _await_start(self, context: Context) -> None:
        """One after another: threads that build models at once spend their time on handing the interpreter on."""
        before, Search._latest = Search._latest, context.begun
        if before is not None:
            before.wait(STAGGER_S)

    def _worst_values(self) -> list[float]:
        """Of each objective so far, for a trial that broke its constraint: some samplers learn of complete trials only.
        Empty where none has finished."""
        import optuna

        complete = self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        known = zip(*(trial.values for trial in complete), strict=True)
        maximizes = [each is optuna.study.StudyDirection.MAXIMIZE for each in self._study.directions]
        return [min(values) if larger else max(values) for values, larger in zip(known, maximizes, strict=False)]

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

    # ---- its checkpoints ----

    def _as_it_was(self, trial: optuna.Trial) -> optuna.trial.FrozenTrial:
        """In the storage, before its objective is called."""
        import optuna

        running = self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
        return next(each for each in running if each.number == trial.number)

    def _go_on(self, trial: optuna.Trial, context: Context, before: optuna.trial.FrozenTrial) -> None:
        """From its own checkpoint or one of those that it continues; with a clone's weights."""
        assert self._folder is not None and context.random_state is not None
        clone = before.user_attrs.get(CLONE)
        context.resumption = Resumption(
            self._folder.of(trial.number),
            [self._folder.of(number) for number in reversed(_predecessors(before))],
            self._every,
            context.random_state,
            context.name or "",
            self._folder.clones(clone) if clone else None,
        )

    def _note_interruption(self, trial: optuna.Trial) -> None:
        """By which another may continue it."""
        if self._folder is not None:
            trial.set_user_attr(INTERRUPTED, True)

    def clone(self, number: int, changed: dict[str, Any]) -> None:
        context, folder = self.running.context(number), self._folder
        assert context is not None and folder is not None
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
                    write_weights(folder.clones(name), donor.model)
                attrs = {CLONED: number, CLONE: name}
                self._study.enqueue_trial({**params, **changed}, user_attrs=attrs)
            except Exception as error:  # a full disk, a storage out of reach: the trial itself goes on
                logger.warning("trial %d: no clone could be made of it (%s)", number, error)

        context.stop.asked.append(write_and_enqueue)


def _has_nan(value: Any) -> bool:
    """An objective's value, or one of several; what is no number Optuna refuses."""
    if isinstance(value, float):
        return isnan(value)
    with suppress(TypeError, ValueError, RuntimeError):
        return any(isnan(float(each)) for each in (value if isinstance(value, (list, tuple)) else (value,)))
    return False


@cache
def _asking_kind(kind: Any) -> Any:
    """What a search puts in place of its study, with the study's own attributes: several threads may search one study
    at once, so that none may change it."""
    methods = {
        "__slots__": ("ask",),
        "__reduce__": lambda study: (object.__new__, (kind,), study.__getstate__()),  # a copy is plain
    }
    return type("Study", (kind,), methods)


def _predecessors(trial: optuna.trial.FrozenTrial) -> Sequence[int]:
    from hydra_tune.integrations.optuna_runner.recovery import predecessors

    history: Sequence[int] = predecessors(trial)
    return history


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


_warned: dict[tuple[str, str], object] = {}  # studies, and of what


def _is_first(study: optuna.Study, what: str) -> bool:
    mine = object()
    return _warned.setdefault((study.study_name, what), mine) is mine  # trials end in several threads


def _warn_of_unprepared(study: optuna.Study) -> None:
    """Once a study, of an objective that has come to its end: one that is pruned before may have had nothing to
    prepare yet."""
    if _is_first(study, "unprepared"):
        logger.warning(
            "a trial of study %s has ended without a call of hydra_tune.prepare: whatever it has computed was beside "
            "the pool, and beyond its budgets. Give prepare its model, optimizer and loaders. A Trainer "
            "of Hugging Face or Lightning does that with HydraTrainerCallback, or HydraLightningCallback.",
            study.study_name,
        )
