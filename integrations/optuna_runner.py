"""Runs an Optuna study's trials side by side over one pool: `Study.optimize` in threads, nothing private."""

from __future__ import annotations

import concurrent.futures.thread
import logging
import os
import threading
import uuid
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, cached_property, partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_tune.context import Context, TrialContext
from hydra_tune.errors import BudgetError, ConfigError, PoolClosedError, ResumeError, TrialStopped
from hydra_tune.integrations.concurrency import Places, SearchEnded
from hydra_tune.integrations.running import Running
from hydra_tune.pool import ShardPool, default_pool
from hydra_tune.resumption import Interval, Resumption, write_weights

if TYPE_CHECKING:
    import optuna

    from hydra_tune.integrations.recovery import StudyFolder

    StudyCallback = Callable[[optuna.Study, optuna.trial.FrozenTrial], None]

logger = logging.getLogger("hydra_tune")
FIGURES, PRUNED, LACK = "hydra_tune", "hydra_tune: pruned because", "hydra_tune: lacks"  # keys of `user_attrs`
INFEASIBLE = "hydra_tune: infeasible because"
BY_HAND = "it was stopped by hand"
RESUMED, CLONED = "hydra_tune: resumed at step", "hydra_tune: cloned from"
INTERRUPTED, CLONE = "hydra_tune: interrupted", "hydra_tune: starts from"


