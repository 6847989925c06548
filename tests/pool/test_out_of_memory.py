"""A block that needs more than on the first batch: what can go goes, then shards get smaller, then its trial ends."""

from contextlib import nullcontext

import optuna
import pytest
import torch
from torch import nn

import comparison
import hydra_tune
import models
from comparison import Script, assert_same
from hydra_tune.trials.context import trial_context
from models import WIDTH, Net

KIB = 1 << 10
BUDGET = 190 * KIB


def in_backward():
    return torch._C._current_graph_task_id() != -1


class Lacks(Script):
    """A block raises as a device would, `times` in a row, after it has drawn and counted."""

    times, steps = 1, (2,)

    class Layer(models.Layer):
        def set_up(self):
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            x = self.norm(nn.functional.dropout(x, 0.2))
            self.script.use_memory(self)
            return super().forward(x)

    def model(self):
        model = Net(self.Layer)
        for layer in model.layers:
            layer.__dict__["script"] = self
        self.step, self.left, self.pool = 0, 0, None
        return model

    def forward(self, model, x):
        self.layer, self.step = model.layers[3], self.step + 1
        self.left = self.times if self.pool is not None and self.step in self.steps else 0
        return model(x)

    def __deepcopy__(self, memo):
        return self  # it is no part of the layers that are measured on copies

    def run(self, pool=None):
        original, self.model = self.model, lambda: self._note(original(), pool)
        return super().run(pool)

    def _note(self, model, pool):
        self.pool = pool
        return model

    def use_memory(self, layer):
        if layer is self.layer and self.left and self.wants():
            self.left -= 1
            self.raised = True
            raise torch.OutOfMemoryError("no room for what this batch needs")

    def wants(self):
        return not in_backward()


class LacksInBackward(Lacks):
    def wants(self):
        return in_backward()


class LacksInEachStep(Lacks):
    steps = (2, 3)


@pytest.mark.sample(3)
@pytest.mark.parametrize("where", ["script", "objective"])
@pytest.mark.parametrize(
    "script",
    [Lacks, LacksInBackward, LacksInEachStep],
    ids=lambda script: script.__name__,
)
def test_a_visit_that_runs_out_of_memory_is_repeated_and_changes_no_number(script, where):
    plain, lacking = script().run(), script()
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        with trial_context(pool, 0) if where == "objective" else nullcontext():
            prepared = lacking.run(pool)
        assert lacking.raised
        assert pool.devices[0].used_bytes == 0
    assert_same(prepared, plain)


@pytest.mark.parametrize("script", [Lacks, LacksInBackward], ids=lambda script: script.__name__)
def test_a_trial_that_lacks_room_twice_ends_alone_and_says_what_was_tried(script):
    script = script()
    script.times = 2
    with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
        with pytest.raises(
            hydra_tune.BudgetError, match=r"in block layers\.3, .*\(no room for .*\), and all .* was dropped"
        ):
            script.run(pool)
        assert pool.devices[0].used_bytes == 0
        assert Script().run(pool)


class Grows(Net):
    """A device's own count: one block needs room that only others' shards have."""

    bytes = 0

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x, self.bytes if i == 3 else 0)
        return self.head(x)


class Takes(models.Layer):
    def forward(self, x, num_bytes=0):
        if num_bytes:
            x = x + (x.new_zeros(num_bytes // 4 // WIDTH, WIDTH) + 0 * x.sum()).sum()
        return super().forward(x)


def test_a_virtual_device_raises_and_what_it_drops_is_room():
    """With a budget for several shards, a block takes more than is free beside them, and less than all."""
    losses = {}
    for num_bytes in (0, 60 * KIB, 400 * KIB):
        torch.manual_seed(0)
        x, plain, model = torch.randn(4, WIDTH), Grows(Takes), Grows(Takes)
        model.load_state_dict(plain.state_dict())
        plain.bytes = num_bytes or 4
        plain(x).sum().backward()  # first: what computes with a batch that was on the device counts there
        with hydra_tune.ShardPool(["cpu"], BUDGET) as pool:
            comparison.step(model, pool).sum().backward()
            model.zero_grad()
            model.bytes = num_bytes or 4
            if num_bytes > BUDGET:
                with pytest.raises(hydra_tune.BudgetError, match=r"a later batch of .* does not fit: it needs more"):
                    model(x)
            else:
                model(x).sum().backward()
                pairs = zip(plain.parameters(), model.parameters(), strict=True)
                losses[num_bytes] = all(torch.equal(a.grad, b.grad) for a, b in pairs)
            hydra_tune.release(model)
            assert pool.devices[0].used_bytes == 0
    assert losses == {0: True, 60 * KIB: True}


def keeps_more_than_was_foreseen(trial, kept_bytes=100 * KIB):
    """In its loop, from the second step on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    model, optimizer = hydra_tune.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    kept, losses = [], []
    for step in range(3):
        loss = model(torch.randn(4, 64)).square().mean()
        kept.append(loss.detach().repeat(kept_bytes // 4 // 2 if step else 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[-1]


def test_a_resident_trial_that_runs_out_of_memory_runs_again_and_is_spilled_as_are_trials_like_it(caplog):
    study = optuna.create_study()
    with hydra_tune.ShardPool(["cpu"], 330 * KIB) as pool:
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(study, keeps_more_than_was_foreseen, n_trials=3)
        assert [trial["resident"] for trial in pool.report()["trials"]] == [True, False, False, False]
        assert pool.devices[0].used_bytes == 0
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3
    assert "It runs again, spilled and alone" in caplog.text
    with hydra_tune.ShardPool(["cpu"], "8MiB") as pool:
        plain = optuna.create_study()
        hydra_tune.HydraTrialRunner(pool, concurrency=1).optimize(plain, keeps_more_than_was_foreseen, n_trials=1)
    assert [trial.value for trial in study.trials] == [plain.trials[0].value] * 3


def test_an_objective_that_prepares_nothing_or_catches_it_runs_out_of_memory_as_without_us():
    def unprepared(trial):
        raise torch.OutOfMemoryError("of its own")

    with hydra_tune.ShardPool(["cpu"], 330 * KIB) as pool:
        runner = hydra_tune.HydraTrialRunner(pool, concurrency=1)
        with pytest.raises(torch.OutOfMemoryError, match="of its own"):
            runner.optimize(optuna.create_study(), unprepared, n_trials=1)
        study = optuna.create_study()
        runner.optimize(study, keeps_more_than_was_foreseen, n_trials=1, catch=torch.OutOfMemoryError)
    assert [trial.state.name for trial in study.trials] == ["FAIL"]
