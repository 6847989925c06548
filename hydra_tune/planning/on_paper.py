"""What a first step that found no room would have needed, computed without any: on tensors that have no memory.

An estimate for the refusal's text, and for samplers that learn by how much trials did not fit. It grows with the model
and its batch. Nothing is known of a model whose control flow looks at values.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hydra_tune.blocks.block import Block, gradient_bytes
from hydra_tune.fork import new_in_child
from hydra_tune.glance import HOOKS_OF_MODULES
from hydra_tune.host_buffer import storage_bytes
from hydra_tune.optim import LiveBytes
from hydra_tune.tree import map_tensors, tensors_in

_one_estimates = new_in_child(threading.Lock())  # a fake mode notes for the process that it is active
_TELLS = logging.getLogger("torch._subclasses.fake_tensor")  # a hundred lines of what it cannot do
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
    with _one_estimates:
        said, _TELLS.disabled = _TELLS.disabled, True
        try:
            return _Estimate(model, blocks, held_bytes).run(args, kwargs)
        except Exception:  # any model may come
            return None
        finally:
            _TELLS.disabled = said


class _Estimate:
    def __init__(
        self, model: nn.Module, blocks: Sequence[Block], held_bytes: Callable[[Sequence[nn.Parameter]], int]
    ) -> None:
        self._model, self._blocks, self._held_bytes = model, blocks, held_bytes
        self._count = LiveBytes()
        self._starts: list[int] = []
        self._saved: dict[str, int] = {}
        self._made: dict[str, int] = {}
        self._work: dict[str, int] = {}

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        trains = torch.is_grad_enabled()
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            twin = self._twin(fake)
            for block in self._blocks:
                module = twin.get_submodule(block.name)
                module.register_forward_pre_hook(lambda *_: self._begin())
                module.register_forward_hook(lambda _, __, made, name=block.name: self._end(name, made))
            given = map_tensors(lambda t: fake.from_tensor(t.detach()).requires_grad_(t.requires_grad), (args, kwargs))
            with self._count:
                outputs = type(twin).forward(twin, *given[0], **given[1])
            made = sum(map(storage_bytes, tensors_in(outputs)))
            inputs = sum(map(storage_bytes, tensors_in(given)))
        kept = 2 * inputs + made + sum(storage_bytes(b) for b in self._model.buffers())
        every = self._count.live_bytes + (_OF_LOSS * made if trains else 0)
        parameters = list(self._model.parameters())
        resident = self._held_bytes(parameters) + kept + max(every, self._count.peak_bytes)
        if not self._blocks:
            return resident
        in_slots = {id(p) for block in self._blocks for p in block.slot_parameters}
        loose = self._held_bytes([p for p in parameters if id(p) not in in_slots])
        between = every - sum(self._saved.values()) + sum(self._made.values())
        return min(resident, loose + kept + between + max(self._of_block(block, trains) for block in self._blocks))

    def _of_block(self, block: Block, trains: bool) -> int:
        gradients = sum(gradient_bytes(p) for p in block.slot_parameters if p.requires_grad) if trains else 0
        work = max(self._work.get(block.name, 0), self._saved.get(block.name, 0) + gradients)
        return block.weight_bytes + work

    def _twin(self, fake: FakeTensorMode) -> nn.Module:
        memo: dict[int, Any] = {}
        for p in self._model.parameters():
            memo[id(p)] = nn.Parameter(fake.from_tensor(p.detach()), requires_grad=p.requires_grad)
        for module in self._model.modules():
            own = [v for v in vars(module).values() if isinstance(v, torch.Tensor)]
            for t in (*(b for b in module._buffers.values() if b is not None), *own):
                memo[id(t)] = fake.from_tensor(t.detach())
        twin = copy.deepcopy(self._model, memo)
        for module in twin.modules():
            for kind in HOOKS_OF_MODULES:
                vars(module).get(kind, {}).clear()
        return twin

    def _begin(self) -> None:
        self._starts.append(self._count.live_bytes)
        self._count.peak_bytes = self._count.live_bytes

    def _end(self, name: str, made: Any) -> None:
        start = self._starts.pop()
        self._work[name] = max(self._work.get(name, 0), self._count.peak_bytes - start)
        self._saved[name] = self._saved.get(name, 0) + self._count.live_bytes - start
        self._made[name] = self._made.get(name, 0) + sum(map(storage_bytes, tensors_in(made)))
