"""A thread of the pool's process that trains one attempt of a Tune trial.

Tune decides after each report whether a trial goes on, and calls a trainable's methods one by one. There the thread
waits for its proxy, which speaks for Tune. It holds its host memory meanwhile.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ray.air.constants import TIME_THIS_ITER_S

from hydra_tune.checkpoints.interval import Interval
from hydra_tune.checkpoints.resumption import Resumption
from hydra_tune.devices.cuda_device import is_lost
from hydra_tune.errors import TrialStopped, clear_frames
from hydra_tune.integrations.frameworks import guards
from hydra_tune.integrations.frameworks.current_trial import running
from hydra_tune.integrations.frameworks.trial_attributes import figures_of
from hydra_tune.integrations.ray_node.kept_state import KeptState, KeptStates
from hydra_tune.integrations.ray_node.messages import (
    Ended,
    Message,
    Order,
    Raised,
    ResultReported,
    SaveState,
    StateSaved,
    Stopped,
)
from hydra_tune.integrations.ray_node.proxy_connections import ProxyConnection
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.trials.context import Context, trial_context

logger = logging.getLogger("hydra_tune")


class TrialThread:
    """Begins with `start`, ends with a last message to its proxy: Ended, Stopped or Raised.

    Args:
        order: what it is to train.
        proxy: where it says what happens.
        work: is called in the thread, with this.
        on_lost: is called if it ends by an error after which the process can use its devices no more.
        states: keep the trial's, for another attempt.
    """

    def __init__(
        self,
        pool: ShardPool,
        order: Order,
        proxy: ProxyConnection,
        work: Callable[[TrialThread], Any],
        on_lost: Callable[[], None],
        states: KeptStates,
    ) -> None:
        guards.install()
        self.order = order
        self._pool = pool
        self.proxy = proxy
        self._work = work
        self._on_lost = on_lost
        self._states = states
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()  # of Tune, for which the thread waits
        self._stop_reason = ""  # if it was asked to
        self._context: Context | None = None
        self._lock = threading.Lock()
        self._trained_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=order.trial_name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # ---- from other threads ----

    def answer(self, value: Any) -> None:
        """The thread goes on."""
        self._answers.put(value)

    def stop(self, reason: str) -> None:
        """At its next task boundary, or where it waits."""
        with self._lock:
            self._stop_reason, context = self._stop_reason or reason, self._context
        if context is not None:
            context.stop(reason)
        self._answers.put(None)

    # ---- in its thread ----

    def await_answer(self) -> Any:
        """Of Tune.

        Raises:
            TrialStopped: it has ended the trial.
        """
        while isinstance(answer := self._answers.get(), SaveState):
            self._save(answer.directory)
        self._check()
        return answer

    def _save(self, directory: str) -> None:
        try:
            self.keep(directory)
            self.proxy.say(StateSaved(""))
        except Exception as error:  # a full disk, or nobody could go on from it
            self.proxy.say(StateSaved(str(error)))

    def keep(self, directory: str) -> None:
        """The trial's state, in the pool and as a checkpoint; where nothing of it is under way.

        Raises:
            ResumeError: nobody could go on from it.
        """
        assert self._context is not None
        trial_id = self.order.trial_id
        self._states.forget(trial_id)  # first, for both may take much memory
        kept = KeptState.of(self._context, trial_id)
        kept.write(directory)
        self._states.keep(kept)

    def report(self, metrics: dict[str, Any], checkpoint: Any) -> Any:
        """Once Tune lets the trial go on, the checkpoint as it has persisted it, if there is one.

        Raises:
            TrialStopped: it has ended the trial.
        """
        self._check()
        self.proxy.say(ResultReported(self.with_figures({TIME_THIS_ITER_S: self.training_s(), **metrics}), checkpoint))
        return self.await_answer().checkpoint

    def with_figures(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Of its training so far, behind its own metrics: Tune's table shows the first four numbers of a result."""
        figures = figures_of(self._context.trials) if self._context is not None and self._context.trials else {}
        return {**metrics, **figures, **metrics}

    def training_s(self) -> float:
        """Seconds since the last call, without those in which the trial waited for memory: Tune counts them as the
        trial's time, by which schedulers compare trials."""
        trials = [] if self._context is None else self._context.trials
        trained_s = time.monotonic() - sum(trial.lease.memory_wait_s for trial in trials)
        since_s, self._trained_s = self._trained_s, trained_s
        return max(0.0, trained_s - since_s)

    def _check(self) -> None:
        if self._context is not None:
            self._context.stop.check_between_steps()

    def _run(self) -> None:
        outcome = self._outcome()
        self._work, self._context = _nothing, None
        if not isinstance(outcome, Stopped):  # a trial that Tune has paused is stopped, too
            self._states.forget(self.order.trial_id)
        try:
            self.proxy.say(outcome)
        except Exception as error:  # what cannot be pickled
            self.proxy.say(Raised.of(error, ""))

    def _outcome(self) -> Message:
        try:
            name, number = self.order.trial_name, _number_of(self.order.trial_id)
            with running(), trial_context(self._pool, number, name=name) as context:
                with self._lock:
                    self._context = context
                if self._stop_reason:
                    context.stop(self._stop_reason)
                self._check()
                if self.order.is_function and self.go_on_from(self.order.tune_context["loaded_checkpoint"]):
                    self.order.tune_context["loaded_checkpoint"] = None
                output = self._work(self)
                if not context.trials:
                    _warn_of_unprepared(self.order.experiment)
                return Ended(output)
        except TrialStopped as stop:
            if self._stop_reason:
                return Stopped(str(stop))
            return Raised.of(RuntimeError(f"the trial was stopped, though Tune has not asked for it: {stop}."), "")
        except BaseException as error:
            if is_lost(error):
                self._on_lost()
            text = "".join(traceback.format_exception(error))
            clear_frames(error)
            return Raised.of(error, text)

    def is_now(self, info: Any) -> None:
        """That of another trial, as its `TrialInfo` says, whose trainable is this one's, reset."""
        if info is not None:
            names = {"trial_id": info.trial_id, "trial_name": info.trial_name}
            self.order = self.order._replace(tune_context={**self.order.tune_context, **names})

    def go_on_from(self, checkpoint: Any) -> bool:
        """The trial's next model goes on from what a pool has kept of this trial, or of the one that it exploits.
        Whether the checkpoint is of that kind: what the trial has kept itself, it reads itself.

        Raises:
            ResumeError: it is, but it is not sound.
        """
        context = self._context
        assert context is not None and context.random_state is not None
        found = None if checkpoint is None else self._states.found_in(checkpoint)
        for trial in context.trials:
            trial.end()
        context.resumption = Resumption(
            None,
            [] if found is None else [found],
            Interval(),
            context.random_state,
            self.order.trial_name,
            perturbed=True,
            counted=self.order.is_function,
        )
        return found is not None

    def goes_on(self) -> None:
        """A trainable has been set up: it draws what it would have drawn."""
        if self._context is not None and self._context.resumption is not None:
            self._context.resumption.resume_step()


@functools.cache
def _warn_of_unprepared(experiment: str) -> None:
    logger.warning(
        "a trial of %s has ended without a call of hydra_tune.prepare: whatever it has computed was beside the pool, "
        "and beyond its budgets. Give prepare its model, optimizer and loaders. A Trainer "
        "of Hugging Face or Lightning does that with HydraTrainerCallback, or HydraLightningCallback.",
        experiment,
    )


def _nothing(_: TrialThread) -> None:
    return None


def _number_of(trial_id: str) -> int:
    """The same in each attempt, and so is what a function that sets no seed draws."""
    return int.from_bytes(hashlib.blake2b(trial_id.encode(), digest_size=4).digest(), "big")
