"""One autograd node for each call of a block, which forgets its activations and repeats the forward.

    plain PyTorch     x --op--op--op--> y           every op is a node, every activation is kept
    here              x --[ BlockFunction ]--> y    one node; kept are x and the random state it drew from

Forward runs on the promoted weights and keeps nothing. Backward promotes them again, repeats the forward
with gradients on, runs the local backward, and hands the gradients of inputs and weights to the outer
graph. The host parameters are inputs of the node, so accumulation into `.grad`, its order, ties and
parameter hooks stay PyTorch's own. (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
arXiv 1604.06174, with the weights away between the two visits.)

Known slack: a block adds the gradients of its own uses of an input before the engine adds those of others,
where plain PyTorch adds use by use; with two uses in a block and one outside the last bit may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from hydra_tune.block import Block
from hydra_tune.errors import PrepareError
from hydra_tune.random_state import generator_states, set_generator_states
from hydra_tune.residency import Residency
from hydra_tune.shard import Direction
from hydra_tune.spill import DeviceCopy


class Executor(Protocol):
    """What a node needs of the trial it runs for."""

    residency: Residency

    @property
    def pass_token(self) -> Any: ...

    def visit(self, block: Block, direction: Direction) -> AbstractContextManager[DeviceCopy]: ...

    def measure_block(self, call: BlockCall, tensors: Sequence[torch.Tensor]) -> None: ...

    def enter_backward(self, token: Any) -> None: ...


class BlockForward:
    """Stands in a prepared block's instance attribute `forward`. A copy of the module gets its own forward."""

    def __init__(self, block: Block, trial: Executor) -> None:
        self.block = block
        self.trial = trial
        self.__wrapped__ = type(block.module).forward.__get__(block.module)  # inspect.signature follows it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.trial.residency.in_visit:  # a block within a block
            return self.block.forward(args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        call = BlockCall(self.block, self.trial, spec, leaves)
        call.refuse_hidden_tensors()
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.trial.measure_block(call, tensors)
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in [*tensors, *self.block.parameters])
        if needs_grad:
            call.keeps_graph = True
            outputs = BlockFunction.apply(call, *tensors, *self.block.parameters)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                outputs = call.run_forward(tensors)
        return call.unflatten_outputs(outputs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self.block.module, "forward")


