"""A rehearsal: some steps of a copy of the model, alone in a pool of its own, on a virtual device with a given budget.

It is the trial's own code that runs, from `prepare` on, so that what is refused, cut, kept and copied is found out and
not worked out a second time. The steps are those of a usual loop:

    3 training steps | some evaluations | 3 training steps | some evaluations | .. until nothing is measured anew
    ^ measured         ^ measured                        ^                  ^
                                            the bytes of a step     the bytes of an evaluation

The optimizer does not step, the trial is only told so: no weight changes, and no optimizer state takes memory.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hydra_tune.blocks.root import trial_of
from hydra_tune.config import MOST_BYTES, format_bytes
from hydra_tune.devices.meter import needs
from hydra_tune.errors import FINER, LARGER, SMALLER_STEP, BudgetError, clear_frames, does_not_fit
from hydra_tune.planning.measured_plans import make_plans
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.preview.feeding import Loss, loss_of, outputs_of, refuse_no_number
from hydra_tune.preview.held_bytes import held_by_what, optimizer_state_bytes
from hydra_tune.randomness.python_and_numpy import PythonAndNumpyStates
from hydra_tune.schedule.plan import TrialPlan
from hydra_tune.trials.context import trial_context
from hydra_tune.trials.preparation import prepare, release
from hydra_tune.trials.trial import Trial

_STEPS = 3  # the first may be measured, and in a small budget the second, too
# A round after which nothing was measured anew is as all later ones. In a small budget several rounds may measure: each
# may find that blocks are too large beside what the rest of the step takes.
_MOST_ROUNDS = 8


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
    """What was found at `budget_bytes`. If `refusal` is set, the rest is as far as the trial has come. `settles` is
    False if some steps are measured anew again and again: training and evaluation ask for different cuts."""

    budget_bytes: int
    refusal: BudgetError | None = None
    settles: bool = True
    device: dict[str, Any] = field(default_factory=dict)
    plans: list[TrialPlan] = field(default_factory=list)
    needs: Needs | None = None
    held: dict[str, int] = field(default_factory=dict)
    state_bytes: int = 0  # optimizer state on the device, which no rehearsal has
    step: Carried = field(default_factory=Carried)
    evaluation: Carried = field(default_factory=Carried)

    @property
    def is_resident(self) -> bool:
        return self.refusal is None and all(plan.resident for plan in self.plans)


@dataclass(frozen=True)
class Script:
    """What is rehearsed. `model` and `optimizer` are copies, which no user has."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    batch: Any
    eval_batch: Any
    loss: Loss | None
    counts_as_gpu: bool

    @property
    def has_both(self) -> bool:
        """Whether it both trains and evaluates."""
        return self.batch is not None and self.eval_batch is not None

    def at(
        self, budget_bytes: int, *, evaluations: int = 3, counting: bool = False, briefly: bool = False
    ) -> Rehearsal:
        """Rehearse with this budget, and with so many evaluations in a row.

        With `counting` operators are counted in all steps, as with `HYDRA_TUNE_CHECKS=1`, so that `device` has the most
        bytes that tensors took. With `briefly` there is one step of training and one evaluation at a time.

        Raises:
            PrepareError: the model or the optimizer cannot be prepared.
        """
        found = Rehearsal(budget_bytes)
        evaluations = 1 if briefly else evaluations
        with (
            process_untouched(),
            garbage_kept(),
            self._pool(budget_bytes) as pool,
            trial_context(pool, 0, name="plan"),
        ):
            try:
                self._run(pool, found, evaluations, counting=counting, briefly=briefly)
            except BudgetError as error:
                clear_frames(error)
                found.refusal = error
            except torch.OutOfMemoryError as error:  # under HYDRA_TUNE_CHECKS, in a step that was measured
                clear_frames(error)
                there_is, helps = f"the budget is {format_bytes(budget_bytes)}", (LARGER, SMALLER_STEP, FINER)
                found.refusal = does_not_fit("a step", needs(error), there_is, helps)
            finally:
                found.device = pool.report()["devices"][0]
                if trial_of(self.model) is not None:
                    release(self.model)
                for p in self.model.parameters():
                    p.grad = None
        return found

    def _pool(self, budget_bytes: int) -> ShardPool:
        pool = ShardPool("cpu", budget_bytes, host_memory=1, seed=0)
        pool.host_memory_bytes = pool.events.machine.host_bytes = MOST_BYTES  # the copy is in host memory already
        pool.logs_plans = False
        for device in pool.devices:
            device.counts_as_gpu = pool.spills_behind = self.counts_as_gpu
        return pool

    def _run(self, pool: ShardPool, found: Rehearsal, evaluations: int, *, counting: bool, briefly: bool) -> None:
        prepare(self.model, self.optimizer, pool=pool)
        trial = trial_of(self.model)
        assert isinstance(trial, Trial)
        if counting:
            trial.meter.always = trial.meter.counting = True
        loop, known, steps = _Loop(self, trial), trial.planner.known, 1 if briefly else _STEPS
        for number in range(_MOST_ROUNDS):
            before = list(known.measures)
            for _ in range(steps if self.batch is not None else 0):
                found.step = loop.train()
            for _ in range(evaluations if self.eval_batch is not None else 0):
                found.evaluation = loop.evaluate()
            is_as_before = before and list(map(id, before)) == list(map(id, known.measures))
            if number and is_as_before:
                break
        else:
            found.settles = False
        trial.boundary()
        if not any(m.trains for m in known.measures) and self.batch is not None:
            loop.train()  # what the last evaluation has found does not fit what training had
            trial.boundary()
        if not known.measures:
            raise does_not_fit(
                "each plan for what was measured",
                "more in the next step, which is measured anew",
                f"the budget is {format_bytes(pool.budget_bytes)}",
                ("a larger memory=", SMALLER_STEP, "splitting the largest layers into smaller children"),
            )
        loop.outputs = loop.loss = None
        trial.planner.settle_last()
        found.plans = [trial.planner.plan_for(measure.kinds[0]) for measure in known.measures]
        found.held, found.state_bytes = held_by_what(trial), optimizer_state_bytes(trial)
        found.needs = _needs(trial)


