"""One trial's model in a pool: where its weights are, which step it is in, which shard it visits.

    resident   weights, gradients and optimizer state on the device; two tasks a step, the root module's
               forward and its backward; nothing is recomputed or copied
    spilled    weights in host memory, blocks visited shard by shard; the optimizer steps the host masters

A device copy of a shard lives from its promotion until its room is needed, the trial's next forward, or
its optimizer step, whichever comes first: host memory is the truth, and may have changed in between.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hydra_tune.block import Block
from hydra_tune.config import checks_enabled, format_bytes
from hydra_tune.cut import blocks_of, cut_at_hooks, open_too_large, recut
from hydra_tune.device import Device
from hydra_tune.errors import BlockTooLargeError, BudgetError, PrepareError
from hydra_tune.graph import Cast
from hydra_tune.host_buffer import storage_bytes
from hydra_tune.meter import TrialMeter
from hydra_tune.mode import TrialMode
from hydra_tune.node import BlockCall, BlockForward
from hydra_tune.optim import optimizer_state_bytes, step_scratch_bytes
from hydra_tune.partition import (
    covers,
    gradient_flags,
    input_signature,
    make_plan,
    pack_shards,
    plan_key,
    promotions,
    switches,
)
from hydra_tune.pilot import DoesNotFitError, Pilot
from hydra_tune.pool import ShardPool
from hydra_tune.probe import user_hooks
from hydra_tune.random_state import generator_states, set_generator_states
from hydra_tune.residency import Residency, Visit
from hydra_tune.root import RootApply, RootForward, refuse_global_hooks, refuse_unsupported
from hydra_tune.shard import BlockProfile, Cut, Direction, Task, TrialPlan
from hydra_tune.tree import map_tensors, tensors_in

logger = logging.getLogger("hydra_tune")


@dataclass(eq=False)
class ForwardPass:
    """Lives as long as the graph of one forward of the root module; done once that graph was used up."""

    done: bool = False
    _casts: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def cast(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What stands for autocast's copy of a weight, one for all its uses in this forward."""
        key = (id(parameter), dtype)
        if key not in self._casts:
            with torch.enable_grad():
                self._casts[key] = Cast.apply(parameter, dtype)  # type: ignore[no-untyped-call]
        return self._casts[key]


class UnmeasuredBlock(Exception):
    """A block is called that no pilot has seen called."""