class BlockCall:
    """One call of a block: its arguments with the tensors taken out, and what its backward must restore."""

    def __init__(self, block: Block, trial: Executor, spec: TreeSpec, leaves: list[Any]) -> None:
        self.block = block
        self.trial = trial
        self.token = trial.pass_token
        self.keeps_graph = False
        self.num_uses: list[int] = []  # of each tensor and parameter within the block; the pilot's finding
        self._spec = spec
        self._leaves = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._random_states: list[torch.Tensor] | None = None
        self._buffers_before: list[tuple[int, torch.Tensor]] = []
        self._versions: list[int] = []
        self._autocast: list[tuple[str, bool, torch.dtype]] = []
        self._output_leaves: list[Any] = []
        self._output_spec: TreeSpec | None = None

    # ---- arguments and outputs ----

    def refuse_hidden_tensors(self) -> None:
        """A mutable object with tensors inside (a cache) would be changed twice, by forward and recompute."""
        for leaf in self._leaves:
            if leaf is not _TENSOR and any(isinstance(v, torch.Tensor) for v in _contents(leaf)):
                raise PrepareError(
                    f"a block's arguments are tensors, plain data, and tuples, lists and dicts of them; block "
                    f"{self.block.name} was given a {type(leaf).__name__} that holds tensors. Pass its tensors, or "
                    "turn the feature off while training (use_cache=False)."
                )

    def refuse_changed_inputs(self, tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
        if list(versions) != versions_of(tensors):
            raise PrepareError(
                f"a block leaves its inputs as they are, but {self.block.name} changed one in place. "
                "Make its first operator out of place (inplace=False), or give it a copy."
            )

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is _TENSOR else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs

    def unflatten_outputs(self, tensors: Sequence[torch.Tensor]) -> Any:
        assert self._output_spec is not None
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is _TENSOR else leaf for leaf in self._output_leaves]
        return tree_unflatten(leaves, self._output_spec)

    # ---- forward ----

    def run_forward(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The block on its promoted weights, without gradients; notes what `run_backward` must restore."""
        generators = self.trial.residency.device.generators()
        before = generator_states(generators)
        versions = versions_of(tensors)
        self._autocast = _autocast_state()
        with self.trial.visit(self.block, Direction.FORWARD) as copy:
            if self.keeps_graph:
                outputs = forward_unsaved(self.block, *self.arguments(detached(tensors)))
            else:
                outputs = self.block.forward(*self.arguments(tensors))
            changed = copy.changed_buffers(self.block)
        self.refuse_changed_inputs(tensors, versions)
        if any(not torch.equal(b, a) for b, a in zip(before, generator_states(generators), strict=True)):
            self._random_states = before
        if self.keeps_graph:
            self._versions = [p._version for p in self.block.parameters]
            self._buffers_before = [(i, host.clone()) for i, host, _ in changed]
        self.trial.residency.write_back(changed)
        leaves, self._output_spec = tree_flatten(outputs)
        self._output_leaves = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    # ---- backward ----

    def run_backward(
        self,
        tensors: Sequence[torch.Tensor],
        needed: Sequence[bool],
        grad_outputs: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Gradients of `tensors` (on the device), then of the block's parameters (on the host).

        `needed` says which of both are wanted; `grad_outputs` has one entry for each output tensor.
        """
        if self._versions != [p._version for p in self.block.parameters]:
            raise RuntimeError(
                f"a weight of block {self.block.name} was changed in place between forward and backward. "
                "Call backward before optimizer.step(), or repeat the forward."
            )
        generators = self.trial.residency.device.generators()
        drawn = generator_states(generators)
        with self.trial.visit(self.block, Direction.BACKWARD) as copy:
            now = copy.swap_buffers(self.block, self._buffers_before)
            try:
                if self._random_states is not None:
                    set_generator_states(generators, self._random_states)
                grads, grad_leaves = self._local_backward(tensors, needed, grad_outputs, copy)
            finally:
                set_generator_states(generators, drawn)
                copy.swap_buffers(self.block, now)
            host_grads = self.trial.residency.spill_gradients(self.block, grad_leaves)
            del grad_leaves  # the step's reservation does not cover them, the visit's does
        return [*grads, *host_grads]

    def _local_backward(
        self,
        tensors: Sequence[torch.Tensor],
        needed: Sequence[bool],
        grad_outputs: Sequence[torch.Tensor | None],
        copy: DeviceCopy,
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        inputs = [t.detach().requires_grad_(n) for t, n in zip(tensors, needed, strict=False)]
        leaves = [copy.leaf(p) for p in self.block.parameters]
        wanted = [x for x, n in zip([*inputs, *leaves], needed, strict=True) if n]
        with torch.enable_grad(), _restored_autocast(self._autocast):
            outputs = self.block.forward(*self.arguments(inputs))
        flat = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]
        pairs = [(o, g) for o, g in zip(flat, grad_outputs, strict=True) if g is not None and o.requires_grad]
        del outputs, flat
        if pairs:
            outs, grads_in = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(outs, wanted, grads_in, allow_unused=True))
        else:
            found = iter(())
        grads = [next(found, None) if n else None for n in needed]
        return grads[: len(inputs)], grads[len(inputs) :]


class BlockFunction(torch.autograd.Function):
    """The node: inputs are the call's tensors, then the block's host parameters."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = tensors[: len(tensors) - len(call.block.parameters)]
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        outputs = call.run_forward(inputs)
        fixed = [outputs[i] for i in call.block.nondifferentiable if i < len(outputs)]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: BlockCall = ctx.call
        if torch.is_grad_enabled():
            raise PrepareError(
                "gradients of gradients are not available in a prepared model: backward was called with "
                "create_graph=True. Call hydra_tune.release(model) first."
            )
        tensors = ctx.saved_tensors
        call.trial.enter_backward(call.token)
        return (None, *call.run_backward(tensors, ctx.needs_input_grad[1:], grad_outputs))


def forward_unsaved(block: Block, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The block's forward by the operators that training uses, but with nothing kept for a backward.

    Some operators compute otherwise, in the last bit, where no gradient is asked for (oneDNN's LSTM).
    """
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_forget, _forget):  # type: ignore[arg-type]
        outputs = block.forward(args, kwargs)
    return tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)


def _forget(_: Any) -> None:
    return None


def detached(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Leaves of a graph of their own, which require a gradient where the given ones do."""
    return [t.detach().requires_grad_(t.requires_grad) for t in tensors]


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [t._version for t in tensors]


# ---- the surroundings of a call ----------------------------------------------------------------------


class _Tensor:
    def __repr__(self) -> str:
        return "tensor"


_TENSOR: Any = _Tensor()


def _contents(leaf: object) -> Iterator[object]:
    """The values of an object's attributes, and of the lists and dicts among them, one level down."""
    for value in getattr(leaf, "__dict__", {}).values():
        yield value
        if isinstance(value, (list, tuple)):
            for item in value:
                yield item
                yield from getattr(item, "__dict__", {}).values()
        elif isinstance(value, dict):
            yield from value.values()


def _autocast_state() -> list[tuple[str, bool, torch.dtype]]:
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]


@contextmanager
def _restored_autocast(state: Sequence[tuple[str, bool, torch.dtype]]) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, enabled, dtype in state:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield
