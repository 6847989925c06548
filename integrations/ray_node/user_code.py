"""Runs what the user has given to Tune, in a trial's thread: a function from its config to its output, or a trainable
whose methods Tune calls one by one.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from ray import cloudpickle
from ray.air.constants import TIME_THIS_ITER_S
from ray.tune import Checkpoint, Trainable
from ray.tune.result import DEFAULT_METRIC, TRIAL_INFO

from hydra_tune.errors import ResumeError
from hydra_tune.integrations.ray_node.messages import Returned
from hydra_tune.integrations.ray_node.trial_thread import TrialThread
from hydra_tune.integrations.ray_node.tune_session import TrialSession, plain


def train(attempt: TrialThread) -> Any:
    session = TrialSession(attempt)
    session.make_current()
    work = cloudpickle.loads(attempt.order.payload)
    if inspect.isclass(work):
        return _serve(attempt, work, session)
    if not inspect.isgeneratorfunction(work):
        return plain(work(attempt.order.config))
    for output in work(attempt.order.config):
        if output:
            session.report(output if isinstance(output, dict) else {DEFAULT_METRIC: output})
    return None


def _serve(attempt: TrialThread, kind: Any, session: TrialSession) -> None:
    """Until Tune stops the trial."""
    quiet = _no_logger(kind, session)
    kind = _timed(_kept_by_its_pool(kind, attempt), attempt)
    trainable = kind(config=attempt.order.config, storage=session.storage, **quiet)
    value: Any = None
    try:
        while True:
            attempt.proxy.say(Returned(value))
            call = attempt.await_answer()
            if call.method == "reset":
                attempt.is_now(call.arguments[0].get(TRIAL_INFO))
                session.enter(call.options["storage"])
            options = {**call.options, **quiet} if call.method == "reset" else call.options
            value = plain(getattr(trainable, call.method)(*call.arguments, **options))
            if call.method == "train":
                value = attempt.with_figures(value)
    finally:
        trainable.stop()


def _timed(kind: Any, attempt: TrialThread) -> Any:
    """`kind`, whose steps do not count the seconds in which they wait for memory."""

    class Timed(kind):  # type: ignore[misc]
        def step(self) -> dict[str, Any]:
            attempt.training_s()
            result = super().step()
            return {TIME_THIS_ITER_S: attempt.training_s(), **result} if isinstance(result, dict) else result

    Timed.__name__, Timed.__qualname__, Timed.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Timed


def _kept_by_its_pool(kind: Any, attempt: TrialThread) -> Any:
    """`kind`, if it says itself what a checkpoint of it is; else one whose checkpoints are its pool's, of what it gives
    to `prepare`."""
    if (kind.save_checkpoint, kind.load_checkpoint) != (Trainable.save_checkpoint, Trainable.load_checkpoint):
        return kind

    class KeptByPool(kind):  # type: ignore[misc]
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            attempt.goes_on()

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            try:
                attempt.keep(checkpoint_dir)
            except ResumeError as error:
                raise ResumeError(
                    f"{kind.__name__} has no save_checkpoint, so that its pool saves what it gives to "
                    f"hydra_tune.prepare, but {error}. Write save_checkpoint and load_checkpoint, or have Tune save "
                    "none: tune.Tuner does at the end, unless CheckpointConfig(checkpoint_at_end=False) says otherwise."
                ) from None

        def load_checkpoint(self, checkpoint_dir: str) -> None:
            """By setting it up again: a prepared model goes on from the pool's state."""
            if not attempt.go_on_from(Checkpoint.from_directory(checkpoint_dir)):
                raise ResumeError(
                    f"{kind.__name__} has no load_checkpoint, and {checkpoint_dir} is no checkpoint of a pool's."
                )
            self.cleanup()
            self.setup(copy.deepcopy(self.config))

    attempt.go_on_from(None)
    KeptByPool.__name__ = KeptByPool.__qualname__ = kind.__name__
    return KeptByPool


def _no_logger(kind: Any, session: TrialSession) -> dict[str, Any]:
    """For older Rays, whose trainables log their results themselves: the proxy's does."""
    if "logger_creator" not in inspect.signature(kind.reset).parameters:
        return {}
    from ray.tune import logger

    loggers: Any = logger
    return {"logger_creator": lambda config: loggers.NoopLogger(config, session.trial_dir)}
