"""A trial's loader workers are forked while no trial visits a block, and inherit no trial."""

import copy
import os
import signal
import threading
import time

import optuna
import pytest
import torch
from torch.utils.data import DataLoader

import hydra_tune
import models
from comparison import step
from hydra_tune.blocks.block import Block
from hydra_tune.checkpoints.checkpoint_folder import CheckpointFolder, Position
from hydra_tune.devices.counting_mode import TrialMode
from hydra_tune.devices.device import Device
from hydra_tune.devices.host_weights import HostWeights
from hydra_tune.devices.meter import CountingPaused, TrialMeter
from hydra_tune.process.fork import ForkGate, gate
from hydra_tune.trials.context import trial_context


def test_a_fork_waits_for_visits_under_way_and_holds_up_the_next():
    gate, events = ForkGate(), []
    inside, may_leave, closed = threading.Event(), threading.Event(), threading.Event()

    def visits():
        gate.enter()
        inside.set()
        assert may_leave.wait(10)
        events.append("leaves the first")
        gate.leave()
        assert closed.wait(10)
        gate.enter()
        events.append("enters the second")
        gate.leave()

    def forks():
        gate.close()
        events.append("forks")
        closed.set()
        while not waits_at(gate):
            pass
        gate.open()

    def waits_at(gate):
        return gate._open._cond._waiters

    first, second = (threading.Thread(target=f, daemon=True) for f in (visits, forks))
    first.start()
    assert inside.wait(10)
    second.start()
    while gate._open.is_set():
        pass
    assert not closed.wait(0.1)
    may_leave.set()
    first.join(10)
    second.join(10)
    assert events == ["leaves the first", "forks", "enters the second"]


def test_a_visit_within_a_visit_does_not_wait_for_the_fork_that_waits_for_it():
    gate = ForkGate()
    assert gate.enter()
    gate._open.clear()
    assert not gate.enter()


def test_a_forked_child_is_in_no_trial():
    meter = TrialMeter(Device(0, 1 << 20), 0, always=True)
    meter.inside = 1
    read, write = os.pipe()
    with TrialMode(meter=meter):
        pid = os.fork()
        if pid == 0:
            torch.ones(10)
            os.write(write, b"%d" % meter.device.live_bytes)
            os._exit(0)
        os.waitpid(pid, 0)
        kept = torch.ones(10)
    assert os.read(read, 10) == b"0"
    assert meter.device.live_bytes == kept.nbytes
    os.close(read)
    os.close(write)


class Loader(list):
    """Notes how many threads are starting its kind's workers."""

    starting, most = 0, 0

    def __iter__(self):
        kind = type(self)
        kind.starting += 1
        kind.most = max(kind.most, kind.starting)
        time.sleep(0.02)
        kind.starting -= 1
        return super().__iter__()


