"""A script that keeps an output of a forward, with its graph, and calls no backward on it."""

import logging
import threading
from contextlib import nullcontext

import optuna
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hydra_tune
from hydra_tune.trials.context import current_context
from models import BUDGETS, WIDTH, Net
from waiting import wait_until

STEPS = 12


class Keeps:
    """As who looks at a shape, or validates without `torch.no_grad()`. Trial 0 goes on when trial 1 has trained."""

    def __init__(self, validates):
        self.validates, self.trained = validates, threading.Event()

    def __call__(self, trial):
        losses = list(self.train(trial.number, prepared=True))
        self.trained.set()
        return losses

    def train(self, number, prepared):
        torch.manual_seed(number)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if prepared:
            model, optimizer = hydra_tune.prepare(model, optimizer)
        output = model(torch.randn(4, WIDTH))
        for step in range(STEPS):
            if self.validates and step % 5 == 0:
                output = model(torch.randn(4, WIDTH))
            loss = nn.functional.cross_entropy(model(torch.randn(8, WIDTH)), torch.randint(0, 8, (8,)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if prepared and number == 0 and step == STEPS - 2:
                assert self.trained.wait(60), "trial 1 has not been let in"
            yield loss.item()
        yield output.sum().item()


@pytest.mark.parametrize("validates", [False, True])
def test_others_train_meanwhile(validates, caplog):
    script, losses = Keeps(validates), {}

    def objective(trial):
        losses[trial.number] = script(trial)
        return 0.0

    with (
        hydra_tune.ShardPool(["cpu"], 2 * BUDGETS["spilled"]) as pool,
        caplog.at_level(logging.WARNING, "hydra_tune"),
    ):
        hydra_tune.HydraTrialRunner(pool, 2).optimize(optuna.create_study(), objective, n_trials=2)
        report = pool.report()
    assert losses == {number: list(script.train(number, prepared=False)) for number in (0, 1)}
    assert not any(trial["resident"] for trial in report["trials"])
    assert [device["used_bytes"] for device in report["devices"]] == [0]
    told = [r.getMessage() for r in caplog.records if "keeps an output of an earlier forward" in r.getMessage()]
    assert len(told) == 2, "each trial once"


def test_a_step_that_had_the_device_alone_is_never_left_with_less_than_it_uses():
    """Another trial holds too much for what the step has proved to need, until it ends. Its second end was once told
    to need nothing, and a third trial was let in to where its activations were."""
    held, begun, confined = threading.Event(), threading.Event(), []

    def objective(trial):
        torch.manual_seed(trial.number)
        model = Net(depth=1 if trial.number else 6)
        optimizer = torch.optim.AdamW(model.parameters())
        if trial.number == 0:
            assert held.wait(60)
        model, optimizer = hydra_tune.prepare(model, optimizer)
        kept = model(torch.randn(4, WIDTH)) if trial.number == 0 else None
        for step in range(20):
            loss = model(torch.randn(8, WIDTH)).flatten().repeat(1 if trial.number else 200).exp().sum()
            if trial.number == 0 and step == 0:
                begun.set()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            held.set()
            if trial.number == 1 and step == 2:
                assert begun.wait(60)
            if trial.number == 0 and step > 9:
                confined.append(pool.events.machine.devices[0].ledger.steps[current_context().trials[0].id])
        return 0.0 if kept is None else kept.sum().item()

    with hydra_tune.ShardPool(["cpu"], 290 << 10) as pool:
        study = optuna.create_study()
        hydra_tune.HydraTrialRunner(pool, 2).optimize(study, objective, n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE"]
    assert min(confined) > 0


def test_who_waited_to_measure_the_same_enters_by_what_was_measured():
    """It need not have the device alone where the estimate was too small."""
    begun, measures = threading.Event(), {}

    def waits():
        return any(trial["state"].startswith("waits") for trial in pool.report()["trials"])

    def objective(trial):
        if trial.number == 1:
            assert begun.wait(60)
        model = hydra_tune.prepare(Net())
        output = model(torch.randn(4, WIDTH))
        measures[trial.number] = current_context().trials[0].planner.pilot is not None
        begun.set()
        if trial.number == 0:
            wait_until(waits)
        output.sum().backward()
        return 0.0

    with hydra_tune.ShardPool(["cpu"], 2 * BUDGETS["spilled"]) as pool:
        hydra_tune.HydraTrialRunner(pool, 2).optimize(optuna.create_study(), objective, n_trials=2)
    assert measures == {0: True, 1: False}


def test_the_report_says_who_waits_for_whose_first_step():
    """Different models, of which each is to be measured."""
    begun, seen = threading.Event(), []

    def waiting(name):
        states = [t["state"] for t in pool.report()["trials"] if t["name"] == name]
        return [state for state in states if state.startswith("waits")]

    def objective(trial):
        if trial.number == 1:
            assert begun.wait(60)
        model = hydra_tune.prepare(Net(depth=6 + trial.number), name=f"net {trial.number}")
        output = model(torch.randn(4, WIDTH))
        begun.set()
        if trial.number == 0:
            wait_until(lambda: seen.extend(waiting("net 1")) or seen)
        output.sum().backward()
        return 0.0

    with hydra_tune.ShardPool(["cpu"], 2 * BUDGETS["spilled"]) as pool:
        hydra_tune.HydraTrialRunner(pool, 2).optimize(optuna.create_study(), objective, n_trials=2)
        assert [trial["state"] for trial in pool.report()["trials"]] == ["ended", "ended"]
    assert seen == ["waits for net 0's first step"]


class Checkpointed(Net):
    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("kind", [Net, Checkpointed])
@pytest.mark.parametrize("around", [nullcontext, torch.autograd.graph.save_on_cpu])
def test_an_output_that_is_dropped_is_not_kept(kind, around, caplog):
    """Whatever hooks see what is saved for its backward."""
    with hydra_tune.ShardPool(["cpu"], BUDGETS["spilled"]) as pool:
        model = kind()
        hydra_tune.prepare(model, pool=pool)
        steps = model.forward.trial.steps
        for _ in range(STEPS):
            with around():
                model(torch.randn(4, WIDTH))
                loss = model(torch.randn(4, WIDTH)).sum()
            loss.backward()
            del loss
            assert not steps.under_way and not steps.forwards
    assert "keeps an output" not in caplog.text
