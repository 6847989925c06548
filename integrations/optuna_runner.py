"""Runs an Optuna study's trials side by side over one pool: `Study.optimize` in threads, nothing private."""

from __future__ import annotations

import concurrent.futures.thread
import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextvars import copy_context
from functools import cache, wraps
from math import isnan
from typing import TYPE_CHECKING, Any

from hydra_tune.context import Context, trial_context
from hydra_tune.errors import BudgetError, ConfigError, PoolClosedError, TrialStopped
from hydra_tune.pool import ShardPool, default_pool
from hydra_tune.stop import Stop

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger("hydra_tune")
FIGURES, PRUNED = "hydra_tune", "hydra_tune: pruned because"  # keys of `user_attrs`
TRIALS_A_DEVICE = 2  # enough for one to compute while another steps its optimizer on the host


class HydraTrialRunner:
    """Takes the place of ``study.optimize(objective, ...)``: the same search, over a shared pool.

    Args:
        pool: where trials run; the default pool if None.
        concurrency: trials that live at a time; two a device if None.

    Each objective runs in a thread with random state of its own, seeded from the pool's seed and the
    trial's number. An objective that raises, is pruned or stopped ends its trial alone.
    """

    def __init__(self, pool: ShardPool | None = None, concurrency: int | None = None) -> None:
        if pool is not None and not isinstance(pool, ShardPool):
            raise ConfigError(f"pool is a ShardPool or None, got {type(pool).__name__}.")
        whole = isinstance(concurrency, int) and not isinstance(concurrency, bool)
        if concurrency is not None and (not whole or concurrency < 1):
            raise ConfigError(f"concurrency is how many trials live at a time, at least 1; got {concurrency!r}.")
        self.pool = pool or default_pool()
        self.concurrency = concurrency or TRIALS_A_DEVICE * len(self.pool.devices)

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

        Raises:
            PoolClosedError: the pool is closed, or was while trials ran.
        """
        from hydra_tune.integrations.rehearsal import warn_of_pruner, warn_of_sampler

        self.pool.check_usable()
        _show_progress()
        warn_of_sampler(study, self.concurrency, n_trials)
        running = Running()

        @cache
        def note_first_report() -> None:  # a study has a pruner, whether its objective reports or not
            warn_of_pruner(study, self.concurrency)

        def run(trial: optuna.Trial) -> Any:
            return run_objective(self.pool, objective, trial, running, note_first_report)

        def optimize() -> None:
            study.optimize(
                run,
                n_trials=n_trials,
                timeout=timeout,
                n_jobs=self.concurrency,
                catch=catch,
                callbacks=None if callbacks is None else list(callbacks),
                gc_after_trial=gc_after_trial,
                show_progress_bar=show_progress_bar,
            )

        if self.concurrency == 1:  # in this thread, where Ctrl-C interrupts the objective itself
            optimize()
        else:
            running.wait_for(optimize)


class Running:
    """The trials of one search. Its loop has a thread of its own, for Optuna's waits on Ctrl-C until all have ended."""

    def __init__(self) -> None:
        self._stops: set[Stop] = set()
        self._reason = ""
        self._lock = threading.Lock()

    def wait_for(self, optimize: Callable[[], None]) -> None:
        error: list[BaseException] = []
        ended = threading.Event()  # a join that is interrupted takes its thread for ended, before Python 3.13

        def run() -> None:
            try:
                optimize()
            except BaseException as raised:
                error.append(raised)
            finally:
                ended.set()

        thread = threading.Thread(target=copy_context().run, args=(run,), name="hydra_tune search", daemon=True)
        try:
            thread.start()
            ended.wait()
        except BaseException:  # in the main thread, which waits here
            logger.warning("interrupted: %d trials stop at their next task boundary", len(self._stops))
            self._stop_all("the search was interrupted")
            ended.wait()
            raise
        finally:
            if ended.is_set():
                thread.join()
        if error:
            raise error[0]

    def _stop_all(self, reason: str) -> None:
        with self._lock:
            self._reason = reason
            stops = list(self._stops)
        for stop in stops:
            stop(reason)

    def add(self, stop: Stop) -> None:
        with self._lock:
            self._stops.add(stop)
            reason = self._reason
        if reason:
            stop(reason)

    def remove(self, stop: Stop) -> None:
        with self._lock:
            self._stops.discard(stop)


def _show_progress() -> None:
    """Progress as plain lines on stderr, unless the user has set up logging."""
    if not logger.handlers and not logging.getLogger().handlers and logger.level == logging.NOTSET:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def run_objective(
    pool: ShardPool,
    objective: Callable[[optuna.Trial], Any],
    trial: optuna.Trial,
    running: Running,
    before_report: Callable[[], None],
) -> Any:
    """One trial, from its random state to its last byte."""
    import optuna

    logger.info("trial %d: starts", trial.number)
    lack, value = "", None
    try:
        with trial_context(pool, trial.number) as context:
            running.add(context.stop)
            try:
                context.stop.check()
                maximizes = trial.study.directions[0] is optuna.study.StudyDirection.MAXIMIZE
                trial.report = _noted(  # type: ignore[method-assign]
                    trial.report, context, before_report, maximizes=maximizes
                )
                value = objective(trial)
            finally:
                running.remove(context.stop)
                _keep_figures(trial, context)
    except TrialStopped as stop:
        logger.info("trial %d: stopped, %s", trial.number, stop)
        if not context.stop.reason:
            raise PoolClosedError(f"trial {trial.number} was stopped: {stop}.") from None
        raise KeyboardInterrupt(f"trial {trial.number} was stopped: {stop}") from None
    except BudgetError as error:
        lack = str(error)  # what is raised below shall not keep it, and its frames
    except Exception as error:
        logger.info("trial %d: ended by %s", trial.number, type(error).__name__)
        raise
    diverged = isinstance(value, float) and isnan(value) and len(trial.study.directions) == 1
    if lack or diverged:
        reason = lack or "its value is nan"
        logger.warning("trial %d: pruned, %s", trial.number, reason)
        trial.set_user_attr(PRUNED, reason)
        raise optuna.TrialPruned(reason)
    logger.info("trial %d: finished with %s", trial.number, value)
    return value


def _keep_figures(trial: optuna.Trial, context: Context) -> None:
    """Of the last model that the objective prepared."""
    if context.trials:
        trial.set_user_attr(FIGURES, context.trials[-1].pool.figures(context.trials[-1]))


def _noted(
    report: Callable[..., None], context: Context, before: Callable[[], None], *, maximizes: bool
) -> Callable[..., None]:
    """`trial.report`, of which the pool's policy learns too, and where an objective that trains nothing may stop."""

    @wraps(report)
    def report_and_note(value: float, step: int) -> None:
        context.stop.check()
        before()
        report(value, step)
        context.note_objective(float(value), maximizes=maximizes)

    return report_and_note


def _forget_executor_threads() -> None:
    """In a child forked by a trial, a loader's worker: at its end CPython would join the executor's threads,
    one of which the child itself runs in, and exit with an error, which PyTorch raises in the parent's main
    thread, if it notices."""
    getattr(concurrent.futures.thread, "_threads_queues", {}).clear()


os.register_at_fork(after_in_child=_forget_executor_threads)
