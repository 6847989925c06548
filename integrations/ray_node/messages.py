"""What a trial's proxy and its pool tell each other: plain data. No torch, for proxies do without.

a function    proxy   Order                       GoOn                 ...
              pool          Begun  ResultReported      ResultReported  ...  Ended

a trainable   proxy   Order                             CallMethod           ...
              pool          Begun  Returned (it is made)            Returned ...

At any time the proxy may send StopTrial, and the pool Printed, Stopped or Raised. Between a function's report and its
GoOn the proxy may send SaveState, which StateSaved answers.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from ray import cloudpickle

# ---- of the proxy ------------------------------------------------------------------------------------


class Order(NamedTuple):
    """What a pool is to run as a trial's next attempt.

    `payload` is a pickled function or class; `tune_context` what `ray.tune.get_context()` tells, and whether the trial
    has a working directory of its own."""

    job: str
    payload: bytes
    config: dict[str, Any]
    tune_context: dict[str, Any]

    @property
    def trial_id(self) -> str:
        return str(self.tune_context["trial_id"])

    @property
    def is_function(self) -> bool:
        """And no trainable's class."""
        return "loaded_checkpoint" in self.tune_context

    @property
    def experiment(self) -> str:
        return str(self.tune_context["experiment_name"])

    @property
    def trial_name(self) -> str:
        return str(self.tune_context["trial_name"])


class GoOn(NamedTuple):
    """From where it reported; with the checkpoint that came with it, as Tune has persisted it."""

    checkpoint: Any = None


class CallMethod(NamedTuple):
    """A method of a trainable."""

    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class SaveState(NamedTuple):
    """Write there what another attempt can go on from; of one that has reported, and waits."""

    directory: str


class StopTrial(NamedTuple):
    reason: str


# ---- of the pool -------------------------------------------------------------------------------------


class Begun(NamedTuple):
    """The order is carried out; or not, for want of a place."""

    has_begun: bool


class ResultReported(NamedTuple):
    """The trial waits until it is told to go on."""

    metrics: dict[str, Any]
    checkpoint: Any


class Printed(NamedTuple):
    stream: str
    text: str


class Returned(NamedTuple):
    """By a method of a trainable."""

    value: Any


class StateSaved(NamedTuple):
    """Or not, and why."""

    why_not: str


class Ended(NamedTuple):
    output: Any


class Stopped(NamedTuple):
    """As it was asked to."""

    reason: str


class Raised(NamedTuple):
    error: bytes
    text: str  # its traceback

    @classmethod
    def of(cls, error: BaseException, text: str) -> Raised:
        """One that cannot be pickled, or not read again, becomes a `RuntimeError` of its type's name and message; so
        does what would end a proxy's process, as `sys.exit` does."""
        if not isinstance(error, Exception):
            error = RuntimeError(f"a trial ends by returning or by an exception, got {type(error).__name__}({error}).")
        try:
            pickled = cloudpickle.dumps(error)
            cloudpickle.loads(pickled)
        except Exception:
            pickled = cloudpickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
        return cls(pickled, text)


Message: TypeAlias = Begun | ResultReported | Printed | Returned | StateSaved | Ended | Stopped | Raised