class _Loop:
    """A usual training loop. As in one, `outputs` and `loss` live until the next step has made new ones."""

    def __init__(self, script: Script, trial: Trial) -> None:
        self._script, self._trial, self._pool = script, trial, trial.pool
        self.outputs: Any = None
        self.loss: torch.Tensor | None = None

    def train(self) -> Carried:
        script, trial, before = self._script, self._trial, _moved(self._pool)
        if script.loss is None:
            self.outputs = outputs_of(script.model, script.batch)
            self.loss = loss_of(self.outputs)
        else:
            self.loss = script.loss(script.model, script.batch)
        refuse_no_number(self.loss)
        between = _moved(self._pool)
        self.loss.backward()
        trial.before_optimizer_step()
        after = _moved(self._pool)
        trial.invalidate_copies()
        for p in script.model.parameters():
            p.grad = None
        return Carried(between[0] - before[0], after[0] - between[0], after[1] - before[1])

    def evaluate(self) -> Carried:
        script, before = self._script, _moved(self._pool)
        modes = [(module, module.training) for module in script.model.modules()]
        script.model.eval()
        with torch.no_grad():
            self.outputs = outputs_of(script.model, script.eval_batch)
        for module, mode in modes:
            module.training = mode
        return Carried(_moved(self._pool)[0] - before[0])


def _moved(pool: ShardPool) -> tuple[int, int]:
    device = pool.report()["devices"][0]
    return device["promoted_bytes"], device["spilled_bytes"]


def _needs(trial: Trial) -> Needs:
    planner, pool = trial.planner, trial.pool
    budget_bytes = pool.budget_bytes

    def plans(*, may_be_resident: bool) -> list[TrialPlan]:
        made = make_plans(trial, planner.cut, planner.known.measures, planner.trained, may_be_resident=may_be_resident)
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
def garbage_kept() -> Iterator[None]:
    """Within, Python collects no cycles: tensors in them take memory until it does, and when that is, is by chance. So
    a rehearsal needs as much as a run may need, and the same each time."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
