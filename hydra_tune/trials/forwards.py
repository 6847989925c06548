"""Forwards of the prepared model. Each belongs to a step, and a step has room on the device before it begins.

    run --> like the steps before it    a simple step: one lease lasts for many of them; a few comparisons, then the
                                        model's own forward
        --> measured before             the step waits until it has room for the bytes that were measured
        --> of a new kind               a pilot: it has the device to itself, and blocks are measured one by one

A spilled model hears that a backward begins from its first visit. A resident model has no visits: the engine asks it
before each backward, or its outputs have a hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hydra_tune.blocks.ambient_settings import autocast_mode
from hydra_tune.blocks.engine import ForwardPass, here
from hydra_tune.blocks.root import RootForward
from hydra_tune.blocks.tree import tensors_in
from hydra_tune.devices.tensor_bytes import storage_bytes
from hydra_tune.errors import PrepareError, clear_frames
from hydra_tune.planning.known_steps import StepKind
from hydra_tune.planning.refusals import refuse_global_hooks, refuse_transforms
from hydra_tune.pool.lease import TELL_AFTER
from hydra_tune.randomness import hold
from hydra_tune.schedule.plan import Direction

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

ResultT = TypeVar("ResultT")
# A pilot lasts while its graph lives, and the script may keep a loss, such as that of a failed backward. It ends after
# this many backwards in any case.
_MAX_PILOT_BACKWARDS = 3
_COMPARED_BY_VALUE = frozenset((bool, int, float, str, type(None)))


class Forwards:
    """Runs the forwards of one trial's models."""

    def __init__(self, trial: Trial) -> None:
        self._reference = weakref.ref(trial)
        self._trial: Trial = weakref.proxy(trial)
        self._summary = trial.summary
        self._planner = trial.planner
        self._steps = trial.steps
        self._lease = trial.lease
        self._tasks = trial.tasks
        self._meter = trial.meter
        self._counting = trial.counting
        self._stop = trial.stop
        self._backwards = trial.backwards
        self._visits = trial.visits
        self.awaits_backward = False  # a simple step has had its forward; its thread's next backward is the step's

    def run(self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward in the step it belongs to, and return its outputs."""
        planner, steps = self._planner, self._steps
        call = _call_key(root, args, kwargs) if steps.forward is None else None
        if call in planner.covered and self._begin_simple():
            return self._run_simple(root, args, kwargs)
        trial = self._trial
        if trial.ended:
            raise PrepareError(f"{trial.name} has ended. Prepare the model again.")
        refuse_transforms(lambda: tensors_in((args, kwargs, [*trial.model.parameters()])))
        if steps.forward is not None or self._visits.under_way:
            return root.run(args, kwargs)  # the model calls itself
        trial.events.check_open(trial)
        if torch._C._current_graph_task_id() != -1 and (planner.plan is None or not planner.plan.resident):
            raise PrepareError(
                f"{trial.name}: the pool repeats or keeps what a spilled model's backward needs, but the model's "
                "forward was called again in a backward, as by a checkpoint around the model. Remove the checkpoint: "
                "the pool saves this memory anyway."
            )
        self._leave_last_step()
        if call in planner.covered:
            if not steps.under_way:
                self._stop.check_between_steps()
            steps.open()
            return self._run_step(root, args, kwargs)
        self._enter_step(root, args, kwargs)
        if call is not None and planner.plan is not None and planner.plan.resident:
            planner.covered.add(call)
            if trial.resumption is None:  # a resident trial has no device copies that the hooks would invalidate
                trial.unhook_optimizers()
        return self._run_step(root, args, kwargs)

    # ---- simple steps: a resident model, one forward, one backward, like the steps before ----

    def _begin_simple(self) -> bool:
        """Begin a simple step; False if this step is not simple. Fields are compared before functions are called, for
        the time that this takes is a good part of a small model's step."""
        steps, lease = self._steps, self._lease
        if (
            not steps.are_simple
            or steps.under_way
            or steps.forwards
            or self._tasks.current is not None
            or self._backwards.under_way
            or self.awaits_backward
            or not (torch.is_grad_enabled() and self._stop.is_quiet)
            or len(lease.ran) >= TELL_AFTER
            or self._trial.resumption is not None  # it must be told of each backward
            or not lease.begin(steps.number + 1, Direction.FORWARD)
        ):
            return False
        self._summary["steps"] = steps.number = steps.number + 1
        self._tasks.current = lease.task
        return True

    def _run_simple(self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        steps, meter = self._steps, self._meter
        steps.forward = ForwardPass(trains=True)
        here.trial = self._reference
        meter.inside += 1
        try:
            if meter.always:
                self._counting.start()
                meter.adopt(tensors_in((args, kwargs)), are_a_batch=True)
            outputs = root.run(args, kwargs)
            self._tasks.leave()
        except BaseException:
            self._trial.leave_after_error()
            raise
        finally:
            meter.inside -= 1
            steps.forward = None
        self.awaits_backward = True
        return outputs

    def run_backward(self, run: Callable[..., ResultT], given: tuple[Any, ...], *, keeps_graph: bool) -> ResultT:
        """Return `run(*given)`, a backward in the trial's thread, taken for that of the simple step. It may be one of
        something else; only a hook on the outputs could tell, and that costs more."""
        steps, lease, tasks = self._steps, self._lease, self._tasks
        self.awaits_backward = trained = False  # a backward within this one is a part of it
        lasts = lease.begin(steps.number, Direction.BACKWARD)
        if lasts:
            tasks.current = lease.task
        else:  # the lease has ended meanwhile
            self._backwards.refuse_after_end()
            steps.begin()
            tasks.go_to(0, Direction.BACKWARD)
        try:
            result = run(*given)  # arguments and no closure: frames of an exception would keep a closure alive
            trained = True
        finally:
            if lasts and tasks.current and not keeps_graph and lease.leave_step(trained=trained):
                tasks.current = None
                if lease.revoked:
                    self._trial.events.hear(self._trial)
            else:
                tasks.leave()
                self.awaits_backward = keeps_graph
                if not keeps_graph:
                    steps.begin()
                    steps.trains = trained
                    steps.leave()
        return result

    # ---- the step that a forward belongs to ----

    def _leave_last_step(self) -> None:
        """End the step before, if no backward of it may come, and write a checkpoint that is due."""
        trial, steps = self._trial, self._steps
        if self._lease.in_step and not steps.under_way:  # begun as a simple step, but its backward did not come
            steps.begin()
        if self.awaits_backward:
            self.awaits_backward = steps.are_simple = False
        trial.leave_step_if_done()
        if trial.resumption is not None and not steps.under_way:
            states = trial.resumption.before_forward() if torch.is_grad_enabled() else None
            if states is not None:
                trial.checkpoint(states)
                trial.resumption.publish()

    def _enter_step(self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Be in a step that has room for this forward: the step under way, a new one, or a pilot."""
        trial, planner, steps = self._trial, self._planner, self._steps
        trial.hook_optimizers()
        if planner.plan is None or not planner.plan.resident:
            refuse_global_hooks()
        trial.forget_collected_models()
        if planner.pilot is not None and steps.num_backwards >= _MAX_PILOT_BACKWARDS:
            steps.leave()
            planner.end_pilot()
        kind = planner.kind_of(trial.models.index(root.module), args, kwargs)
        if planner.pilot is not None:  # its step has several forwards
            planner.pilot.add(kind)
            return
        if steps.under_way:
            if planner.known.covers(kind):
                steps.open()
            else:
                planner.learn(kind)  # the next step reserves room for it, too
            return
        self._stop.check_between_steps()
        if not (planner.known.covers(kind) or planner.learn(kind)) and self._begin_pilot(kind, args, kwargs):
            return
        planner.settle(planner.plan_for(kind))
        steps.open()

    def _begin_pilot(self, kind: StepKind, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Wait for room, and begin a pilot. False if another trial has measured this kind of step meanwhile."""
        trial, meter = self._trial, self._meter
        refuse_global_hooks()
        meter.counting = True
        self._counting.start()
        try:
            if not self._planner.begin(kind, args, kwargs):
                return False
            hold(trial.device.generators, trial.random_state)  # as with a lease: a pilot has the device to itself
            self._steps.begin()
            meter.adopt(tensors_in((args, kwargs)), are_a_batch=True)
        except torch.OutOfMemoryError as error:
            clear_frames(error)
            refusal = meter.refusal(error)
            trial.leave_after_error()
            raise refusal from None
        except BaseException:
            trial.leave_after_error()
            raise
        meter.watch_outside()
        return True

    def _run_step(self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward in the step that has begun. After an error the step's lease and room are given up."""
        trial, planner, steps, meter = self._trial, self._planner, self._steps, self._meter
        pilot, plan = planner.pilot, planner.plan
        self._summary["steps"] = steps.number = steps.number + 1
        trial.invalidate_copies()
        planner.share_slots()
        steps.forward = forward_pass = ForwardPass(trains=torch.is_grad_enabled())
        here.trial = self._reference
        steps.num_forwards += 1
        steps.forwards.append(weakref.ref(forward_pass))
        if meter.always:
            self._counting.start()
        meter.inside += 1
        try:
            if meter.counting:
                meter.adopt(tensors_in((args, kwargs)), are_a_batch=True)
            if pilot is None and plan is not None and plan.resident:
                self._tasks.go_to(0, Direction.FORWARD)
            outputs = root.run(args, kwargs)
            if forward_pass.ended_by is not None:
                raise forward_pass.ended_by
            if pilot is not None:
                kept = [args, kwargs, args, kwargs, outputs] if trial.device.counts_as_gpu else [outputs]
                pilot.kept_bytes = max(pilot.kept_bytes, sum(map(storage_bytes, tensors_in(kept))))
            self._tasks.leave()
        except BaseException as error:
            refusal, forward_pass.done = error, True
            if isinstance(error, torch.OutOfMemoryError) and pilot is not None:
                clear_frames(error)
                refusal = meter.refusal(error)
            trial.leave_after_error()
            if refusal is not error:
                raise refusal from None
            raise
        finally:
            meter.inside -= 1
            steps.forward = forward_pass.ended_by = None
        if not torch.is_grad_enabled():
            forward_pass.done = True
            if pilot is not None:
                trial.leave_step_if_done()
            if trial.resumption is not None:
                trial.resumption.note()
        elif pilot is not None or (plan is not None and plan.resident):
            self._announce_backward(outputs, forward_pass)
        return outputs

    def _announce_backward(self, outputs: Any, forward_pass: ForwardPass) -> None:
        """Hook the outputs, so that the trial enters their backward. Needed if no visit may be the first to do that."""
        trial = self._reference()  # a strong reference, so that the graph keeps the trial
        assert trial is not None

        def enter(_: Any) -> None:
            trial.backwards.enter(forward_pass)
            if (plan := trial.planner.plan) is not None and plan.resident:
                trial.tasks.go_to(0, Direction.BACKWARD)

        for tensor in (outputs,) if type(outputs) is torch.Tensor else tensors_in(outputs):
            if (node := tensor.grad_fn) is not None:
                node.register_prehook(enter)


def _call_key(root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The part of a call that decides how much room it needs. None if an argument is no tensor and no plain value: such
    a call is looked at in full each time."""
    casts = autocast_mode() if torch._C._is_any_autocast_enabled() else None
    key: list[Any] = [id(root), torch.is_grad_enabled(), casts]
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            key += (value.shape, value.dtype, value.requires_grad)
        elif type(value) in _COMPARED_BY_VALUE:
            key.append(value)
        else:
            return None
    return (*key, *kwargs) if kwargs else tuple(key)
