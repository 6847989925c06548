"""Finds the plan for a trial's next forward. It depends on who has measured such a forward:

    this trial                       -> its present plan, or a new one from all that it has measured
    a trial of this architecture     -> that trial's numbers count as its own
    no trial                         -> a pilot measures this forward and its backward (`pilot.py`)

Then the weights are put where the plan says. The way of a weight, and the folder that owns each stage:

    prepare           trials     it stays in host memory; the first forward finds its plan here
    settle            planning   resident: `Residency.hold` moves it to the device for good; nothing below follows
                                 spilled:  `Residency.spill` lays it into the trial's host buffer (devices)
    a visit           pool       its shard's task gets the lease, and the shard a slot; it may be promoted ahead
                      trials     `Residency.promote_shard` copies the shard
                      blocks     the module computes with the copy
    its gradient      blocks     `Promote.backward` is given all gradients of the call
                      trials     `Residency.spill_gradients` brings them to host memory, where autograd adds them up
    optimizer.step    trials     it steps the weights in host memory; device copies are stale: the machine drops them

A visit involves both trials and the pool. A trial's own `Residency` moves its bytes, since they end with the trial. The
pool decides for all trials when bytes may move.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hydra_tune.blocks.tree import tensors_in
from hydra_tune.config import format_bytes
from hydra_tune.devices.tensor_bytes import storage_bytes, weights_of
from hydra_tune.errors import BudgetError
from hydra_tune.planning import partition
from hydra_tune.planning.fingerprint import plan_key
from hydra_tune.planning.known_steps import KnownSteps, RefusedStep, StepKind, StepMeasure
from hydra_tune.planning.measured_plans import make_plans
from hydra_tune.planning.model_cut import ModelCut
from hydra_tune.planning.optimizer_memory import held_bytes
from hydra_tune.planning.pilot import Pilot
from hydra_tune.planning.refusals import refuse_computed_weights, refuse_unsupported
from hydra_tune.schedule.events import Admit, PilotDone, PilotReady, PlanReady, Shared, StartPilot
from hydra_tune.schedule.plan import TOO_LARGE, Cut, TrialPlan

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

logger = logging.getLogger("hydra_tune")


class Planner:
    """One trial's plans: owns the cut of its model, its measured steps, and the pilot under way."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.cut = ModelCut(trial)
        self.known = KnownSteps()
        self.plan: TrialPlan | None = None  # the one that the trial is admitted under
        self.pilot: Pilot | None = None  # the one under way
        self._step: RefusedStep | None = None  # of the pilot, should it be refused
        self._given_bytes = 0  # of its first forward's inputs
        self.trained: set[int] = set()  # ids of parameters that are trained in a step that the plan covers
        self.covered: set[Any] = set()  # calls that the plan is known to cover; only of a resident plan
        self._shared_at = -1  # `SharedWeights.changes` when the machine was told what the plan's shards share
        self._plans: dict[bool, TrialPlan] = {}  # made from all that is known: for training (True) and evaluation

    def start(self) -> None:
        """Forget former plans, and cut the trial's present model or models."""
        self.leave_plan()
        self.known.forget()
        self._plans = {}
        self.cut.adopt(Cut())

    def close(self) -> None:
        """Drop references to the model and the trial, so that no reference cycle keeps them alive."""
        self.cut.close()
        self.__dict__.pop("_trial", None)

    # ---- the plan for a forward ----

    def kind_of(self, number: int, args: Sequence[Any], kwargs: dict[str, Any]) -> StepKind:
        """The kind of a forward with these arguments. `number` says which of the trial's models is called."""
        kind = self.known.kind_of(self._trial.model, number, args, kwargs)
        self.cut.keep_where_hooked()
        return kind

    def learn(self, kind: StepKind) -> bool:
        """Whether a trial of the same architecture has measured such a forward. Its numbers become this trial's."""
        trial = self._trial
        key = plan_key(trial.model, trial.optimizers)
        if key != self.known.key:
            refuse_unsupported(trial.model)
            self.known.take_architecture(key, trial.pool.known.of(key))
            self.cut.is_stale = True
        return self._take_known(kind)

    def _take_known(self, kind: StepKind) -> bool:
        found = next((m for m in self.known.architecture.measures if m.covers(kind.of_any)), None)
        plan = self.plan or next(iter(self._plans.values()), None)
        if found is None or plan is None or not plan.resident:
            refuse_computed_weights(self._trial.model)
        if found is not None:
            self._count(replace(found, kinds=(kind,)))
        return found is not None

    def _count(self, measure: StepMeasure) -> None:
        """Include this measure in later plans."""
        self.cut.choose(measure.cut)
        self.known.measures, self._plans = measure.put_among(self.known.measures), {}

    def plan_for(self, kind: StepKind) -> TrialPlan:
        """The plan for a forward of a known kind.

        Raises:
            BudgetError: no plan fits the budget.
        """
        trial, architecture = self._trial, self.known.architecture
        if not self._plans:
            if self.cut.is_stale:
                self.cut.adopt(self.cut.choices)
            may_be_resident = not (trial.alone or architecture.too_large or trial.residency.spilled)
            self.trained = self.known.trained(trial.model)
            trial.pool.shared_weights.enter(trial.id, weights_of(trial.model))  # some may have been frozen since
            self._plans = plans = make_plans(
                trial, self.cut, self.known.measures, self.trained, may_be_resident=may_be_resident
            )
            trial.summary |= partition.summary_of(plans.get(True) or plans[False])
        architecture.plan = plan = self._plans.get(kind.trains) or self._plans[True]
        return plan

    # ---- a pilot's beginning and end ----

    def begin(self, kind: StepKind, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Begin a pilot for a forward of this kind, with these inputs: wait until no other step runs on the device,
        then cut the model into blocks that run in visits. Returns False if another trial has measured this kind while
        this one waited.

        Raises:
            BudgetError: a trial of the same architecture was refused for this kind.
        """
        trial, refusals = self._trial, self.known.architecture.refusals
        if kind.of_any in refusals:
            raise copy.copy(refusals[kind.of_any])  # the copy has no frames
        self.leave_plan()
        self._step = RefusedStep.of(trial, args, kwargs)
        self._given_bytes = sum(map(storage_bytes, tensors_in((args, kwargs))))
        room = trial.events.ask(trial, PilotReady(trial.id, trial.alone), StartPilot)
        self.pilot = Pilot(trial, kind, room.free_bytes)
        if self._take_known(kind):
            self.give_up_pilot()
            return False
        self.cut.adopt(self.cut.choices)
        return True

    def note_refusal(self, error: BudgetError) -> BudgetError:
        """The error, which ends the pilot under way since something has no room.

        How much would be enough is not known. So the lack that the error states, for samplers, is a guess that grows
        with the model and its inputs.

        If the pilot had the whole budget, other trials of the architecture would fail, too, and are refused with the
        same error. Not if the step had several forwards: other trials may have fewer in a step.
        """
        trial, pilot, budget_bytes = self._trial, self.pilot, self._trial.pool.budget_bytes
        if pilot is None:
            return error
        beyond_bytes = held_bytes(trial, list(trial.model.parameters()), trains=pilot.trains) + self._given_bytes
        error.lack = max(beyond_bytes / budget_bytes, 0.01)
        error.step = self._step
        if pilot.free_bytes >= budget_bytes and trial.steps.num_forwards <= 1:
            self.known.architecture.refusals[pilot.kinds[0].of_any] = copy.copy(error)  # without frames
        return error

    def end_pilot(self) -> None:
        """End the pilot after its step. From here on its numbers are known, to trials of the architecture as well."""
        step_bytes = self._trial.meter.outside_peak()
        pilot = self.give_up_pilot(trained=self._trial.steps.trains)
        if pilot.failed:
            return
        profiles = pilot.profiles_beside(step_bytes)
        measure = StepMeasure(tuple(pilot.kinds), self.cut.choices, profiles, step_bytes, pilot.kept_bytes)
        before = self.known.measures
        self._count(measure)
        try:
            self.plan_for(pilot.kinds[0])
            self.known.architecture.add(measure)
        except BudgetError as error:
            # Each block did fit alone, but not beside what the whole step holds, which is known only now.
            model = self._trial.model
            opened = [name for name in error.blocks if partition.has_children(model.get_submodule(name))]
            if opened and opened[0] == error.blocks[0]:  # the largest
                self.known.measures = []  # so that a new pilot measures the next step
                self.cut.adopt(self.cut.choices.adding("opened", opened, TOO_LARGE))
                return
            # The next forward of this kind is refused, in all trials of the architecture. Other kinds are not.
            self.known.measures, self._plans = before, {}
            for latest in before[-1:]:
                self._count(latest)
            if len(pilot.kinds) == 1:
                self.known.architecture.refusals[pilot.kinds[0].of_any] = copy.copy(error)

    def give_up_pilot(self, *, trained: bool = False) -> Pilot:
        """End the pilot: stop counting and give the device back. Weights return to host memory. Returns the pilot."""
        (pilot, self.pilot), trial = (self.pilot, None), self._trial
        assert pilot is not None
        trial.meter.counting = trial.meter.always
        if not trial.meter.always:
            trial.stop_counting()
        pilot.end()
        trial.events.tell(PilotDone(trial.id, pilot.peak_bytes, trained and not pilot.failed))
        trial.residency.bring_home(trial.optimizers)
        return pilot

    # ---- weights where the plan wants them ----

    def settle(self, plan: TrialPlan) -> None:
        """Have the trial admitted under this plan, and put every weight where the plan says."""
        trial = self._trial
        if plan is self.plan:
            return
        if not plan.resident:
            refuse_computed_weights(trial.model)
        before, self.covered = self.plan, set()
        alike = before is not None and (before.resident, before.cut, before.held_bytes, before.held_weights) == (
            plan.resident, plan.cut, plan.held_bytes, plan.held_weights,
        )  # fmt: skip
        if not (alike and trial.events.readmit(trial, plan)):
            self.leave_plan()  # a trial that waits for admission holds nothing
            trial.events.ask(trial, PlanReady(trial.id, plan), Admit)
        if not alike and not (plan.resident and plan.cut == self.cut.choices):  # a resident trial makes no visits
            self.cut.adopt(plan.cut, plan.blocks)
        shards = self.cut.pack(plan, self.trained)
        self.plan, self._shared_at = plan, -1
        trial.residency.cut(shards)
        if plan.resident:
            self.cut.unwrap()
            trial.residency.hold(trial.model, [], trial.optimizers)
        else:
            trial.residency.hold(trial.model, self.cut.blocks, trial.optimizers)
            trial.residency.spill(self.cut.blocks, self.trained)
        self._log_once(plan)

    def _log_once(self, plan: TrialPlan) -> None:
        """Once an architecture, for each of its residencies."""
        logged, trial = self.known.architecture.logged, self._trial
        if trial.pool.logs_plans and plan.resident not in logged and logger.isEnabledFor(logging.INFO):
            logged.add(plan.resident)
            how = "resident" if plan.resident else f"spilled, in {len(plan.shards)} shards"
            sizes = map(format_bytes, (plan.need_bytes, trial.pool.budget_bytes))
            logger.info("%s: %s is %s; a step takes %s of %s", trial.name, type(trial.model).__name__, how, *sizes)

    def share_slots(self) -> None:
        """Tell the machine which shards have weights that other trials have, too, if that has changed."""
        trial, weights = self._trial, self._trial.pool.shared_weights
        if self.plan is None or self.plan.resident or self._shared_at == weights.changes:
            return
        self._shared_at = weights.changes
        slots = [
            [p for b in shard for p in b.slot_parameters if id(p) not in b.riders] for shard in trial.residency.shards
        ]
        numbers = tuple(
            None if any(id(p) in self.trained for p in slot) else weights.number_of_shard(slot) for slot in slots
        )
        if any(n is not None for n in (*numbers, *trial.residency.shared.numbers)):
            trial.events.tell_between_tasks(trial, Shared(trial.id, numbers))
            trial.residency.share(numbers)
        trial.summary["shared_weights"] = numbers

    @property
    def peak_bytes(self) -> int:
        """The least budget in which the trial's steps run, as far as they are known."""
        return max((plan.need_bytes for plan in self._plans.values()), default=0)

    def settle_last(self) -> None:
        """Settle under the plan for the kind that was measured last, if one was."""
        if self.known.measures:
            self.settle(self.plan_for(self.known.measures[-1].kinds[0]))

    def leave_plan(self) -> None:
        """Give up the plan. Weights return to host memory."""
        self.plan, self.covered = None, set()
        self._trial.residency.bring_home(self._trial.optimizers)

    def note_out_of_memory(self) -> None:
        """If the trial was resident, let no trial of its architecture be resident from here on."""
        if self.plan is not None and self.plan.resident:
            self.known.architecture.too_large = True
