"""Who waits for long says for whom, and who is only slow is left in peace."""

import threading
import time

import pytest
import torch
from torch import nn

import hydra_tune
from hydra_tune import event_loop, garbage
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
        ({"memory": "900KiB"}, "trial 1 waits for memory of cpu:0 (virtual), and no task has begun for a while: trial"),
        ({"memory": "8MiB", "host_memory": "900KiB"}, " of host memory, and no task has begun for a while: trial"),
    ],
    ids=["device", "host memory"],
)
def test_who_waits_for_what_is_kept_says_for_whom(limits, words, monkeypatch, caplog):
    monkeypatch.setattr(garbage, "WARN_S", 0.05)
    monkeypatch.setattr(event_loop, "_LOOK_AROUND_S", 0.02)
    with hydra_tune.ShardPool(["cpu"], **limits) as shared:
        kept = train(shared)
        thread = threading.Thread(target=train, args=(shared,))
        thread.start()
        wait_until(lambda: words in caplog.text, "it says so")
        assert "trial 0 has " in caplog.text and "hydra_tune.release(model)" in caplog.text
        hydra_tune.release(kept)
        thread.join(WAIT_S)
        assert not thread.is_alive()


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.1)
        return super().forward(x)


def test_whoever_waits_for_a_pilot_is_left_in_peace(monkeypatch, caplog):
    monkeypatch.setattr(garbage, "WARN_S", 0.05)
    monkeypatch.setattr(event_loop, "_LOOK_AROUND_S", 0.02)

    def pilot(shared):
        model = hydra_tune.prepare(nn.Sequential(*(Slow(96, 96) for _ in range(8))), pool=shared)
        model(torch.ones(4, 96))
        hydra_tune.release(model)

    with hydra_tune.ShardPool(["cpu"], "900KiB") as shared:
        thread = threading.Thread(target=pilot, args=(shared,))
        thread.start()
        wait_until(lambda: shared._machine.devices[0].ledger.pilot is not None, "its pilot begins")
        hydra_tune.release(train(shared))
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert "no task has begun" not in caplog.text


def seconds(monkeypatch, until, asks):
    """At which it says yes."""
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    wait, found = garbage.Wait(), []
    for second in range(1, until):
        now_s[0] = float(second)
        if asks(wait, second):
            found.append(second)
    return found


def test_whoever_waits_while_tasks_begin_is_left_in_peace(monkeypatch):
    warned = seconds(monkeypatch, 600, lambda wait, second: wait.shall_warn(min(second, 300)))
    assert warned == [360, 420, 540], "after a minute without a task, then after two, and after four"


def test_garbage_is_looked_for_ever_more_seldom(monkeypatch):
    assert seconds(monkeypatch, 200, lambda wait, _: wait.shall_collect()) == [1, 2, 4, 8, 16, 32, 64, 124, 184]
