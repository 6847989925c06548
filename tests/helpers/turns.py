"""Threads of a pool that take turns in an order which a seed decides: a run that can be repeated, event by event.

One thread goes on at a time, until it waits for the pool or has been given a task; then any of them is next. Copies
ahead of their tasks are made in between, by whoever has the turn. The pool's clock counts what is asked of it.
"""

import itertools
import random
import threading
from types import SimpleNamespace

import hydra_tune
from hydra_tune.devices import meter
from hydra_tune.trials.context import trial_context

MOST_TURNS = 1_000_000


class Turns:
    def __init__(self, seed):
        self._rng = random.Random(seed)
        self._changed = threading.Condition()
        self._threads = []
        self._whose = None
        self._count = 0
        self.jobs = []

    def join(self, everyone):
        """Wait for all the others, and for one's turn."""
        with self._changed:
            self._threads.append(name := threading.current_thread().name)
            if len(self._threads) == everyone:
                self._threads.sort()
                self._choose()
            self._await(name)

    def pass_on(self):
        while self.jobs and self._rng.random() < 0.5:
            self.jobs.pop(0)()
        with self._changed:
            self._choose()
            self._await(threading.current_thread().name)

    def leave(self):
        with self._changed:
            self._threads.remove(threading.current_thread().name)
            if self._threads:
                self._choose()

    def _choose(self):
        self._count += 1
        self._whose = self._rng.choice(self._threads)
        self._changed.notify_all()

    def _await(self, name):
        while self._whose != name and self._count < MOST_TURNS:
            self._changed.wait()
        assert self._count < MOST_TURNS, "nobody goes on"


class Waits:
    """In place of a condition of the pool's: who waits passes the turn on, and looks again when it is back."""

    def __init__(self, pool):
        self._pool = pool

    def wait(self, timeout=None):
        saved = self._pool.events.lock._release_save()
        try:
            self._pool.turns.pass_on()
        finally:
            self._pool.events.lock._acquire_restore(saved)

    def notify_all(self):
        pass


class TurnsPool(hydra_tune.ShardPool):
    def __init__(self, *args, turns_seed, **kwargs):
        super().__init__(*args, **kwargs)
        self.turns = Turns(turns_seed)
        self.story = []  # all that the scheduler was told, and has said
        ticks = itertools.count()
        events = self.events
        events.table.leases = Leases(self)
        events.report.trace.now_s = lambda: float(next(ticks))
        events.promotions.copiers = [self.turns.jobs.append] * len(events.promotions.copiers)
        handle, acquire = events._handle, events.acquire

        def handle_and_note(event, at_s=None):
            handle(event, at_s)
            self.story.append(events.machine._story[-1])

        def acquire_and_pass_on(trial, task, after=None):
            acquire(trial, task, after)
            self.turns.pass_on()

        events._handle, events.acquire = handle_and_note, acquire_and_pass_on


class Leases(dict):
    def __init__(self, pool):
        self._pool = pool

    def __setitem__(self, number, lease):
        lease.wake = Waits(self._pool)
        super().__setitem__(number, lease)


def run_in_turns(monkeypatch, pool, objectives):
    """Each in a thread of its own, with the random state of its number."""
    ticks = itertools.count()
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    errors = []

    def run(number):
        pool.turns.join(len(objectives))
        try:
            with trial_context(pool, number):
                objectives[number](number)
        except BaseException as error:
            errors.append(error)
        finally:
            pool.turns.leave()

    threads = [threading.Thread(target=run, args=(n,), name=f"objective {n}") for n in range(len(objectives))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
