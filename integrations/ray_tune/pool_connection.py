"""A proxy's connection to its node's pool: has an attempt begin there, and hears what it says. No torch."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Client
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayTaskError

from hydra_tune.errors import HydraTuneError
from hydra_tune.integrations.ray_node.messages import (
    Begun,
    CallMethod,
    Ended,
    GoOn,
    Message,
    Order,
    Printed,
    Raised,
    ResultReported,
    Returned,
    SaveState,
    StateSaved,
    Stopped,
    StopTrial,
)
from hydra_tune.integrations.ray_node.pool_spec import PoolSpec

logger = logging.getLogger("hydra_tune")
_FULL_S = 0.5  # a full pool is asked again after so long


class PoolLostError(HydraTuneError, RuntimeError):
    """The pool's process has died, and with it this attempt of the trial."""


class RemoteTraceback(Exception):
    """The cause of an error that a trial raised in its pool: where, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class PoolConnection:
    """Of one proxy: one attempt after another, each of which ends before the next one begins."""

    def __init__(self, spec: PoolSpec) -> None:
        self._spec = spec
        self._connection: Any = None
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._waits = False  # the attempt, which has reported

    def begin(self, payload: bytes, config: dict[str, Any], tune_context: dict[str, Any]) -> None:
        """Wait for a place in the pool, and have it begin.

        Raises:
            PoolLostError: the pool has died, or the trial was stopped meanwhile.
            ConfigError: it could not be made.
        """
        context = ray.get_runtime_context()
        order = Order(context.get_job_id(), payload, config, tune_context)
        self._stopped.clear()
        self._waits = False
        if self._connection is not None:
            self._connection.close()  # of the attempt before, which ends if it has not
        self._connection = self._connected(context.get_node_id())
        self._say(order)
        while not self._has_begun():
            if self._stopped.wait(_FULL_S):
                raise PoolLostError("the trial was stopped while it waited for a place in its pool.")
            self._say(order)

    def _connected(self, node: str) -> Any:
        keeper = ray.get_actor(self._spec.name, self._spec.namespace)
        try:
            address, key = ray.get(keeper.address_on.remote(node))
            return Client(address, authkey=key)
        except RayTaskError as error:
            if isinstance(error.cause, Exception) and not isinstance(error.cause, RayActorError):
                raise error.cause from None
            raise PoolLostError(f"the pool's process has died: {error.cause}") from None
        except (RayActorError, OSError) as error:  # of which the first would tell Tune that this proxy has died
            raise PoolLostError(f"the pool's process has died: {error}") from None

    def _has_begun(self) -> bool:
        said = self._heard()
        return isinstance(said, Begun) and said.has_begun

    def messages(self, persisted: Callable[[], Any]) -> Iterator[ResultReported | Ended]:
        """What a function's attempt says, printed text apart, until it has ended. The attempt goes on where the next
        one is asked for; `persisted` is what has become of the checkpoint that it has reported last.

        Raises:
            Exception: what the function raised.
        """
        while True:
            said = self._heard()
            if isinstance(said, ResultReported):
                self._waits = True
                yield said
                self._waits = False
                self._say(GoOn(None if said.checkpoint is None else persisted()))
            elif isinstance(said, Ended):
                yield said
                return
            elif isinstance(said, Stopped):
                return

    def save(self, directory: str) -> bool:
        """Have an attempt that has reported write there what another one can go on from; in another thread than that of
        `messages`, which waits. Whether it has."""
        if not self._waits:
            return False
        self._say(SaveState(directory))
        while not isinstance(said := self._heard(), StateSaved):
            if isinstance(said, (Ended, Stopped)):
                raise PoolLostError(f"the trial was stopped in its pool: {said}.")
        if said.why_not:
            logger.info("a trial is saved by what it reports, or else by its pool, but %s", said.why_not)
        return not said.why_not

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Of the attempt's trainable, in its thread.

        Raises:
            Exception: what the method raised.
        """
        self._say(CallMethod(method, arguments, options))
        return self.await_value()

    def await_value(self) -> Any:
        """What the attempt's trainable has returned: nothing, once it is made."""
        while not isinstance(said := self._heard(), Returned):
            if isinstance(said, (Ended, Stopped)):
                raise PoolLostError(f"the trial was stopped in its pool: {said}.")
        return said.value

    def stop(self, reason: str) -> None:
        """Have the attempt end; it need not have begun, and may have ended."""
        self._stopped.set()
        if self._connection is not None:
            with suppress(PoolLostError):
                self._say(StopTrial(reason))

    # ---- its messages ----

    def _say(self, message: Any) -> None:
        connection, data = self._connection, cloudpickle.dumps(message)
        try:
            with self._lock:
                connection.send_bytes(data)
        except OSError as error:
            raise PoolLostError(f"the pool's process has died: {error}") from None

    def _heard(self) -> Message:
        try:
            message: Message = cloudpickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise PoolLostError(f"the pool's process has died: {str(error) or 'its connection has ended'}.") from None
        if isinstance(message, Printed):
            stream = getattr(sys, message.stream)
            stream.write(message.text)
            stream.flush()  # into the file of `log_to_file`, which somebody may watch
        if isinstance(message, Raised):
            raise cloudpickle.loads(message.error) from (RemoteTraceback(message.text) if message.text else None)
        return message
