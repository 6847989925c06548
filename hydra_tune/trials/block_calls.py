"""Calls of blocks: from the model's forward, from a checkpoint that repeats it, or from the user's own code.

with gradients      a `Call` of blocks/, which repeats the forward in the backward, or keeps its activations
without gradients   evaluated: nothing of it stays on the device
in a pilot          measured first, then one of the two above
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from hydra_tune.blocks.ambient_settings import AmbientSettings
from hydra_tune.blocks.block import Block, are_trained
from hydra_tune.blocks.call import KeptCall, hooks_of_checkpoint, is_watched, refuse_hooks
from hydra_tune.blocks.engine import ForwardPass
from hydra_tune.blocks.repeated_call import RepeatedCall
from hydra_tune.blocks.shared_casts import OtherBranchError
from hydra_tune.blocks.tree import Structure, flatten_call, map_tensors, tensors_in
from hydra_tune.devices.meter import needs
from hydra_tune.devices.tensor_bytes import versions_of
from hydra_tune.errors import BudgetError, PrepareError, ReturnsWeightsError, clear_frames
from hydra_tune.planning.fingerprint import Fingerprint
from hydra_tune.planning.partition import UNMEASURED
from hydra_tune.planning.planner import Planner
from hydra_tune.planning.reached_weights import stays_as_it_is, weights_in
from hydra_tune.planning.refusals import refuse_transforms
from hydra_tune.randomness import DrawRecord
from hydra_tune.schedule.plan import TOO_LARGE, Direction
from hydra_tune.trials.backwards import Backwards
from hydra_tune.trials.steps import Steps
from hydra_tune.trials.tasks import Visits

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial


class BlockCalls:
    """Runs the calls of one trial's blocks."""

    def __init__(self, trial: Trial, *, planner: Planner, steps: Steps, visits: Visits, backwards: Backwards) -> None:
        self._trial = weakref.ref(trial)
        self._planner = planner
        self._steps = steps
        self._visits = visits
        self._backwards = backwards

    @property
    def trial(self) -> Trial:
        """Alive for as long as a block is called: the block's stand-in refers to it."""
        trial = self._trial()
        assert trial is not None, "a block that is called leads to its trial"
        return trial

    @property
    def are_expected(self) -> bool:
        """Whether the model's forward is under way, outside of all blocks."""
        return self._steps.forward is not None and not self._visits.under_way

    @property
    def are_within_another(self) -> bool:
        """Whether the calling thread is within another block, which runs the inner one as a part of itself.

        If another thread calls a block during a forward, this is False, and `run` refuses the call.
        """
        return self._visits.under_way and (self._steps.forward is None or self.trial.is_here)

    def run(self, block: Block, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a call of a block, and return what the block's forward returns."""
        steps = self._steps
        try:
            if steps.forward is None and not self._backwards.under_way:
                forward_pass = steps.latest_forward if torch._C._current_graph_task_id() != -1 else None
                if forward_pass is not None and torch.is_grad_enabled():  # within a backward: a checkpoint repeats it
                    self._backwards.enter(forward_pass)
                    return self._run(block, args, kwargs)
                trial = self.trial
                trial.acquire()
                try:
                    return self._run_alone(block, args, kwargs)
                finally:
                    trial.busy.release()
            return self._run(block, args, kwargs)
        except Exception as error:
            if steps.forward is not None and isinstance(error, (PrepareError, BudgetError, torch.OutOfMemoryError)):
                steps.forward.ended_by = steps.forward.ended_by or error
            raise

    def _run_alone(self, block: Block, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a block that is called outside of its model's forward, as `generate` calls an encoder."""
        planner, steps = self._planner, self._steps
        if planner.plan is None and planner.pilot is None:
            return block.forward(args, kwargs)
        if torch.is_grad_enabled():
            raise PrepareError(
                f"a prepared model is called as a whole, but block {block.name} was called outside of the model's "
                "forward, perhaps by another method of the model. Call the model itself (its forward may call such "
                "methods), prepare the part that you call, or call it under torch.no_grad()."
            )
        if planner.pilot is None:
            steps.open()
        steps.forward = ForwardPass()
        try:
            return self._run(block, args, kwargs)
        finally:
            steps.forward = None
            self.trial.tasks.leave()

    def _run(self, block: Block, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        trial, forward = self.trial, self._steps.forward
        if forward is not None and not trial.is_here:
            raise PrepareError(
                f"a prepared model's layers run in the thread that called the model, but block {block.name} was called "
                "in another thread, perhaps one of an executor. Call them one after another, without threads."
            )
        refuse_transforms(lambda: [*tensors_in((args, kwargs)), *block.parameters])
        pilot, with_gradients = self._planner.pilot, torch.is_grad_enabled()
        if pilot is not None:
            trial.events.check_open(trial)
            if with_gradients and block.keeps == UNMEASURED:
                block.keeps = ""
        backwards = self._backwards
        forward_pass = forward or next(iter(backwards.under_way[-1].passes[trial]))
        forward_pass.calls[block.name] += 1
        leaves, structure = flatten_call(args, kwargs)
        given = [x for x in leaves if isinstance(x, torch.Tensor)]
        is_trained = any(are_trained(given)) or any(are_trained(block.parameters)) or _hides_trained(leaves)
        if not (with_gradients and is_trained):
            return self._evaluate_or_open(block, args, kwargs, given)
        # A pilot measures blocks in the forward. Under a reentrant checkpoint gradients are off there, and a block is
        # called with gradients only in the backward: then it is measured in the backward.
        if pilot is not None and (not backwards.under_way or block.name not in pilot.trained):
            return pilot.run(block, args, kwargs, forward_pass)
        return self.run_trained(block, args, kwargs, forward_pass, leaves, structure)

    # ---- with gradients ----

    def keeps(self, settings: AmbientSettings) -> bool:
        """Whether a call must keep its activations because of what is set now, though its block could be repeated."""
        # a checkpoint repeats the forward, and its backward follows at once
        backward_follows = self._steps.forward is None
        is_rebuilt, choices = settings.state.is_rebuilt, settings.process.choices
        return backward_follows or is_rebuilt or choices != self._backwards.kernel_choices or is_watched()

    def run_trained(
        self,
        block: Block,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        forward_pass: ForwardPass,
        leaves: Sequence[Any],
        structure: Structure,
    ) -> Any:
        """Run a call with gradients: keep its activations if something demands it, else repeat it in the backward."""
        trial, hooks = self.trial, hooks_of_checkpoint()
        if hooks is not None or block.keeps or self.keeps(settings := AmbientSettings.now(block.module_states)):
            kept = KeptCall(block, trial, forward_pass, hooks)
            return trial.retry.with_room(block, lambda: kept.run(args, kwargs), lambda: False)
        call = RepeatedCall(block, trial, forward_pass, leaves, structure, settings)
        if self._planner.pilot is not None:
            self._planner.pilot.watch(call, call.tensors)
        try:
            return trial.retry.with_room(block, lambda: call.run(args, kwargs), call.rewind)
        except OtherBranchError:
            if not call.do_without_casts():
                raise
        return trial.retry.with_room(block, lambda: call.run(args, kwargs), call.rewind)

    # ---- without gradients ----

    def _evaluate_or_open(
        self, block: Block, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[torch.Tensor]
    ) -> Any:
        """Evaluate. In a pilot, a block that has no room is opened: its children become blocks. A weight that a block
        returns is held on the device."""
        versions = versions_of(given)
        try:
            return self._evaluate(block, args, kwargs, given)
        except (torch.OutOfMemoryError, ReturnsWeightsError) as error:
            if self._planner.pilot is None or versions != versions_of(given):
                raise
            returned, needed = getattr(error, "weights", ()), needs(error)
            clear_frames(error)
        for weight in returned:
            block = self._planner.cut.hold_weight(block, weight, "its block returns it")
        if returned:
            return self._evaluate(block, args, kwargs, given)
        self._planner.cut.open_block(block, f"{TOO_LARGE}: it needs {needed}")
        return block.forward(args, kwargs)

    def _evaluate(
        self, block: Block, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[torch.Tensor]
    ) -> Any:
        """Run the block's forward in a visit, without clones of its inputs: no backward follows that needs them."""
        versions, draws, buffers = versions_of(given), DrawRecord(), block.buffers_now()

        def run() -> Any:
            caches, pilot = torch.is_autocast_cache_enabled(), self._planner.pilot
            copy = self._visits.begin(block, Direction.FORWARD)
            try:
                weights = copy.leaves(block.slot_parameters)
                for leaf in weights:
                    leaf.grad = None  # left by a run that ran out of memory
                block.lend(weights)
                torch.set_autocast_cache_enabled(False)  # cached casts would outlive the visit, but their slots do not
                try:
                    with draws, nullcontext() if pilot is None else pilot.measuring(block):
                        outputs = block.forward(args, kwargs)
                finally:
                    torch.set_autocast_cache_enabled(caches)
                    block.take_back(weights)
                refuse_hooks(block, weights)
                _take_gradients(block, weights)
                if copy.num_bytes and (returned := weights_in(outputs, copy)):
                    draws.rewind()
                    raise ReturnsWeightsError(block.name, returned)
                return map_tensors(lambda t: t.clone() if copy.has(t) else t, outputs)
            finally:
                self._visits.end(copy, Direction.FORWARD)

        def undo() -> bool:
            draws.rewind()
            block.put_back_buffers(buffers)
            return versions == versions_of(given)

        return self.trial.retry.with_room(block, run, undo)


def _hides_trained(leaves: Sequence[Any]) -> bool:
    """Whether an object among the arguments has a tensor that requires a gradient, as the cache of peft's prefixes."""
    objects = [x for x in leaves if not isinstance(x, torch.Tensor) and not stays_as_it_is(x)]
    return bool(objects) and any(t.requires_grad for t in Fingerprint().tensors_within(objects))


def _take_gradients(block: Block, weights: Sequence[torch.Tensor]) -> None:
    """Add gradients to the parameters if the block has run a backward within itself, though gradients were off around
    it."""
    for weight, p in zip(weights, block.slot_parameters, strict=True):
        if weight.grad is not None:
            gradient, weight.grad = weight.grad.to(p.device, copy=True), None
            p.grad = gradient if p.grad is None else p.grad + gradient
