"""Cuts one trial's model and finds the plan for a forward: the one there is, what another trial has measured, or a
first step of its own.

A trial's plan is made of what forwards like its own have been measured to need; what its neighbours train never counts.
Trainings and evaluations share what is held for life, and have steps and shards of their own.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hydra_tune.blocks.ambient_settings import autocast_mode
from hydra_tune.blocks.block import Block
from hydra_tune.blocks.stand_ins import BlockForward
from hydra_tune.blocks.tree import tensors_in
from hydra_tune.devices.host_buffer import storage_bytes
from hydra_tune.devices.meter import ADVICE
from hydra_tune.errors import BudgetError, PrepareError
from hydra_tune.planning import partition
from hydra_tune.planning.fingerprint import has_users_hook, model_state, plan_key
from hydra_tune.planning.known_architectures import KnownArchitecture
from hydra_tune.planning.optimizer_memory import stepping_bytes
from hydra_tune.planning.pilot import Pilot
from hydra_tune.planning.refusals import refuse_computed_weights, refuse_unsupported
from hydra_tune.planning.step_kind import StepKind, StepMeasure, larger_of
from hydra_tune.schedule.events import Admit, PilotDone, PilotReady, PlanReady, StartPilot
from hydra_tune.schedule.plan import TOO_LARGE, BlockProfile, Cut, TrialPlan

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

_MOST_SETTINGS = 8  # which modules train, or what is switched on, may be drawn anew in each step
MARGIN = 32  # a training step may take this part more, of itself and its largest task, than the first one has


class Planner:
    """`blocks` in the order of `plan`, once there is one; `first` is the first step under way."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.blocks: list[Block] = []
        self.plan: TrialPlan | None = None  # that the trial is admitted under
        self.pilot: Pilot | None = None
        self.covered: set[Any] = set()  # calls that the plan, a resident one, is known to cover
        self._plans: dict[bool, TrialPlan] = {}  # of `_measures`, for training and for evaluation
        self._measures: list[StepMeasure] = []  # of forwards that this trial has made
        self._key, self._known = b"", KnownArchitecture()  # of the architecture, and what is known of it
        self._cut = Cut()
        self._is_changed = False  # the model, since it was cut
        self._shard_of: dict[str, int] = {}
        self.uses: Counter[int] = Counter()  # of weights, by id: the blocks that have them
        self._settings: set[Hashable] = set()

    def start(self) -> None:
        """Cut the model, or the models, that the trial has now."""
        self._settings.clear()
        self.leave_plan()
        self._key, self._measures, self._plans = b"", [], {}
        self._adopt_cut(Cut())

    def close(self) -> None:
        """Let go of the model and of the trial, so that no cycle keeps either."""
        self.blocks, self._shard_of = [], {}
        self.__dict__.pop("_trial", None)

    # ---- the plan for a forward ----

    def kind_of(self, number: int, args: Sequence[Any], kwargs: dict[str, Any]) -> StepKind:
        """Of a forward of the model with this number."""
        state, inputs = model_state(self._trial.model), (args, kwargs)
        for block in self.blocks:  # it would fire again when its block is repeated
            if not block.keeps and any(map(has_users_hook, block.modules[1:])):
                block.keeps = "it has a hook within"
        if len(self._settings) < _MOST_SETTINGS:
            self._settings.add(state.switches)
        setting = (
            state.buffers, partition.flags_of(inputs),
            autocast_mode(), state.switches if state.switches in self._settings else None, number,
        )  # fmt: skip
        return StepKind(torch.is_grad_enabled(), setting, partition.input_signature(inputs), state.parameters)

    def knows(self, kind: StepKind) -> bool:
        return any(measure.covers(kind) for measure in self._measures)

    def learn(self, kind: StepKind) -> bool:
        """Whether a trial of the same architecture has made such a forward: then this one's plan counts with it."""
        trial = self._trial
        key = plan_key(trial.model, trial.optimizers)
        if key != self._key:  # it has changed: what was measured of it holds no more
            refuse_unsupported(trial.model)
            self._key, self._known, self._measures, self._is_changed = key, trial.pool.known.of(key), [], True
        return self._take_known(kind)

    def _take_known(self, kind: StepKind) -> bool:
        found = next((m for m in self._known.measures if m.covers(kind.of_any)), None)
        plan = self.plan or next(iter(self._plans.values()), None)
        if found is None or plan is None or not plan.resident:
            refuse_computed_weights(self._trial.model)
        if found is not None:
            self._count(replace(found, kinds=(kind,)))
        return found is not None

    def _count(self, measure: StepMeasure) -> None:
        self._is_changed |= measure.cut != self._cut
        self._measures, self._cut, self._plans = measure.put_among(self._measures), measure.cut, {}

    def plan_for(self, kind: StepKind) -> TrialPlan:
        """
        Raises:
            BudgetError: there is none.
        """
        if not self._plans:
            if self._is_changed:
                self._adopt_cut(self._cut)
            self._plans = plans = self._make_plans()
            self._trial.summary |= partition.summary_of(plans.get(True) or plans[False])
        self._known.plan = plan = self._plans.get(kind.trains) or self._plans[True]
        return plan

    # ---- a first step ----

    def begin(self, kind: StepKind) -> bool:
        """Wait until the device is the trial's own, to measure a forward of this kind; blocks run in visits from here
        on. False if another trial has measured it meanwhile."""
        trial = self._trial
        if kind.of_any in self._known.refusals:
            raise copy.copy(self._known.refusals[kind.of_any])  # without its frames
        self.leave_plan()
        room = trial.events.ask(trial, PilotReady(trial.id, trial.alone), StartPilot)
        self.pilot = Pilot(trial, kind, room.free_bytes)
        if self._take_known(kind):
            self.give_up_first()
            return False
        self._adopt_cut(self._cut)
        return True

    def refusal_of(self, error: BudgetError, args: Sequence[Any], kwargs: dict[str, Any]) -> BudgetError:
        """The error that ends a first step. What it would have needed is not known: its lack grows with the model and
        what this is given. What fits depends on the budget, not on the neighbours: where the step had all of it, trials
        alike are refused by the same words. Not where it had several forwards: others may have fewer in a step."""
        first, trial = self.pilot, self._trial
        if first is None:
            return error
        refusal, budget_bytes = copy.copy(error), trial.pool.budget_bytes
        beyond = self._held_bytes(list(trial.model.parameters()), first.trains)
        beyond += sum(map(storage_bytes, tensors_in((args, kwargs))))
        refusal.lacking(budget_bytes + beyond, budget_bytes)
        if first.free_bytes >= budget_bytes and trial.steps.num_forwards <= 1:
            self._known.refusals[first.kinds[0].of_any] = copy.copy(refusal)
        return refusal

    def end_first(self) -> None:
        """It has come to its end: what it has shown is known from here on."""
        step_bytes = self._trial.meter.outside_peak()
        first = self.give_up_first(trained=self._trial.steps.trains)
        if first.failed:
            return
        profiles = first.profiles_beside(step_bytes)
        measure = StepMeasure(tuple(first.kinds), self._cut, profiles, step_bytes, first.kept_bytes)
        before = self._measures
        self._count(measure)
        try:
            self.plan_for(first.kinds[0])
            self._known.add(measure)
        except BudgetError as error:
            # Blocks are too large beside what their step holds, which was not known when they were measured.
            model = self._trial.model
            opened = [name for name in error.blocks if partition.has_children(model.get_submodule(name))]
            if opened and opened[0] == error.blocks[0]:  # the largest
                self._measures = []  # the next step is measured anew
                self._adopt_cut(self._cut.adding("opened", opened, TOO_LARGE))
                return
            # The next forward of this kind is refused, and that of trials alike; others go on as before.
            self._measures, self._plans = before, {}
            for latest in before[-1:]:
                self._count(latest)
            if len(first.kinds) == 1:
                self._known.refusals[first.kinds[0].of_any] = copy.copy(error)

    def give_up_first(self, *, trained: bool = False) -> Pilot:
        (first, self.pilot), trial = (self.pilot, None), self._trial
        assert first is not None
        trial.meter.counting = trial.meter.always
        if not trial.meter.always:
            trial.unwatch()
        first.end()
        trial.events.tell(PilotDone(trial.id, first.peak_bytes, trained and not first.failed))
        trial.residency.bring_home(trial.optimizers)
        return first

    def open_block(self, block: Block, reason: str) -> None:
        """Within a first step: its children are blocks from here on, or it is on the device as a whole."""
        opens = partition.has_children(block.module)
        if not opens and reason.startswith(TOO_LARGE):
            raise self.no_room(block, reason)
        self._adopt_cut(self._cut.adding("opened" if opens else "kept", [block.name], reason))

    def no_room(self, block: Block, reason: str) -> BudgetError:
        why = reason.removeprefix("it ").removesuffix(ADVICE).rstrip(" .")
        return BudgetError(f"block {block.name} {why}. {self._cut.advice()}")

    def hold_weight(self, block: Block, weight: nn.Parameter, reason: str) -> Block:
        """Within a first step: a weight of this block is on the device from here on; the block as it is then."""
        name = next(n for n, p in self._trial.model.named_parameters() if p is weight)
        try:
            self._adopt_cut(self._cut.adding("held", [name], reason))
        except torch.OutOfMemoryError as error:
            raise self._trial.meter.no_room(error) from None
        if self._trial.casts.has(weight):
            raise PrepareError(
                "a weight that was used as autocast's copy so far is used otherwise in the same autocast context: "
                f"{reason}. It is on the device from here on: repeat the forward."
            )
        return next(each for each in self.blocks if each.module is block.module)

    # ---- plans ----

    def _make_plans(self) -> dict[bool, TrialPlan]:
        """Of what the trial has done, trained or not; all of them resident, or none."""
        trial, kinds = self._trial, sorted({m.trains for m in self._measures}, reverse=True)
        if not (trial.alone or self._known.too_large or trial.residency.spilled):
            plans = {trains: self._make(trains, resident=True) for trains in kinds}
            if all(plan.resident for plan in plans.values()):
                return plans
        return {trains: self._make(trains, resident=False) for trains in kinds}

    def _make(self, trains: bool, *, resident: bool) -> TrialPlan:
        trial, measures = self._trial, [m for m in self._measures if m.trains == trains]
        profiles: dict[str, BlockProfile] = {}
        for measure in measures:
            for name, profile in measure.blocks.items():
                profiles[name] = larger_of(profiles[name], profile) if name in profiles else profile
        uncalled, names = self._uncalled(profiles), {block.name for block in self.blocks}
        known = [profile for name, profile in profiles.items() if name in names]
        ever_trains = any(m.trains for m in self._measures)  # both plans hold the same
        kept = max(m.kept_bytes for m in self._measures) + sum(map(storage_bytes, trial.model.buffers()))
        step_bytes = max(m.step_bytes for m in measures) + sum(p.boundary_bytes + p.saved_bytes for p in uncalled)
        work_bytes = max((p.work_bytes for p in (*uncalled, *known)), default=0)
        loose = [p for p in trial.model.parameters() if id(p) not in self.uses]  # in no slot
        gradients = (sum(storage_bytes(p) for p in b.slot_parameters if p.requires_grad) for b in self.blocks)
        plan = partition.make_plan(
            [*uncalled, *known],
            budget_bytes=trial.pool.budget_bytes,
            loose_bytes=self._held_bytes(loose, ever_trains) + kept,
            resident_bytes=self._held_bytes(list(trial.model.parameters()), ever_trains) + kept,
            step_bytes=step_bytes + ((step_bytes + work_bytes) // MARGIN if trains else 0),
            late_bytes=max(gradients, default=0) if ever_trains and trial.pool.spills_behind else 0,
            may_be_resident=resident,
            cut=self._cut,
        )
        if trial.alone:
            plan = replace(plan, held_bytes=trial.pool.budget_bytes - plan.step_bytes - plan.task_bytes)
        return plan

    def _uncalled(self, known: Mapping[str, BlockProfile]) -> list[BlockProfile]:
        """Blocks that no forward has called yet are like a called one of their kind, or nothing is known of them."""
        of_kind = {_kind_of(b): known[b.name] for b in self.blocks if b.name in known}
        return [
            replace(of_kind.get(_kind_of(b)) or BlockProfile("", b.weight_bytes), name=b.name, visits=0)
            for b in self.blocks
            if b.name not in known
        ]

    def _held_bytes(self, parameters: Sequence[nn.Parameter], trains: bool) -> int:
        """Weights, and in training gradients, optimizer state, and what a step of the optimizer takes beside them. What
        no optimizer has yet may still get one."""
        total = sum(map(storage_bytes, parameters))
        if not trains:
            return total
        total += sum(storage_bytes(p) for p in parameters if p.requires_grad)
        foreach, left = not self._trial.device.is_virtual, {id(p): p for p in parameters}
        taken = []
        for optimizer in self._trial.optimizers:
            own = [left.pop(id(p)) for group in optimizer.param_groups for p in group["params"] if id(p) in left]
            taken.append(stepping_bytes(optimizer, own, foreach_by_default=foreach))
        taken = taken or [stepping_bytes(None, parameters, foreach_by_default=foreach)]
        return total + sum(state for state, _ in taken) + max(scratch for _, scratch in taken)

    # ---- weights where the plan wants them ----

    def settle(self, plan: TrialPlan) -> None:
        """Be admitted under this plan, and put every weight where it wants it."""
        trial = self._trial
        if plan is self.plan:
            return
        if not plan.resident:
            refuse_computed_weights(trial.model)
        before, self.covered = self.plan, set()
        alike = before is not None and (before.resident, before.cut, before.held_bytes) == (
            plan.resident, plan.cut, plan.held_bytes,
        )  # fmt: skip
        if not (alike and trial.events.readmit(trial, plan)):
            self.leave_plan()  # until it is admitted it holds nothing
            trial.events.ask(trial, PlanReady(trial.id, plan), Admit)
        if not alike and not (plan.resident and plan.cut == self._cut):  # who is resident makes no visits
            self._adopt_cut(plan.cut, plan.blocks)
        names = {b.name: b for b in self.blocks}
        self.blocks = [names[p.name] for p in plan.blocks]
        self.plan = plan
        trial.residency.cut([[self.blocks[i] for i in shard.blocks] for shard in plan.shards])
        self._shard_of = {self.blocks[i].name: n for n, shard in enumerate(plan.shards) for i in shard.blocks}
        if plan.resident:
            self.unwrap()
            self._hold([])
        else:
            self._hold(self.blocks)
            trial.residency.spill(self.blocks)

    def settle_last(self) -> None:
        """By what was measured last, if anything was."""
        if self._measures:
            self.settle(self.plan_for(self._measures[-1].kinds[0]))

    def leave_plan(self) -> None:
        """Weights are in host memory, until there is another one."""
        self.plan, self.covered = None, set()
        self._trial.residency.bring_home(self._trial.optimizers)

    def note_out_of_memory(self) -> None:
        """Where all of it was on the device, trials like it are spilled from here on."""
        if self.plan is not None and self.plan.resident:
            self._known.too_large = True

    def shard_of(self, block: Block) -> int:
        if block.name not in self._shard_of:
            raise PrepareError(
                f"a backward comes before the model is cut anew, but block {block.name}, whose backward was still to "
                "come, is cut otherwise now. Call backward before a forward on other inputs, or raise the pool's "
                "memory=."
            )
        return self._shard_of[block.name]

    def _hold(self, except_blocks: Sequence[Block]) -> None:
        self._trial.residency.hold(self._trial.model, except_blocks, self._trial.optimizers)

    def _adopt_cut(self, cut: Cut, profiles: Sequence[BlockProfile] = ()) -> None:
        self.unwrap()
        self._cut, self._is_changed = cut, False
        model, budget_bytes = self._trial.model, self._trial.pool.budget_bytes
        self.blocks = partition.blocks_of(model, budget_bytes, cut, profiles, self.blocks)
        self.uses = Counter(id(p) for block in self.blocks for p in block.slot_parameters)
        for block in self.blocks:  # from here on they run in visits
            block.is_current = True
            block.module.forward = BlockForward(block, self._trial)
        if self.pilot is not None:
            self._hold(self.blocks)

    def unwrap(self) -> None:
        for block in self.blocks:
            ours = block.module.__dict__.get("forward")
            block.is_current, block.module_states.shared = False, None
            if isinstance(ours, BlockForward):  # perhaps a former block's, which the user has put back
                ours.give_back()


def _kind_of(block: Block) -> Hashable:
    return type(block.module), tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in block.slot_parameters)
