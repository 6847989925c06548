"""Calls of blocks, wherever they come from: the model's forward, a checkpoint's repetition, the user's own code.

with gradients      repeated, or its activations are kept: a `Call` of blocks/, whose backward comes later
without             evaluated: nothing of it stays on the device
in a pilot          the pilot measures it, then makes one of the others of it
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
from hydra_tune.devices.tensor_bytes import versions_of
from hydra_tune.errors import BudgetError, PrepareError, ReturnsWeightsError, clear_frames
from hydra_tune.planning.partition import UNMEASURED
from hydra_tune.planning.planner import Planner
from hydra_tune.planning.reached_weights import weights_in
from hydra_tune.planning.refusals import refuse_transforms
from hydra_tune.randomness import DrawRecord
from hydra_tune.schedule.plan import TOO_LARGE, Direction
from hydra_tune.trials.backwards import Backwards
from hydra_tune.trials.steps import Steps
from hydra_tune.trials.visits import Visits

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial


class BlockCalls:
    def __init__(self, trial: Trial, *, planner: Planner, steps: Steps, visits: Visits, backwards: Backwards) -> None:
        self._trial = weakref.ref(trial)
        self._planner = planner
        self._steps = steps
        self._visits = visits
        self._backwards = backwards

    @property
    def trial(self) -> Trial:
        """A call keeps it, as the graph keeps the call."""
        trial = self._trial()
        assert trial is not None, "a block that is called leads to its trial"
        return trial

    @property
    def are_expected(self) -> bool:
        """In a forward, and in no block."""
        return self._steps.forward is not None and not self._visits.under_way

    @property
    def are_within_another(self) -> bool:
        """In the calling thread; what another calls in a forward is refused."""
        return self._visits.under_way and (self._steps.forward is None or self.trial.is_here)

    def run(self, block: Block, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        steps = self._steps
        try:
            if steps.forward is None and not self._backwards.under_way:
                forward_pass = steps.latest_forward if torch._C._current_graph_task_id() != -1 else None
                if forward_pass is not None and torch.is_grad_enabled():  # a checkpoint repeats it
                    self._backwards.enter(forward_pass)
                    return self._run(block, args, kwargs)
                trial = self.trial
                trial.hold()
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
        """One that is called outside of its root's forward, as `generate` calls an encoder."""
        planner, steps = self._planner, self._steps
        if planner.plan is None and planner.pilot is None:
            return block.forward(args, kwargs)
        if torch.is_grad_enabled():
            raise PrepareError(
                f"a prepared model is called as a whole, but block {block.name} was called outside of its forward, "
                "perhaps by another of its methods. Call the model itself (its forward may call these), prepare the "
                "part that you call, or call it under torch.no_grad()."
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
                "in another, perhaps that of an executor. Call them one after another, without threads."
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
        if not (with_gradients and (any(are_trained(given)) or any(are_trained(block.parameters)))):
            return self._evaluate_or_open(block, args, kwargs, given)
        # a reentrant checkpoint calls a block with gradients in the backward only
        if pilot is not None and (not backwards.under_way or block.name not in pilot.trained):
            return pilot.run(block, args, kwargs, forward_pass)
        return self.run_trained(block, args, kwargs, forward_pass, leaves, structure)

    # ---- with gradients ----

    def keeps(self, settings: AmbientSettings) -> bool:
        """Whether a call now is not to be repeated, whatever its block is like."""
        at_once = self._steps.forward is None  # a checkpoint's repetition, whose own backward follows
        is_rebuilt, choices = settings.state.is_rebuilt, settings.process.choices
        return at_once or is_rebuilt or choices != self._backwards.choices or is_watched()

    def run_trained(
        self,
        block: Block,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        forward_pass: ForwardPass,
        leaves: Sequence[Any],
        structure: Structure,
    ) -> Any:
        hooks, with_room = hooks_of_checkpoint(), self._visits.with_room
        if hooks is not None or block.keeps or self.keeps(settings := AmbientSettings.now(block.module_states)):
            kept = KeptCall(block, self.trial, forward_pass, hooks)
            return with_room(block, lambda: kept.run(args, kwargs), lambda: False)
        call = RepeatedCall(block, self.trial, forward_pass, leaves, structure, settings)
        if self._planner.pilot is not None:
            self._planner.pilot.watch(call, call.tensors)
        try:
            return with_room(block, lambda: call.run(args, kwargs), call.rewind)
        except OtherBranchError:
            if not call.do_without_casts():
                raise
        return with_room(block, lambda: call.run(args, kwargs), call.rewind)

    # ---- without ----

    def _evaluate_or_open(
        self, block: Block, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[torch.Tensor]
    ) -> Any:
        versions = versions_of(given)
        try:
            return self._evaluate(block, args, kwargs, given)
        except (torch.OutOfMemoryError, ReturnsWeightsError) as error:
            if self._planner.pilot is None or versions != versions_of(given):
                raise
            returned, reason = getattr(error, "weights", ()), str(error)
            clear_frames(error)
        for weight in returned:
            block = self._planner.cut.hold_weight(block, weight, "its block returns it")
        if returned:
            return self._evaluate(block, args, kwargs, given)
        self._planner.cut.open_block(block, f"{TOO_LARGE}: {reason}")
        return block.forward(args, kwargs)

    def _evaluate(
        self, block: Block, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[torch.Tensor]
    ) -> Any:
        """No backward follows, so it may change what it is given."""
        versions, draws, buffers = versions_of(given), DrawRecord(), block.buffers_now()

        def run() -> Any:
            caches, pilot = torch.is_autocast_cache_enabled(), self._planner.pilot
            copy = self._visits.begin(block, Direction.FORWARD)
            try:
                weights = copy.leaves(block.slot_parameters)
                for leaf in weights:
                    leaf.grad = None  # of a run that had no room
                block.lend(weights)
                torch.set_autocast_cache_enabled(False)  # its casts would outlive the visit; slots do not
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

        def rewound() -> bool:
            draws.rewind()
            block.put_back_buffers(buffers)
            return versions == versions_of(given)

        return self._visits.with_room(block, run, rewound)


def _take_gradients(block: Block, weights: Sequence[torch.Tensor]) -> None:
    """Of a backward that the block has run itself, for all that no gradients were asked for around it."""
    for weight, p in zip(weights, block.slot_parameters, strict=True):
        if weight.grad is not None:
            gradient, weight.grad = weight.grad.to(p.device, copy=True), None
            p.grad = gradient if p.grad is None else p.grad + gradient
