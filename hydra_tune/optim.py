"""What an optimizer will take for some parameters, found by stepping one like it on no memory at all."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_tune.tree import tensors_in

logger = logging.getLogger("hydra_tune")


def optimizer_state_bytes(optimizer: torch.optim.Optimizer | None, parameters: Sequence[nn.Parameter]) -> int:
    """Bytes of optimizer state for `parameters`, where `optimizer` keeps it beside them.

    Steps copies of the optimizer on meta tensors, one for each kind of parameter. Two values a parameter, as Adam
    keeps, are assumed where there is no optimizer yet or it can't be copied so.
    """
    trainable = [p for p in parameters if p.requires_grad]
    assumed = 2 * sum(p.numel() * p.element_size() for p in trainable)
    if optimizer is None or not trainable:
        return assumed
    try:
        return sum(count * _state_bytes(twin) for twin, count in _on_meta(optimizer, trainable))
    except Exception as error:  # any optimizer class may come, with any constructor
        logger.info("cannot size the state of %s (%s); assuming Adam's", type(optimizer).__name__, error)
        return assumed


def training_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Weights, gradients and optimizer state; without an optimizer, none of its state."""
    parameters = list(model.parameters())
    weights = sum(p.numel() * p.element_size() for p in parameters)
    gradients = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    return weights + gradients + (0 if optimizer is None else optimizer_state_bytes(optimizer, parameters))


def step_scratch_bytes(
    optimizer: torch.optim.Optimizer | None, parameters: Sequence[nn.Parameter], *, foreach_by_default: bool
) -> int:
    """The most that temporaries of one step on the device take, where it steps `parameters` there: of all of them
    with `foreach`, of one without.

    Steps copies of the optimizer, as above. Where there is none or it can't be copied so, two values a parameter are
    assumed.
    """
    trainable = [p for p in parameters if p.requires_grad]
    defaults = getattr(optimizer, "defaults", {"foreach": None})  # none yet, or one that wraps another
    if defaults.get("fused") or not trainable:
        return 0
    foreach = defaults.get("foreach", False)
    foreach = foreach_by_default if foreach is None else foreach
    at_once = sum if foreach else max
    assumed = 2 * at_once(p.numel() * p.element_size() for p in trainable)
    if optimizer is None:
        return assumed
    try:
        if foreach:
            return sum(count * _scratch_bytes(twin) for twin, count in _on_meta(optimizer, trainable, foreach=True))
        twins = _on_meta(optimizer, trainable, each=2, foreach=False)  # the loop keeps some until the next has its own
        return max((_scratch_bytes(twin) for twin, _ in twins), default=0)
    except Exception as error:  # as above
        logger.info("cannot size a step of %s (%s); assuming two values", type(optimizer).__name__, error)
        return assumed


def _on_meta(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], each: int = 1, **options: Any
) -> Iterator[tuple[torch.optim.Optimizer, int]]:
    """For each kind of parameter that it steps, one like it with these options over `each` of that kind with gradients;
    and how many there are. Operators take their time on meta tensors."""
    wanted = set(parameters)
    for group in optimizer.param_groups:
        own = {k: v for k, v in group.items() if k in optimizer.defaults}
        own |= {k: v for k, v in {"fused": None, **options}.items() if k in own}
        kinds = Counter((p.size(), p.stride(), p.dtype) for p in group["params"] if p in wanted)
        for (size, stride, dtype), count in kinds.items():
            twins = [nn.Parameter(torch.empty_strided(size, stride, dtype=dtype, device="meta")) for _ in range(each)]
            for twin in twins:
                twin.grad = torch.empty_like(twin)
            yield type(optimizer)([{"params": twins, **own}]), count  # type: ignore[call-arg]


def _state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    optimizer.step()
    return sum(v.numel() * v.element_size() for v in _state_of(optimizer))


def _scratch_bytes(optimizer: torch.optim.Optimizer) -> int:
    optimizer.step()  # makes its state
    parameters = optimizer.param_groups[0]["params"]
    temporaries = _Temporaries([*parameters, *(p.grad for p in parameters), *_state_of(optimizer)])
    with temporaries:
        optimizer.step()
    return temporaries.peak_bytes


class _Temporaries(TorchDispatchMode):
    """Counts the storages that operators make, while they live, beside those of `known`."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._live_bytes = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in tensors_in(outputs):
            self._note(tensor.untyped_storage())
        return outputs

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self._live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
            weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.remove(key)
        self._live_bytes -= num_bytes
