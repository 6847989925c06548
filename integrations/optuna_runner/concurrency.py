"""How many trials of a search live at a time.

Too few leave the device idle while weights move; too many do not fit host memory, and their bytes are unknown before
the first is prepared. So a search begins with enough of them to hide transfers, and lets more ask once a trial's bytes
are known, up to what host memory holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hydra_tune.config import MOST_TRIALS_A_DEVICE

if TYPE_CHECKING:
    from hydra_tune.pool.shard_pool import ShardPool

logger = logging.getLogger("hydra_tune")
LEAST_A_DEVICE = 2  # one computes while another steps its optimizer on the host
LOOK_AROUND_S = 0.5
TOLD_S = 30.0  # a storage that failed to be told of a trial's end keeps nobody waiting for longer


class SearchEnded(Exception):
    """Raised instead of a trial that was asked for too late."""


class Places:
    """How many trials of one search may live at a time. Whoever asks Optuna for a trial waits for a place first."""

    def __init__(
        self, pool: ShardPool, concurrency: int | None, timeout_s: float | None, stopped: Callable[[], bool]
    ) -> None:
        self._pool = pool
        self._stopped = stopped
        self._given = concurrency
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._taken: dict[int, float | None] = {}  # by thread: when its trial ended, which is still to be told
        self._ended = False
        self._change = threading.Condition()
        self._said = 0

    @property
    def are_counted(self) -> bool:
        """Whether somebody may wait for one."""
        return self._given is None

    @property
    def most(self) -> int:
        """Threads that a search may need."""
        return self._given or MOST_TRIALS_A_DEVICE * len(self._pool.devices)

    @property
    def number(self) -> int:
        """As far as is known by now."""
        if self._given is not None:
            return self._given
        least, host_bytes = LEAST_A_DEVICE * len(self._pool.devices), self._pool.host_bytes
        shared_bytes = max(0, self._pool.host_used_bytes - sum(host_bytes))
        most_bytes, a_trial = self._pool.host_memory_bytes - shared_bytes, max(host_bytes, default=0)
        if a_trial == 0:
            return least
        number = max(least, min(self.most, most_bytes // a_trial))
        if number != self._said:
            self._said = number
            logger.info("up to %d trials live together, for which host memory has room", number)
        return number

    def take(self) -> None:
        """For the calling thread.

        Raises:
            SearchEnded: the search was stopped, or its time is over.
        """
        if self._ended:
            raise SearchEnded
        if self._given is not None:  # there are no more threads than that
            return
        with self._change:
            self._taken.pop(threading.get_ident(), None)
            while not self._ended and self._living >= self.number:
                self._change.wait(LOOK_AROUND_S)
                over = self._until_s is not None and time.monotonic() >= self._until_s
                self._ended = self._ended or over or self._stopped()
            if self._ended:
                raise SearchEnded
            self._taken[threading.get_ident()] = None

    @property
    def _living(self) -> int:
        late_s = time.monotonic() - TOLD_S
        return sum(ended_s is None or ended_s > late_s for ended_s in self._taken.values())

    def trial_ends(self) -> None:
        """That of the calling thread; next it is told, then the place is given back."""
        if self._given is not None:
            return
        with self._change:
            self._taken[threading.get_ident()] = time.monotonic()

    def give_back(self) -> None:
        with self._change:
            self._taken.pop(threading.get_ident(), None)
            self._change.notify_all()

    def end(self) -> None:
        """Nobody gets a place any more."""
        with self._change:
            self._ended = True
            self._change.notify_all()