class HydraTrialRunner:
    """Takes the place of ``study.optimize(objective, ...)``: the same search, over a shared pool.

    Args:
        pool: where trials run; the default pool if None.
        concurrency: trials that live at a time. If None, as many as the pool's host memory holds, by the first one's
            bytes: at least two a device, at most eight.
        checkpoint_dir: where trials leave checkpoints, and from where those of a process that died or was interrupted
            go on when the search begins anew. One folder for all processes of a study; it needs locks on files.
        checkpoint_every: mini-batches, or a `datetime.timedelta`; five minutes if None. A trial whose objective calls
            `hydra_tune.resume_step()` writes one as soon after as it is between two steps.

    Each objective runs in a thread with random state of its own, seeded from the pool's seed and the
    trial's number. An objective that raises, is pruned or stopped ends its trial alone.
    """

    def __init__(
        self,
        pool: ShardPool | None = None,
        concurrency: int | None = None,
        *,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | timedelta | None = None,
    ) -> None:
        if pool is not None and not isinstance(pool, ShardPool):
            raise ConfigError(f"pool is a ShardPool or None, got {type(pool).__name__}.")
        whole = isinstance(concurrency, int) and not isinstance(concurrency, bool)
        if concurrency is not None and (not whole or concurrency < 1):
            raise ConfigError(f"concurrency is how many trials live at a time, at least 1; got {concurrency!r}.")
        if checkpoint_every is not None and checkpoint_dir is None:
            raise ConfigError("checkpoint_every says how often checkpoints are written, but checkpoint_dir not where.")
        self.pool = pool or default_pool()
        self.concurrency = concurrency
        if checkpoint_dir is not None and not isinstance(checkpoint_dir, (str, os.PathLike)):
            raise ConfigError(f"checkpoint_dir is the path of a folder, got {checkpoint_dir!r}.")
        self.checkpoint_dir = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._every = Interval.of(checkpoint_every)
        self._searches: list[Search] = []

    def optimize(
        self,
        study: optuna.Study,
        objective: Callable[[optuna.Trial], Any],
        n_trials: int | None = None,
        timeout: float | None = None,
        catch: Iterable[type[Exception]] | type[Exception] = (),
        callbacks: Iterable[Callable[[optuna.Study, optuna.trial.FrozenTrial], None]] | None = None,
        gc_after_trial: bool = False,
        show_progress_bar: bool = False,
    ) -> None:
        """`Study.optimize`, each argument with the meaning it has there.

        After Ctrl-C no trial begins; those that run stop at their next task boundary and are told as failed; then
        `KeyboardInterrupt` is raised. A second Ctrl-C raises it at once, and they stop by themselves. A trial that can
        never fit, or whose value is NaN, is told as pruned, with the reason in its `user_attrs`.

        With `checkpoint_dir`, trials whose process has died wait in the study again, under their number, and those
        that were interrupted as new ones with ``user_attrs["hydra_tune: continues trials"]``; they run first.

        Raises:
            PoolClosedError: the pool is closed, or was while trials ran.
            RuntimeError: an objective of this study calls it.
        """
        import optuna

        from hydra_tune.integrations.rehearsal import warn_of_sampler

        self.pool.check_usable()
        if not isinstance(study, optuna.Study):
            raise ConfigError(f"study is an optuna.Study, got {type(study).__name__}.")
        if study._thread_local.in_optimize_loop:  # which Optuna would not find out: the search has a thread of its own
            raise RuntimeError("an objective cannot optimize its own study.")
        _show_progress()
        caught = (catch,) if isinstance(catch, type) else tuple(catch)
        places = Places(self.pool, self.concurrency, timeout, lambda: study._stop_flag)  # no public way to ask
        search = Search(self.pool, objective, study, places, caught)
        warn_of_sampler(study, search.places.number, n_trials)
        if self.checkpoint_dir is not None:
            search.keep_checkpoints(self.checkpoint_dir, self._every)

        def optimize() -> None:
            with suppress(SearchEnded):
                search.asking().optimize(
                    search.run,
                    n_trials=n_trials,
                    timeout=timeout,
                    n_jobs=search.places.most if n_trials is None else min(search.places.most, max(2, n_trials)),
                    catch=caught,
                    callbacks=search.callbacks(callbacks or ()) or None,  # for each the trial is copied
                    gc_after_trial=gc_after_trial,
                    show_progress_bar=show_progress_bar,
                )
            if search.error is not None:
                raise search.error

        self._searches.append(search)
        try:
            here = threading.current_thread() is threading.main_thread()
            if self.concurrency == 1 and here:  # where Ctrl-C interrupts the objective itself
                optimize()
            else:
                search.running.wait_for(optimize, search.places.end)
        finally:
            self._searches.remove(search)
            search.close()

    # ---- by hand, from any other thread ----

    def pause(self, trial: optuna.Trial | optuna.trial.FrozenTrial | int) -> None:
        """Hold a live trial where it next is between two steps. It keeps its host memory, and what it has reserved;
        `optimize` waits for it, whatever its timeout."""
        self._context(trial).stop.pause()

    def resume(self, trial: optuna.Trial | optuna.trial.FrozenTrial | int) -> None:
        """Let a paused trial go on."""
        self._context(trial).stop.go_on()

    def stop(self, trial: optuna.Trial | optuna.trial.FrozenTrial | int | None = None) -> None:
        """End a live trial at its next task boundary. It is told as pruned, at the last value that it has reported.
        Without one, end all of them, and begin none: `optimize` returns."""
        if trial is not None:
            self._context(trial).stop(BY_HAND)
            return
        for search in list(self._searches):
            search.places.end()
            search.running.stop_all(BY_HAND)

    def clone(self, trial: optuna.Trial | optuna.trial.FrozenTrial | int, **changed: Any) -> None:
        """Enqueue a new trial with a live one's parameters, but those in `changed`, which starts from its weights and
        buffers as they are when it next is between two steps. Needs `checkpoint_dir`, where they travel."""
        if self.checkpoint_dir is None:
            raise ConfigError("a clone's weights travel through checkpoint_dir; give HydraTrialRunner one.")
        self._search(trial).clone(_number_of(trial), changed)

    def _context(self, trial: optuna.Trial | optuna.trial.FrozenTrial | int) -> Context:
        number = _number_of(trial)
        context: Context | None = self._search(trial).running.context(number)
        if context is None:
            raise ConfigError(f"trial {number} has just ended.")
        return context

    def _search(self, trial: optuna.Trial | optuna.trial.FrozenTrial | int) -> Search:
        number = _number_of(trial)
        found = [search for search in self._searches if number in search.running.numbers]
        if len(found) != 1:
            live = [number for search in self._searches for number in search.running.numbers]
            raise ConfigError(
                f"a trial is paused, resumed, stopped or cloned while it lives, but {number} is not among "
                f"those that do, {live}, or more than once."
            )
        return found[0]


