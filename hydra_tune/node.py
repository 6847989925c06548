"""One autograd node for each call of a block, which forgets its activations and repeats the forward.

    plain PyTorch     x --op--op--op--> y           every op is a node, every activation is kept
    here              x --[ BlockFunction ]--> y    one node; kept are x and the random state it drew from

Forward runs on the promoted weights and keeps nothing. Backward promotes them again, repeats the forward
with gradients on, runs the local backward, and hands the gradients of inputs and weights to the outer
graph. The host parameters are inputs of the node, so accumulation into `.grad`, its order, ties and
parameter hooks stay PyTorch's own. (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
arXiv 1604.06174, with the weights away between the two visits.) A tensor is an input once for each of its uses in
the block, so that sums with uses elsewhere are made in plain PyTorch's order: see `graph`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hydra_tune.block import Block
from hydra_tune.call import BlockCall, Executor
from hydra_tune.errors import HydraTuneError, PrepareError, SecondGradientError, UncuttableError
from hydra_tune.forward_pass import AbandonedForward
from hydra_tune.graph import alias_of, nodes_from
from hydra_tune.own_forward import StandIn
from hydra_tune.root import transform_around
from hydra_tune.shard import Direction
from hydra_tune.tree import map_tensors, tensors_in


class BlockForward(StandIn):
    """Stands in a prepared block's instance attribute `forward`."""

    def __init__(self, block: Block, trial: Executor) -> None:
        super().__init__(block.module)
        self.block = block
        self.trial = trial
        self.__wrapped__ = self.original  # inspect.signature follows it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        turn = self.trial.turn
        turn.wait(self.block.name, _CALL)
        with turn.lock:
            before, turn.holder = turn.holder, threading.get_ident()
            try:
                if self.trial.residency.in_visit:  # a block within a block
                    return self.block.forward(args, kwargs)
                try:
                    return self._run(args, kwargs)
                except (HydraTuneError, AbandonedForward) as error:
                    self.trial.end_forward(error)
                    raise
            finally:
                turn.holder = before

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not self.trial.has_model:
            self.trial.end()
            return self.block.forward(args, kwargs)
        if not self.block.is_current:  # a user's own forward that was put around this one leads here still
            return self.block.forward(args, kwargs)
        transform = transform_around(lambda: [*tensors_in((args, kwargs)), *self.block.parameters])
        if transform is not None:
            error = UncuttableError(
                f"a block runs operator by operator, but {self.block.name} is called within {transform}. Call the "
                "block outside of it, or hydra_tune.release(model) first."
            )
            self.trial.finds(self.block, error)
            raise error
        if not torch.is_grad_enabled() and not self.trial.in_forward:
            return self.trial.run_block(self.block, args, kwargs)
        call = BlockCall(self.block, self.trial, args, kwargs)
        if not self.trial.probe(call):
            return self._run_as_it_is(args, kwargs)
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in (*call.tensors, *self.block.parameters))):
            try:
                return call.run_without_graph(args, kwargs)
            except UncuttableError as error:
                if not self.trial.finds(self.block, error):
                    raise
            return self._run_as_it_is(args, kwargs)
        call.arguments.refuse_hidden_tensors()
        call.start_graph()
        made = call.run_forward()  # first: it tells which weights are used
        return call.outputs_of(_apply(call, made, *call.edges_in()))

    def _run_as_it_is(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """In a pilot that has found that it can't be cut so."""
        with self.trial.visit(self.block, Direction.FORWARD), torch.set_grad_enabled(self.block.differentiates):
            outputs = self.block.forward(args, kwargs)
            if self.block.differentiates:
                return map_tensors(torch.detach, outputs)
        given = tensors_in((args, kwargs))
        sources = [t for t in (*given, *self.block.parameters) if t.requires_grad]
        return _as_with_graph(outputs, given, sources) if sources and torch.is_grad_enabled() else outputs


_CALL = BlockForward.__call__.__code__


def end_orphans(model: nn.Module) -> bool:
    """End the trials whose own model was collected, while this part of it lives on; whether there were any."""
    found = False
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, BlockForward) and not forward.trial.has_model:
            forward.trial.end()
            found = True
    return found


