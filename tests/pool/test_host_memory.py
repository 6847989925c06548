"""Trials wait in `prepare` until host memory has room for their weights, gradients and optimizer state."""

import gc
import threading
import time

import pytest
import torch

import hydra_tune
from hydra_tune.blocks.root import trial_of
from hydra_tune.planning.optimizer_memory import training_bytes
from hydra_tune.trials.context import trial_context
from models import BUDGETS, Net
from waiting import WAIT_S, wait_until


def prepared(pool, model, **options):
    optimizer = torch.optim.AdamW(model.parameters())
    hydra_tune.prepare(model, optimizer, pool=pool, **options)
    return training_bytes(model, optimizer)


def test_weights_gradients_and_states_count():
    model = Net()
    weights = sum(p.numel() * 4 for p in model.parameters())
    model.head.bias.requires_grad_(False)
    frozen = model.head.bias.numel() * 4
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    assert training_bytes(model, None) == 2 * weights - frozen
    steps = 4 * (len(list(model.parameters())) - 1)
    assert 4 * weights - 3 * frozen <= training_bytes(model, optimizer) <= 4 * weights - 3 * frozen + steps


@pytest.fixture
def room_for_one():
    model = Net()
    need = training_bytes(model, torch.optim.AdamW(model.parameters()))
    with hydra_tune.ShardPool(["cpu"], "1MiB", host_memory=need * 3 // 2) as pool:
        yield pool


def waits(pool):
    for _ in range(int(WAIT_S / 0.01)):
        states = [trial["state"] for trial in pool.report()["trials"]]
        if any("waits" in state for state in states):
            return states
        time.sleep(0.01)
    raise AssertionError(states)


def in_thread(work):
    result = []

    def run():
        try:
            result.append(work())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


def test_a_trial_waits_until_another_has_ended_and_the_report_says_so(room_for_one):
    pool, first, second = room_for_one, Net(), Net()
    prepared(pool, first)
    thread, result = in_thread(lambda: prepared(pool, second, name="the second"))
    assert waits(pool) == ["live", "waits for 397.2 KiB of host memory"]
    assert pool.report()["trials"][1]["name"] == "the second"
    wait_until(lambda: [trial.waits_s or 0.0 for trial in pool.snapshot().trials][1] > 0.1)
    assert pool.snapshot().trials[0].waits_s is None
    hydra_tune.release(first)
    thread.join(WAIT_S)
    (told,) = pool.snapshot().trials
    assert told.waits_s is None and trial_of(second).lease.memory_wait_s > 0.1
    assert [trial["state"] for trial in pool.report()["trials"]] == ["ended", "live"] and len(result) == 1
    hydra_tune.release(second)


def test_a_trial_that_was_collected_makes_room(room_for_one):
    first = Net()
    prepared(room_for_one, first)
    thread, result = in_thread(lambda: prepared(room_for_one, Net()))
    waits(room_for_one)
    del first
    gc.collect()
    thread.join(WAIT_S)
    assert isinstance(result[0], int)


@pytest.mark.parametrize("when", ["resident", "in its first step"])
def test_a_trial_that_was_collected_makes_room_on_the_device(when):
    """For one that waits between two tasks: nobody says that a model was collected."""

    def work():
        model = Net()
        hydra_tune.prepare(model, pool=pool)
        return model(torch.randn(4, 32)).sum().item()

    with hydra_tune.ShardPool(["cpu"], 3 * BUDGETS["three shards"]) as pool:
        first = Net()
        hydra_tune.prepare(first, pool=pool)
        loss = first(torch.randn(4, 32)).sum()
        if when == "resident":
            loss.backward()
            first(torch.randn(4, 32)).sum().backward()  # by the plan
            assert pool.report()["trials"][0]["resident"]
        thread, result = in_thread(work)
        wait_until(lambda: pool.events.machine.devices[0].admissions or pool.events.machine.devices[0].entries)
        del first, loss
        gc.collect()
        thread.join(WAIT_S)
    assert isinstance(result[0], float)


def test_who_waits_is_stopped_when_the_pool_is_closed(room_for_one):
    pool, first = room_for_one, Net()
    prepared(pool, first)
    thread, result = in_thread(lambda: prepared(pool, Net()))
    waits(pool)
    pool.close()
    thread.join(WAIT_S)
    assert isinstance(result[0], hydra_tune.PoolClosedError)
    assert [trial["state"] for trial in pool.report()["trials"]] == ["live"]
    hydra_tune.release(first)


def test_a_trial_that_needs_more_than_there_is_for_all_is_refused(room_for_one):
    with pytest.raises(
        hydra_tune.BudgetError, match=r"large one does not fit: .* and all trials of this pool may have 59"
    ):
        prepared(room_for_one, Net(depth=12), name="the large one")
    assert room_for_one.report()["trials"] == []


def test_trials_of_a_runner_take_turns(room_for_one):
    live, most = [], []

    def objective(number):
        with trial_context(room_for_one, number):
            model = Net()
            prepared(None, model)
            live.append(number)
            most.append(len(live))
            model(torch.randn(4, 32)).sum().backward()
            live.remove(number)

    threads = [threading.Thread(target=objective, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert most == [1, 1, 1, 1]


@pytest.mark.parametrize("amount", ["lots", 0, "900TiB"])
def test_host_memory_is_bytes_that_the_host_has(amount):
    with pytest.raises(hydra_tune.ConfigError):
        hydra_tune.ShardPool(["cpu"], "1MiB", host_memory=amount)
