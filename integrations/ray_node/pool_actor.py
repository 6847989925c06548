"""One node's pool under Ray: an actor that owns the node's devices, in whose threads the node's trials train.

A pool's process that dies starts again, empty; its trials fail, and Tune's `max_failures` decides whether they start
anew.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from functools import partial
from typing import Any

from hydra_tune.integrations.ray_node.messages import Begun, CallMethod, GoOn, Order, Raised, SaveState, StopTrial
from hydra_tune.integrations.ray_node.pool_spec import PoolSpec
from hydra_tune.integrations.ray_node.proxy_connections import ProxyConnection, ProxyConnections
from hydra_tune.show.snapshot import PoolSnapshot

LAST_WORDS_S = 1.0  # for a proxy to hear that the process ends
GIL_S = 0.001  # for which a computing thread has it, while a report waits
logger = logging.getLogger("hydra_tune")


class PoolActor:
    """One node's pool. Proxies speak to it by connections of their own; by the actor's methods they only find it.

    The class is known where there is no torch.
    """

    def __init__(self, spec: PoolSpec, job: str, places: int, num_threads: int) -> None:
        os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # the process stays where it is, threads move
        import torch

        from hydra_tune.integrations.ray_node import tune_session, user_code
        from hydra_tune.integrations.ray_node.kept_state import KeptStates
        from hydra_tune.integrations.ray_node.trial_thread import TrialThread
        from hydra_tune.pool.shard_pool import ShardPool
        from hydra_tune.show.control_socket import control_server

        torch.set_num_threads(num_threads)
        sys.setswitchinterval(GIL_S)
        tune_session.install()
        self._pool = ShardPool(**spec.arguments)
        control_server.show(self._pool)
        self._job = None if spec.shared else job
        self._places = places
        self._attempts: dict[ProxyConnection, TrialThread] = {}
        self._states = KeptStates(lambda: self._pool.host_memory_bytes - self._pool.host_used_bytes)
        self._attempt = partial(
            TrialThread, self._pool, work=user_code.train, on_lost=self._start_anew, states=self._states
        )
        self._proxies = ProxyConnections(self._hears)

    def address(self) -> tuple[Any, bytes]:
        """Where a proxy of this node connects, and by which key."""
        return self._proxies.address, self._proxies.key

    def report(self) -> dict[str, Any]:
        """`ShardPool.report`, how many trials live, and how many attempts have gone on from what the pool had of them,
        or of others, in its memory or in a checkpoint."""
        live = sum(attempt.is_alive for attempt in list(self._attempts.values()))
        return {"live": live, "continued": dict(self._states.continued), **self._pool.report()}

    def end(self) -> dict[str, Any]:
        """Its last report. The process leaves nothing behind when it is killed then."""
        from hydra_tune.show.control_socket import control_server

        control_server.close()
        return self.report()

    def snapshot(self) -> PoolSnapshot:
        """What the pool does now."""
        return self._pool.snapshot()

    # ---- in the thread that reads ----

    def _hears(self, proxy: ProxyConnection, said: Any) -> None:
        if isinstance(said, Order):
            self._begin(proxy, said)
            return
        attempt = self._attempts.get(proxy)
        if attempt is None:
            return
        if said is None:
            attempt.stop("its proxy has died")
            if not attempt.is_alive:
                del self._attempts[proxy]
        elif isinstance(said, StopTrial):
            attempt.stop(said.reason)
        elif isinstance(said, (GoOn, CallMethod, SaveState)):
            attempt.answer(said)

    def _begin(self, proxy: ProxyConnection, order: Order) -> None:
        """Unless the pool is full. A former attempt of the same trial ends."""
        if self._job is not None and order.job != self._job:
            error = PermissionError(
                f"a pool runs code of its own Ray job, {self._job}, but job {order.job} asked. Share one with "
                "HydraExecutor(pool=...) in both."
            )
            proxy.say(Raised.of(error, ""))
            return
        self._attempts = {proxy: attempt for proxy, attempt in self._attempts.items() if attempt.is_alive}
        former = [attempt for attempt in self._attempts.values() if attempt.order.trial_id == order.trial_id]
        for attempt in former:
            attempt.stop("another attempt of this trial has begun")
        has_place = len(self._attempts) - len(former) < self._places
        proxy.say(Begun(has_place))
        if has_place:
            self._attempts[proxy] = attempt = self._attempt(order=order, proxy=proxy)
            attempt.start()

    def _start_anew(self) -> None:
        """In a new process, once the trial has been heard of."""
        logger.error("a device is lost to this process: it ends, and a new one begins")
        threading.Timer(LAST_WORDS_S, os._exit, [1]).start()
