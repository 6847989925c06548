"""One trial's model in a pool: where its weights are, which step it is in, which shard it visits.

    resident   weights, gradients and optimizer state on the device; two tasks a step, the root module's
               forward and its backward; nothing is recomputed or copied; a turn may last for many (`lease.py`)
    spilled    weights in host memory, blocks visited shard by shard; the optimizer steps the host masters

A device copy of a shard lives from its promotion until its room is needed, the trial's next forward, or
its optimizer step, whichever comes first: host memory is the truth, and may have changed in between.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from hydra_tune.autocast_context import AutocastContext
from hydra_tune.block import Block
from hydra_tune.call import BlockCall, ResultT
from hydra_tune.callers import Callers, calls_backward
from hydra_tune.casts import CastsOfForward, watch_clearings
from hydra_tune.company import company
from hydra_tune.config import checks_enabled
from hydra_tune.copies import Copies
from hydra_tune.device import Device
from hydra_tune.errors import BudgetError, PrepareError, clear_frames
from hydra_tune.events import TaskReady
from hydra_tune.fork import gate
from hydra_tune.forward_pass import AbandonedForward, ForwardPass
from hydra_tune.garbage import collect_until
from hydra_tune.gradient_sums import GradientSums
from hydra_tune.graph import keep_again, note_users
from hydra_tune.hf_config import use_cache_again, use_no_cache
from hydra_tune.late_gradients import gates_for
from hydra_tune.leased_visit import LeasedVisit
from hydra_tune.meter import TrialMeter
from hydra_tune.mode import Counted, TrialMode, drop_modes
from hydra_tune.planner import Planner, UnmeasuredBlock
from hydra_tune.pool import ShardPool
from hydra_tune.residency import Residency
from hydra_tune.resumption import Resumption
from hydra_tune.rewind import Rewind
from hydra_tune.root import RootApply, RootForward, refuse_transforms
from hydra_tune.shard import Direction, Task, TrialPlan
from hydra_tune.shared_random import SharedDraws
from hydra_tune.spill import DeviceCopy
from hydra_tune.steps import Steps
from hydra_tune.stop import Stop
from hydra_tune.tree import tensors_in
from hydra_tune.turn import Turn
from hydra_tune.unseen_writes import UnseenWrites

logger = logging.getLogger("hydra_tune")


class Trial:
    """Executes one prepared model. Used by one thread at a time; the pool's lock guards what is shared."""

    def __init__(self, number: int, home: Device, *, pool: ShardPool, name: str | None, stop: Stop) -> None:
        self.id = number
        self.pool = pool
        self.stop = stop
        self.lease = pool.lease_of(number)
        self.name = name or f"trial {number}"
        self.meter = TrialMeter(home.meter, number, always=checks_enabled())
        self.mode: TrialMode | None = None  # the runner's, where there is one
        self.resumption: Resumption | None = None  # likewise
        self.planner = Planner(self)
        self._model: Callable[[], nn.Module | None] = lambda: None
        self.ended = False
        self._plain = False  # the model, again
        self._running = False  # its root, or a block that is called alone
        self._unfinished = False  # what a script has called; still, after an exception
        self._callers = Callers()
        self._process = os.getpid()
        self.optimizer: torch.optim.Optimizer | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.residency = Residency(home, self.meter, pool.log_of(number))
        self._warned = False
        self._task: Task | None = None
        self._task_device = home  # of that task, or the one before
        self._task_start_s = 0.0
        self.steps = Steps(self)
        self._backward_within = False  # of the forward under way
        self._pass: ForwardPass | None = None
        self._autocast = AutocastContext()  # that it is in, if it is
        self._backward_id = -1
        self._backward_passes: set[ForwardPass] = set()
        self.sums = GradientSums()  # of weights that blocks use several times
        self.copies = Copies()
        self.turn = Turn()
        self.marked: dict[int, BlockCall] = {}  # what a checkpoint repeats in the backward under way, by their marks
        self._configs: list[Any] = []

    @property
    def device(self) -> Device:
        """Its home."""
        return self.residency.device

    @property
    def plan(self) -> TrialPlan | None:
        return self.planner.plan

    @property
    def has_pre_hooks(self) -> bool:
        return self.planner.has_pre_hooks

    @property
    def unseen_writes(self) -> UnseenWrites:
        return self.planner.unseen_writes

    @property
    def is_alone(self) -> bool:
        """No other objective runs in this process, nor has another thread a model in this pool."""
        return company.count <= (self.mode is not None) and not self.pool.is_shared

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one that has called the model last."""
        return self._callers.is_last

    # ---- the model's life in the pool ----

    def bind(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Put the model's blocks under this trial. Nothing is cut or moved before the first forward."""
        self._model = weakref.ref(model)
        self.optimizer = optimizer
        self.planner.start()
        watch_clearings()
        model.forward = RootForward(model, self)
        model._apply = RootApply(model, self)  # type: ignore[method-assign]
        self._configs = use_no_cache(model)
        if optimizer is not None and hasattr(optimizer, "_optimizer_step_pre_hooks"):
            # They only let go early: an optimizer that wraps another, and has none, does without.
            self._hooks = [
                optimizer.register_step_pre_hook(lambda *_: self.boundary()),
                optimizer.register_step_post_hook(lambda *_: self._after_optimizer_step()),
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
        if self._plain:
            return
        self.ended = True
        self._task = None
        with_gradients = torch.is_grad_enabled()
        try:
            self._leave_device()
        finally:  # last: from here on others may have its bytes
            torch._C._set_grad_enabled(with_gradients)  # should that be interrupted
            self.pool.end_trial(self)
            self._plain = True
            if self.has_model:  # so far `release` may be called again, should it be interrupted
                self.model.__dict__.pop("_apply", None)
                self.model.__dict__.pop("forward", None)
        self.planner.close()
        self.steps.close()
        self.optimizer = self.resumption = None

    def _leave_device(self) -> None:
        self.pool.await_copies(self)
        for hook in self._hooks:
            hook.remove()
        self.residency.close_visits()
        self.residency.await_gradients()
        self.planner.unwrap()  # parts of a model may live longer
        self.device.synchronize()  # it may have computed in a stream that is not the caller's
        self.residency.bring_home(self.optimizer)
        self.residency.close()
        use_cache_again(self._configs)

    def summary(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "device": self.device.name,
            "steps": self.steps.number,
            "state": "ended" if self.ended else "paused" if self.stop.is_paused else "live",
            **self.planner.summary(),
        }

    # ---- steps ----

    def boundary(self) -> None:
        """A place where no task of this trial can be under way: end what lingers."""
        self._refuse_other_threads()
        unfinished = self._begin()
        self._boundary()
        self._unfinished = unfinished

    def _after_optimizer_step(self) -> None:
        unfinished = self._begin()
        self._invalidate()
        if self.resumption is not None:
            self.resumption.has_stepped()
        self._unfinished = unfinished

    def _invalidate(self) -> None:
        """Device copies of shards are stale; none of a trial that is resident."""
        if self.plan is None or not self.plan.resident:
            self.pool.invalidate(self)

    def _boundary(self) -> None:
        self.leave()
        if self.marked and not self.in_backward:
            self.marked.clear()  # first: they keep their forward
        self.copies.refuse_writes()
        self.copies.forget()
        if self.steps.leave_if_done():
            self.sums.forget()

    def open_step(self, plan: TrialPlan) -> None:
        self._boundary()
        self.steps.open(plan)

    def _note_for_resumption(self) -> None:
        if self.resumption is not None and not self.ended:
            self.resumption.note()

    def checkpoint(self, states: Sequence[dict[str, Any]]) -> None:
        """Write one, from the host, with the trial's loaders in these states; the devices go on with others."""
        if self.resumption is not None and not self.steps.under_way:
            with self.meter.paused():
                self.resumption.stage(self.model, self.optimizer, states)

    def _refuse_other_threads(self) -> None:
        if os.getpid() != self._process and self.pool.is_shared:  # nobody here goes on with the others' tasks
            raise PrepareError(
                f"a prepared model is called in the process that has prepared it, where its pool's other trials are, "
                f"but that of {self.name} was called in a forked one, perhaps a loader's worker. Give that one a "
                "copy.deepcopy(model), which is a plain model."
            )
        self._callers.enter(self, self.name, in_backward=self._backward_id != -1)

    # ---- interruptions ----

    def _begin(self) -> bool:
        """Wherever a script calls. What it called before may have been interrupted at any line (Ctrl-C, a signal's
        handler that raises): that is made good first. Whether it is still to come to its end."""
        unfinished, self._unfinished = self._unfinished, True
        if unfinished and not (self._running or self.ended or self._is_sound()):
            self._start_anew()
        return unfinished

    def _is_sound(self) -> bool:
        """Whether nothing was left halfway, and the pool believes the same as this trial."""
        residency, planner = self.residency, self.planner
        if residency.in_visit or not self.meter.is_idle or not planner.settled or planner.pilot is not None:
            return False
        if self.meter.counting != (self.meter.always or self.steps.measures) or not self._agrees():
            return False
        standing = self.pool.standing(self)
        if standing is None or self.plan is None:
            return standing is not None
        shards = self.plan.shards
        in_slots = {(device, shard) for device, shard in residency.copies if shards[shard].slot_bytes}
        return standing.admitted and standing.slots == in_slots

    def _agrees(self) -> bool:
        """Whether the pool believes the same of the step and the lease."""
        standing = self.pool.standing(self)
        in_step = self.steps.under_way or self.planner.failed_pilot_bytes is not None
        return standing is not None and standing.in_step == in_step and standing.running == self._task

    def _start_anew(self) -> None:
        """As if the step that was interrupted had not begun; what it has computed stays as it is."""
        self.pool.await_copies(self)
        self._put_back()
        drop_modes(self.meter)
        gate.leave()
        self.meter.reset()
        self.residency.await_gradients()
        self.residency.forget_copies()
        self._task = None
        self.steps.forget()
        self._pass, self._backward_passes, self._backward_id = None, set(), -1
        self.planner.settle_again()

    def _put_back(self) -> None:
        """What context managers do, where these were interrupted themselves."""
        self.residency.close_visits()
        keep_again()

    # ---- forward and backward of the root module ----

    def run_root(self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.ended:
            raise PrepareError(f"{self.name} has ended. Prepare the model again.")
        refuse_transforms(lambda: tensors_in((args, kwargs, [*self.model.parameters()])))
        self._refuse_other_threads()
        is_repeated = self.in_backward and torch._C._current_graph_task_id() == self._backward_id
        if is_repeated or (self.planner.pilot is not None and self._running):
            raise PrepareError(
                "a prepared model's backward repeats forwards block by block, but its whole forward was called once "
                "more, by a checkpoint around the model, by a hook or by the model itself. Leave that out."
            )
        self.pool.check_open(self)
        return self._running_it(lambda: self._run_root(root, args, kwargs))

    def _running_it(self, run: Callable[[], Any]) -> Any:
        with_gradients, running = torch.is_grad_enabled(), self._running
        try:
            self._begin()
            self._running = True
            outputs = run()
            self._unfinished = running
            return outputs
        except BaseException:
            torch._C._set_grad_enabled(with_gradients)
            if not running:
                self._put_back()
            raise
        finally:
            self._running = running

    def _run_root(self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with self.counted():
            if self.meter.counting:
                self.meter.adopt(tensors_in((args, kwargs)))
            self._boundary()
            if self.resumption is not None and not self.steps.under_way:
                self._before_step(self.resumption)
            casts = CastsOfForward()  # an attempt that is started anew may leave some for the forward
            plan = self.planner.plan_for(root, args, kwargs)
            self.open_step(plan)
            if self.steps.leave_unmeasured():
                plan = self.planner.plan_for(root, args, kwargs)
            while self.planner.unmeasured:  # which this forward may call, or not
                rewind = Rewind(self.model, (args, kwargs), self.meter, self.device.generators())
                rewind.keep((*rewind.tensors, *map(self.model.get_parameter, plan.written)))
                rewind.keep(self.planner.weights_written_unseen())
                try:
                    with SharedDraws() as draws:
                        return self._run_step(root, plan, casts, args, kwargs)
                except UnmeasuredBlock:
                    self.leave()
                    self.steps.leave()
                    draws.take_back()
                    rewind.restore()
                    rewind.refuse_other_writes()
                    plan = self.planner.extend_plan(root, args, kwargs)
            return self._run_step(root, plan, casts, args, kwargs)

    def _before_step(self, resumption: Resumption) -> None:
        states = resumption.before_forward() if torch.is_grad_enabled() else None
        if states is not None:
            self.checkpoint(states)
            resumption.publish()

    def _run_step(
        self, root: RootForward, plan: TrialPlan, casts: CastsOfForward, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        if not self.steps.under_way:  # it was left for another plan
            self.open_step(plan)
        self.steps.number += 1
        self._invalidate()
        try:
            with self.one_pass() as forward_pass:
                self.steps.add_forward(forward_pass)
                if plan.resident:
                    self._autocast.begin_forward([], self.name)
                    self._go_to(0, Direction.FORWARD)
                else:
                    self._begin_spilled(forward_pass)
                self._backward_within, with_gradients = False, torch.is_grad_enabled()
                looking = nullcontext() if plan.resident else self.planner.looking_for_unseen_writes()
                with looking:
                    outputs = root.original(*args, **kwargs)
                if self._backward_within:  # once, however many
                    self.steps.add_backward()
                made = tensors_in(outputs)
                if forward_pass.may_join:
                    note_users(made)
                self.copies.refuse_writes()
                forward_pass.joined_casts = casts.join(made)
                self._warn_of_parted_casts(plan)
                self.steps.trains |= self._backward_within and with_gradients and not _want_backward(made)
                self.leave()
        except BaseException:
            self.leave_after_error()
            raise
        finally:
            if not self.lease.is_noted:  # else it is told what has changed
                self.pool.note_summary(self)
                self.lease.is_noted = self.lease.is_open
        if plan.resident or forward_pass.may_repeat:
            self._announce_backward(outputs, forward_pass)
        if not torch.is_grad_enabled():
            self._note_for_resumption()
        return outputs

    def _warn_of_parted_casts(self, plan: TrialPlan) -> None:
        if self._warned or not (plan.resident or plan.cut.kept) or not torch.is_grad_enabled():
            return
        if self._autocast.is_parted:
            self._warned = True
            logger.warning(
                "%s runs several forwards in one autocast context, and another trial has left its own meanwhile, which "
                "clears the casts of all threads: gradients of weights that stay on the device may differ in the last "
                "bit of the lower precision from plain PyTorch's. Give each forward a torch.autocast and a backward of "
                "its own, or search with concurrency=1.",
                self.name,
            )

    def _begin_spilled(self, forward_pass: ForwardPass) -> None:
        if self._autocast.goes_on:
            self._autocast.begin_forward(self.planner.cast_weights(), self.name)
        if self.device.spills_behind and torch.is_grad_enabled() and not self.planner.has_hooks:
            forward_pass.gates = gates_for(self.planner.blocks)

    def run_block(self, block: Block, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A block that evaluation calls outside of its root's forward, as `generate` calls an encoder."""
        self._refuse_other_threads()
        return self._running_it(lambda: self._run_block(block, args, kwargs))

    def _run_block(self, block: Block, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.plan is None:
            _refuse_before_first_batch(block, tensors_in((args, kwargs)))
            return block.forward(args, kwargs)
        with self.counted(), self.one_pass():
            self.open_step(self.plan)
            self.pool.invalidate(self)
            try:
                if not self.plan.resident and self._autocast.goes_on:
                    self._autocast.begin_forward(self.planner.cast_weights(), self.name)
                outputs = BlockCall(block, self, args, kwargs).run_without_graph(args, kwargs)
                self.leave()
            except BaseException:
                self.leave_after_error()
                raise
        return outputs

    @contextmanager
    def one_pass(self) -> Iterator[ForwardPass]:
        """The forward that blocks are called in."""
        if not self._autocast.goes_on:
            self._autocast = AutocastContext()
        self._pass = forward_pass = ForwardPass(autocast=self._autocast)
        before = self._autocast.noted()
        try:
            yield forward_pass
            if forward_pass.ended_by is not None:
                raise forward_pass.ended_by
        finally:
            forward_pass.gates.clear()
            self._autocast.end_forward()
            if isinstance(forward_pass.ended_by, AbandonedForward):
                self._autocast.take_back(before)  # the forward proper will cast it
            self._pass = forward_pass.ended_by = None  # its frames refer to the pass

    def end_forward(self, error: Exception) -> None:
        """The forward under way has failed, whatever the model does with this error of ours."""
        if self._pass is not None and self._pass.ended_by is None:
            self._pass.ended_by = error

    def _announce_backward(self, outputs: Any, forward_pass: ForwardPass) -> None:
        """Where no node of a block may be the first to do so: a checkpoint may repeat them before."""

        def enter(grad: torch.Tensor) -> None:
            if self.planner.pilot is not None:  # whose forward runs a backward through these outputs
                return
            self.enter_backward(forward_pass, [grad])
            if self.plan is not None and self.plan.resident:
                self._go_to(0, Direction.BACKWARD)

        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None:
                tensor.register_hook(enter)

    @property
    def in_forward(self) -> bool:
        """Whether blocks are called by their root, or by a checkpoint that repeats them in backward."""
        return self._pass is not None or bool(self._backward_passes)

    @property
    def in_backward(self) -> bool:
        return bool(self._backward_passes)

    def pass_of(self, block: Block) -> ForwardPass:
        """The one that a call of this block belongs to."""
        if self._pass is None and self._backward_passes:  # a checkpoint around blocks repeats their forward
            return next(iter(self._backward_passes))
        if self._pass is None:
            raise PrepareError(
                f"a prepared model is called as a whole, but block {block.name} was called outside of its forward, "
                "perhaps by another of its methods. Call the model itself (its forward may call these), prepare the "
                "part that you call, or call it under torch.no_grad(); where checkpoints around blocks repeat them, "
                "give these use_reentrant=False, or the pool so much memory= that no block is opened that has one "
                "within it (the report's `cut`)."
            )
        return self._pass

    def enter_backward(self, forward_pass: ForwardPass, grads: Sequence[torch.Tensor | None]) -> None:
        """Called by each node of this trial's in a backward; at its end the lease and the step are left."""
        refuse_transforms(lambda: [grad for grad in grads if grad is not None])
        if self.ended:
            raise PrepareError(f"{self.name} has ended; backward came too late. Call it before release(model).")
        current = torch._C._current_graph_task_id()
        if current != self._backward_id:
            if calls_backward(sys._getframe()):  # else the thread is autograd's own, of a GPU, and the caller waits
                self._refuse_other_threads()
            outer = -1, set[ForwardPass]()
            if self._backward_id != -1 and calls_backward(sys._getframe(), 2):  # a checkpoint repeats what runs one
                outer = self._backward_id, self._backward_passes
            else:
                self._begin()
            self._backward_id = current
            self._backward_passes = set()
            keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(keeps_graph, *outer))
            if not self.steps.under_way and self.planner.pilot is None:
                if self.plan is None:
                    raise PrepareError(
                        "a backward comes after a later forward has failed or was interrupted in its pilot, and the "
                        "model has no plan now. Call backward before the next forward, or repeat the forward."
                    )
                self.open_step(self.plan)
        self.steps.trains |= self._pass is None
        self._backward_passes.add(forward_pass)

    def _end_backward(self, keeps_graph: bool, outer: int, outer_passes: set[ForwardPass]) -> None:
        """Of one within a forward, or within the `outer` backward, what is around it goes on."""
        within_forward, within_backward = self._pass is not None, outer != -1
        if not keeps_graph:
            for forward_pass in self._backward_passes - outer_passes - {self._pass}:
                forward_pass.done = True
        self._backward_id, self._backward_passes = outer, outer_passes
        self._backward_within |= within_forward
        if not (within_forward or within_backward):
            self.steps.add_backward()
            if not self.ended:
                self._boundary()
            self._note_for_resumption()
        self._unfinished = self._running or within_backward

    # ---- visits ----

    def probe(self, call: BlockCall) -> bool:
        return self.planner.probe(call)

    def measuring(self, call: BlockCall) -> AbstractContextManager[None]:
        return self.planner.measuring(call)

    def note_backward(self, call: BlockCall) -> None:
        if self.planner.pilot is not None and call.seen is not None:
            self.planner.pilot.run_back.append(call.seen)

    def finds(self, block: Block, error: PrepareError) -> bool:
        return self.planner.finds(block, error)

    def with_room(self, block: Block, run: Callable[[], ResultT], rewound: Callable[[], bool]) -> ResultT:
        """Run a visit to the block. Where that runs out of memory, and all is as if it had not run, drop what can be
        dropped and run it again; then with each of the trial's blocks in a shard of its own.

        Raises:
            BudgetError: it has run out of memory in all these ways.
        """
        if self.planner.pilot is not None or self.plan is None or self.plan.resident:
            return run()
        for make_room in (self._drop_others, self._repack):
            try:
                return run()
            except torch.OutOfMemoryError as error:
                clear_frames(error)  # which keep what it has computed
                if not rewound():
                    self.leave_after_error()
                    raise
            make_room(block)
        try:
            return run()
        except torch.OutOfMemoryError as error:
            self.leave_after_error()
            raise BudgetError(
                f"block {block.name} of {self.name} ran out of memory, again when all that could go from "
                f"{self._task_device.name} had gone, and again in a shard of its own: {error} Its first batch needed "
                "less. Raise the pool's memory=, or lower the batch size."
            ) from None

    def _drop_others(self, block: Block) -> None:
        logger.warning("%s: block %s ran out of memory; all other shards are dropped", self.name, block.name)
        if self._task is not None:  # the failed forward may have changed its buffers
            self.residency.drop_shard(self._task_device, self._task.shard)
        self._free_all_idle()

    def _repack(self, block: Block) -> None:
        logger.warning("%s: block %s ran out of memory; each block has a shard of its own now", self.name, block.name)
        self.leave()
        self.planner.repack()
        self._free_all_idle()

    def _free_all_idle(self) -> None:
        self.pool.drop_idle(self)
        self.residency.await_gradients()  # which are on the device until then
        collect_until(lambda: False)
        self._task_device.free_cache()

    def visit(self, block: Block, direction: Direction, *, evaluates: bool = False) -> LeasedVisit:
        """One that evaluates makes no graph, and is at home."""
        return LeasedVisit(self, block, direction, evaluates=evaluates)

    def take_lease(self, block: Block, direction: Direction, *, at_home: bool) -> DeviceCopy:
        """Be where the block is; its copy there."""
        if self.planner.pilot is not None:
            return self.planner.pilot.copy_of(block)
        copy: DeviceCopy = self._go_to(self.planner.shard_of(block), direction, at_home=at_home)
        return copy

    def _go_to(self, shard: int, direction: Direction, *, at_home: bool = False) -> Any:
        if self.lease.begin(self.steps.number, direction):
            self._task = self.lease.task
            self.pool.check_open(self)
            return None
        task = Task(self.id, self.steps.number, shard, direction)
        if self._task != task or (at_home and self._task_device is not self.device):
            if self.steps.alone or self.planner.failed_pilot_bytes is not None:
                self.leave()
            ended, self._task = self._task, None
            after = (ended, self._task_start_s) if ended else None
            ready = TaskReady(task, at_home or self.steps.measures)
            self._task_start_s, self._task_device = self.pool.acquire(ready, after)
            self._task = task
        assert self.plan is not None
        device = self._task_device
        if not self.plan.resident and (device.number, shard) not in self.residency.copies:
            self.promote_shard(device, shard, *self.pool.slot_of(task))  # it needs no slot, or that failed
        return self.residency.copies.get((device.number, shard))

    def leave_after_error(self) -> None:
        """An exception keeps what its task had on the device. A runner lets go of that, then of the lease. And an
        interruption what it has left halfway."""
        if self.mode is None and self._agrees():
            self.leave()

    def leave(self) -> None:
        """Release the lease, if this trial has it, or what a failed pilot had."""
        if self._task is not None:
            task, self._task = self._task, None
            goes_on = self.lease.end()
            if goes_on is None:
                self.pool.release(task, self._task_start_s)
            elif not goes_on:
                self.pool.hear(self)
            if self.steps.alone:  # no one knows yet how much room the step itself needs
                self.pool.invalidate(self)
        if self.planner.failed_pilot_bytes is not None:
            self.pool.end_pilot(self, self.planner.failed_pilot_bytes)
            self.planner.failed_pilot_bytes = None

    def promote_shard(self, device: Device, shard: int, offset: int, num_bytes: int, *, ahead: bool = False) -> None:
        """Carry out the scheduler's `Promote`, in this trial's thread; with `ahead`, in a device's."""
        assert self.plan is not None
        blocks = [self.planner.blocks[i] for i in self.plan.shards[shard].blocks]
        promote = self.residency.promote_ahead if ahead else self.residency.promote_shard
        promote(device, shard, blocks, offset, num_bytes)

    def drop_shard(self, device: Device, shard: int) -> None:
        """Carry out the scheduler's `Drop`, in any thread."""
        self.residency.drop_shard(device, shard)

    def move_home(self, device: Device) -> None:
        """Carry out the scheduler's `Move`."""
        self.residency.move_home(device)

    def counted(self) -> Counted:
        """Count operators on the device, where anything counts them: in pilots and under checks."""
        return Counted(self.meter, install=self.mode is None)


def _refuse_before_first_batch(block: Block, given: Sequence[torch.Tensor]) -> None:
    """On a device that is none of host memory's, where its weights are until then."""
    for device in {tensor.device for tensor in given if tensor.device.type != "cpu"}:
        raise PrepareError(
            f"a prepared model's weights are in host memory until its first batch, but block {block.name} was called "
            f"before, on {device}. Call the model itself first, under torch.no_grad() if that is to train nothing."
        )


def _want_backward(outputs: Sequence[torch.Tensor]) -> bool:
    """Whether the script is to call it, of a forward that has run one already."""
    return any(output.requires_grad for output in outputs)