def _as_with_graph(outputs: Any, given: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Any:
    """They require gradients as in plain PyTorch: where an input needs none, some operators run other kernels."""
    known = set(map(id, given))
    made = {id(x): x for x in tensors_in(outputs) if id(x) not in known and (x.is_floating_point() or x.is_complex())}
    if not made:
        return outputs
    standing = _Standing.apply(tuple(alias_of(x) for x in made.values()), *sources)  # type: ignore[no-untyped-call]
    stands_for = dict(zip(made, standing, strict=True))
    return map_tensors(lambda x: stands_for.get(id(x), x), outputs)


class _Standing(torch.autograd.Function):
    """The node of a block that ran without a graph, in a pilot that will be flown again."""

    @staticmethod
    def forward(ctx: Any, made: tuple[torch.Tensor, ...], *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.num_sources = len(sources)
        return made

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[None, ...]:
        return None, *[None] * ctx.num_sources


class BlockFunction(torch.autograd.Function):
    """The node: its inputs are the call's edges."""

    @staticmethod
    def forward(
        ctx: Any, call: BlockCall, made: tuple[torch.Tensor, ...], *edges: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        keeps_clones = call.block.keeps_clones  # an inference tensor can't be saved, but used
        tensors = [t.clone() if keeps_clones or t.is_inference() else t for t in call.tensors]
        ctx.save_for_backward(*tensors, *call.marks())
        ctx.mark_non_differentiable(*(made[i] for i in call.nondifferentiable))
        return made

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: BlockCall | None = ctx.call
        if call is None:  # let go of below
            raise RuntimeError(
                "Trying to backward through the graph a second time, or through another output of a block than the "
                "first time: its outputs have one node here. Specify retain_graph=True the first time."
            )
        if torch.is_grad_enabled():
            raise SecondGradientError(
                "gradients of gradients are not available in a prepared model that is spilled: backward was called "
                "with create_graph=True. Raise the pool's memory= until the model is resident, or call "
                "hydra_tune.release(model) first.",
                [node.call.block for node in nodes_from([ctx]) if isinstance(getattr(node, "call", None), BlockCall)],
            )
        if any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in grad_outputs):
            raise PrepareError(
                "a prepared model's gradients are computed one by one, but backward was called with "
                "is_grads_batched=True. Call it once for each, or hydra_tune.release(model) first."
            )
        if call.forward_pass.undone:
            raise PrepareError(
                "a model's first forward runs twice, and what the first run leaves is put back, but this backward goes "
                f"through what block {call.block.name} computed then: it is kept where that can't be, perhaps in a "
                "global list. Keep it in an attribute of a module, or return it."
            )
        call.trial.enter_backward(call.forward_pass, grad_outputs)
        try:
            tensors = ctx.saved_tensors  # a checkpoint around the block repeats its forward here
        except RuntimeError as error:
            if "inplace" not in str(error):
                raise
            raise RuntimeError(
                f"a block's inputs stay as they are from its forward to its backward, which repeats the forward, but "
                f"one of block {call.block.name} was changed in place in between. Give the model a copy of it."
            ) from error
        try:
            grads = call.run_backward(call.unmarked(tensors), ctx.needs_input_grad[2:], grad_outputs)
        except BaseException:  # an interruption may come where a visit ends
            call.trial.residency.close_visits()
            raise
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call = None  # a kept activation shall not keep the model
        call.trial.note_backward(call)
        return (None, None, *grads)


# As `BlockFunction.apply` where no transform of torch.func is around, which would be refused; in less time.
_apply: Callable[..., Any] = super(torch.autograd.Function, BlockFunction).apply
