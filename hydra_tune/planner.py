"""Cuts one trial's model and finds the plan for its inputs: the one there is, another trial's, or a new pilot's.

    cut -> pilot -> findings? -> cut anew -> pilot -> ... -> plan, shared by all trials with the same key
                    too large? -> open that block

A plan holds until the model or its inputs become such as it does not cover.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from hydra_tune.block import Block, gradient_bytes
from hydra_tune.call import BlockCall, Executor
from hydra_tune.config import format_bytes
from hydra_tune.cut import blocks_of, cut_at_hooks, open_too_large, recut
from hydra_tune.device import Device
from hydra_tune.errors import BlockTooLargeError, BudgetError, PoolClosedError, PrepareError
from hydra_tune.events import StartPilot
from hydra_tune.fingerprint import PlanKey
from hydra_tune.forward_pass import AbandonedForward, ForwardPass
from hydra_tune.glance import Glance, Parts, glance_at, parts_of
from hydra_tune.host_buffer import storage_bytes
from hydra_tune.meter import TrialMeter
from hydra_tune.mode import TrialMode, drawing_for_nothing
from hydra_tune.node import BlockForward
from hydra_tune.optim import optimizer_state_bytes, step_scratch_bytes
from hydra_tune.partition import (
    covers,
    gradient_flags,
    input_signature,
    make_plan,
    pack_shards,
    plan_key,
    shards_of_one,
    switches,
)
from hydra_tune.pilot import DoesNotFitError, Pilot, free_remains, larger_of
from hydra_tune.plan_summary import summary_of
from hydra_tune.pool import Client, ShardPool
from hydra_tune.process_state import autocast_mode
from hydra_tune.random_state import has_own_state
from hydra_tune.root import (
    RootForward,
    refuse_computed_weights,
    refuse_global_hooks,
    refuse_own_forward,
    refuse_unsupported,
)
from hydra_tune.shard import BlockProfile, Cut, TrialPlan
from hydra_tune.tree import flatten
from hydra_tune.unchanged import Unchanged, signature_of_call
from hydra_tune.unseen_writes import UnseenWrites

logger = logging.getLogger("hydra_tune")
MOST_CALLS = 64  # whose shapes differ
MOST_MODES = 8  # which modules train, or what is switched on, may be drawn anew in each step


class UnderWay(Protocol):
    """What a planner needs of its trial's steps."""

    under_way: bool

    def leave(self) -> None: ...


class Planned(Executor, Client, Protocol):
    """What a planner needs of the trial it plans for."""

    name: str
    pool: ShardPool
    meter: TrialMeter
    mode: TrialMode | None
    optimizer: torch.optim.Optimizer | None

    @property
    def device(self) -> Device: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def steps(self) -> UnderWay: ...

    def leave_after_error(self) -> None: ...

    def counted(self) -> AbstractContextManager[None]: ...

    def one_pass(self) -> AbstractContextManager[ForwardPass]: ...


class UnmeasuredBlock(AbandonedForward):
    """A block is called that no pilot has seen called."""


