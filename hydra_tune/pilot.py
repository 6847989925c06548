"""Measures a model's blocks on its first batch, one block at a time on the device.

The root module runs once as it would in training. Before each block's own call the pilot runs it forward,
and forward with gradients and backward, and notes bytes and seconds. Nothing of it stays: random state
and buffers are put back, `p.grad` is never written, and the outputs are thrown away.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hydra_tune.block import Block
from hydra_tune.config import format_bytes
from hydra_tune.errors import PrepareError
from hydra_tune.host_buffer import storage_bytes
from hydra_tune.node import BlockCall, detached, forward_unsaved, versions_of
from hydra_tune.random_state import random_state_kept
from hydra_tune.residency import Residency
from hydra_tune.shard import BlockProfile
from hydra_tune.spill import DeviceCopy

logger = logging.getLogger("hydra_tune")
OUTPUT_COPIES = 3  # what a loss makes of the model's outputs: log-probabilities, their gradient, one more


class DoesNotFitError(Exception):
    """The pilot has less free memory than a block needs to compute; `work_bytes` is None if it never got so far."""

    def __init__(self, block: Block, work_bytes: int | None) -> None:
        work = "more than is free" if work_bytes is None else format_bytes(work_bytes)
        weights = format_bytes(block.weight_bytes)
        super().__init__(f"block {block.name} needs {weights} of weights and {work} to compute")


@dataclass
class Pilot:
    """One pass over a model. Afterwards: profiles in the order in which blocks ran, and the step's bytes."""

    model: nn.Module
    blocks: Sequence[Block]
    residency: Residency
    free_bytes: int
    profiles: dict[Block, BlockProfile] = field(default_factory=dict)
    step_bytes: int = 0
    kept_bytes: int = 0  # what a training loop keeps from one step to the next: batches and outputs
    peak_bytes: int = 0
    _copy: tuple[Block, DeviceCopy] | None = None

    def run(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        meter, device, buffers = self.residency.meter, self.residency.device, list(self.model.buffers())
        values = [b.clone() for b in buffers]
        before = meter.trial_bytes
        try:
            with random_state_kept(device.generators()), torch.enable_grad():
                meter.watch_outside()
                outputs = forward(*args, **kwargs)
            tensors = [x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor)]
            self._refuse_uncalled_weights(tensors)
            _warn_of_reordered_sums(tensors)
            self._drop_copy()
            forward_peak, held = meter.outside_peak(), meter.trial_bytes - before
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            self.kept_bytes = 2 * sum(map(storage_bytes, inputs)) + sum(map(storage_bytes, tensors))
            boundaries = [p.boundary_bytes for p in self.profiles.values()]
            saved_between = max(0, held - sum(boundaries))
            loss_bytes = max(OUTPUT_COPIES * sum(map(storage_bytes, tensors)), saved_between)
            self.step_bytes = forward_peak + loss_bytes + 2 * max(boundaries, default=0)
        finally:
            self._drop_copy()
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)
        uncalled = [block for block in self.blocks if block not in self.profiles]
        self.profiles.update((block, BlockProfile(block.name, block.weight_bytes)) for block in uncalled)

    # ---- one block ----

    def copy_of(self, block: Block) -> DeviceCopy:
        """The block alone on the device, at the arena's start."""
        if self._copy is None or self._copy[0] is not block:
            self._drop_copy()
            if block.weight_bytes > self.free_bytes:
                raise DoesNotFitError(block, None)
            self._copy = block, self.residency.promote([block], 0, block.weight_bytes)
        return self._copy[1]

    def _drop_copy(self) -> None:
        if self._copy is not None:
            block, _ = self._copy
            self._copy = None
            self.residency.device.free_slot(0, block.weight_bytes)

    def measure(self, call: BlockCall, tensors: Sequence[torch.Tensor]) -> None:
        """Profile one call of a block; of several calls, the largest figures count."""
        block, meter, device = call.block, self.residency.meter, self.residency.device
        meter.outside_ends()
        copy = self.copy_of(block)
        with random_state_kept(device.generators()), self.residency.inside(block, copy):
            now = [(i, copy.buffer(*site).clone()) for i, site in enumerate(block.buffer_sites)]
            try:
                forward_s, forward_work, boundary = self._forward(call, tensors)
                backward_s, backward_work, saved = self._backward(call, tensors, copy)
            except torch.OutOfMemoryError:
                raise DoesNotFitError(block, None) from None
            copy.swap_buffers(block, now)
        meter.outside_starts()
        profile = BlockProfile(
            block.name, block.weight_bytes, forward_work, backward_work, saved, boundary, forward_s, backward_s,
            block.nondifferentiable,
        )  # fmt: skip
        known = self.profiles.get(block)
        self.profiles[block] = profile if known is None else _larger(known, profile)
        fits = block.weight_bytes + max(forward_work, backward_work)
        self.peak_bytes = max(self.peak_bytes, fits + meter.trial_bytes)
        if fits > self.free_bytes:
            raise DoesNotFitError(block, max(forward_work, backward_work))

    def _forward(self, call: BlockCall, tensors: Sequence[torch.Tensor]) -> tuple[float, int, int]:
        with torch.no_grad(), self._measured() as used:
            versions, start = versions_of(tensors), time.perf_counter()
            try:
                outputs = forward_unsaved(call.block, *call.arguments(detached(tensors)))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # autograd's own refusal of an input changed in place does not name the block
                call.block.forward(*call.arguments(tensors))
                call.refuse_changed_inputs(tensors, versions)
                raise
            call.refuse_changed_inputs(tensors, versions)
            self.residency.device.synchronize()
            seconds = time.perf_counter() - start
            boundary = sum(storage_bytes(x) for x in tree_leaves(outputs) if isinstance(x, torch.Tensor))
        return seconds, used[0], boundary

    def _backward(self, call: BlockCall, tensors: Sequence[torch.Tensor], copy: DeviceCopy) -> tuple[float, int, int]:
        block, meter = call.block, self.residency.meter
        inputs = detached(tensors)
        leaves = [copy.leaf(p) for p in block.parameters]
        with torch.enable_grad(), self._measured() as used:
            before, start = meter.trial_bytes, time.perf_counter()
            outputs = [x for x in tree_leaves(block.forward(*call.arguments(inputs))) if isinstance(x, torch.Tensor)]
            saved = meter.trial_bytes - before
            block.nondifferentiable = tuple(i for i, x in enumerate(outputs) if not x.requires_grad)
            differentiable = [x for x in outputs if x.requires_grad]
            self._refuse_foreign_nodes(block, differentiable, [*inputs, *leaves])
            call.num_uses = _num_uses(differentiable, [*inputs, *leaves])
            wanted = [x for x in (*inputs, *leaves) if x.requires_grad]
            if differentiable:
                ones = [torch.ones_like(x) for x in differentiable]
                torch.autograd.grad(differentiable, wanted, ones, allow_unused=True)
            self.residency.device.synchronize()
            seconds = time.perf_counter() - start
        _refuse_side_channels(block)
        return seconds, used[0], saved

    @contextmanager
    def _measured(self) -> Iterator[list[int]]:
        """The most bytes beyond those there at the start, known at the end."""
        used = [0]
        before = self.residency.meter.start_window()
        yield used
        used[0] = self.residency.meter.window_peak - before

    # ---- what cannot be cut ----

    def _refuse_foreign_nodes(
        self, block: Block, outputs: Sequence[torch.Tensor], allowed: Sequence[torch.Tensor]
    ) -> None:
        known = {id(t) for t in allowed}
        for node in _nodes(outputs):
            variable = getattr(node, "variable", None)
            foreign = variable is not None and id(variable) not in known
            if foreign or type(node).__name__ == "BlockFunctionBackward":
                what = self._name_of(variable) if foreign else "a tensor of another block"
                raise PrepareError(
                    f"a block reaches weights and activations through its own modules and arguments, but "
                    f"{block.name} uses {what} beside them. Pass it as an argument, or register the weight in "
                    "the block as well (a tied parameter)."
                )

    def _refuse_uncalled_weights(self, outputs: Sequence[torch.Tensor]) -> None:
        owner = {id(p): block for block in self.blocks for p in block.parameters}
        for node in _nodes(outputs):
            if type(node).__name__ == "BlockFunctionBackward":
                continue
            for child, _ in node.next_functions:
                variable = getattr(child, "variable", None)
                if variable is not None and id(variable) in owner:
                    raise PrepareError(
                        f"weights of a block are used by calling it, but {self._name_of(variable)} of block "
                        f"{owner[id(variable)].name} is used from outside. Call the module that owns it, or make "
                        "it a parameter of the model's root, which stays resident."
                    )

    def _name_of(self, variable: torch.Tensor | None) -> str:
        names = [name for name, p in self.model.named_parameters() if p is variable]
        return names[0] if names else "a tensor that requires a gradient"


