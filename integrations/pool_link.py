"""A proxy's side of an attempt: finds its node's pool, has it begin, and hears what it says. No torch."""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError, RayTaskError

from hydra_tune.errors import HydraTuneError
from hydra_tune.integrations.messages import Ended, Message, Order, Printed, Raised, Reported, Returned, Stopped
from hydra_tune.integrations.pool_spec import PoolSpec

BEAT_S = 1.0
_FULL_S = 1.0  # a full pool is asked again after so long


class PoolLostError(HydraTuneError, RuntimeError):
    """The pool's process has died, and with it this attempt of the trial."""


class RemoteTraceback(Exception):
    """The cause of an error that a trial raised in its pool: where, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class PoolLink:
    """Of one proxy: one attempt after another, each of which ends before the next one begins."""

    def __init__(self, spec: PoolSpec) -> None:
        self._spec = spec
        self._attempt: str | None = None
        self._lock = threading.Lock()
        self._pool: Any = None
        self._ended = threading.Event()

    # ---- one attempt ----

    def begin(self, payload: bytes, config: dict[str, Any], surroundings: dict[str, Any]) -> None:
        """Wait for a place in the pool, and have it begin.

        Raises:
            PoolLostError: the pool has died.
        """
        context = ray.get_runtime_context()
        order = Order(uuid.uuid4().hex, context.get_job_id(), payload, config, surroundings)
        if self._pool is None:
            keeper = ray.get_actor(self._spec.name, self._spec.namespace)
            self._pool = self._got(keeper.pool_on.remote(context.get_node_id()))
        self._ended.clear()
        self._attempt = order.attempt
        reference = ray.put(order)
        while not self._got(self._pool.begin.remote(reference)):
            if self._ended.wait(_FULL_S):
                return
        threading.Thread(target=self._beat, args=(order.attempt,), name="hydra_tune beat", daemon=True).start()

    def messages(self) -> Iterator[Reported | Ended]:
        """What a function's attempt says, printed text apart, until it has ended. The attempt goes on where the next
        one is asked for.

        Raises:
            Exception: what the function raised.
        """
        taken = self._take()
        while True:
            for message in taken:
                said = self._heard(message)
                if isinstance(said, Reported):
                    yield said
                    taken = self._got(self._pool.go_on.remote(self._attempt))
                    break
                if isinstance(said, (Ended, Stopped)):
                    self._forget()
                    if isinstance(said, Ended):
                        yield said
                    return
            else:
                taken = self._take()

    def call(self, method: str, *arguments: Any) -> Any:
        """Of the attempt's trainable, in its thread.

        Raises:
            Exception: what the method raised.
        """
        return self._value(self._got(self._pool.go_on.remote(self._attempt, (method, arguments))))

    def await_value(self) -> Any:
        """What the attempt's trainable has returned: nothing, once it is made."""
        return self._value(self._take())

    def stop(self, reason: str) -> None:
        """Have the attempt end; it need not have begun, and may have ended."""
        self._ended.set()
        attempt, self._attempt = self._attempt, None
        if attempt is not None and self._pool is not None:
            with suppress(RayError):  # it has died, or hears of it by our silence
                ray.get(self._pool.stop.remote(attempt, reason), timeout=BEAT_S)

    # ---- its messages ----

    def _value(self, taken: list[Message]) -> Any:
        while True:
            for message in taken:
                said = self._heard(message)
                if isinstance(said, Returned):
                    return said.value
                if isinstance(said, (Ended, Stopped)):
                    raise PoolLostError(f"the trial was stopped in its pool: {said}.")
            taken = self._take()

    def _take(self) -> list[Message]:
        taken: list[Message] = self._got(self._pool.take.remote(self._attempt))
        return taken

    def _heard(self, message: Message) -> Message:
        if isinstance(message, Printed):
            getattr(sys, message.stream).write(message.text)
        if isinstance(message, Raised):
            self._forget()
            raise cloudpickle.loads(message.error) from (RemoteTraceback(message.text) if message.text else None)
        return message

    def _forget(self) -> None:
        self._ended.set()
        attempt, self._attempt = self._attempt, None
        self._pool.forget.remote(attempt)

    def _got(self, reference: Any) -> Any:
        """A `RayActorError` would tell Tune that this proxy has died."""
        try:
            return ray.get(reference)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, LookupError):
                raise PoolLostError("the pool's process has died, and began anew without this trial.") from None
            if isinstance(cause, RayActorError):
                raise PoolLostError(f"the pool's process has died: {cause}") from None
            raise cause from None
        except RayActorError as error:
            self._pool = None
            raise PoolLostError(f"the pool's process has died: {error}") from None

    def _beat(self, attempt: str) -> None:
        while not self._ended.wait(BEAT_S) and self._attempt == attempt:
            pool = self._pool
            if pool is not None:
                pool.beat.remote(attempt)