class Planner:
    """`blocks` in the order of `plan`, once there is one; `pilot` is the one under way."""

    def __init__(self, trial: Planned) -> None:
        self._trial = trial
        self.blocks: list[Block] = []
        self.plan: TrialPlan | None = None
        self.pilot: Pilot | None = None
        self.failed_pilot_bytes: int | None = None  # the most of one that failed and still has its reservation
        self._shard_of: dict[str, int] = {}
        self._repacked = False  # this trial alone has smaller shards
        self._spills = False  # though it might fit
        self.unmeasured: set[Block] = set()
        self._known: Any = None  # what this was noted for
        self._key = PlanKey(b"", ())
        self._kinds: set[type | None] = set()  # kept for as long as plans are looked up by keys that name them
        self._signature: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
        self._flags: Hashable = ()
        self._parameters: tuple[tuple[int, str, int], ...] = ()
        self._parts = Parts([], [])  # of the model, of which the blocks are
        self._cut = self._hook_cut = Cut()
        self._hooked: tuple[int, ...] = ()
        self.has_pre_hooks = False  # of the user's, on modules, which may write weights before a block's forward
        self._seen: set[Hashable] = set()  # switches of the model
        self.unseen_writes = UnseenWrites(trial.meter)
        self._kind: Hashable = ()  # of the forward that there is a plan for
        self.settled = True  # neither is a plan being looked for, nor are weights on their way to where it wants them
        self._last: tuple[TrialPlan, PlanKey, Any, Hashable, Any] | None = None  # settled, and what it covers
        self._differentiating: dict[str, str] = {}  # blocks that run a backward within a forward, perhaps only in some
        self._covered: tuple[TrialPlan | None, set[Any]] = None, set()  # calls of it that this plan is known to cover
        self._summary: tuple[TrialPlan | None, int, dict[str, Any]] | None = None  # of that plan, in that budget

    def start(self) -> None:
        """Cut the model for the first time."""
        refuse_unsupported(self._trial.model)
        refuse_own_forward(self._trial.model)
        self.blocks = blocks_of(self._trial.model, self._limit_bytes, self._cut)
        self.wrap()

    def close(self) -> None:
        """Let go of the model and of the trial, so that no cycle keeps either."""
        self.blocks, self._shard_of = [], {}
        self.unmeasured.clear()
        self._kinds.clear()
        self.__dict__.pop("_trial", None)

    def summary(self) -> dict[str, Any]:
        """Plain data on the plan, the same as long as that is."""
        plan, budget_bytes = self.plan, self._trial.device.budget_bytes
        if self._summary is not None and self._summary[0] is plan and self._summary[1] == budget_bytes:
            return self._summary[2]
        self._summary = plan, budget_bytes, summary_of(plan, budget_bytes)
        return self._summary[2]

    # ---- what a step measures ----

    @property
    def has_hooks(self) -> bool:
        """Of the user's, on modules."""
        return bool(self._hooked)

    @property
    def step_is_measured(self) -> bool:
        """Whether the plan's step bytes are those of a whole step of training, not the pilot's estimate."""
        return self._key in self._trial.pool.measured

    def use_measured_step(self, step_bytes: int) -> None:
        """Share a plan with these bytes instead of the estimate.

        Raises:
            BudgetError: they do not fit.
        """
        assert self.plan is not None
        pool = self._trial.pool
        if self.step_is_measured:  # by another trial meanwhile
            known = pool.plans[self._key]
            step_bytes = max(step_bytes, known.step_bytes - known.late_bytes)
        step_bytes += self.plan.late_bytes
        room_bytes = pool.budget_bytes - self.plan.held_bytes - step_bytes
        plan = replace(self.plan, step_bytes=step_bytes, shards=pack_shards(self.plan.blocks, room_bytes))
        if plan.need_bytes > pool.budget_bytes:
            raise BudgetError(
                f"the first step of {self._trial.name} needed {format_bytes(plan.need_bytes)}: "
                f"{format_bytes(step_bytes)} between its blocks, in its loss and kept by its loop; but the budget is "
                f"{format_bytes(pool.budget_bytes)}. Raise the pool's memory=, or lower the batch size."
            ).lacking(plan.need_bytes, pool.budget_bytes)
        pool.share(self._key, plan)
        pool.measured.add(self._key)

    @property
    def known_step_bytes(self) -> int:
        """Of a step under way: as it was measured, where that is more than the plan that it began with has."""
        assert self.plan is not None
        return max(self.plan.step_bytes, self._trial.pool.plans[self._key].step_bytes)

    def shard_of(self, block: Block) -> int:
        """Where the block is now; a graph may be older than the plan."""
        if block.name not in self._shard_of:
            raise PrepareError(
                f"a backward comes before the model is cut anew, but block {block.name}, whose backward was still to "
                "come, is cut otherwise now. Call backward before a forward on other inputs, give all forwards of a "
                "step inputs of one shape, or raise the pool's memory=."
            )
        return self._shard_of[block.name]

    def measuring(self, call: BlockCall) -> AbstractContextManager[None]:
        """Around a call without gradients."""
        return self.pilot.measuring(call) if self.pilot is not None and self.pilot.forward_only else nullcontext()

    def finds(self, block: Block, error: PrepareError) -> bool:
        """Note in a pilot that this block can't be cut so; False outside of one."""
        if self.pilot is not None:
            self.pilot.findings.uncuttable[block] = str(error)
        return self.pilot is not None

    # ---- the plan for a forward ----

    def cast_weights(self) -> list[torch.Tensor]:
        """Weights of blocks that autocast casts, where it is on; all that it may, where no training was seen."""
        knows = self.plan is not None and bool(self.plan.modes)
        return [
            p
            for block in self.blocks
            for i, p in enumerate(block.parameters)
            if p.requires_grad and p.dtype is torch.float32 and (not knows or block.edges.of_weight(i).num_casts)
        ]

    def probe(self, call: BlockCall) -> bool:
        """In a pilot, measure this call first; False if it can't be cut so and is to run as it is.

        Raises:
            UnmeasuredBlock: no pilot has measured this block; the forward is to be started anew after one.
        """
        if self.pilot is not None:
            self._trial.pool.check_open(self._trial)
            return self.pilot.measure(call)
        if call.block in self.unmeasured:
            raise UnmeasuredBlock
        return True

    def plan_for(self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> TrialPlan:
        """The plan for these inputs, from a pilot in this training mode and autocast if gradients may follow."""
        call = signature_of_call(args, kwargs)
        if self.plan is not None and self._is_as_before(root, self.plan, call):
            return self.plan
        glance = glance_at(self._trial.model)
        self.has_pre_hooks = glance.pre_hooked
        plan, mode = self._plan_for_inputs(root, args, kwargs, glance), (glance.training, autocast_mode())
        while torch.is_grad_enabled() and mode not in plan.modes:
            casts_alike = any(casts == mode[1] for _, casts in plan.modes)
            if casts_alike and len(plan.modes) >= MOST_MODES:
                break
            if self._trial.steps.under_way and plan.resident:
                break  # its weights are not to be moved while a graph may refer to them
            if self._trial.steps.under_way:
                self._trial.steps.leave()
            plan = self.extend_plan(root, args, kwargs)
        self._note_unmeasured(mode)
        gradients = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._kind = plan.cut, self._flags, mode, glance.hooks, gradients
        if plan.resident and call is not None and (mode in plan.modes or not gradients[0]):
            self._note_covered(root, plan, call)
        return plan

    def _is_as_before(self, root: RootForward, plan: TrialPlan, call: Any) -> bool:
        """Whether all that would be looked at is as it was when this plan, a resident one, was found to cover it."""
        covering, calls = self._covered
        if covering is not plan or call not in calls or root.unchanged is None:
            return False
        if self._trial.pool.plans.get(self._key) is not plan:
            return False
        if root.unchanged.holds():
            return True
        root.unchanged = None
        return False

    def _note_covered(self, root: RootForward, plan: TrialPlan, call: Any) -> None:
        covering, calls = self._covered
        if root.unchanged is None or covering is not plan or len(calls) >= MOST_CALLS:
            self._covered = plan, (calls := set())
            root.unchanged = Unchanged.since_now(self._trial.model)
        calls.add(call)

    def looking_for_unseen_writes(self) -> AbstractContextManager[None]:
        """Around a forward of a plan that spills."""
        return self.unseen_writes.looking(self._kind, self.blocks)

    def weights_written_unseen(self) -> list[nn.Parameter]:
        """By a forward that may have to begin anew; also those that a hook may write, for all that is known."""
        hooked = self.unmeasured if self.has_pre_hooks else ()
        return [p for block in self.blocks if block.rewritten or block in hooked for p in block.slot_parameters]

    def _plan_for_inputs(
        self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any], glance: Glance
    ) -> TrialPlan:
        """The one there is, another trial's, or a new pilot's."""
        signature = input_signature((args, kwargs))
        trial, pool = self._trial, self._trial.pool
        flags = (
            glance.needs_gradient, gradient_flags((args, kwargs)), switches((args, kwargs)), self._switches(glance),
            self._cut_of_hooks(glance), bool(glance.hooked), glance.buffers,
        )  # fmt: skip
        if self.plan is None or not self.plan.resident:
            refuse_global_hooks()
        in_step = trial.steps.under_way  # whose backward a plan would have to hold
        forward_only = not torch.is_grad_enabled() and not in_step
        known = flags == self._flags and glance.parameters == self._parameters and covers(self._signature, signature)
        if known and self.plan is not None and not self.plan.resident:
            known = self._follow(self.plan, in_step=in_step)
        if self.plan is not None and known and (self.plan.modes or forward_only):
            shared = pool.plans[self._key]
            if shared is not self.plan and not in_step and not self._repacked:  # a first step has measured it anew
                self.settled = False
                same_held = (shared.resident, shared.cut) == (self.plan.resident, self.plan.cut)
                if not (same_held and pool.readmit(trial, shared)):
                    trial.residency.bring_home(trial.optimizer)  # until it is admitted it holds nothing
                    pool.admit(trial, shared)
                self._settle(shared)
            return self.plan
        refuse_unsupported(trial.model)
        if any(isinstance(leaf, Iterator) for leaf in flatten((args, kwargs))[0]):
            raise PrepareError(
                "a prepared model's first forward runs twice, but an argument of it can be read only once. Give it a "
                "list instead of an iterator."
            )
        key_of = partial(plan_key, trial.model, trial.optimizer, (args, kwargs), flags)
        key = key_of(trial.residency.spilled, forward_only)
        self._spills = trial.residency.spilled or key in pool.too_large
        if self._spills:
            key = key_of(True, forward_only)
        if key not in pool.plans or not pool.plans[key].resident:
            refuse_computed_weights(trial.model)
        if in_step:
            trial.steps.leave()
        former, former_key, self._key = self.plan, self._key, key
        self.settled = False
        self._kinds.update(kind() for kind in self._key.kinds)
        try:
            if former is not None:
                trial.residency.bring_home(trial.optimizer)
            if self._key not in pool.plans:
                cut = self._hook_cut
                self._adopt_cut(replace(cut, kept=(*cut.kept, *self._differentiating.items())))
                self._run_pilot(root, args, kwargs, forward_only)
            plan = pool.plans[self._key]
            pool.admit(trial, plan)
        except BaseException as error:
            self._key = former_key
            self._fall_back(former, error)
            raise
        self._signature, self._flags, self._parameters = signature, flags, glance.parameters
        self._settle(plan)
        logger.info("%s", self._spell_plan(plan))
        return plan

    def _follow(self, plan: TrialPlan, *, in_step: bool) -> bool:
        """Make the blocks anew, if modules without weights were replaced since; whether the plan may hold then: others
        of the same classes do what these did."""
        now, then = parts_of(self._trial.model), self._parts
        if now == then:
            return True
        if now.classes != then.classes or not self._still_covers(plan):
            return False
        if not (in_step and any(module._buffers for module in now.replaced(then))):
            self._adopt_cut(plan.cut, plan.blocks)
        return True  # else an earlier call of the step has buffers that new blocks would not know

    def _fall_back(self, former: TrialPlan | None, error: BaseException) -> None:
        """After a pilot that failed: the script may go on with batches as before, under the plan that it had; the
        next forward looks for one where the trial cannot be admitted now."""
        stops = isinstance(error, PoolClosedError) or not isinstance(error, Exception)
        if former is None or stops or self.failed_pilot_bytes is not None or not self._still_covers(former):
            self.plan, self.settled = None, True
            return
        self._trial.pool.admit(self._trial, former)
        self._settle(former)

    def _note_unmeasured(self, mode: tuple[Hashable, Hashable]) -> None:
        """Which blocks this forward must not call before another pilot has. One may have passed them over, or the
        pilots of this mode have, or they came with a cut that is newer than these."""
        plan, with_gradients = self.plan, torch.is_grad_enabled()
        assert plan is not None
        if self._known == (plan, mode, with_gradients):
            return
        self._known = plan, mode, with_gradients
        if plan.resident:
            self.unmeasured = set()
            return
        like = {mode} if mode in plan.modes else {known for known in plan.modes if known[1] == mode[1]}

        def is_known(profile: BlockProfile) -> bool:
            return profile.measured and not (with_gradients and profile.modes.isdisjoint(like))

        blocks = zip(self.blocks, plan.blocks, strict=True)
        self.unmeasured = {block for block, profile in blocks if not is_known(profile)}

    def _switches(self, glance: Glance) -> Hashable:
        """Of the model; nothing more where they change all the time."""
        now = glance.switches
        if len(self._seen) < MOST_MODES:
            self._seen.add(now)
        return now if now in self._seen else None

    def _still_covers(self, plan: TrialPlan) -> bool:
        """Whether the model, which may have grown, still has the plan's blocks."""
        blocks = blocks_of(self._trial.model, self._limit_bytes, plan.cut)
        return {block.name for block in blocks} >= {profile.name for profile in plan.blocks}

    def _cut_of_hooks(self, glance: Glance) -> Cut:
        """Where the model must be cut for the hooks that it has now."""
        if glance.hooked != self._hooked:
            self._hooked = glance.hooked
            self._hook_cut = cut_at_hooks(self._trial.model, self._limit_bytes, Cut())
        return self._hook_cut

    def extend_plan(self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> TrialPlan:
        """The same plan with what a pilot of this forward, which calls other blocks or in another mode, adds to it."""
        assert self.plan is not None
        trial, pool, former = self._trial, self._trial.pool, self.plan
        self.settled = False
        trial.residency.bring_home(trial.optimizer)
        try:
            self._adopt_cut(former.cut)
            forward_only = not former.modes and not torch.is_grad_enabled()
            self._run_pilot(root, args, kwargs, forward_only, former)
            plan = pool.plans[self._key]
            pool.admit(trial, plan)
        except BaseException as error:
            self._fall_back(former, error)
            raise
        self._settle(plan)
        self._note_unmeasured((glance_at(trial.model).training, autocast_mode()))
        return plan

    def _spell_plan(self, plan: TrialPlan) -> str:
        weights = format_bytes(sum(block.weight_bytes for block in plan.blocks))
        how = "resident" if plan.resident else f"spilled, in {len(plan.shards)} shards"
        device = self._trial.device
        need = f"needs {format_bytes(plan.need_bytes)} of {format_bytes(device.budget_bytes)}"
        return f"{self._trial.name}: {weights} of weights, {how}, {need} on {device.name}"

    def _settle(self, plan: TrialPlan) -> None:
        """Put every weight where the plan wants it."""
        self.plan, self._repacked = plan, False
        self._adopt_cut(plan.cut, plan.blocks)
        self._shard_of = {self.blocks[i].name: n for n, shard in enumerate(plan.shards) for i in shard.blocks}
        if plan.resident:
            self.unwrap()
            self._hold([])
        else:
            self._hold(self.blocks)
            self._trial.residency.spill(self.blocks)
        self._last = plan, self._key, self._signature, self._flags, self._parameters
        self.settled = True

    def settle_again(self) -> None:
        """After an interruption: give everything back, and ask for it anew under the last plan, if there was one."""
        trial, self.plan = self._trial, None
        self.pilot = self.failed_pilot_bytes = None
        trial.residency.bring_home(trial.optimizer)
        trial.pool.interrupt(trial)
        if self._last is not None and self._still_covers(self._last[0]):
            plan, self._key, self._signature, self._flags, self._parameters = self._last
            trial.pool.admit(trial, plan)
            self._settle(plan)
        self.settled = True

    def note_out_of_memory(self) -> None:
        """Where all of it was on the device, trials like it are spilled from here on."""
        if self.plan is not None and self.plan.resident:
            self._trial.pool.too_large.add(self._key)

    def repack(self) -> None:
        """Within a step, between tasks: each block in a shard of its own, until this trial is settled anew."""
        assert self.plan is not None
        self.plan = replace(self.plan, shards=shards_of_one(self.plan.blocks))
        self._repacked = True
        self._shard_of = {self.blocks[i].name: n for n, shard in enumerate(self.plan.shards) for i in shard.blocks}
        self._trial.pool.repack(self._trial, self.plan)

    def _hold(self, except_blocks: Sequence[Block]) -> None:
        self._trial.residency.hold(self._trial.model, except_blocks, self._trial.optimizer)

    def _adopt_cut(self, cut: Cut, profiles: Sequence[BlockProfile] = ()) -> None:
        self.unwrap()
        self._cut, self._known = cut, None
        self.blocks = blocks_of(self._trial.model, self._limit_bytes, cut, profiles)
        self.unseen_writes.tell(self.blocks)
        self.wrap()

    def wrap(self) -> None:
        """From here on blocks run in visits."""
        for block in self.blocks:
            block.module.forward = BlockForward(block, self._trial)
        self._parts = parts_of(self._trial.model)

    def unwrap(self) -> None:
        for block in self.blocks:
            block.is_current = False
            ours = block.module.__dict__.get("forward")
            if isinstance(ours, BlockForward):  # perhaps a former block's, which the user has put back
                if ours.block.own_forward is not None:
                    block.module.forward = ours.block.own_forward
                else:
                    del block.module.__dict__["forward"]

    @property
    def _limit_bytes(self) -> int:
        return self._trial.pool.budget_bytes

    def _run_pilot(
        self,
        root: RootForward,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        forward_only: bool,
        former: TrialPlan | None = None,
    ) -> None:
        """Make the plan that all trials with this key share; one that covers `former` too."""
        trial, pool = self._trial, self._trial.pool
        empty, first_lack, least_bytes = False, None, self._least_pilot_bytes
        mode = glance_at(trial.model).training, autocast_mode()  # before the forward, which may change either
        while True:
            room = pool.start_pilot(trial, empty=empty, least_bytes=least_bytes)
            if pool.plans.get(self._key) is not former:  # another trial's pilot came first
                pool.end_pilot(trial, 0)
                return
            try:
                pilot = self._try_pilot(room, root, args, kwargs, forward_only)
                pool.share(self._key, self._make_plan(pilot, former, mode))
                return
            except BudgetError as error:
                if room.beside:
                    least_bytes = None
                    continue
                if not isinstance(error, BlockTooLargeError):
                    raise
                if room.free_bytes < trial.device.budget_bytes and not empty:
                    empty = True  # what fits depends on the budget, not on the neighbours
                    continue
                first_lack = first_lack or error
                opened = open_too_large(trial.model, self._cut, error.block)
                if opened is None:
                    raise first_lack from None
                self._adopt_cut(opened)

    @property
    def _least_pilot_bytes(self) -> int | None:
        """Fewer will not do: for what stays on the device, and a block with its gradients. None, where nobody could
        tell whether the pilot keeps to its bytes."""
        trial = self._trial
        if trial.mode is None:
            return None
        largest = max((block.weight_bytes for block in self.blocks), default=0)
        return 2 * largest + sum(map(storage_bytes, (*self._loose, *trial.model.buffers())))

    @property
    def _loose(self) -> list[nn.Parameter]:
        """Weights that are in no slot."""
        in_slots = {id(p) for block in self.blocks for p in block.slot_parameters}
        return [p for p in self._trial.model.parameters() if id(p) not in in_slots]

    def _make_plan(self, pilot: Pilot, former: TrialPlan | None, mode: tuple[Hashable, Hashable]) -> TrialPlan:
        trial = self._trial
        every = list(trial.model.parameters())
        buffers = sum(storage_bytes(b) for b in trial.model.buffers())
        in_blocks = sum(storage_bytes(b) for block in self.blocks for b in block.buffers())
        profiles, step_bytes = list(pilot.profiles.values()), pilot.step_bytes
        if trial.mode is not None:  # the first step is measured, and looked at once a visit
            step_bytes += max((p.boundary_bytes for p in profiles), default=0)
        modes = frozenset() if pilot.forward_only else frozenset({mode})
        profiles = [replace(p, modes=modes) if p.measured else p for p in profiles]
        if former is not None:
            known = {p.name: p for p in former.blocks if p.visits}
            both = [larger_of(p, known[p.name]) if p.measured and p.name in known else p for p in profiles]
            profiles = [p if p.measured else known.get(p.name, p) for p in both]
            step_bytes = max(step_bytes, former.step_bytes - former.late_bytes)
        plan = make_plan(
            profiles,
            budget_bytes=trial.pool.budget_bytes,
            loose_bytes=self._training_bytes(self._loose) + buffers - in_blocks + pilot.kept_bytes,
            resident_bytes=self._training_bytes(every) + buffers + pilot.kept_bytes,
            step_bytes=step_bytes,
            late_bytes=self._late_bytes,
            may_be_resident=not (self._spills or trial.residency.spilled),
            cut=self._cut,
        )
        in_forward = set(map(id, pilot.written))
        written = {name for name, p in trial.model.named_parameters() if id(p) in in_forward}
        return replace(
            plan,
            modes=modes.union(former.modes if former else ()),
            written=(former.written if former else frozenset()).union(written),
        )

    @property
    def _late_bytes(self) -> int:
        """Gradients of one block that are on their way to the host while the next one computes."""
        if not self._trial.pool.spills_behind:
            return 0
        trained = ([p for p in block.slot_parameters if p.requires_grad] for block in self.blocks)
        return max((sum(map(storage_bytes, parameters)) for parameters in trained), default=0)

    def _training_bytes(self, parameters: Sequence[nn.Parameter]) -> int:
        """Weights, gradients and optimizer state, and what a step of the optimizer takes beside them."""
        optimizer, foreach = self._trial.optimizer, self._trial.device.foreach_by_default
        gradients = sum(gradient_bytes(p) for p in parameters if p.requires_grad)
        state = optimizer_state_bytes(optimizer, parameters)
        scratch = step_scratch_bytes(optimizer, parameters, foreach_by_default=foreach)
        return sum(map(storage_bytes, parameters)) + gradients + state + scratch

    def _try_pilot(
        self, room: StartPilot, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any], forward_only: bool
    ) -> Pilot:
        """Pilots of ever better cuts, until nothing is found.

        Raises:
            BudgetError: there is no room; a `BlockTooLargeError` if it is a block that lacks it.
        """
        trial, peak_bytes = self._trial, 0
        try:
            while True:
                pilot = Pilot(trial.model, self.blocks, trial.residency, room.free_bytes, room.beside, forward_only)
                error = copy_context().run(self._fly, pilot, root, args, kwargs)
                peak_bytes = max(peak_bytes, pilot.peak_bytes)
                if not pilot.findings:
                    break
                found = pilot.findings.uncuttable
                self._differentiating |= {b.name: reason for b, reason in found.items() if b.differentiates}
                self._adopt_cut(recut(trial.model, self._cut, pilot.findings))
        except BaseException:
            self.failed_pilot_bytes = peak_bytes
            trial.leave_after_error()
            raise
        trial.pool.end_pilot(trial, peak_bytes)
        if error is not None:
            raise error
        return pilot

    def _fly(self, pilot: Pilot, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> BudgetError | None:
        """Run one pilot; why it could not come to its end, if it lacked room."""
        self.pilot, trial = pilot, self._trial
        counting, trial.meter.counting = trial.meter.counting, True
        before = trial.meter.trial_bytes
        error: BudgetError | None = None
        try:
            apart = nullcontext() if has_own_state() else drawing_for_nothing()
            with trial.counted(), apart, trial.one_pass() as forward_pass, pilot.limited():
                self._hold(self.blocks)
                try:
                    pilot.run(root.original, args, kwargs)
                finally:
                    forward_pass.undone = pilot.undone
        except DoesNotFitError as lack:
            error = BlockTooLargeError(
                lack.block.name,
                f"{lack}, but the budget of {trial.device.name} is {format_bytes(trial.device.budget_bytes)}. "
                f"Raise the pool's memory=, lower the batch size, or split the module into smaller children."
                f"{self._cut.spell_kept()}",
            ).lacking(trial.device.budget_bytes - pilot.free_bytes + lack.need_bytes, trial.device.budget_bytes)
        except torch.OutOfMemoryError as lack:
            error = BudgetError(f"{trial.name} does not fit even one block at a time: {lack}{self._cut.spell_kept()}")
        except Exception:
            if not pilot.findings:  # cut anew, it may not come to this
                raise
        finally:
            trial.meter.counting = counting
            self.pilot = None
            trial.residency.bring_home(trial.optimizer)  # until it is admitted it holds nothing
        free_remains(trial.meter, before)
        return error
