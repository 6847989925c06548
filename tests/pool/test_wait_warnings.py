"""Who waits for long says for whom, and who is only slow is left in peace."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune.pool import long_leases, waiting_trials
from waiting import WAIT_S, wait_until


def train(shared, width=96):
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
    model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), pool=shared)
    loss = model(torch.ones(4, width)).square().mean()
    loss.backward()
    optimizer.step()
    return model


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (
            {"memory": "900KiB"},
            "trial 1 waits for memory of cpu:0 (virtual), and no task has begun for a while, beside trial",
        ),
        (
            {"memory": "8MiB", "host_memory": "900KiB"},
            " of host memory, and no task has begun for a while, beside trial",
        ),
    ],
    ids=["device", "host memory"],
)
def test_who_waits_for_what_is_kept_says_for_whom(limits, words, monkeypatch, caplog):
    monkeypatch.setattr(waiting_trials, "_WARN_S", 0.05)
    monkeypatch.setattr(long_leases, "LOOK_AROUND_S", 0.02)
    with hydra_tune.ShardPool(["cpu"], **limits) as shared:
        kept = train(shared)
        thread = threading.Thread(target=train, args=(shared,))
        thread.start()
        wait_until(lambda: words in caplog.text, "it says so")
        assert "beside trial 0." in caplog.text and "hydra_tune.release(model)" in caplog.text
        hydra_tune.release(kept)
        thread.join(WAIT_S)
        assert not thread.is_alive()


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.1)
        return super().forward(x)


def test_whoever_waits_for_a_pilot_is_left_in_peace(monkeypatch, caplog):
    monkeypatch.setattr(waiting_trials, "_WARN_S", 0.05)
    monkeypatch.setattr(long_leases, "LOOK_AROUND_S", 0.02)

    def pilot(shared):
        model = hydra_tune.prepare(nn.Sequential(*(Slow(96, 96) for _ in range(8))), pool=shared)
        model(torch.ones(4, 96))
        hydra_tune.release(model)

    with hydra_tune.ShardPool(["cpu"], "900KiB") as shared:
        thread = threading.Thread(target=pilot, args=(shared,))
        thread.start()
        wait_until(lambda: shared.events.machine.devices[0].ledger.pilot is not None, "its pilot begins")
        hydra_tune.release(train(shared))
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert "no task has begun" not in caplog.text


class Looks:
    """The wakes of a trial that waits for so many seconds, without a wait; and when it does what it does so seldom."""

    def __init__(self, seconds):
        self.seconds, self.now_s, self.found = seconds, 0.0, []

    def wait(self, seconds):
        self.now_s += seconds

    def check(self):
        if self.now_s >= self.seconds:
            raise TimeoutError

    def note(self, *_):
        self.found.append(self.now_s)


def looks_of_a_wait(monkeypatch, seconds, name, busy=lambda now_s: False):
    with hydra_tune.ShardPool(["cpu"], "8MiB") as shared:
        kept, looks = train(shared), Looks(seconds)
        note = looks.note if name == "collect" else lambda: None
        monkeypatch.setattr(threading, "Thread", lambda **_: SimpleNamespace(start=note))
        monkeypatch.setattr(shared.events.waiting, "_warn", looks.note if name == "warn" else lambda _: None)
        monkeypatch.setattr(shared.events.waiting, "anybody_computes", lambda: busy(looks.now_s))
        leases = shared.events.table.leases
        leases[7] = SimpleNamespace(granted=[], wake=looks)
        with shared.events.lock, pytest.raises(TimeoutError):
            shared.events.await_answer(7, object, looks.check)
        del leases[7]
        hydra_tune.release(kept)
    return looks.found


def test_whoever_waits_while_others_compute_is_left_in_peace(monkeypatch):
    warned = looks_of_a_wait(monkeypatch, 900, "warn", lambda now_s: now_s <= 300 or now_s == 500)
    assert warned == [360, 560], "after a minute in which nobody was seen to compute, once each time"


def test_garbage_is_looked_for_ever_more_seldom(monkeypatch):
    assert looks_of_a_wait(monkeypatch, 200, "collect") == [1, 2, 4, 8, 16, 32, 64, 128]
