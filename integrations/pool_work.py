"""What an attempt does in its thread: a training function from its config to its output, or a trainable's methods as
Tune calls them."""

from __future__ import annotations

import inspect
from typing import Any

from ray import cloudpickle
from ray.tune.result import DEFAULT_METRIC

from hydra_tune.integrations.attempt import Attempt
from hydra_tune.integrations.messages import Returned
from hydra_tune.integrations.pool_session import TrialSession


def train(attempt: Attempt) -> Any:
    session = TrialSession(attempt)
    session.make_current()
    work = cloudpickle.loads(attempt.order.payload)
    if inspect.isclass(work):
        return _serve(attempt, work, session)
    if not inspect.isgeneratorfunction(work):
        return work(attempt.order.config)
    for output in work(attempt.order.config):
        if output:
            session.report(output if isinstance(output, dict) else {DEFAULT_METRIC: output})
    return None


def _serve(attempt: Attempt, kind: Any, session: TrialSession) -> None:
    """Until Tune stops the trial."""
    quiet = _no_logger(kind, session)
    trainable = kind(config=attempt.order.config, storage=session.storage, **quiet)
    value: Any = None
    try:
        while True:
            attempt.say(Returned(value))
            call = attempt.await_answer()
            options = {**call.options, **quiet} if call.method == "reset" else call.options
            value = getattr(trainable, call.method)(*call.arguments, **options)
    finally:
        trainable.stop()


def _no_logger(kind: Any, session: TrialSession) -> dict[str, Any]:
    """For older Rays, whose trainables log their results themselves: the proxy's does."""
    if "logger_creator" not in inspect.signature(kind.reset).parameters:
        return {}
    from ray.tune import logger

    loggers: Any = logger
    return {"logger_creator": lambda config: loggers.NoopLogger(config, session.trial_dir)}