class Trial:
    """Executes one prepared model. Used by one thread at a time; the pool's lock guards what is shared."""

    def __init__(self, number: int, home: int, *, pool: ShardPool, device: Device, name: str | None) -> None:
        self.id = number
        self.home = home
        self.pool = pool
        self.device = device
        self.name = name or f"trial {number}"
        self.meter = TrialMeter(device.meter, number, always=checks_enabled())
        self.mode: TrialMode | None = None  # the runner's, where there is one
        self.plan: TrialPlan | None = None
        self.blocks: list[Block] = []
        self.step = 0
        self.ended = False
        self._optimizer: torch.optim.Optimizer | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._signature: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
        self._flags: Hashable = ()
        self._parameters: list[int] = []
        self._cut = self._hook_cut = Cut()
        self._hooked: list[int] = []
        self._unmeasured: set[Block] = set()
        self._warned = False
        self._key: Hashable = None
        self._pilot: Pilot | None = None
        self._pilot_bytes: int | None = None  # at most, of one that failed and still has its reservation
        self.residency = Residency(
            device, self.meter, lambda what, num_bytes: pool.count(what, number, home, num_bytes)
        )
        self._shard_of: dict[Block, int] = {}
        self._task: Task | None = None
        self._task_start_s = 0.0
        self._in_step = False
        self._alone = False
        self._saw_backward = False
        self._passes: weakref.WeakSet[ForwardPass] = weakref.WeakSet()
        self._pass: ForwardPass | None = None
        self._backward_id = -1
        self._backward_passes: set[ForwardPass] = set()
        self._use_cache: list[Any] = []

    # ---- the model's life in the pool ----

    def bind(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Put the model's blocks under this trial. Nothing is cut or moved before the first forward."""
        self._model = weakref.ref(model)
        self._optimizer = optimizer
        self.blocks = blocks_of(model, self._limit_bytes, self._cut)
        refuse_unsupported(model, self.blocks)
        model.forward = RootForward(model, self)
        model._apply = RootApply(model, self)  # type: ignore[method-assign]
        self._wrap()
        configs = {id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if c is not None}
        self._use_cache = [c for c in configs.values() if getattr(c, "use_cache", False) is True]
        for config in self._use_cache:
            config.use_cache = False
        if optimizer is not None:
            self._hooks = [
                optimizer.register_step_pre_hook(lambda *_: self.boundary()),
                optimizer.register_step_post_hook(lambda *_: self.pool.invalidate(self)),
            ]

    @property
    def has_model(self) -> bool:
        return self._model() is not None

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None, "the model outlives its trial's work"
        return model

    def end(self) -> None:
        """Give back every byte; the model is plain again, on the host, with its current weights."""
        if self.ended:
            return
        self.ended = True
        self._task = None
        try:
            self._leave_device()
        finally:  # last: from here on others may have its bytes
            self.device.meter.end_trial(self.id)
            self.pool.end_trial(self)
        self.blocks, self._shard_of, self._optimizer = [], {}, None

    def _leave_device(self) -> None:
        for hook in self._hooks:
            hook.remove()
        model = self._model()
        if model is not None:
            model.__dict__.pop("forward", None)
            model.__dict__.pop("_apply", None)
            self._unwrap()
            self.residency.bring_home(self._optimizer)
        self.residency.close()
        for config in self._use_cache:
            config.use_cache = True

    @property
    def _limit_bytes(self) -> int:
        return self.pool.budget_bytes

    def _wrap(self) -> None:
        for block in self.blocks:
            block.module.forward = BlockForward(block, self)

    def _unwrap(self) -> None:
        for block in self.blocks:
            block.module.__dict__.pop("forward", None)

    def summary(self) -> dict[str, Any]:
        plan = self.plan
        blocks = plan.blocks if plan else ()
        shards = list(zip(plan.shards, promotions(plan, self.device.budget_bytes), strict=True)) if plan else []
        return {
            "name": self.name,
            "device": self.device.name,
            "steps": self.step,
            "state": "ended" if self.ended else "live",
            "resident": plan is not None and plan.resident,
            "held_bytes": plan.held_bytes if plan else 0,
            "step_bytes": plan.step_bytes if plan else 0,
            "weight_bytes": sum(p.weight_bytes for p in blocks),
            "promoted_bytes_per_step": sum(shard.slot_bytes * times for shard, times in shards),
            "shards": [
                {
                    "blocks": [blocks[i].name for i in shard.blocks],
                    "slot_bytes": shard.slot_bytes,
                    "promotions_per_step": times,
                    "forward_work_bytes": shard.forward_work_bytes,
                    "backward_work_bytes": shard.backward_work_bytes,
                }
                for shard, times in shards
            ],
            "cut": {
                "opened": dict(plan.cut.opened) if plan else {},
                "kept": dict(plan.cut.kept) if plan else {},
                "held": dict(plan.cut.held) if plan else {},
            },
        }

    # ---- steps ----

    def boundary(self) -> None:
        """A place where no task of this trial can be under way: end what lingers."""
        self.leave()
        if self._in_step and all(p.done for p in self._passes):
            self._leave_step()

    def open_step(self, plan: TrialPlan) -> None:
        self.boundary()
        if self._in_step:
            return
        self._alone = self._may_measure_step(plan)
        self._saw_backward = False
        self.pool.enter_step(self, alone=self._alone)
        self._in_step = True
        if self._alone:
            self.meter.counting = True
            self.meter.watch_outside()

    def _may_measure_step(self, plan: TrialPlan) -> bool:
        """Only a runner's mode sees the operators of user code, and only a step of training has them all."""
        unmeasured = not plan.resident and self._key not in self.pool.measured
        return unmeasured and self.mode is not None and torch.is_grad_enabled()

    def _leave_step(self) -> None:
        self._in_step = False
        self.pool.leave_step(self)
        if self._alone:
            self._alone = False
            self.meter.counting = self.meter.always
            step_bytes = self.meter.outside_peak()
            if self._saw_backward:
                self._use_measured_step(step_bytes)

    def _use_measured_step(self, step_bytes: int) -> None:
        assert self.plan is not None
        if self._key in self.pool.measured:  # by another trial meanwhile
            step_bytes = max(step_bytes, self.pool.plans[self._key].step_bytes)
        room_bytes = self.pool.budget_bytes - self.plan.held_bytes - step_bytes
        plan = replace(self.plan, step_bytes=step_bytes, shards=pack_shards(self.plan.blocks, room_bytes))
        if plan.need_bytes > self.pool.budget_bytes:
            raise BudgetError(
                f"the first step of {self.name} needed {format_bytes(plan.need_bytes)}: "
                f"{format_bytes(step_bytes)} between its blocks, in its loss and kept by its loop; but the budget is "
                f"{format_bytes(self.pool.budget_bytes)}. Raise ShardPool(memory=...), or lower the batch size."
            )
        self.pool.plans[self._key] = plan
        self.pool.measured.add(self._key)

    # ---- forward and backward of the root module ----

    def run_root(self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.ended:
            raise PrepareError(f"{self.name} has ended. Prepare the model again.")
        if torch.is_inference_mode_enabled():  # whose tensors could not be measured: without gradients instead
            with torch.inference_mode(False), torch.no_grad():
                args, kwargs = map_tensors(torch.clone, (args, kwargs))
                return self.run_root(root, args, kwargs)
        with self._counted():
            if self.meter.counting:
                self.meter.adopt(tensors_in((args, kwargs)))
            self.boundary()
            plan = self._plan_for(root, args, kwargs)
            while self._unmeasured:  # which this forward may call, or not
                generators = self.device.generators()
                random_states, buffers = generator_states(generators), [b.clone() for b in self.model.buffers()]
                try:
                    return self._run_step(root, plan, args, kwargs)
                except UnmeasuredBlock:
                    self.leave()
                    self._leave_step()
                    set_generator_states(generators, random_states)
                    with torch.no_grad():
                        for buffer, value in zip(self.model.buffers(), buffers, strict=True):
                            buffer.copy_(value)
                    plan = self._extend_plan(root, args, kwargs)
            return self._run_step(root, plan, args, kwargs)

    def _run_step(self, root: RootForward, plan: TrialPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.open_step(plan)
        self.step += 1
        self.pool.invalidate(self)
        if not plan.resident:
            self._warn_of_second_forward()
        self._pass = forward_pass = ForwardPass()
        self._passes.add(forward_pass)
        try:
            if plan.resident:
                self._go_to(0, Direction.FORWARD)
            outputs = root.original(*args, **kwargs)
            self.leave()
        except BaseException:
            self._leave_after_error()
            raise
        finally:
            self._pass = None
            self.pool.note_summary(self)
        if plan.resident:
            self._lease_backward(outputs, forward_pass)
        return outputs

    def _warn_of_second_forward(self) -> None:
        autocast = any(torch.is_autocast_enabled(kind) for kind in ("cpu", self.device.torch_device.type))
        if autocast and not self._warned and any(not p.done for p in self._passes):
            self._warned = True
            logger.warning(
                "%s runs a second forward under autocast before the backward of the first: in one autocast context "
                "gradients may differ in the last bit of the lower precision from plain PyTorch's, which casts a "
                "weight once for both",
                self.name,
            )

    def _lease_backward(self, outputs: Any, forward_pass: ForwardPass) -> None:
        def take_lease(grad: torch.Tensor) -> None:
            self.enter_backward(forward_pass)
            self._go_to(0, Direction.BACKWARD)

        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None:
                tensor.register_hook(take_lease)

    @property
    def forward_pass(self) -> ForwardPass:
        if self._pass is None and self._backward_passes:  # a checkpoint around blocks repeats their forward
            return next(iter(self._backward_passes))
        if self._pass is None:
            raise PrepareError(
                "a prepared model is called as a whole: a block was called outside of its root's forward. "
                "Call the model itself, or prepare the part that you call; where checkpoints around blocks repeat "
                "them, give these use_reentrant=False."
            )
        return self._pass

    def enter_backward(self, forward_pass: ForwardPass) -> None:
        """Called by each node of this trial's in a backward; at its end the lease and the step are left."""
        if self.ended:
            raise PrepareError(f"{self.name} has ended; backward came too late. Call it before release(model).")
        current = torch._C._current_graph_task_id()
        if current != self._backward_id:
            self._backward_id = current
            self._backward_passes = set()
            keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(keeps_graph))
            if not self._in_step:
                assert self.plan is not None
                self.open_step(self.plan)
        self._saw_backward = True
        self._backward_passes.add(forward_pass)

    def _end_backward(self, keeps_graph: bool) -> None:
        if not keeps_graph:
            for forward_pass in self._backward_passes:
                forward_pass.done = True
        self._backward_passes = set()
        self._backward_id = -1
        if not self.ended:
            self.boundary()

    # ---- visits ----

    @contextmanager
    def visit(self, block: Block, direction: Direction) -> Iterator[Visit]:
        """Hold the lease, with the block's device copy under its module's names. The lease lingers after,
        for the next block of the same shard."""
        if self._pilot is not None:
            copy = self._pilot.copy_of(block)
        else:
            copy = self._go_to(self._shard_of[block], direction)
        self.meter.outside_ends()
        try:
            with self._counted(), self.residency.inside(block, copy) as visit:
                yield visit
        except BaseException:
            self._leave_after_error()
            raise
        finally:
            self.meter.outside_starts()

    def _go_to(self, shard: int, direction: Direction) -> Any:
        task = Task(self.id, self.step, shard, direction)
        if self._task != task:
            self.leave()
            self._task_start_s = self.pool.acquire(task)
            self._task = task
        assert self.plan is not None
        if not self.plan.resident and shard not in self.residency.copies:
            self.promote_shard(shard, 0, 0)  # all its weights are held: it needs no slot
        return self.residency.copies.get(shard)

    def _leave_after_error(self) -> None:
        """An exception keeps what its task had on the device. A runner lets go of that, then of the lease."""
        if self.mode is None:
            self.leave()

    def leave(self) -> None:
        """Release the lease, if this trial has it, or what a failed pilot had."""
        if self._task is not None:
            task, self._task = self._task, None
            self.pool.release(task, self._task_start_s)
            if self._alone:  # no one knows yet how much room the step itself needs
                self.pool.invalidate(self)
        if self._pilot_bytes is not None:
            self.pool.end_pilot(self, self._pilot_bytes)
            self._pilot_bytes = None

    def promote_shard(self, shard: int, offset: int, num_bytes: int) -> None:
        """Carry out the scheduler's `Promote`, in this trial's thread."""
        assert self.plan is not None
        blocks = [self.blocks[i] for i in self.plan.shards[shard].blocks]
        self.residency.copies[shard] = self.residency.promote(blocks, offset, num_bytes)

    def drop_shard(self, shard: int) -> None:
        """Carry out the scheduler's `Drop`, in any thread."""
        self.residency.copies.pop(shard, None)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count operators on the device, where anything counts them: in pilots and under checks."""
        installs = self.mode is None and self.meter.counting and not self.meter.watched
        self.meter.inside += 1
        self.meter.watched |= installs
        try:
            with TrialMode(meter=self.meter) if installs else nullcontext():
                yield
        finally:
            self.meter.inside -= 1
            self.meter.watched &= not installs

    # ---- plan ----

    def probe(self, call: BlockCall) -> bool:
        """In a pilot, measure this call first; False if it can't be cut so and is to run as it is.

        Raises:
            UnmeasuredBlock: no pilot has measured this block; the forward is to be started anew after one.
        """
        if self._pilot is not None:
            return self._pilot.measure(call)
        if call.block in self._unmeasured:
            raise UnmeasuredBlock
        return True

    def _plan_for(self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> TrialPlan:
        """The plan for these inputs: the one there is, another trial's, or a new pilot's."""
        signature = input_signature((args, kwargs))
        flags = (gradient_flags(self.model, (args, kwargs)), switches((args, kwargs)), self._cut_of_hooks())
        parameters = [id(p) for p in self.model.parameters()]
        if self.plan is None or not self.plan.resident:
            refuse_global_hooks()
        known = flags == self._flags and parameters == self._parameters and covers(self._signature, signature)
        if self.plan is not None and known:
            shared = self.pool.plans[self._key]
            if shared is not self.plan and not self._in_step:  # measured anew, by its first step or another trial
                self.residency.bring_home(self._optimizer)
                self.pool.admit(self, shared)
                self._settle(shared)
            return self.plan
        if self._in_step:
            self._leave_step()
        former, former_key = self.plan, self._key
        self._key = (plan_key(self.model, self._optimizer, (args, kwargs)), flags, self.residency.spilled)
        try:
            if former is not None:
                self.residency.bring_home(self._optimizer)
            if self._key not in self.pool.plans:
                self._adopt_cut(self._cut_of_hooks())
                self._run_pilot(root, args, kwargs)
            plan = self.pool.plans[self._key]
            self.pool.admit(self, plan)
        except BaseException as error:
            self._key = former_key
            if former is not None:
                if isinstance(error, Exception):  # the script may go on with batches as before
                    self.pool.admit(self, former)
                self._settle(former)
            raise
        self._signature, self._flags, self._parameters = signature, flags, parameters
        self._settle(plan)
        logger.info("%s", self._spell_plan(plan))
        return plan

    def _cut_of_hooks(self) -> Cut:
        """Where the model must be cut for the hooks that it has now."""
        hooked = [id(module) for module in self.model.modules() if user_hooks(module)]
        if hooked != self._hooked:
            self._hooked, self._hook_cut = hooked, cut_at_hooks(self.model, self._limit_bytes, Cut())
        return self._hook_cut

    def _extend_plan(self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> TrialPlan:
        """The same plan with what a pilot of this forward, which calls other blocks, adds to it."""
        assert self.plan is not None
        former = self.plan
        self.residency.bring_home(self._optimizer)
        self._adopt_cut(former.cut)
        self._run_pilot(root, args, kwargs, former)
        self.pool.admit(self, self.pool.plans[self._key])
        self._settle(self.pool.plans[self._key])
        return self.plan

    def _spell_plan(self, plan: TrialPlan) -> str:
        weights = format_bytes(sum(block.weight_bytes for block in plan.blocks))
        how = "resident" if plan.resident else f"spilled, in {len(plan.shards)} shards"
        need = f"needs {format_bytes(plan.need_bytes)} of {format_bytes(self.device.budget_bytes)}"
        return f"{self.name}: {weights} of weights, {how}, {need} on {self.device.name}"

    def _settle(self, plan: TrialPlan) -> None:
        """Put every weight where the plan wants it."""
        self.plan = plan
        self._adopt_cut(plan.cut, plan.blocks)
        self._shard_of = {self.blocks[i]: n for n, shard in enumerate(plan.shards) for i in shard.blocks}
        self._unmeasured = {
            block for block, profile in zip(self.blocks, plan.blocks, strict=True) if not profile.measured
        }
        if plan.resident:
            self._unwrap()
            self._unmeasured = set()
            self._hold([])
        else:
            self._hold(self.blocks)
            self.residency.spill(self.blocks)

    def _hold(self, except_blocks: Sequence[Block]) -> None:
        self.residency.hold(self.model, except_blocks, self._optimizer)

    def _adopt_cut(self, cut: Cut, profiles: Sequence[BlockProfile] = ()) -> None:
        self._unwrap()
        self._cut = cut
        self.blocks = blocks_of(self.model, self._limit_bytes, cut, profiles)
        self._wrap()

    def _run_pilot(
        self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any], former: TrialPlan | None = None
    ) -> None:
        """Make the plan that all trials with this key share; one that covers `former` too."""
        empty, first_lack = False, None
        while True:
            free_bytes = self.pool.start_pilot(self, empty=empty)
            if self.pool.plans.get(self._key) is not former:  # another trial's pilot came first
                self.pool.end_pilot(self, 0)
                return
            try:
                pilot = self._try_pilot(free_bytes, root, args, kwargs)
                self.pool.plans[self._key] = self._make_plan(pilot, former)
                return
            except BlockTooLargeError as error:
                if free_bytes < self.device.budget_bytes and not empty:
                    empty = True  # what fits depends on the budget, not on the neighbours
                    continue
                first_lack = first_lack or error
                opened = open_too_large(self.model, self._cut, error.block)
                if opened is None:
                    raise first_lack from None
                self._adopt_cut(opened)

    def _make_plan(self, pilot: Pilot, former: TrialPlan | None) -> TrialPlan:
        in_slots = {p for block in self.blocks for p in block.slot_parameters}
        loose = [p for p in self.model.parameters() if p not in in_slots]
        every = list(self.model.parameters())
        buffers = sum(storage_bytes(b) for b in self.model.buffers())
        in_blocks = sum(storage_bytes(b) for block in self.blocks for b in block.buffers())
        scratch = step_scratch_bytes(self._optimizer, every, foreach_by_default=self.device.foreach_by_default)
        profiles, step_bytes = list(pilot.profiles.values()), pilot.step_bytes
        if former is not None:
            known = {p.name: p for p in former.blocks if p.visits}
            profiles = [p if p.visits else known.get(p.name, p) for p in profiles]
            step_bytes = max(step_bytes, former.step_bytes)
        return make_plan(
            profiles,
            budget_bytes=self.pool.budget_bytes,
            loose_bytes=self._training_bytes(loose) + buffers - in_blocks + pilot.kept_bytes,
            resident_bytes=self._training_bytes(every) + buffers + scratch + pilot.kept_bytes,
            step_bytes=step_bytes,
            may_be_resident=not self.residency.spilled,
            cut=self._cut,
        )

    def _training_bytes(self, parameters: Sequence[nn.Parameter]) -> int:
        """Weights, gradients and optimizer state."""
        gradients = sum(storage_bytes(p) for p in parameters if p.requires_grad)
        return sum(map(storage_bytes, parameters)) + gradients + optimizer_state_bytes(self._optimizer, parameters)

    def _try_pilot(self, free_bytes: int, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> Pilot:
        """Pilots of ever better cuts, until nothing is found.

        Raises:
            BudgetError: there is no room; a `BlockTooLargeError` if it is a block that lacks it.
        """
        peak_bytes = 0
        try:
            while True:
                pilot = Pilot(self.model, self.blocks, self.residency, free_bytes)
                error = self._fly(pilot, root, args, kwargs)
                peak_bytes = max(peak_bytes, pilot.peak_bytes)
                if not pilot.findings:
                    break
                self._adopt_cut(recut(self.model, self._cut, pilot.findings))
        except BaseException:
            self._pilot_bytes = peak_bytes
            self._leave_after_error()
            raise
        self.pool.end_pilot(self, peak_bytes)
        if error is not None:
            raise error
        return pilot

    def _fly(self, pilot: Pilot, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> BudgetError | None:
        """Run one pilot; why it could not come to its end, if it lacked room."""
        self._pilot, self._pass = pilot, ForwardPass()
        counting, self.meter.counting = self.meter.counting, True
        error: BudgetError | None = None
        try:
            with self._counted():
                self._hold(self.blocks)
                pilot.run(root.original, args, kwargs)
        except DoesNotFitError as lack:
            error = BlockTooLargeError(
                lack.block.name,
                f"{lack}, but the budget of {self.device.name} is {format_bytes(self.device.budget_bytes)}. "
                f"Raise ShardPool(memory=...), lower the batch size, or split the module into smaller children."
                f"{self._cut.spell_kept()}",
            )
        except torch.OutOfMemoryError as lack:
            error = BudgetError(f"{self.name} does not fit even one block at a time: {lack}")
        finally:
            self.meter.counting = counting
            self._pass = self._pilot = None
            self.residency.bring_home(self._optimizer)  # until it is admitted it holds nothing
        if error is not None or pilot.findings:
            gc.collect(1)  # frames that exceptions have left hold tensors
        return error
