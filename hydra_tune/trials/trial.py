"""One trial's model in a pool: where its weights are, which step it is in, which shard it visits.

    resident   weights, gradients and optimizer state on the device; two tasks a step, the root module's
               forward and its backward; nothing is repeated or copied; a turn may last for many (`lease.py`)
    spilled    weights in host memory, blocks visited shard by shard; the optimizer steps the host masters
    first      a kind of step that nobody has measured: blocks visited one by one, each measured before it runs

A device copy of a shard lives from its promotion until its room is needed, the trial's next forward, or
its optimizer step, whichever comes first: host memory is the truth, and may have changed in between.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from hydra_tune.blocks.ambient_settings import AmbientSettings, TorchSettings, autocast_mode
from hydra_tune.blocks.block import Block, are_trained, has_hooks
from hydra_tune.blocks.call import Call, KeptCall, hooks_of_checkpoint, is_watched, refuse_hooks
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.blocks.engine import Backward, ForwardPass, here
from hydra_tune.blocks.repeated_call import RepeatedCall
from hydra_tune.blocks.root import RootApply, RootForward, SeveralModels, give_back
from hydra_tune.blocks.shared_casts import OtherBranchError, SharedCasts
from hydra_tune.blocks.tree import Structure, flatten_call, map_tensors, tensors_in
from hydra_tune.checkpoints.resumption import Resumption
from hydra_tune.config import checks_enabled
from hydra_tune.devices.counting_mode import TrialMode, unwatch, watch
from hydra_tune.devices.device import Device
from hydra_tune.devices.host_buffer import storage_bytes, versions_of
from hydra_tune.devices.meter import CountingPaused, TrialMeter
from hydra_tune.errors import BudgetError, PrepareError, ReturnsWeightsError, clear_frames
from hydra_tune.planning.partition import UNMEASURED, summary_of
from hydra_tune.planning.planner import Planner
from hydra_tune.planning.reached_weights import weights_in
from hydra_tune.planning.refusals import refuse_global_hooks, refuse_transforms
from hydra_tune.planning.step_kind import StepKind
from hydra_tune.pool.lease import TELL_AFTER
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.process.fork import gate
from hydra_tune.process.garbage import collect
from hydra_tune.process.interrupts import Stop, interrupts
from hydra_tune.randomness import DrawRecord, RandomState, hold
from hydra_tune.schedule.events import Invalidated, OutOfMemory
from hydra_tune.schedule.plan import TOO_LARGE, Direction, Task, TrialPlan
from hydra_tune.trials.residency import Residency
from hydra_tune.trials.steps import Steps

logger = logging.getLogger("hydra_tune")
ResultT = TypeVar("ResultT")
_MOST_FIRST_BACKWARDS = 3  # of a first step, which lasts because the script keeps a loss, as of a failed backward
_TOLD_BY_VALUE = frozenset((bool, int, float, str, type(None)))


@dataclass(eq=False)
class _Root:
    """One prepared model, with what stepping it has been hooked to."""

    model: weakref.ref[nn.Module]
    optimizer: torch.optim.Optimizer | None
    hooks: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)

    def unhook(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()


class _Sent(NamedTuple):
    """A gradient in host memory, which only autograd holds."""

    parameter: nn.Parameter
    place: int
    version: int
    block: str
    late: bool


class Trial:
    """Executes one prepared model. Used by one thread at a time; the pool's lock guards what is shared."""

    def __init__(self, number: int, home: Device, *, pool: ShardPool, name: str, stop: Stop) -> None:
        self.id = number
        self.pool = pool
        self.stop = stop
        self.events = pool.events
        self.lease = pool.events.table.leases[number]
        self.name = name
        self.summary = {"name": self.name, "device": home.name, "steps": 0, "state": "live", **summary_of(TrialPlan())}
        self.of_runner = False  # whose trials end with their objective
        self.alone = False  # its device is its own, and it is spilled: it has run out of memory otherwise
        self.meter = TrialMeter(home, number, always=checks_enabled())
        self.resumption: Resumption | None = None  # the runner's, where there is one
        self.planner = Planner(self)
        self.residency = Residency(home, self.meter, pool)
        self.steps = Steps(self)
        self._roots: list[_Root] = []  # the models that it has prepared, as long as they live
        self.ended = False
        self.is_plain = False  # it has let go of its model
        self.busy = threading.RLock()  # held by the thread that is in a forward or a backward of it
        self._thread = 0  # that has held it last
        self._process = gate.process
        self.random_state: RandomState | None = None  # the runner's, where there is one
        self._counting: TrialMode | None = None  # from a first step's begin to its end; under checks, to the trial's
        # the task that has the lease
        self._task: Task | None = None
        self.awaits_backward = False  # of the one forward of a simple step
        self._steps_are_simple: bool | None = None  # one forward, one backward; None as long as nobody has seen
        self._ref = weakref.ref(self)
        # the forward under way, and the backward
        self._pass: ForwardPass | None = None
        self.casts = SharedCasts()
        self._visiting = False  # a block's forward is under way, or its repetition
        self.is_measuring = False  # in a first step, a block's first run: what it keeps may be dropped yet
        self._choices = TorchSettings.now().choices  # of kernels, in the last backward; at first, in `prepare`
        self._backwards: list[Backward] = []  # that have come to this trial, the innermost last
        self._open: weakref.ref[Call] | None = None  # the call whose block's backward is under way; its graph has it
        self._open_copy: DeviceCopy | None = None
        self._touched: list[weakref.ref[Call]] = []  # in the backward under way
        self._sent: list[_Sent] = []  # in the backward under way
        self._taken = set[int]()  # weights, by id, whose gradients autograd has taken as they were sent, the last time

    # ---- what it is ----

    @property
    def device(self) -> Device:
        """Its home."""
        return self.residency.device

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one that has called the model last."""
        return self._thread == threading.get_ident()

    @property
    def models(self) -> list[nn.Module]:
        """Those that it has prepared and nobody has dropped."""
        return [model for root in self._roots if (model := root.model()) is not None]

    @property
    def model(self) -> nn.Module:
        """The one that it has prepared; of several, what has them as children."""
        models = self.models
        assert models, "a model outlives its trial's work"
        return models[0] if len(models) == 1 else SeveralModels(models)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [root.optimizer for root in self._roots if root.optimizer is not None]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The first of them."""
        return next(iter(self.optimizers), None)

    # ---- the model's life in the pool ----

    def bind(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Put the model's blocks under this trial, beside those of others that it has. Nothing is cut or moved before
        the first forward."""
        self.boundary()
        self._roots = [root for root in self._roots if root.model() is not None]
        root = _Root(weakref.ref(model), optimizer)
        self._roots.append(root)
        try:
            self.planner.start()
        except BaseException:
            self._roots.remove(root)
            raise
        model.forward = RootForward(model, self)
        model._apply = RootApply(model, self)  # type: ignore[method-assign]
        self._hook(root)

    def _hook(self, root: _Root) -> None:
        """To its optimizer's steps. They only let go early: one that wraps another, and has no hooks, does without."""
        optimizer = root.optimizer
        if not root.hooks and optimizer is not None and hasattr(optimizer, "_optimizer_step_pre_hooks"):
            root.hooks.append(optimizer.register_step_pre_hook(self._before_optimizer_step))
            root.hooks.append(optimizer.register_step_post_hook(self._after_optimizer_step))

    def release(self, model: nn.Module) -> None:
        """Let go of this model; with the last one the trial ends."""
        if len(self.models) <= 1:
            self.end()
            return
        self.boundary()
        self.planner.leave_plan()
        for root in [root for root in self._roots if root.model() is model]:
            self._roots.remove(root)
            root.unhook()
            give_back(model, self)
        self.planner.start()

    def end(self) -> None:
        """Give back every byte; the model is plain again, on the host, with its current weights."""
        if self.is_plain:
            return
        self.ended = True
        self._task = None
        with_gradients = torch.is_grad_enabled()
        try:
            self.events.promotions.await_copies(self)
            self.unwatch()
            self._close_backward()
            self.residency.await_gradients()
            if self.planner.pilot is not None:
                self.planner.pilot.end()
                self.planner.pilot = None
            self.planner.cut.unwrap()  # parts of a model may live longer
            self.device.synchronize()  # it may have computed in a stream that is not the caller's
            self.residency.bring_home(self.optimizers)
            self.residency.close()
        finally:  # last: from here on others may have its bytes
            torch._C._set_grad_enabled(with_gradients)  # should that have failed
            self.events.end_trial(self)
            for root in self._roots:
                root.unhook()
            for model in self.models:  # so far `release` may be called again, should it have failed
                give_back(model, self)
            self.is_plain = True
        self.planner.close()
        self.resumption = None
        self._roots = []

    # ---- steps ----

    def boundary(self) -> None:
        """A place where no task of this trial can be under way: end what lingers."""
        self.hold()
        try:
            self._boundary()
        finally:
            self.busy.release()

    def _before_optimizer_step(self, *_: Any) -> None:
        """A first step that has ended has made a plan, by which a trial that fits is on the device from here on."""
        plan = self.planner.plan
        if plan is not None and plan.resident:
            within_forward = self._pass is not None  # which goes on, and keeps its lease
            if within_forward or (self._task is None and not self.steps.under_way):
                return
        self.boundary()
        if self.planner.plan is None and self.planner.pilot is None and not self.ended:
            self.planner.settle_last()
        interrupts.check()

    def _after_optimizer_step(self, *_: Any) -> None:
        self._invalidate()
        if self.resumption is not None:
            self.resumption.has_stepped()
        interrupts.check()

    def _invalidate(self) -> None:
        """Device copies of shards are stale; none of a trial that is resident."""
        if (plan := self.planner.plan) is None or not plan.resident:
            if self._task is not None:  # of a closure that the optimizer has called, within a forward
                self.boundary()
            self.events.tell_between_tasks(self, Invalidated(self.id))

    def _boundary(self) -> None:
        self.leave()
        if self.steps.leave_if_done() and self.planner.pilot is not None:
            self.planner.end_pilot()

    def checkpoint(self, states: Sequence[dict[str, Any]]) -> None:
        """Write one, from the host, with the trial's loaders in these states; the devices go on with others."""
        if self.resumption is not None and not self.steps.under_way:
            with CountingPaused():
                self.resumption.stage(self.model, self.optimizer, states)

    def hold(self) -> None:
        """The model is the calling thread's from here on, until that releases `busy`.

        Raises:
            PrepareError: another thread is in its forward or backward; or this is another process.
        """
        if gate.process != self._process:  # nobody here goes on with other trials' tasks, or copies ahead
            raise PrepareError(
                f"a prepared model is called in the process that has prepared it, but that of {self.name} was called "
                "in a forked one, perhaps a loader's worker. Give that one a copy.deepcopy(model), a plain model."
            )
        if not self.busy.acquire(blocking=False):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            raise PrepareError(
                f"one thread at a time calls a prepared model, but {threading.current_thread().name} called that of "
                f"{self.name} while {names.get(self._thread)} was in its forward or backward. Let a lock be held "
                "around each step and each evaluation, or evaluate a copy.deepcopy(model), which is a plain model."
            )
        self._thread = threading.get_ident()

    # ---- the root module's forward ----

    def run_root(self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        call = _call_key(root, args, kwargs) if self._pass is None else None
        if call in self.planner.covered and self._begin_simple():
            return self._run_simple(root, args, kwargs)
        if self.ended:
            raise PrepareError(f"{self.name} has ended. Prepare the model again.")
        refuse_transforms(lambda: tensors_in((args, kwargs, [*self.model.parameters()])))
        if self._pass is not None or self._visiting:
            return root.run(args, kwargs)  # the model calls itself
        self.events.check_open(self)
        if torch._C._current_graph_task_id() != -1 and (self.planner.plan is None or not self.planner.plan.resident):
            raise PrepareError(
                f"{self.name}: a spilled model keeps what its own backward needs, but its forward was called again in "
                "a backward, as by a checkpoint around the model. Take the checkpoint away; the pool has the memory."
            )
        self._leave_last_step()
        if call in self.planner.covered:
            if not self.steps.under_way:
                self.stop.check_between_steps()
            self.steps.open()
            return self._run_step(root, args, kwargs)
        self._enter(root, args, kwargs)
        if call is not None and self.planner.plan is not None and self.planner.plan.resident:
            self.planner.covered.add(call)
            if self.resumption is None:  # nothing goes stale
                for each in self._roots:
                    each.unhook()
        return self._run_step(root, args, kwargs)

    def _begin_simple(self) -> bool:
        """A step of a resident model, like those before: one forward, one backward. What is ours is a good part of what
        a small model costs, so that each thing is looked at before something is called for it."""
        steps = self.steps
        if (
            not self._steps_are_simple
            or self.resumption is not None  # that hears of each backward
            or steps.under_way
            or steps.forwards
            or self._task is not None
            or self._backwards
            or self.awaits_backward
            or not (torch.is_grad_enabled() and self.stop.is_quiet)
            or len(self.lease.ran) >= TELL_AFTER
            or not self.lease.begin(steps.number + 1, Direction.FORWARD)
        ):
            return False
        self.summary["steps"] = steps.number = steps.number + 1
        self._task = self.lease.task
        return True

    def _run_simple(self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._pass = ForwardPass(trains=True)
        here.trial = self._ref
        self.meter.inside += 1
        try:
            if self.meter.always:
                self._count()
                self.meter.adopt(tensors_in((args, kwargs)), are_a_batch=True)
            outputs = root.run(args, kwargs)
            self.leave()
        except BaseException:
            self._leave_after_error()
            raise
        finally:
            self.meter.inside -= 1
            self._pass = None
        self.awaits_backward = True
        return outputs

    def run_backward(self, run: Callable[..., ResultT], given: tuple[Any, ...], *, keeps_graph: bool) -> ResultT:
        """That of a simple step, for all that is known: a hook on the outputs would tell, and costs more."""
        steps, lease = self.steps, self.lease
        self.awaits_backward = trained = False  # one within it is a part of it
        lasts = lease.begin(steps.number, Direction.BACKWARD)
        if lasts:
            self._task = lease.task
        else:  # its turn was ended meanwhile
            self._refuse_late_backward()
            steps.begin()
            self._go_to(0, Direction.BACKWARD)
        try:
            result = run(*given)  # no closure, which the frames of an exception would keep
            trained = True
        finally:
            if lasts and self._task and not keeps_graph and lease.leave_step(trained=trained):
                self._task = None
                if lease.revoked:
                    self.events.hear(self)
            else:
                self.leave()
                self.awaits_backward = keeps_graph
                if not keeps_graph:
                    steps.begin()
                    steps.trains = trained
                    steps.leave()
        return result

    def _refuse_late_backward(self) -> None:
        if self.ended:
            raise PrepareError(f"{self.name} has ended; backward came too late. Call it before release(model).")

    def _leave_last_step(self) -> None:
        if self.lease.in_step and not self.steps.under_way:  # a simple one, had its backward come
            self.steps.begin()
        if self.awaits_backward:
            self.awaits_backward = self._steps_are_simple = False
        self._boundary()
        if self.resumption is not None and not self.steps.under_way:
            states = self.resumption.before_forward() if torch.is_grad_enabled() else None
            if states is not None:
                self.checkpoint(states)
                self.resumption.publish()

    def _enter(self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Be in a step that has room for this forward."""
        planner = self.planner
        for each in self._roots:
            self._hook(each)
        if self.planner.plan is None or not self.planner.plan.resident:
            refuse_global_hooks()
        if len(self.models) < len(self._roots):  # one was collected
            self._roots = [each for each in self._roots if each.model() is not None]
            planner.leave_plan()
            planner.start()
        if planner.pilot is not None and self.steps.num_backwards >= _MOST_FIRST_BACKWARDS:
            self.steps.leave()
            self.planner.end_pilot()
        kind = planner.kind_of(self.models.index(root.module), args, kwargs)
        if planner.pilot is not None:  # of a step with several forwards
            planner.pilot.add(kind)
            return
        if self.steps.under_way:
            if planner.known.covers(kind):
                self.steps.open()
            else:
                planner.learn(kind)  # the next step counts with it
            return
        self.stop.check_between_steps()
        if not (planner.known.covers(kind) or planner.learn(kind)) and self._begins_first_step(kind, args, kwargs):
            return
        planner.settle(planner.plan_for(kind))
        self.steps.open()

    def _begins_first_step(self, kind: StepKind, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """False if another trial has measured it while this one waited for room."""
        refuse_global_hooks()
        self.meter.counting = True
        self._count()
        try:
            if not self.planner.begin(kind):
                return False
            hold(self.device.generators, self.random_state)  # as a lease does: it has the device to itself
            self.steps.begin()
            self.meter.adopt(tensors_in((args, kwargs)), are_a_batch=True)
        except torch.OutOfMemoryError as error:
            clear_frames(error)
            refusal = self.planner.refusal_of(self.meter.no_room(error), args, kwargs)
            self._leave_after_error()
            raise refusal from None
        except BaseException:
            self._leave_after_error()
            raise
        self.meter.watch_outside()
        return True

    def _count(self) -> None:
        """Operators of this thread, also between forward and backward, until `unwatch`. The engine runs nodes with the
        modes that were there when a backward was called."""
        if self._counting is None:
            self._counting = TrialMode(self.meter)
            weakref.finalize(self, setattr, self._counting, "meter", None).atexit = False
            watch(self._counting)

    def unwatch(self) -> None:
        """Within a backward not for good: at its end the engine puts back what is on the stack."""
        if self._counting is not None:
            unwatch(self._counting)
            if not self._backwards:
                self._counting.meter = None  # it may be another thread's, on whose stack it does nothing
                self._counting = None

    def _run_step(self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        first, plan = self.planner.pilot, self.planner.plan
        self.summary["steps"] = self.steps.number = self.steps.number + 1
        self._invalidate()
        self._pass = forward_pass = ForwardPass(trains=torch.is_grad_enabled())
        here.trial = self._ref
        self.steps.num_forwards += 1
        self.steps.forwards.append(weakref.ref(forward_pass))
        if self.meter.always:
            self._count()
        self.meter.inside += 1
        try:
            if self.meter.counting:
                self.meter.adopt(tensors_in((args, kwargs)), are_a_batch=True)
            if first is None and plan is not None and plan.resident:
                self._go_to(0, Direction.FORWARD)
            outputs = root.run(args, kwargs)
            if forward_pass.ended_by is not None:
                raise forward_pass.ended_by
            if first is not None:
                kept = [outputs] if self.device.is_virtual else [args, kwargs, args, kwargs, outputs]
                first.kept_bytes = max(first.kept_bytes, sum(map(storage_bytes, tensors_in(kept))))
            self.leave()
        except BaseException as error:
            refusal, forward_pass.done = error, True
            if isinstance(error, torch.OutOfMemoryError) and first is not None:
                clear_frames(error)
                refusal = self.planner.refusal_of(self.meter.no_room(error), args, kwargs)
            elif isinstance(error, BudgetError):
                refusal = self.planner.refusal_of(error, args, kwargs)
            self._leave_after_error()
            if refusal is not error:
                raise refusal from None
            raise
        finally:
            self.meter.inside -= 1
            self._pass = forward_pass.ended_by = None
        if not torch.is_grad_enabled():
            forward_pass.done = True
            if first is not None:
                self._boundary()
            if self.resumption is not None:
                self.resumption.note()
        elif first is not None or (plan is not None and plan.resident):
            self._announce_backward(outputs, forward_pass)
        return outputs

    def _announce_backward(self, outputs: Any, forward_pass: ForwardPass) -> None:
        """Where no block may be the first to do so."""

        def enter(_: Any) -> None:
            self._enter_backward(forward_pass)
            if (plan := self.planner.plan) is not None and plan.resident:
                self._go_to(0, Direction.BACKWARD)

        for tensor in (outputs,) if type(outputs) is torch.Tensor else tensors_in(outputs):
            if (node := tensor.grad_fn) is not None:
                node.register_prehook(enter)

    # ---- blocks ----

    @property
    def is_between_visits(self) -> bool:
        """In a forward, and in no block."""
        return self._pass is not None and not self._visiting

    @property
    def in_visit(self) -> bool:
        """In the calling thread; what another calls in a forward is refused."""
        return self._visiting and (self._pass is None or self._thread == threading.get_ident())

    def run_block(self, block: Block, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        try:
            if self._pass is None and not self._backwards:
                forward_pass = self.steps.latest_forward if torch._C._current_graph_task_id() != -1 else None
                if forward_pass is not None and torch.is_grad_enabled():  # a checkpoint repeats it
                    self._enter_backward(forward_pass)
                    return self._run_block(block, args, kwargs)
                self.hold()
                try:
                    return self._run_block_alone(block, args, kwargs)
                finally:
                    self.busy.release()
            return self._run_block(block, args, kwargs)
        except Exception as error:
            if self._pass is not None and isinstance(error, (PrepareError, BudgetError, torch.OutOfMemoryError)):
                self._pass.ended_by = self._pass.ended_by or error
            raise

    def _run_block_alone(self, block: Block, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One that is called outside of its root's forward, as `generate` calls an encoder."""
        if self.planner.plan is None and self.planner.pilot is None:
            return block.forward(args, kwargs)
        if torch.is_grad_enabled():
            raise PrepareError(
                f"a prepared model is called as a whole, but block {block.name} was called outside of its forward, "
                "perhaps by another of its methods. Call the model itself (its forward may call these), prepare the "
                "part that you call, or call it under torch.no_grad()."
            )
        if self.planner.pilot is None:
            self.steps.open()
        self._pass = ForwardPass()
        try:
            return self._run_block(block, args, kwargs)
        finally:
            self._pass = None
            self.leave()

    def _run_block(self, block: Block, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._pass is not None and self._thread != threading.get_ident():
            raise PrepareError(
                f"a prepared model's layers run in the thread that called the model, but block {block.name} was called "
                "in another, perhaps that of an executor. Call them one after another, without threads."
            )
        refuse_transforms(lambda: [*tensors_in((args, kwargs)), *block.parameters])
        first, with_gradients = self.planner.pilot, torch.is_grad_enabled()
        if first is not None:
            self.events.check_open(self)
            if with_gradients and block.keeps == UNMEASURED:
                block.keeps = ""
        forward_pass = self._pass or next(iter(self._backwards[-1].passes[self]))
        forward_pass.calls[block.name] += 1
        leaves, structure = flatten_call(args, kwargs)
        given = [x for x in leaves if isinstance(x, torch.Tensor)]
        if not (with_gradients and (any(are_trained(given)) or any(are_trained(block.parameters)))):
            return self._evaluate_or_open(block, args, kwargs, given)
        # a reentrant checkpoint calls a block with gradients in the backward only
        if first is not None and (not self._backwards or block.name not in first.trained):
            return first.run(block, args, kwargs, forward_pass)
        return self.run_call(block, args, kwargs, forward_pass, leaves, structure)

    def keeps_call(self, settings: AmbientSettings) -> bool:
        """Whether a call now is not to be repeated, whatever its block is like."""
        at_once = self._pass is None  # a checkpoint's repetition, whose own backward follows
        is_rebuilt, choices = settings.state.is_rebuilt, settings.process.choices
        return at_once or is_rebuilt or choices != self._choices or is_watched()

    def run_call(
        self,
        block: Block,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        forward_pass: ForwardPass,
        leaves: Sequence[Any],
        structure: Structure,
    ) -> Any:
        """With gradients."""
        hooks = hooks_of_checkpoint()
        if hooks is not None or block.keeps or self.keeps_call(settings := AmbientSettings.now(block.module_states)):
            kept = KeptCall(block, self, forward_pass, hooks)
            return self.with_room(block, lambda: kept.run(args, kwargs), lambda: False)
        call = RepeatedCall(block, self, forward_pass, leaves, structure, settings)
        if self.planner.pilot is not None:
            self.planner.pilot.watch(call, call.tensors)
        try:
            return self.with_room(block, lambda: call.run(args, kwargs), call.rewind)
        except OtherBranchError:
            if not call.do_without_casts():
                raise
        return self.with_room(block, lambda: call.run(args, kwargs), call.rewind)

    def _evaluate_or_open(
        self, block: Block, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[torch.Tensor]
    ) -> Any:
        versions = versions_of(given)
        try:
            return self._evaluate(block, args, kwargs, given)
        except (torch.OutOfMemoryError, ReturnsWeightsError) as error:
            if self.planner.pilot is None or versions != versions_of(given):
                raise
            returned, reason = getattr(error, "weights", ()), str(error)
            clear_frames(error)
        for weight in returned:
            block = self.planner.cut.hold_weight(block, weight, "its block returns it")
        if returned:
            return self._evaluate(block, args, kwargs, given)
        self.planner.cut.open_block(block, f"{TOO_LARGE}: {reason}")
        return block.forward(args, kwargs)

    def _evaluate(
        self, block: Block, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[torch.Tensor]
    ) -> Any:
        """No backward follows, so it may change what it is given."""
        versions, draws, buffers = versions_of(given), DrawRecord(), block.buffers_now()

        def run() -> Any:
            caches, first = torch.is_autocast_cache_enabled(), self.planner.pilot
            copy = self.begin_visit(block, Direction.FORWARD)
            try:
                weights = copy.leaves(block.slot_parameters)
                for leaf in weights:
                    leaf.grad = None  # of a run that had no room
                block.lend(weights)
                torch.set_autocast_cache_enabled(False)  # its casts would outlive the visit; slots do not
                try:
                    with draws, nullcontext() if first is None else first.measuring(block):
                        outputs = block.forward(args, kwargs)
                finally:
                    torch.set_autocast_cache_enabled(caches)
                    block.take_back(weights)
                refuse_hooks(block, weights)
                self._take_gradients(block, weights)
                if copy.num_bytes and (returned := weights_in(outputs, copy)):
                    draws.rewind()
                    raise ReturnsWeightsError(block.name, returned)
                return map_tensors(lambda t: t.clone() if copy.has(t) else t, outputs)
            finally:
                self.end_visit(copy, Direction.FORWARD)

        def rewound() -> bool:
            draws.rewind()
            block.put_back_buffers(buffers)
            return versions == versions_of(given)

        return self.with_room(block, run, rewound)

    @staticmethod
    def _take_gradients(block: Block, weights: Sequence[torch.Tensor]) -> None:
        """Of a backward that the block has run itself, for all that no gradients were asked for around it."""
        for weight, p in zip(weights, block.slot_parameters, strict=True):
            if weight.grad is not None:
                gradient, weight.grad = weight.grad.to(p.device, copy=True), None
                p.grad = gradient if p.grad is None else p.grad + gradient

    def begin_visit(self, block: Block, direction: Direction) -> DeviceCopy:
        """The block's weights are on the device, for its forward or the repetition of that, until `end_visit`."""
        copy = self._at(block, direction)
        gate.enter()
        self._visiting = True
        self.meter.inside += 1
        if self.meter.counting and direction is Direction.FORWARD:
            self.meter.outside_ends()
        return copy

    def end_visit(self, copy: DeviceCopy, direction: Direction) -> None:
        self._visiting = False
        self.meter.inside -= 1
        copy.used = copy.device.mark()
        if self.meter.counting and direction is Direction.FORWARD and not self.is_measuring:
            self.meter.outside_starts()
        gate.leave()

    def _at(self, block: Block, direction: Direction) -> DeviceCopy:
        """Be where the block's shard is; its copy there."""
        if self.planner.pilot is not None:
            copy = self.planner.pilot.copy_of(block)
            if copy is not self._open_copy:  # which is gone: a checkpoint has called other blocks meanwhile
                self._close_backward()
        elif self.planner.plan is not None and self.planner.plan.resident:
            copy = DeviceCopy(self.device, self.device.slot(None, 0), [], None)
        else:
            copy = self._go_to(self.planner.cut.shard_of(block), direction)
        self.residency.refresh(copy, block)
        return copy

    # ---- backward ----

    def visit_backward(self, call: Call) -> DeviceCopy:
        if self._open is None or self._open() is not call or self._open_copy is None:
            self._enter_backward(call.forward_pass)
            self._close_backward()
            self.meter.outside_ends()
            self._open_copy = self._at(call.block, Direction.BACKWARD)
            self._open = weakref.ref(call)
            self._touched.append(self._open)
        return self._open_copy

    def _close_backward(self) -> None:
        """The block's backward is over, or another's begins."""
        if self._open_copy is not None:
            self._open_copy.used = self._open_copy.device.mark()
            self.meter.outside_starts(later=True)
        self._open = self._open_copy = None

    def send_home(self, call: Call, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Gradients of a call's weights, to host memory, unless these are on the device by now."""
        self._enter_backward(call.forward_pass)
        parameters = call.promoted
        if any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in gradients):
            raise PrepareError(
                f"{self.name}: a prepared model's gradients are computed one by one, but backward was called with "
                "is_grads_batched=True. Call torch.autograd.grad once for each gradient of the output."
            )
        is_resident = not self.residency.spilled and self.planner.pilot is None
        if torch.is_grad_enabled() or is_resident:  # gradients of gradients follow; or the weights are there by now
            sent = [None if g is None else g.to(p.device, p.dtype) for g, p in zip(gradients, parameters, strict=True)]
        elif call.casts:  # converted there: exactly, and the device has no room for both
            sent = self.residency.spill_gradients(parameters, gradients, late=False)
            with CountingPaused():
                sent = [None if g is None else g.to(p.dtype) for g, p in zip(sent, parameters, strict=True)]
        else:
            sent = self._sent_late_or_not(call, gradients)
        call.forget()
        self._close_backward()
        return sent

    def _sent_late_or_not(self, call: Call, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        parameters = call.promoted
        alone = (
            self.device.spills_behind
            and call.forward_pass.calls.get(call.block.name, 0) == 1
            and self.steps.has_one_forward
            # nor does autograd, or a hook, read what it adds to `.grad`
            and not any(self.planner.cut.uses[id(p)] > 1 or p.grad is not None or has_hooks(p) for p in parameters)
        )
        late = alone and all(id(p) in self._taken and _is_accumulated(p) for p in parameters)
        sent = self.residency.spill_gradients(parameters, gradients, late=late)
        if alone:
            self._sent += [
                _Sent(p, g.data_ptr(), g._version, call.block.name, late)
                for p, g in zip(parameters, sent, strict=True)
                if g is not None
            ]
        return sent

    def _enter_backward(self, forward_pass: ForwardPass) -> None:
        """Called by each visit in a backward; at its end the lease and the step are left."""
        backward = here.backward
        if backward is None:
            raise PrepareError(
                f"a prepared model's backward runs in the thread that asks for it, by torch.autograd, but that of "
                f"{self.name} came in another, or by other means. Call loss.backward() in the thread that has called "
                "the model."
            )
        passes = backward.passes.get(self)
        if passes is not None:
            passes.add(forward_pass)
            return
        self._refuse_late_backward()
        self.hold()
        backward.passes[self] = {forward_pass}
        self._backwards.append(backward)
        self._choices = TorchSettings.now().choices
        if not self.steps.under_way:
            if self.planner.plan is None:
                self.planner.settle_last()
            if self.planner.plan is None:
                raise PrepareError(
                    "a backward comes after a later forward has failed or was interrupted in its first step, and the "
                    "model has no plan now. Call backward before the next forward, or repeat the forward."
                )
            self.steps.open()

    def end_backward(self, backward: Backward, *, failed: bool) -> None:
        """Of one within a forward, or within another backward, what is around it goes on."""
        self._backwards.remove(backward)
        self.busy.release()
        within_forward, within_backward = self._pass is not None, bool(self._backwards)
        if failed or not backward.keeps_graph:
            outer = [each.passes[self] for each in self._backwards]
            for forward_pass in backward.passes[self]:
                if forward_pass is not self._pass and not any(forward_pass in passes for passes in outer):
                    forward_pass.done = True
        self._close_backward()
        for reference in self._touched:
            if (call := reference()) is not None:
                call.forget()
        self._touched = []
        self.residency.await_gradients()
        if failed:
            self._sent = []
            if not (within_forward or within_backward):
                self._leave_after_error()
            elif self.planner.pilot is not None:
                self.planner.pilot.failed = True
            return
        if self._sent:
            self._check_taken()
        if self.meter.counting and (self.residency.spilled or self.planner.pilot is not None):
            # in host memory, though a virtual device's operator may have added to it
            for gradient in [p.grad for block in self.planner.cut.blocks for p in block.slot_parameters]:
                if gradient is not None:
                    self.meter.disown(gradient)
        steps = self.steps
        if not within_forward:
            steps.trains = True
        elif self._pass is not None and self._pass.trains:
            steps.trains = True
            if not self._pass.has_trained:
                self._pass.has_trained = True
                steps.num_backwards += 1
        if not (within_forward or within_backward):
            steps.num_backwards += 1
            if self._steps_are_simple is None:
                self._steps_are_simple = (steps.num_forwards, steps.num_backwards) == (1, 1) or None
            if not self.ended:
                self._boundary()
            if self.resumption is not None:
                self.resumption.note()

    def _check_taken(self) -> None:
        """What was sent late must have been taken as it is: who adds something to it reads it before it is there."""
        summed, sent, self._sent = "", self._sent, []
        for p, place, version, block, late in sent:
            gradient = p.grad
            if gradient is not None and (gradient.data_ptr(), gradient._version) == (place, version):
                self._taken.add(id(p))
            else:
                self._taken.discard(id(p))
                summed = block if late else summed
        if summed:
            raise PrepareError(
                f"a weight of block {summed} has another use in this backward, as a penalty has it, and had none "
                "before, so that its gradient was on its way while it was added up. From here on it is awaited: "
                "set the gradients to None, and repeat the forward."
            )

    # ---- room ----

    def with_room(self, block: Block, run: Callable[[], ResultT], rewound: Callable[[], bool]) -> ResultT:
        """Run a visit to the block. Where that runs out of memory, and all is as if it had not run, drop what can be
        dropped and run it again.

        Raises:
            BudgetError: it has run out of memory again.
        """
        is_first = self.planner.pilot is not None
        if not is_first and (self.planner.plan is None or self.planner.plan.resident):
            return run()
        try:
            return run()
        except torch.OutOfMemoryError as error:
            clear_frames(error)  # which keep what it has computed
            can_repeat = rewound()
            if is_first and self._backwards:
                raise self.meter.no_room(error) from None
            if is_first:  # which has nothing to drop
                raise
            if not can_repeat:
                self._leave_after_error()
                raise
        self._drop_others(block)
        try:
            return run()
        except torch.OutOfMemoryError as error:
            self._leave_after_error()
            raise BudgetError(
                f"block {block.name} of {self.name} ran out of memory, again when all that could go from "
                f"{self.device.name} had gone: {error} Its first batch needed less. Raise the pool's memory=, or "
                "lower the batch size."
            ) from None

    def _drop_others(self, block: Block) -> None:
        logger.warning("%s: block %s ran out of memory; all other shards are dropped", self.name, block.name)
        self._close_backward()
        if self._task is not None:
            self.residency.drop_shard(self._task.shard)
        self.events.tell(OutOfMemory(self.id))
        self.residency.await_gradients()  # which are on the device until then
        collect()
        self.device.free_cache()

    # ---- the lease ----

    def _go_to(self, shard: int, direction: Direction) -> Any:
        assert self.planner.plan is not None
        if self.planner.plan.resident and self.lease.begin(self.steps.number, direction):
            self._task = self.lease.task
            self.events.check_open(self)
            return None
        task = Task(self.id, self.steps.number, shard, direction)
        if self._task != task:
            self._close_backward()
            ended, self._task = self._task, None
            self.events.acquire(self, task, ended)
            hold(self.device.generators, self.random_state)
            self._task = task
        copies = self.residency.copies
        if shard not in copies and not self.planner.plan.resident:
            place = self.device.ledger.slots.get((self.id, shard), (0, 0))  # it needs no slot, or that failed
            self.residency.promote_shard(shard, *place)
        return copies.get(shard)

    def _leave_after_error(self) -> None:
        """An exception keeps what its task had on the device. A runner lets go of that, then of the lease."""
        self._visiting = False
        if self.planner.pilot is not None:
            self.planner.pilot.failed = True
        if not self.of_runner:
            self.leave()
            if self.planner.pilot is not None:
                self.steps.under_way = False  # it has not begun
                self.planner.give_up_pilot()
            self.unwatch()  # under checks, too: the next forward counts again

    def leave(self) -> None:
        """Release the lease, if this trial has it."""
        if self._open is not None:
            self._close_backward()
        if self._task is not None:
            task, self._task = self._task, None
            goes_on = self.lease.end()
            if goes_on is None:
                self.events.release(task)
            elif not goes_on:
                self.events.hear(self)


def _call_key(root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What of a call decides how much room it needs; None of one whose arguments have others in them."""
    casts = autocast_mode() if torch._C._is_any_autocast_enabled() else None
    told: list[Any] = [id(root), torch.is_grad_enabled(), casts]
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            told += (value.shape, value.dtype, value.requires_grad)
        elif type(value) in _TOLD_BY_VALUE:
            told.append(value)
        else:
            return None
    return (*told, *kwargs) if kwargs else tuple(told)


def _is_accumulated(parameter: torch.Tensor) -> bool:
    """By the backward under way, and not what `torch.autograd.grad` returns."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError:
        return False
