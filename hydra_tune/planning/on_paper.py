"""What a first step that found no room would have needed, computed without any: on tensors that have no memory.

An estimate for the refusal's text, and for samplers that learn by how much trials did not fit. It grows with the model
and its batch. Nothing is known of a model whose control flow looks at values.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from hydra_tune.blocks.block import Block, gradient_bytes
from hydra_tune.fork import new_in_child
from hydra_tune.hooks import HOOKS_OF_MODULES
from hydra_tune.host_buffer import storage_bytes
from hydra_tune.thread_mode import ThreadMode
from hydra_tune.tree import map_tensors, tensors_in

_one_estimates = new_in_child(threading.Lock())  # a fake mode notes for the process that it is active
_OF_LOSS = 3  # what a loss makes of the model's outputs: log-probabilities, their gradient, one more


def least_bytes(
    model: nn.Module,
    blocks: Sequence[Block],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    held_bytes: Callable[[Sequence[nn.Parameter]], int],
) -> int | None:
    """The least budget that would do, about; None where nobody can tell. `held_bytes` of parameters is what these take
    on the device for a trial's life, with gradients and optimizer state."""
    count, trains = _Count(), torch.is_grad_enabled()
    try:
        with _one_estimates, FakeTensorMode(allow_non_fake_inputs=True) as fake:
            twin = _twin_of(model, fake)
            for block in blocks:
                count.watch(block.name, twin.get_submodule(block.name))
            given = map_tensors(lambda t: fake.from_tensor(t.detach()).requires_grad_(t.requires_grad), (args, kwargs))
            with count:
                outputs = type(twin).forward(twin, *given[0], **given[1])
            made = sum(map(storage_bytes, tensors_in(outputs)))
            inputs = sum(map(storage_bytes, tensors_in(given)))
    except Exception:  # any model may come
        return None
    kept = 2 * inputs + made + sum(map(storage_bytes, model.buffers()))
    every = count.live_bytes + (_OF_LOSS * made if trains else 0)
    parameters = list(model.parameters())
    resident = held_bytes(parameters) + kept + max(every, count.peak_bytes)
    in_slots = {id(p) for block in blocks for p in block.slot_parameters}
    loose = held_bytes([p for p in parameters if id(p) not in in_slots])
    between = every - sum(count.saved.values()) + sum(count.made.values())
    largest = 0
    for block in blocks:
        gradients = sum(gradient_bytes(p) for p in block.slot_parameters if p.requires_grad) if trains else 0
        work = max(count.work[block.name], count.saved[block.name] + gradients)
        largest = max(largest, block.weight_bytes + work)
    return min(resident, loose + kept + between + largest) if blocks else resident


def _twin_of(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    with FakeCopyMode(fake):
        twin = copy.deepcopy(model)
    for module in twin.modules():
        for kind in HOOKS_OF_MODULES:
            vars(module).get(kind, {}).clear()
    return twin


class _Count(ThreadMode):
    """Bytes of the storages that operators make, while they live; by the names of blocks the most that one has while it
    runs, what it leaves, and what of this it returns."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0
        self.work, self.saved, self.made = (defaultdict[str, int](int) for _ in range(3))
        self._known: set[int] = set()
        self._starts: list[int] = []

    def watch(self, name: str, module: nn.Module) -> None:
        def begin(*_: Any) -> None:
            self._starts.append(self.live_bytes)
            self.peak_bytes = self.live_bytes

        def end(_: nn.Module, __: Any, outputs: Any) -> None:
            start = self._starts.pop()
            self.work[name] = max(self.work[name], self.peak_bytes - start)
            self.saved[name] += self.live_bytes - start
            self.made[name] += sum(map(storage_bytes, tensors_in(outputs)))

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs or {}))}
        made = func(*args, **(kwargs or {}))
        for tensor in tensors_in(made):
            storage = tensor.untyped_storage()
            key, num_bytes = storage._cdata, storage.nbytes()
            if key not in given and key not in self._known:
                self._known.add(key)
                self.live_bytes += num_bytes
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                weakref.finalize(storage, self._forget, key, num_bytes)
        return made

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= num_bytes