def optimize(
    study: optuna.Study,
    objective: Callable[[optuna.Trial], Any],
    n_trials: int | None = None,
    timeout: float | None = None,
    *,
    pool: ShardPool | None = None,
    concurrency: int | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int | timedelta | None = None,
    **options: Any,
) -> None:
    """``study.optimize(objective, ...)`` over a pool: `HydraTrialRunner` and its `optimize` in one call."""
    runner = HydraTrialRunner(pool, concurrency, checkpoint_dir=checkpoint_dir, checkpoint_every=checkpoint_every)
    runner.optimize(study, objective, n_trials, timeout, **options)


def _number_of(trial: Any) -> int:
    number = trial if isinstance(trial, int) else getattr(trial, "number", None)
    if isinstance(trial, bool) or not isinstance(number, int):
        raise ConfigError(f"a trial is optuna's, or its number; got {trial!r}.")
    return number


def _show_progress() -> None:
    """Progress as plain lines on stderr, unless the user has set up logging."""
    if not logger.handlers and not logging.getLogger().handlers and logger.level == logging.NOTSET:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


class Search:
    """One `optimize`: its trials, each from its random state to its last byte."""

    def __init__(
        self,
        pool: ShardPool,
        objective: Callable[[optuna.Trial], Any],
        study: optuna.Study,
        places: Places,
        caught: tuple[type[Exception], ...],
    ) -> None:
        self.places = places
        self.running = Running()
        self._pool = pool
        self._objective = objective
        self._study = study
        self._stock_ask: Callable[..., optuna.Trial] = study.ask
        self._caught = caught
        self._folder: StudyFolder | None = None
        self._every = Interval.of(None)
        self.error: Exception | None = None  # the first that `Study.optimize` is to raise, and may lose
        self._first_report = threading.Lock()  # taken for good by the first trial that reports

    def _warn_at_first_report(self) -> None:
        """A study has a pruner, whether its objective reports or not."""
        if self._first_report.acquire(blocking=False):
            from hydra_tune.integrations.rehearsal import warn_of_pruner

            warn_of_pruner(self._study, self.places.number)

    def keep_checkpoints(self, checkpoint_dir: Path, every: Interval) -> None:
        from hydra_tune.integrations.recovery import StudyFolder

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
        return [*own, *(lambda _, trial, user=user: user(study, trial) for user in users)]

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

    def run(self, trial: optuna.Trial) -> Any:
        try:
            return self._run(trial)
        except BaseException as error:
            import optuna

            if not isinstance(error, (*self._caught, optuna.TrialPruned)):
                if isinstance(error, Exception):
                    self.error = self.error or error
                self.places.end()
            raise
        finally:
            self.places.trial_ends()

    def _run(self, trial: optuna.Trial) -> Any:
        talks = logger.isEnabledFor(logging.INFO)
        if talks:
            logger.info("trial %d: starts", trial.number)
        reason, value = "", None
        before = None if self._folder is None else self._as_it_was(trial)
        history = () if before is None else _predecessors(before)
        try:
            with TrialContext(self._pool, trial.number, history[0] if history else None) as context:
                self.running.add(trial.number, context)
                try:
                    context.stop.check()
                    if before is not None:
                        self._go_on(trial, context, before)
                    known = () if before is None else before.intermediate_values
                    trial.report = self._noted(trial.report, context, known)  # type: ignore[method-assign]
                    value = self._objective(trial)
                finally:
                    vars(trial).pop("report", None)  # or the collector has to come for every trial
                    if context.resumption is not None and context.resumption.began_at:
                        trial.set_user_attr(RESUMED, context.resumption.began_at)
                    self.running.remove(trial.number)
                    _keep_figures(trial, context)
        except TrialStopped as stop:
            logger.info("trial %d: stopped, %s", trial.number, stop)
            if not context.stop.reason:
                raise PoolClosedError(f"trial {trial.number} was stopped: {stop}.") from None
            if self.running.interrupted:
                self._note_interruption(trial)
                raise KeyboardInterrupt(f"trial {trial.number} was stopped: {stop}") from None
            reason = str(stop)
        except KeyboardInterrupt:
            self._note_interruption(trial)
            raise
        except ResumeError:
            self._note_interruption(trial)  # it may go on yet
            raise
        except BudgetError as error:
            reason = str(error)  # what is raised below shall not keep it, and its frames
            trial.set_user_attr(LACK, error.lack)
            _note_constraint(trial, context, error.lack)
            if context.notes_memory and len(trial.study.directions) == 1:
                logger.warning("trial %d: infeasible, %s", trial.number, reason)
                trial.set_user_attr(INFEASIBLE, reason)
                return self._worst_value()
        except Exception as error:
            logger.info("trial %d: ended by %s", trial.number, type(error).__name__)
            _note_constraint(trial, context, 0.0)
            raise
        else:
            _note_constraint(trial, context, 0.0)
        if isinstance(value, float) and isnan(value) and len(trial.study.directions) == 1:
            reason = "its value is nan"
        if reason:
            logger.warning("trial %d: pruned, %s", trial.number, reason)
            trial.set_user_attr(PRUNED, reason)
            import optuna

            raise optuna.TrialPruned(reason)
        if talks:
            logger.info("trial %d: finished with %s", trial.number, value)
        return value

    def _worst_value(self) -> float:
        """For a trial that broke its constraint: some samplers learn of complete trials only."""
        import optuna

        complete = self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        worst = min if self._maximizes else max
        values = [t.value for t in complete if t.value is not None and INFEASIBLE not in t.user_attrs]
        return float(worst(values, default=0.0))

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
            context.note_objective(float(value), maximizes=self._maximizes)

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
        assert self._folder is not None and context.mode is not None and context.mode.random_state is not None
        clone = before.user_attrs.get(CLONE)
        context.resumption = Resumption(
            self._folder.of(trial.number),
            [self._folder.of(number) for number in reversed(_predecessors(before))],
            self._every,
            context.mode.random_state,
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
                with donor.meter.paused():
                    write_weights(folder.clones(name), donor.model)
                attrs = {CLONED: number, CLONE: name}
                self._study.enqueue_trial({**params, **changed}, user_attrs=attrs)
            except Exception as error:  # a full disk, a storage out of reach: the trial itself goes on
                logger.warning("trial %d: no clone could be made of it (%s)", number, error)

        context.stop.between_steps(write_and_enqueue)


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
    from hydra_tune.integrations.recovery import predecessors

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


def _note_constraint(trial: optuna.Trial, context: Context, lack: float) -> None:
    """For an objective that has called `memory_constraint`."""
    if context.notes_memory:
        trial.set_constraint(LACK, lack)


def _keep_figures(trial: optuna.Trial, context: Context) -> None:
    """Of the last model that the objective prepared."""
    if context.trials:
        trial.set_user_attr(FIGURES, context.trials[-1].pool.figures(context.trials[-1]))


def _forget_executor_threads() -> None:
    """In a child forked by a trial, a loader's worker: at its end CPython would join the executor's threads,
    one of which the child itself runs in, and exit with an error, which PyTorch raises in the parent's main
    thread, if it notices."""
    getattr(concurrent.futures.thread, "_threads_queues", {}).clear()


os.register_at_fork(after_in_child=_forget_executor_threads)
