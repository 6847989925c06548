"""What an optimizer will take for some parameters, found by stepping ones like it on no memory at all."""

from __future__ import annotations

import copy
import logging
import math
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from hydra_tune.randomness import state_kept
from hydra_tune.shared_random import watching_draws
from hydra_tune.thread_mode import ThreadMode
from hydra_tune.tree import tensors_in

logger = logging.getLogger("hydra_tune")
_FEW, _MANY = 2, 4  # parameters of a copy: a loop keeps some of the one before until the next has its own


def optimizer_state_bytes(optimizer: torch.optim.Optimizer | None, parameters: Sequence[nn.Parameter]) -> int:
    """Bytes of optimizer state for `parameters`, where `optimizer` keeps it beside them.

    Steps copies of the optimizer on meta tensors, for each kind of parameter. Two values a parameter, as Adam keeps,
    are assumed where there is no optimizer yet or it can't be copied so.
    """
    trainable = [p for p in parameters if p.requires_grad]
    every = sum(p.numel() * p.element_size() for p in trainable)
    if optimizer is None or not trainable:
        return 2 * every
    if isinstance(optimizer, torch.optim.LBFGS):  # steps and differences of gradients, and two values more
        return (2 * int(optimizer.param_groups[0]["history_size"]) + 2) * every
    try:
        return sum(count * step.state_bytes for step, count in _steps(optimizer, trainable, foreach_by_default=False))
    except Exception as error:  # any optimizer class may come, with any constructor
        logger.info("cannot size the state of %s (%s); assuming Adam's", type(optimizer).__name__, error)
        return 2 * every


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
    where it steps them at once, as with `foreach`; of two of the largest where it steps one after another.

    Steps copies of the optimizer, as above. Where there is none or it can't be copied so, two values a parameter are
    assumed.
    """
    sizes = [p.numel() * p.element_size() for p in parameters if p.requires_grad]
    if not sizes:
        return 0
    if isinstance(optimizer, torch.optim.LBFGS):  # which steps all of them as one vector
        return 10 * sum(sizes)
    defaults = getattr(optimizer, "defaults", {})
    try:
        if optimizer is not None:
            trainable = [p for p in parameters if p.requires_grad]
            steps = list(_steps(optimizer, trainable, foreach_by_default=foreach_by_default))
            at_once = sum(count * step.scratch_bytes for step, count in steps if step.at_once)
            return at_once + max((_FEW * step.scratch_bytes for step, _ in steps if not step.at_once), default=0)
    except Exception as error:  # as above
        logger.info("cannot size a step of %s (%s); assuming two values", type(optimizer).__name__, error)
    if defaults.get("fused"):
        return 0
    foreach = defaults.get("foreach")
    return 2 * (sum(sizes) if (foreach_by_default if foreach is None else foreach) else max(sizes))


def options_of(optimizer: torch.optim.Optimizer) -> list[tuple[Hashable, list[nn.Parameter]]]:
    """What decides the bytes that it takes: each group's options, of which a rate counts as zero or not, and its
    parameters."""
    defaults = getattr(optimizer, "defaults", None)
    groups = getattr(optimizer, "param_groups", [])
    own = ({k: v for k, v in group.items() if defaults is None or k in defaults} for group in groups)
    return [(_plain_options(options), group["params"]) for options, group in zip(own, groups, strict=True)]


def load_exactly(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """To the bit: `load_state_dict` would round a state to its parameter's dtype.

    Raises:
        ValueError, KeyError: as `load_state_dict`.
    """
    optimizer.load_state_dict(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in state["state"].items():
        own = optimizer.state[parameters[index]] if isinstance(index, int) else {}
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, torch.Tensor) and own[key].dtype != value.dtype:
                own[key] = value.to(own[key].device)


def _plain_options(group: dict[str, Any]) -> tuple[tuple[str, Hashable], ...]:
    return tuple((key, _plain(value)) for key, value in sorted(group.items()) if key != "params")


def _plain(value: Any) -> Hashable:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value != 0
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else repr(value)


class _Kind(NamedTuple):
    """Parameters that take the same."""

    options: tuple[tuple[str, Hashable], ...]
    fused: bool  # its step takes nothing beside its state
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Step:
    """What one parameter takes."""

    state_bytes: int
    scratch_bytes: int
    at_once: bool  # with all others


_MOST_KNOWN = 10_000  # kinds of a class, whose options may be new ones each time
_known: weakref.WeakKeyDictionary[type, dict[_Kind, _Step]] = weakref.WeakKeyDictionary()


def _steps(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], *, foreach_by_default: bool
) -> Iterator[tuple[_Step, int]]:
    """For each kind of parameter that it steps what one takes, and how many there are."""
    wanted, known = set(parameters), _known.setdefault(type(optimizer), {})
    kinds: Counter[_Kind] = Counter()
    options: dict[_Kind, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        own = {key: value for key, value in group.items() if key in optimizer.defaults}
        own |= {key: False for key in ("fused", "capturable") if key in own}  # for which meta tensors are no device
        if own.get("foreach", False) is None:
            own["foreach"] = foreach_by_default and not isinstance(optimizer, torch.optim.Adafactor)  # a loop anywhere
        plain, fused = _plain_options(own), bool(group.get("fused"))
        for p in group["params"]:
            if p in wanted:
                kind = _Kind(plain, fused, p.size(), p.stride(), p.dtype)
                kinds[kind] += 1
                options[kind] = own
    for kind, count in kinds.items():
        if kind not in known:
            if len(known) == _MOST_KNOWN:
                known.clear()
            known[kind] = _measured(type(optimizer), kind, options[kind])
        yield known[kind], count


def _measured(make: type[torch.optim.Optimizer], kind: _Kind, options: dict[str, Any]) -> _Step:
    """Nobody draws other random numbers for it, nor is any hook called.

    Raises:
        RuntimeError: hooks of all optimizers would be, by a class that calls its base's `step`.
    """
    if make.__module__.partition(".")[0] != "torch" and (_global_optimizer_pre_hooks or _global_optimizer_post_hooks):
        raise RuntimeError("hooks of all optimizers would be called")

    def measure(number: int) -> tuple[int, int]:
        return _measured_together(make, kind, copy.deepcopy(options), number)

    with state_kept(), torch.no_grad():
        (few, many), _ = watching_draws(lambda: (measure(_FEW), measure(_MANY)))
    at_once = many[1] > few[1] * (_FEW + _MANY) / (2 * _FEW)
    scratch_bytes = 0 if kind.fused else math.ceil(many[1] / _MANY if at_once else few[1] / _FEW)
    return _Step(math.ceil(few[0] / _FEW), scratch_bytes, at_once)


def _measured_together(
    make: type[torch.optim.Optimizer], kind: _Kind, options: dict[str, Any], number: int
) -> tuple[int, int]:
    """Bytes of state, and of temporaries at most, of as many parameters."""
    parameters = [
        nn.Parameter(torch.empty_strided(kind.size, kind.stride, dtype=kind.dtype, device="meta"))
        for _ in range(number)
    ]
    for p in parameters:
        p.grad = torch.empty_like(p)
    optimizer: Any = make([{"params": parameters, **options}])  # type: ignore[call-arg]
    step = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    with _Temporaries([]):
        step(optimizer)  # makes its state
    state = tensors_in(list(optimizer.state.values()))
    with _Temporaries([*parameters, *(p.grad for p in parameters), *state]) as temporaries:
        step(optimizer)
    state = tensors_in(list(optimizer.state.values()))
    return sum(v.numel() * v.element_size() for v in state), temporaries.peak_bytes


class _Temporaries(ThreadMode):
    """Counts the storages that operators make, while they live, beside those of `known`. A number that is read of a
    meta tensor is 1."""

    def __init__(self, known: Sequence[Any]) -> None:
        self.peak_bytes = 0
        self._live_bytes = 0
        self._kept = [tensor.untyped_storage() for tensor in known]  # or the next one might get their place
        self._known = {storage._cdata for storage in self._kept}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return 1.0
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
