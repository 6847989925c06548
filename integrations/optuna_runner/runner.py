"""Runs an Optuna study's trials side by side over one pool: `Study.optimize` in threads, nothing private."""

from __future__ import annotations

import concurrent.futures.thread
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_tune.checkpoints.interval import Interval
from hydra_tune.errors import ConfigError
from hydra_tune.integrations.frameworks.current_trial import current_trial
from hydra_tune.integrations.optuna_runner.concurrency import Places, SearchEnded
from hydra_tune.integrations.optuna_runner.live_attributes import shown
from hydra_tune.integrations.optuna_runner.search import BY_HAND, Search
from hydra_tune.pool.shard_pool import ShardPool, default_pool
from hydra_tune.show.control_socket import COMMANDS
from hydra_tune.trials.context import Context

if TYPE_CHECKING:
    import optuna

    from hydra_tune.integrations.optuna_runner.search_checkpoints import SearchCheckpoints

logger = logging.getLogger("hydra_tune")
_DONE = {
    "pause": "pauses between two steps",
    "resume": "goes on",
    "stop": "stops at its next task",
    "clone": "is cloned between two steps",
}


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
        n_jobs: None = None,  # refused, by `concurrency`
    ) -> None:
        _refuse_n_jobs(n_jobs)
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
        show_progress_bar: bool | None = None,
        *,
        n_jobs: None = None,  # refused, by `concurrency`
    ) -> None:
        """`Study.optimize`, each argument with the meaning it has there, but for the progress.

        `show_progress_bar` shows a table of devices and trials in place, in a terminal or a notebook, and a line every
        30 s elsewhere; by default it does, False shows nothing. At the end a summary is logged.

        After Ctrl-C no trial begins; those that run stop at their next task boundary and are told as failed; then
        `KeyboardInterrupt` is raised. A second Ctrl-C raises it at once, and they stop by themselves. A trial that can
        never fit, or whose value is NaN, is told as pruned, with the reason in its `user_attrs`.

        With `checkpoint_dir`, trials whose process has died wait in the study again, under their number, and those
        that were interrupted as new ones with ``user_attrs["hydra_tune: continues trials"]``; they run first.

        Raises:
            PoolClosedError: the pool is closed, or was while trials ran.
            RuntimeError: an objective of this study calls it.
        """
        from hydra_tune.integrations.optuna_runner.search_warnings import warn_of_sampler

        _refuse_n_jobs(n_jobs)
        self._check(study)
        if not callable(objective):
            raise ConfigError(f"objective is a function of a trial, got {type(objective).__name__}.")
        if study._thread_local.in_optimize_loop:  # which Optuna would not find out: the search has a thread of its own
            raise RuntimeError("an objective cannot optimize its own study.")
        _show_progress()
        caught = (catch,) if isinstance(catch, type) else tuple(catch)
        places = Places(self.pool, self.concurrency, timeout, lambda: study._stop_flag)  # no public way to ask
        checkpoints = self._checkpoints(study)
        search = Search(self.pool, study, places, caught, checkpoints, n_trials)
        warn_of_sampler(study, search.places.number, n_trials)
        if checkpoints is not None:
            checkpoints.folder.recover(study)

        def optimize() -> None:
            with suppress(SearchEnded), search.running.ending():
                search.asking().optimize(
                    partial(search.run, objective),
                    n_trials=n_trials,
                    timeout=timeout,
                    n_jobs=search.places.most if n_trials is None else min(search.places.most, max(2, n_trials)),
                    catch=caught,
                    callbacks=search.callbacks(callbacks or ()) or None,  # for each the trial is copied
                    gc_after_trial=gc_after_trial,
                )
            if search.error is not None:
                raise search.error
            if search.places.most > 1:
                search.refuse_untold()

        self._searches.append(search)
        try:
            here = threading.current_thread() is threading.main_thread()
            with self.pool.shared_weights.bases_kept(), shown(search.progress, study, show_progress_bar, self.command):
                if self.concurrency == 1 and here:  # where Ctrl-C interrupts the objective itself
                    optimize()
                else:
                    search.running.wait_for(optimize, search.places.end)
        finally:
            self._searches.remove(search)
            search.close()

    @contextmanager
    def trial(self, study: optuna.Study, **options: Any) -> Iterator[optuna.Trial]:
        """Optuna's ask-and-tell: a trial that the study is asked for, with the `options` of `Study.ask`, for a block
        that runs as an objective of `optimize` does, in the calling thread::

            with runner.trial(study) as trial:
                study.tell(trial, train(trial))

        The block tells, by number or with ``state=``, too. If it raises, its trial is told as failed, and the error
        goes on. Whatever `optimize` prunes for (`optuna.TrialPruned`, a model that can never fit, NaN, `stop`) is told
        as pruned, and the script goes on after the block; so is a trial that runs out of memory, for a block cannot be
        run again. As many trials live as threads are in a block, whatever `concurrency` says. What a block leaves in
        variables stays in memory for as long as they do: a function that it calls leaves nothing.

        Raises:
            ConfigError: the runner has a `checkpoint_dir`.
            PoolClosedError: the pool is closed, or was meanwhile.
            RuntimeError: the block has told nothing; or the calling thread runs a trial already.
        """
        from hydra_tune.integrations.optuna_runner.ask_and_tell import asked_trial

        self._check(study)
        if self.checkpoint_dir is not None:
            raise ConfigError(
                "checkpoints are of searches, which say what goes on, but a trial is asked for by hand, of a runner "
                "with checkpoint_dir. Call its optimize, or make a HydraTrialRunner without checkpoint_dir."
            )
        if current_trial() is not None:
            raise RuntimeError(
                "a thread runs one trial at a time, and is in one. Ask for another one in another thread."
            )
        _show_progress()
        search = Search(self.pool, study, Places(self.pool, 1, None, lambda: False))
        self._searches.append(search)
        try:
            with asked_trial(search.attempts, study, options) as trial:
                yield trial
        finally:
            self._searches.remove(search)

    def _checkpoints(self, study: optuna.Study) -> SearchCheckpoints | None:
        if self.checkpoint_dir is None:
            return None
        from hydra_tune.integrations.optuna_runner.search_checkpoints import SearchCheckpoints

        return SearchCheckpoints(self.checkpoint_dir, study, self._every)

    def _check(self, study: Any) -> None:
        import optuna

        self.pool.events.check_usable()
        if not isinstance(study, optuna.Study):
            raise ConfigError(f"study is an optuna.Study, got {type(study).__name__}.")

    # ---- by hand, from any other thread ----

    def pause(self, trial: optuna.Trial | optuna.trial.FrozenTrial | int) -> None:
        """Hold a live trial where it next is between two steps. It keeps its host memory, and what it has reserved;
        `optimize` waits for it, whatever its timeout."""
        self._context(trial).stop.goes_on.clear()

    def resume(self, trial: optuna.Trial | optuna.trial.FrozenTrial | int) -> None:
        """Let a paused trial go on."""
        self._context(trial).stop.goes_on.set()

    def stop(self, trial: optuna.Trial | optuna.trial.FrozenTrial | int | None = None) -> None:
        """End a live trial at its next task boundary. It is told as pruned, at the last value that it has reported.
        Without one, end all of them: `optimize` begins none and returns; a block that is opened later runs."""
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

    def command(self, command: str, trial: str) -> str:
        """For `hydra-tune top`: "pause", "resume", "stop" or "clone" the live trial of this name, such as "trial 3".
        Returns what was done.

        Raises:
            ConfigError: there is no such trial, or a clone was asked for without `checkpoint_dir`.
        """
        word, _, number = trial.partition(" ")
        if command not in COMMANDS or word != "trial" or not number.isdigit():
            raise ConfigError(f"a trial is named as in 'trial 3', and one of {COMMANDS}; got {command!r}, {trial!r}.")
        getattr(self, command)(int(number))
        return f"{trial}: {_DONE[command]}"

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