def _nodes(outputs: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Every node of the graph behind `outputs`."""
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)


def _num_uses(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[int]:
    """How many operators of a block's graph each leaf goes into."""
    uses = Counter(id(getattr(child, "variable", None)) for node in _nodes(outputs) for child, _ in node.next_functions)
    return [uses[id(leaf)] for leaf in leaves]


def _warn_of_reordered_sums(outputs: Sequence[torch.Tensor]) -> None:
    """A block adds the gradients of its own uses of a tensor before the engine adds those of others."""
    users: defaultdict[tuple[Any, int], list[tuple[str, int]]] = defaultdict(list)
    for node in _nodes(outputs):
        call = getattr(node, "call", None)
        for i, (child, number) in enumerate(node.next_functions):
            if child is not None:
                used = (call.block.name, call.num_uses[i]) if isinstance(call, BlockCall) else ("", 1)
                users[child, number].append(used)
    shared = (tensor_users for tensor_users in users.values() if len(tensor_users) > 1)
    names = sorted({name for tensor_users in shared for name, uses in tensor_users if uses > 1})
    if names:
        logger.warning(
            "gradients may differ from plain PyTorch's in the last bit where the model is spilled: %s%s use an input "
            "more than once that is used elsewhere too (a skip connection), and sums are made block by block",
            ", ".join(names[:3]),
            " and others" if len(names) > 3 else "",
        )


def _refuse_side_channels(block: Block) -> None:
    for module in block.module.modules():
        for name, value in vars(module).items():
            values = value if isinstance(value, (list, tuple)) else [value]
            if any(isinstance(v, torch.Tensor) and v.grad_fn is not None for v in values):
                raise PrepareError(
                    f"a block hands activations on through its outputs, but {block.name} keeps one in "
                    f"{type(module).__name__}.{name}, whose gradient would be lost. Return it, or detach it."
                )


def _larger(a: BlockProfile, b: BlockProfile) -> BlockProfile:
    figures = {k: max(v, getattr(b, k)) for k, v in vars(a).items() if k not in ("name", "nondifferentiable")}
    figures["saved_bytes"] = a.saved_bytes + b.saved_bytes  # resident, each call keeps its own
    return BlockProfile(a.name, **figures, nondifferentiable=b.nondifferentiable)
