"""One node's pool under Ray: an actor that owns the node's devices, in whose threads the node's trials train.

A pool's process that dies starts again, empty; its trials fail, and Tune's `max_failures` decides whether they start
anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from typing import Any

from hydra_tune.integrations.messages import Message, Order
from hydra_tune.integrations.pool_spec import PoolSpec

POLL_S = 5.0  # a message is awaited for so long before the proxy asks anew
SILENCE_S = 10.0  # a proxy that is not heard of for longer is dead
LAST_WORDS_S = 1.0
GIL_S = 0.001  # for which a computing thread has it, while a report waits
logger = logging.getLogger("hydra_tune")


class PoolActor:
    """One node's pool. Its methods run in an event loop, trials in threads of their own."""

    def __init__(self, spec: PoolSpec, job: str, places: int, num_threads: int) -> None:
        import torch

        from hydra_tune.integrations import pool_session, pool_work  # noqa: F401, which takes seconds
        from hydra_tune.integrations.attempt import Attempt
        from hydra_tune.pool import ShardPool

        torch.set_num_threads(num_threads)
        sys.setswitchinterval(GIL_S)
        pool_session.install()
        self._pool = ShardPool(**spec.arguments)
        self._job = None if spec.shared else job
        self._places = places
        self._attempts: dict[str, Attempt] = {}
        self._reaper: asyncio.Task[None] | None = None

    async def is_ready(self) -> bool:
        return True

    async def begin(self, order: Order) -> bool:
        """Start an attempt; False if the pool is full. A former one of the same trial ends."""
        from hydra_tune.integrations.attempt import Attempt
        from hydra_tune.integrations.pool_work import train

        if self._job is not None and order.job != self._job:
            raise PermissionError(
                f"a pool runs code of its own Ray job, {self._job}, but job {order.job} asked. Share one with "
                "HydraExecutor(pool=...) in both."
            )
        if self._reaper is None:
            self._loop = asyncio.get_running_loop()
            self._reaper = self._loop.create_task(self._reap())
        live = [attempt for attempt in self._attempts.values() if attempt.is_alive]
        former = [attempt for attempt in live if attempt.order.trial_id == order.trial_id]
        for attempt in former:
            attempt.stop("another attempt of this trial has begun")
        if len(live) - len(former) >= self._places:
            return False
        attempt = Attempt(self._pool, order, train, self._start_anew)
        self._attempts[order.attempt] = attempt
        attempt.start()
        return True

    async def take(self, name: str) -> list[Message]:
        """What the attempt says next."""
        taken: list[Message] = await self._of(name).take(POLL_S)
        return taken

    async def go_on(self, name: str, answer: Any = None) -> list[Message]:
        """Let the attempt go on, and what it says next."""
        attempt = self._of(name)
        attempt.answer(answer)
        taken: list[Message] = await attempt.take(POLL_S)
        return taken

    async def stop(self, name: str, reason: str) -> None:
        attempt = self._attempts.get(name)
        if attempt is not None:
            attempt.stop(reason)

    async def forget(self, name: str) -> None:
        """An attempt whose last message was taken."""
        self._attempts.pop(name, None)

    async def beat(self, name: str) -> bool:
        """The proxy lives; whether it does so for anything."""
        attempt = self._attempts.get(name)
        if attempt is not None:
            attempt.seen_s = time.monotonic()
        return attempt is not None

    async def report(self) -> dict[str, Any]:
        """`ShardPool.report`, and how many trials live."""
        live = sum(attempt.is_alive for attempt in self._attempts.values())
        return {"live": live, **await asyncio.to_thread(self._pool.report)}

    def _start_anew(self) -> None:
        """From any thread: in a new process, once the trial has been heard of."""
        logger.error("a device is lost to this process: it ends, and a new one begins")
        self._loop.call_soon_threadsafe(self._loop.call_later, LAST_WORDS_S, os._exit, 1)

    def _of(self, name: str) -> Any:
        attempt = self._attempts.get(name)
        if attempt is None:
            raise LookupError(f"no attempt {name} is known here.")
        return attempt

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for name, attempt in list(self._attempts.items()):
                if time.monotonic() - attempt.seen_s > SILENCE_S:
                    attempt.stop("its proxy has died")
                    del self._attempts[name]