def _refuse_n_jobs(n_jobs: Any) -> None:
    if n_jobs is None:
        return
    instead = "Leave both out: as many live as host memory holds." if n_jobs == -1 else f"Write concurrency={n_jobs!r}."
    raise ConfigError(
        "concurrency, of HydraTrialRunner or hydra_tune.optimize, says how many trials live at a time over one pool; "
        f"got n_jobs={n_jobs!r}. {instead}"
    )


def _number_of(trial: Any) -> int:
    number = trial if isinstance(trial, int) else getattr(trial, "number", None)
    if isinstance(trial, bool) or not isinstance(number, int):
        raise ConfigError(f"a trial is optuna's, or its number; got {trial!r}.")
    return number


def _show_progress() -> None:
    """Progress as plain lines on stderr, unless the user has set up logging. They are quiet as Optuna's are."""
    if not logger.handlers and not logging.getLogger().handlers and logger.level == logging.NOTSET:
        import optuna

        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        handler.addFilter(lambda record: record.levelno >= optuna.logging.get_verbosity())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def _forget_executor_threads() -> None:
    """In a child forked by a trial, a loader's worker: at its end CPython would join the executor's threads,
    one of which the child itself runs in, and exit with an error, which PyTorch raises in the parent's main
    thread, if it notices."""
    getattr(concurrent.futures.thread, "_threads_queues", {}).clear()


os.register_at_fork(after_in_child=_forget_executor_threads)
