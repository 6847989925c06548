"""One trial's models in a pool, from `prepare` to the trial's end. The work is divided among its parts:

    Forwards     the models' forwards: which step each belongs to             forwards.py
    Steps        room on the device for a whole step                          steps.py
    Tasks        the lease: which shard computes now                          tasks.py
    BlockCalls   a block's forward: repeated, kept or evaluated               block_calls.py
    Visits       a block's weights are on the device                          tasks.py
    OutOfMemoryRetry   a block that ran out of memory runs once more          out_of_memory.py
    Backwards    the backwards that reach the trial                           backwards.py
    SentGradients, Residency    gradients to the host; where tensors are      sent_gradients.py, residency.py
    Planner      measures steps, and makes a plan from that                   planning/planner.py

A trial is in one of three states:

    resident   weights, gradients and optimizer state on the device; two tasks a step, the model's forward
               and its backward; nothing is repeated or copied; one lease may last for many steps
    spilled    weights in host memory, where the optimizer steps them; blocks are visited shard by shard
    pilot      the first step of a new kind: blocks are visited and measured one by one, and the trial has
               the device to itself

Host memory owns the current weights of a spilled trial, and a script may change them between steps. So a shard's device
copy lives until its room is needed, until the trial's next forward, or until its optimizer step.
The parts refer to the trial weakly. A trial that nobody uses any more is gone at once, and its bytes are free.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hydra_tune.blocks.root import RootApply, RootForward, SeveralModels, give_back
from hydra_tune.blocks.shared_casts import SharedCasts
from hydra_tune.checkpoints.resumption import Resumption
from hydra_tune.config import checks_enabled
from hydra_tune.devices.counting_mode import Counting
from hydra_tune.devices.device import Device
from hydra_tune.devices.meter import CountingPaused, TrialMeter
from hydra_tune.devices.tensor_bytes import weights_of
from hydra_tune.errors import PrepareError
from hydra_tune.planning.partition import summary_of
from hydra_tune.planning.planner import Planner
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.process.fork import gate
from hydra_tune.process.interrupts import Stop, interrupts
from hydra_tune.randomness import RandomState
from hydra_tune.schedule.events import Invalidated
from hydra_tune.schedule.plan import TrialPlan
from hydra_tune.sharing.shared_parameter import GuardedBase, make_shared
from hydra_tune.trials.backwards import Backwards
from hydra_tune.trials.block_calls import BlockCalls
from hydra_tune.trials.forwards import Forwards
from hydra_tune.trials.out_of_memory import OutOfMemoryRetry
from hydra_tune.trials.residency import Residency
from hydra_tune.trials.sent_gradients import SentGradients
from hydra_tune.trials.steps import Steps
from hydra_tune.trials.tasks import Tasks, Visits


@dataclass(eq=False)
class _Root:
    """One prepared model, its optimizer, and our hooks on the optimizer's steps."""

    model: weakref.ref[nn.Module]
    optimizer: torch.optim.Optimizer | None
    hooks: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)

    def unhook(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()


class Trial:
    """Runs its prepared models. Used by one thread at a time. What it shares with other trials is guarded by the pool's
    lock."""

    def __init__(self, number: int, home: Device, *, pool: ShardPool, name: str, stop: Stop) -> None:
        self.id = number
        self.name = name
        self.pool = pool
        self.stop = stop
        self.events = pool.events
        self.lease = lease = pool.events.table.leases[number]
        self.summary = {"name": name, "device": home.name, "steps": 0, "state": "live", **summary_of(TrialPlan())}
        self.of_runner = False  # a runner's trial ends with its objective
        self.alone = False  # has a device for itself and is spilled there: it has run out of memory beside others
        self.resumption: Resumption | None = None  # the runner's, if it writes checkpoints
        self.random_state: RandomState | None = None  # the runner's
        self._roots: list[_Root] = []  # its prepared models, as long as they live
        self.ended = self.is_plain = False  # plain: its models are so again
        self.busy = threading.RLock()  # held by the thread that is in a forward or a backward of the trial
        self._thread = 0  # the thread that has held `busy` last
        self._process = gate.process
        self.meter = TrialMeter(home, number, always=checks_enabled())
        self.counting = Counting(self.meter)  # active in pilots; with HYDRA_TUNE_CHECKS=1, until the trial ends
        self.casts = SharedCasts()
        self.base = GuardedBase()
        self.planner = planner = Planner(self)
        self.residency = residency = Residency(home, self.meter, pool)
        self.steps = steps = Steps(self)
        self.tasks = tasks = Tasks(self, self.events, lease=lease, steps=steps, planner=planner, residency=residency)
        self.visits = visits = Visits(tasks, planner=planner, residency=residency)
        self.retry = OutOfMemoryRetry(self)
        self.gradients = gradients = SentGradients(self, planner=planner, steps=steps, residency=residency)
        self.backwards = Backwards(self, planner=planner, steps=steps, visits=visits, gradients=gradients)
        self.block_calls = BlockCalls(self, planner=planner, steps=steps, visits=visits, backwards=self.backwards)
        self.forwards = Forwards(self)

    # ---- what it is ----

    @property
    def device(self) -> Device:
        """The trial's home."""
        return self.residency.device

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one that has called the model last."""
        return self._thread == threading.get_ident()

    @property
    def models(self) -> list[nn.Module]:
        """The prepared models that are alive, in the order in which they were prepared."""
        return [model for root in self._roots if (model := root.model()) is not None]

    @property
    def model(self) -> nn.Module:
        """The prepared model; if there are several, a module that has them as children."""
        models = self.models
        assert models, "a model outlives its trial's work"
        return models[0] if len(models) == 1 else SeveralModels(models)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [root.optimizer for root in self._roots if root.optimizer is not None]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The first of the optimizers, if there is one."""
        return next(iter(self.optimizers), None)

    # ---- the model's life in the pool ----

    def bind(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Put a model under this trial, beside the models that it has already. Nothing is cut or moved before the first
        forward."""
        self.boundary()
        self._roots = [root for root in self._roots if root.model() is not None]
        root = _Root(weakref.ref(model), optimizer)
        self._roots.append(root)
        try:
            self.pool.shared_weights.enter(self.id, weights_of(model))
            self.planner.start()
        except BaseException:
            self._roots.remove(root)
            raise
        self.base.watch(model.parameters())
        model.forward = RootForward(model, self)
        model._apply = RootApply(model, self)  # type: ignore[method-assign]
        self.hook_optimizers()

    def forget_collected_models(self) -> None:
        """Start over with a new plan if one of the models was garbage collected."""
        if len(self.models) < len(self._roots):
            self._roots = [root for root in self._roots if root.model() is not None]
            self.base.forget_all_but(self.model.parameters())
            self.planner.leave_plan()
            self.planner.start()

    def release(self, model: nn.Module) -> None:
        """Make this model plain again. If it is the last one, the trial ends."""
        if len(self.models) <= 1:
            self.end()
            return
        self.boundary()
        self.planner.leave_plan()
        for root in [root for root in self._roots if root.model() is model]:
            self._roots.remove(root)
            root.unhook()
            make_shared(model.parameters())
            give_back(model, self)
        self.planner.start()

    def end(self) -> None:
        """End the trial and give back every byte. Its models are plain again, in host memory, with their current
        weights."""
        if self.is_plain:
            return
        self.ended = True
        self.tasks.current = None
        with_gradients = torch.is_grad_enabled()
        try:
            self.events.promotions.await_copies(self)
            self.stop_counting()
            self.tasks.backward.end()
            self.residency.await_gradients()
            if self.planner.pilot is not None:
                self.planner.pilot.end()
                self.planner.pilot = None
            self.planner.cut.unwrap()  # also those parts that outlive their model
            self.device.synchronize()  # the trial may have computed on another stream than the caller's
            self.residency.bring_home(self.optimizers)
            self.residency.close()
        finally:
            torch._C._set_grad_enabled(with_gradients)  # an error above may have left it off
            self.events.end_trial(self)  # not earlier: from here on other trials may use its bytes
            for root in self._roots:
                root.unhook()
            for model in self.models:  # last: if something before this fails, `release` may be called again
                make_shared(model.parameters())
                give_back(model, self)
            self.is_plain = True
        self.planner.close()
        self.resumption = None
        self._roots = []

    # ---- one thread at a time ----

    def acquire(self) -> None:
        """Acquire `busy` for the calling thread. The caller releases it.

        Raises:
            PrepareError: another thread is in a forward or backward of the trial, or this is another process.
        """
        if gate.process != self._process:  # a forked process has no threads of the pool, nor the other trials' threads
            raise PrepareError(
                f"a prepared model is called in the process that has prepared it, but that of {self.name} was called "
                "in a forked process, perhaps a loader's worker. Give that process a copy.deepcopy(model), which is a "
                "plain model."
            )
        if not self.busy.acquire(blocking=False):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            raise PrepareError(
                f"one thread at a time calls a prepared model, but {threading.current_thread().name} called that of "
                f"{self.name} while {names.get(self._thread)} was in its forward or backward. Hold a lock around each "
                "step and each evaluation, or evaluate a copy.deepcopy(model), which is a plain model."
            )
        self._thread = threading.get_ident()

    # ---- steps ----

    def boundary(self) -> None:
        """Called where no task of the trial can be under way: end the task and the step that could not end before."""
        self.acquire()
        try:
            self.leave_step_if_done()
        finally:
            self.busy.release()

    def leave_step_if_done(self) -> None:
        """End the task, and the step and its pilot if no backward of them may come."""
        self.tasks.leave()
        if self.steps.leave_if_done() and self.planner.pilot is not None:
            self.planner.end_pilot()

    def leave_after_error(self) -> None:
        """Give up the task and the pilot after an exception.

        The frames of the exception keep what the task has on the device. So a runner's trial keeps its lease: the
        runner frees the frames first, and then ends the trial.
        """
        self.visits.under_way = False
        if self.planner.pilot is not None:
            self.planner.pilot.failed = True
        if not self.of_runner:
            self.tasks.leave()
            if self.planner.pilot is not None:
                self.steps.under_way = False  # the step of a pilot that has failed does not count as one
                self.planner.give_up_pilot()
            self.stop_counting()  # with HYDRA_TUNE_CHECKS=1 the next forward starts it again

    def stop_counting(self) -> None:
        self.counting.stop(for_good=not self.backwards.under_way)

    def checkpoint(self, states: Sequence[dict[str, Any]]) -> None:
        """Write a checkpoint from host memory, with the trial's loaders in these states. Devices work for other trials
        meanwhile."""
        if self.resumption is not None and not self.steps.under_way:
            with CountingPaused():
                self.resumption.stage(self.model, self.optimizer, states)

    # ---- the optimizers' steps ----

    def hook_optimizers(self) -> None:
        """Hook the optimizers' steps, to give up leases early. An optimizer without hooks, such as one that wraps
        another, does without: then leases are given up at the next forward."""
        for root in self._roots:
            optimizer = root.optimizer
            if not root.hooks and optimizer is not None and hasattr(optimizer, "_optimizer_step_pre_hooks"):
                root.hooks.append(optimizer.register_step_pre_hook(self.before_optimizer_step))
                root.hooks.append(optimizer.register_step_post_hook(self._after_optimizer_step))

    def unhook_optimizers(self) -> None:
        for root in self._roots:
            root.unhook()

    def before_optimizer_step(self, *_: Any) -> None:
        """End the step whose backward was the last. If that was a pilot's, the planner makes a plan, and a trial that
        fits is moved to the device, so that the optimizer steps there."""
        plan = self.planner.plan
        if plan is not None and plan.resident:
            within_forward = self.steps.forward is not None  # the forward goes on, and keeps its lease
            if within_forward or (self.tasks.current is None and not self.steps.under_way):
                return
        self.boundary()
        if self.planner.plan is None and self.planner.pilot is None and not self.ended:
            self.planner.settle_last()
        interrupts.check()

    def _after_optimizer_step(self, *_: Any) -> None:
        self.invalidate_copies()
        if self.resumption is not None:
            self.resumption.has_stepped()
        interrupts.check()

    def invalidate_copies(self) -> None:
        """Tell the pool that the trial's device copies of shards are stale. A resident trial has none."""
        if (plan := self.planner.plan) is None or not plan.resident:
            if self.tasks.current is not None:  # the optimizer was called with a closure, within a forward
                self.boundary()
            self.events.tell_between_tasks(self, Invalidated(self.id))
