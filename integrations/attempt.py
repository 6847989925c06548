"""One attempt of a Tune trial, in the pool's process: a thread that trains, and what it has to say to its proxy.

The thread speaks by posting messages, and waits where Tune decides (after a report, for a trainable's next method); the
proxy takes them by long polls in the pool's event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from hydra_tune.context import Context, TrialContext
from hydra_tune.device import is_lost
from hydra_tune.errors import TrialStopped, clear_frames
from hydra_tune.integrations.messages import Ended, Message, Order, Raised, Reported, Stopped
from hydra_tune.pool import ShardPool


class Attempt:
    """`work` is called in the trial's thread, with this; `on_lost`, if it ends by an error after which the process can
    use its devices no more. Made within the event loop."""

    def __init__(
        self, pool: ShardPool, order: Order, work: Callable[[Attempt], Any], on_lost: Callable[[], None]
    ) -> None:
        self.order = order
        self.seen_s = time.monotonic()  # its proxy
        self._pool = pool
        self._work = work
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._messages: deque[Message] = deque()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()  # of Tune, for which the thread waits
        self._stop_reason = ""  # if it was asked to
        self._context: Context | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=order.trial_name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # ---- in the event loop ----

    async def take(self, timeout_s: float) -> list[Message]:
        """What it has said since; nothing, if it says nothing for so long."""
        self.seen_s = time.monotonic()
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except asyncio.TimeoutError:
            return []
        finally:
            self.seen_s = time.monotonic()
        with self._lock:
            self._news.clear()
            taken = list(self._messages)
            self._messages.clear()
        return taken

    def answer(self, value: Any = None) -> None:
        """The thread goes on."""
        self._answers.put(value)

    def stop(self, reason: str) -> None:
        """At its next task boundary, or where it waits."""
        with self._lock:
            self._stop_reason, context = reason, self._context
        if context is not None:
            context.stop(reason)
        self._answers.put(None)

    # ---- in its thread ----

    def say(self, message: Message) -> None:
        with self._lock:
            self._messages.append(message)
        self._loop.call_soon_threadsafe(self._news.set)

    def await_answer(self) -> Any:
        """Of Tune.

        Raises:
            TrialStopped: it has ended the trial.
        """
        answer = self._answers.get()
        self._check()
        return answer

    def report(self, metrics: dict[str, Any], checkpoint: Any) -> None:
        """Returns once Tune lets the trial go on.

        Raises:
            TrialStopped: it has ended the trial.
        """
        self._check()
        self.say(Reported(metrics, checkpoint))
        self.await_answer()

    def _check(self) -> None:
        if self._context is not None:
            self._context.stop.check_between_steps()

    def _run(self) -> None:
        outcome = self._outcome()
        self._work, self._context = _nothing, None
        self.say(outcome)

    def _outcome(self) -> Message:
        try:
            name, number = self.order.trial_name, _number_of(self.order.trial_id)
            with TrialContext(self._pool, number, name=name) as context:
                with self._lock:
                    self._context = context
                if self._stop_reason:
                    context.stop(self._stop_reason)
                self._check()
                return Ended(self._work(self))
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


def _nothing(_: Attempt) -> None:
    return None


def _number_of(trial_id: str) -> int:
    """The same in each attempt, and so is what a function that sets no seed draws."""
    return int.from_bytes(hashlib.blake2b(trial_id.encode(), digest_size=4).digest(), "big")
