"""A rehearsal: some steps of a copy of the model, alone in a pool of its own, on a virtual device with a given budget.

It is the trial's own code that runs, from `prepare` on, so that what is refused, cut, kept and copied is found out and
not worked out a second time. The steps are those of a usual loop:

    train | train | evaluate | evaluate | train | train | evaluate | evaluate
      |               |                           |                     |
    measured        measured              the bytes of a step   the bytes of an evaluation

The optimizer does not step, the trial is only told so: no weight changes, and no optimizer state takes memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hydra_tune.blocks.root import trial_of
from hydra_tune.config import MOST_BYTES
from hydra_tune.errors import BudgetError, clear_frames
from hydra_tune.planning.measured_plans import make_plans
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.preview.feeding import Loss, loss_of, outputs_of
from hydra_tune.preview.held_bytes import held_by_what
from hydra_tune.randomness.python_and_numpy import PythonAndNumpyStates
from hydra_tune.schedule.plan import TrialPlan
from hydra_tune.trials.context import trial_context
from hydra_tune.trials.preparation import prepare, release
from hydra_tune.trials.trial import Trial

_ROUNDS = 2  # the first is measured anew, the second is as all later ones


@dataclass(frozen=True)
class Needs:
    """Least budgets that follow from what was measured. `resident_bytes`: from here on a trial is resident.

    `least_bytes`    all that is held, a step's bytes, and the weights and the work of the largest block
    `roomy_bytes`    twice what is held and a step's bytes, that work, and two slots: a second trial's step fits, and a
                     shard is promoted while another computes
    """

    least_bytes: int
    roomy_bytes: int
    resident_bytes: int
    two_residents_bytes: int

    @property
    def comfortable_bytes(self) -> int:
        """If a trial is resident in less than the roomy budget: what two resident trials need."""
        return self.roomy_bytes if self.roomy_bytes < self.resident_bytes else self.two_residents_bytes


@dataclass
class Carried:
    """Bytes that a step has moved: to the device in its forward and in its backward, and gradients to the host."""

    forward_bytes: int = 0
    backward_bytes: int = 0
    gradient_bytes: int = 0

    @property
    def to_device_bytes(self) -> int:
        return self.forward_bytes + self.backward_bytes


@dataclass
class Rehearsal:
    """What was found at `budget_bytes`. If `refusal` is set, the rest is as far as the trial has come."""

    budget_bytes: int
    refusal: BudgetError | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    plans: list[TrialPlan] = field(default_factory=list)
    needs: Needs | None = None
    held: dict[str, int] = field(default_factory=dict)
    step: Carried = field(default_factory=Carried)
    evaluation: Carried = field(default_factory=Carried)


@dataclass(frozen=True)
class Script:
    """What is rehearsed. `model` and `optimizer` are copies, which no user has."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    batch: Any
    eval_batch: Any
    loss: Loss | None
    counts_as_gpu: bool

    def at(self, budget_bytes: int) -> Rehearsal:
        """Rehearse with this budget.

        Raises:
            PrepareError: the model or the optimizer cannot be prepared.
        """
        found = Rehearsal(budget_bytes)
        with process_untouched(), self._pool(budget_bytes) as pool:
            with trial_context(pool, 0, name="plan"):
                try:
                    self._run(pool, found)
                except BudgetError as error:
                    clear_frames(error)
                    found.refusal = error
                finally:
                    report = pool.report()
                    found.summary, found.device = (report["trials"] or [{}])[-1], report["devices"][0]
                    if trial_of(self.model) is not None:
                        release(self.model)
                    for p in self.model.parameters():
                        p.grad = None
        return found

    def _pool(self, budget_bytes: int) -> ShardPool:
        pool = ShardPool("cpu", budget_bytes, host_memory=1, seed=0)
        pool.host_memory_bytes = pool.events.machine.host_bytes = MOST_BYTES  # the copy is in host memory already
        for device in pool.devices:
            device.counts_as_gpu = pool.spills_behind = self.counts_as_gpu
        return pool

    def _run(self, pool: ShardPool, found: Rehearsal) -> None:
        model = self.model
        prepare(model, self.optimizer, pool=pool)
        trial = trial_of(model)
        assert isinstance(trial, Trial)
        modes = [(module, module.training) for module in model.modules()]
        outputs = loss = None  # as in a usual loop, both live until the next step has made new ones
        for _ in range(_ROUNDS):
            for _ in range(_ROUNDS if self.batch is not None else 0):
                before = _moved(pool)
                if self.loss is None:
                    outputs = outputs_of(model, self.batch)
                    loss = loss_of(outputs)
                else:
                    loss = self.loss(model, self.batch)
                between = _moved(pool)
                loss.backward()
                trial.before_optimizer_step()
                after = _moved(pool)
                trial.invalidate_copies()
                for p in model.parameters():
                    p.grad = None
                found.step = Carried(between[0] - before[0], after[0] - between[0], after[1] - before[1])
            for _ in range(_ROUNDS if self.eval_batch is not None else 0):
                model.eval()
                before = _moved(pool)
                with torch.no_grad():
                    outputs = outputs_of(model, self.eval_batch)
                found.evaluation = Carried(_moved(pool)[0] - before[0])
                for module, mode in modes:
                    module.training = mode
        del outputs, loss
        trial.boundary()
        trial.planner.settle_last()
        found.plans = [trial.planner.plan_for(measure.kinds[0]) for measure in trial.planner.known.measures]
        found.held = held_by_what(trial)
        found.needs = _needs(trial)


def _moved(pool: ShardPool) -> tuple[int, int]:
    device = pool.report()["devices"][0]
    return device["promoted_bytes"], device["spilled_bytes"]


def _needs(trial: Trial) -> Needs:
    planner, pool = trial.planner, trial.pool
    budget_bytes = pool.budget_bytes

    def plans(*, may_be_resident: bool) -> list[TrialPlan]:
        made = make_plans(
            trial, planner.cut, planner.known.measures, planner.trained, may_be_resident=may_be_resident
        )
        return list(made.values())

    pool.budget_bytes = MOST_BYTES  # of a pool that nobody else uses: so every plan fits
    try:
        residents = plans(may_be_resident=True)
        resident = max(plan.need_bytes for plan in residents)
        two = max(2 * (plan.all_held_bytes + plan.step_bytes) + plan.task_bytes for plan in residents)
        try:
            spilled = plans(may_be_resident=False)
        except BudgetError:  # nothing could be spilled
            return Needs(resident, resident, resident, two)
    finally:
        pool.budget_bytes = budget_bytes
    least = roomy = 0
    for plan in spilled:
        stays, largest = plan.all_held_bytes + plan.step_bytes, max(p.weight_bytes for p in plan.blocks)
        alone = max(p.weight_bytes + p.work_bytes for p in plan.blocks)
        least = max(least, stays + alone)
        roomy = max(roomy, 2 * stays + 2 * largest + max(p.work_bytes for p in plan.blocks))
    return Needs(min(least, resident), roomy, resident, two)


@contextmanager
def process_untouched() -> Iterator[None]:
    """Within, nothing is left behind in the process: random states, autograd's threads, which device is used."""
    others = PythonAndNumpyStates()
    threads = torch._C._is_multithreading_enabled()
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.inference_mode(False):
            yield
    finally:
        others.put_back()
        torch._C._set_multithreading_enabled(threads)