def test_loaders_start_their_workers_one_after_another():
    """filelock refuses a fork while another thread's waits for visits."""
    together = threading.Barrier(3)

    def loop():
        with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
            model, _, loader = hydra_tune.prepare(torch.nn.Linear(2, 2), None, Loader([torch.ones(1, 2)]), pool=pool)
            together.wait(10)
            for x in loader:
                model(x)
            hydra_tune.release(model)

    threads = [threading.Thread(target=loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert Loader.most == 1 and not any(thread.is_alive() for thread in threads)


def test_a_thread_that_was_interrupted_on_its_way_out_and_searches_holds_up_no_fork():
    """By Ctrl-C in `release`, for one. Trials' loaders waited for it for ever."""
    hung = []

    def objective(trial):
        def let_go():
            hung.append(True)
            gate._inside.clear()

        watch = threading.Timer(20, let_go)
        watch.start()
        batches = list(DataLoader([1, 2], num_workers=1))
        watch.cancel()
        return len(batches)

    gate.enter()
    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
        hydra_tune.HydraTrialRunner(pool, 2).optimize(optuna.create_study(), objective, n_trials=1)
    assert not hung


def test_a_child_that_was_forked_while_a_thread_came_to_wait_for_the_end_of_the_fork_goes_on():
    """It has that thread's lock, but not the thread."""
    gate = ForkGate()

    def forks():
        gate.close()
        waits = threading.Thread(target=gate._open._cond.acquire)
        waits.start(), waits.join(10)
        gate.open_in_child()

    child = threading.Thread(target=forks, daemon=True)
    child.start(), child.join(10)
    assert not child.is_alive()


def test_a_fork_waits_for_a_pools_lock():
    held, may_go, pool = threading.Event(), threading.Event(), hydra_tune.ShardPool(["cpu"], "1MiB")

    def handles():
        with pool.events.lock:
            held.set()
            assert may_go.wait(10)
            pool.handled = True

    thread = threading.Thread(target=handles)
    thread.start()
    assert held.wait(10)
    threading.Timer(0.05, may_go.set).start()
    child = os.fork()
    if child == 0:
        os._exit(int(not hasattr(pool, "handled")))
    _, status = os.waitpid(child, 0)
    thread.join()
    assert status == 0


def test_a_loader_forks_while_another_trials_checkpoint_is_on_its_way_to_the_disk(tmp_path, monkeypatch):
    """It waited for the disk, and all trials' operators waited for the fork."""
    syncing, forked, waited, fsync = threading.Event(), threading.Event(), [], os.fsync

    def slow(file):
        syncing.set()
        waited.append(forked.wait(10))
        fsync(file)

    def trial():
        meter = TrialMeter(Device(0, 1 << 20), 0, always=False)
        with TrialMode(meter=meter), CountingPaused():
            CheckpointFolder(tmp_path).write(Position(0, 1), {"weight": torch.ones(10)})

    monkeypatch.setattr(os, "fsync", slow)
    thread = threading.Thread(target=trial)
    thread.start()
    assert syncing.wait(10)
    child = os.fork()
    if child == 0:
        os._exit(0)
    forked.set()
    os.waitpid(child, 0)
    thread.join()
    assert waited and all(waited)
    assert CheckpointFolder(tmp_path).newest()[0] == Position(0, 1) and not gate._inside


def test_a_fork_that_is_interrupted_while_it_waits_for_a_pools_lock_leaves_none_taken():
    """By Ctrl-C: hooks at a fork can't raise, and the fork goes on."""
    gate, locks = ForkGate(), [threading.RLock() for _ in range(3)]
    for lock in locks:
        gate.guard(lock)

    class Interrupting:
        def __enter__(self):
            raise KeyboardInterrupt

        def __exit__(self, *_):
            raise RuntimeError("cannot release un-acquired lock")

    gate._guarded_locks.insert(1, Interrupting())
    with pytest.raises(KeyboardInterrupt):
        gate.close()
    gate.open()
    taken = []
    thread = threading.Thread(target=lambda: taken.extend(lock.acquire(timeout=10) for lock in locks))
    thread.start(), thread.join()
    assert taken == [True] * 3 and gate._open.is_set()


def answer_of_a_child(function):
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            function()
            os.write(writes, b"went")
        except hydra_tune.HydraTuneError as error:
            os.write(writes, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writes)
    with os.fdopen(reads) as told:
        return told.read()


def test_a_forked_child_may_copy_a_spilled_model_and_let_go_of_it_but_not_call_it():
    """Its pool is the parent's, whose copy thread and other trials' threads stay behind."""
    torch.manual_seed(0)
    model, x = models.Net(), torch.randn(4, models.WIDTH)
    expected = model(x).detach()

    def copies():
        assert torch.equal(copy.deepcopy(model)(x), expected)

    def lets_go():
        hydra_tune.release(model)
        assert torch.equal(model(x), expected)

    with hydra_tune.ShardPool(["cpu"], models.BUDGETS["few blocks"]) as pool:
        step(model, pool).sum().backward()
        model(x).sum().backward()
        assert "was called in a forked process" in answer_of_a_child(lambda: model(x))
        assert answer_of_a_child(copies) == answer_of_a_child(lets_go) == "went"
        assert torch.equal(model(x), expected)
        hydra_tune.release(model)


def test_a_forked_child_makes_a_pool_of_its_own():
    """As scripts without one do, of themselves."""

    def trains(pool=None):
        hydra_tune.prepare(torch.nn.Linear(4, 4), pool=pool)(torch.ones(2, 4)).sum().backward()

    trains()
    assert answer_of_a_child(trains) == "went"
    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool:
        assert "Make a new ShardPool in a forked one" in answer_of_a_child(lambda: trains(pool))


class Pinning(Device):
    is_virtual = False


@pytest.mark.parametrize(("device", "seen"), [(Pinning, 7), (Device, 0)])
def test_weights_that_a_gpu_copies_from_stay_where_they_are_when_the_process_forks(device, seen):
    """Then both have them. Others are the process's own."""
    layer = torch.nn.Linear(4, 4)
    layer.bias.data.zero_()
    host = HostWeights(Block("layer", layer).slot_parameters, device(0, 1 << 16))
    written, tells = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(written, 1)
            os._exit(int(layer.bias[0]))
        finally:
            os._exit(99)
    layer.bias.data.fill_(7)
    os.write(tells, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == seen
    os.close(written), os.close(tells)
    host.close()


class Waits(torch.nn.Linear):
    """For another thread, within its forward."""

    inside, may_go = threading.Event(), threading.Event()

    def forward(self, x):
        self.inside.set()
        assert self.may_go.wait(10)
        return super().forward(x)


def test_a_fork_waits_for_a_block_but_not_for_what_is_computed_between_blocks():
    forked = threading.Event()

    def forks():
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        forked.set()

    thread = threading.Thread(target=forks)
    model = torch.nn.Sequential(Waits(64, 64), *(torch.nn.Linear(64, 64) for _ in range(7)))

    def let_go():
        assert Waits.inside.wait(10)
        thread.start()
        early.append(forked.wait(0.1))
        Waits.may_go.set()

    early = []
    with hydra_tune.ShardPool(["cpu"], 100_000) as pool:
        hydra_tune.prepare(model, pool=pool)
        Waits.may_go.set()
        model(torch.ones(2, 64)).sum().backward()  # a pilot's forward, too
        Waits.inside.clear(), Waits.may_go.clear()
        lets_go = threading.Thread(target=let_go)
        lets_go.start()
        y = model(torch.ones(2, 64)).sum()
        assert forked.wait(10), "with a graph that lives"
        y.backward()
        lets_go.join(10), thread.join(10)
    assert early == [False]


class Draws(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return torch.cat([torch.rand(2), torch.tensor([float(torch.initial_seed() % 1000)])])


def test_a_loaders_worker_draws_as_in_plain_pytorch():
    def drawn():
        torch.manual_seed(5)
        return [*DataLoader(Draws(), num_workers=2, shuffle=True), torch.rand(2)]

    expected = drawn()
    with hydra_tune.ShardPool(["cpu"], "1MiB") as pool, trial_context(pool, 0):
        found = drawn()
    assert all(map(torch.equal, found, expected))


BACKENDS = [name for name, module in vars(torch).items() if "_initialization_lock" in getattr(module, "__dict__", ())]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_child_may_seed_though_another_thread_was_seeding(backend):
    """`torch.manual_seed` holds a lock of each backend's for a moment; a loader's worker begins with it, and waited for
    ever for mtia's."""
    lock, held, done = getattr(torch, backend)._initialization_lock, threading.Event(), threading.Event()

    def seeds():
        with lock:
            held.set()
            assert done.wait(20)

    thread = threading.Thread(target=seeds)
    thread.start()
    assert held.wait(10)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(10)
            torch.manual_seed(0)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    done.set()
    thread.join(10)
    assert os.waitstatus_to_exitcode(status) == 0
