"""How much memory an optimizer will take, before it has stepped: copies of it step parameters on the meta device."""

from __future__ import annotations

import copy
import logging
import math
import weakref
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_map

from hydra_tune.blocks.tree import tensors_in
from hydra_tune.devices.counting_mode import ThreadMode
from hydra_tune.devices.tensor_bytes import storage_bytes, tensor_bytes
from hydra_tune.randomness import DrawRecord, drawing_again
from hydra_tune.randomness.python_and_numpy import PythonAndNumpyStates

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

logger = logging.getLogger("hydra_tune")
# How many parameters a copy has. At least two: a loop over parameters frees some temporaries of one only once the next
# one has made its own.
_FEW, _MANY = 2, 4


def stepping_bytes(
    optimizer: torch.optim.Optimizer | None, parameters: Sequence[nn.Parameter], *, foreach_by_default: bool = False
) -> tuple[int, int]:
    """Bytes of optimizer state for `parameters`, and the most bytes of temporaries in one step, on the same device.

    Temporaries are those of all parameters if the optimizer steps them at once, as with `foreach`. If it steps one
    after another, they are those of the two largest.

    Steps copies of the optimizer on meta tensors, for each kind of parameter. If there is no optimizer yet, or such a
    copy fails, both are assumed to be two values a parameter, as in Adam.
    """
    trained = [p for p in parameters if p.requires_grad]
    every = sum(p.nbytes for p in trained)
    if isinstance(optimizer, torch.optim.LBFGS):  # steps all as one vector; keeps past steps and gradient differences
        return (2 * int(optimizer.param_groups[0]["history_size"]) + 2) * every, 10 * every
    if optimizer is not None:
        try:
            return _stepped_bytes(optimizer, trained, foreach_by_default=foreach_by_default)
        except Exception as error:  # a user's optimizer class may have any constructor
            logger.info("cannot size a step of %s (%s); assuming Adam's", type(optimizer).__name__, error)
    at_once = foreach_by_default or getattr(optimizer, "defaults", {}).get("foreach")
    return 2 * every, 2 * (every if at_once else max((p.nbytes for p in trained), default=0))


def training_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of weights, gradients and optimizer state. Without an optimizer no state counts."""
    parameters = list(model.parameters())
    gradients = sum(p.nbytes for p in parameters if p.requires_grad)
    state = 0 if optimizer is None else stepping_bytes(optimizer, parameters)[0]
    return sum(map(tensor_bytes, parameters)) + gradients + state


def held_bytes(trial: Trial, parameters: Sequence[nn.Parameter], *, trains: bool) -> int:
    """Bytes of these parameters; in training also of gradients, optimizer state, and temporaries of an optimizer's
    step. A trial without an optimizer may still get one, so Adam's bytes are assumed for it."""
    total = sum(map(storage_bytes, parameters))
    if not trains:
        return total
    total += sum(storage_bytes(p) for p in parameters if p.requires_grad)
    foreach, left = trial.device.counts_as_gpu, {id(p): p for p in parameters}
    taken = []
    for optimizer in trial.optimizers:
        own = [left.pop(id(p)) for group in optimizer.param_groups for p in group["params"] if id(p) in left]
        taken.append(stepping_bytes(optimizer, own, foreach_by_default=foreach))
    taken = taken or [stepping_bytes(None, parameters, foreach_by_default=foreach)]
    return total + sum(state for state, _ in taken) + max(scratch for _, scratch in taken)


def options_of(optimizer: torch.optim.Optimizer) -> list[tuple[str, list[nn.Parameter]]]:
    """What decides how many bytes the optimizer takes: for each group, its options as text, and its parameters. A float
    option, as a learning rate, counts only as zero or not."""
    defaults = getattr(optimizer, "defaults", {})
    return [
        (_told({k: v for k, v in group.items() if k in defaults}), group["params"]) for group in optimizer.param_groups
    ]


def load_exactly(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load `state` without rounding. `load_state_dict` alone would cast each state to its parameter's dtype.

    Raises:
        ValueError, KeyError: as `load_state_dict` does.
    """
    optimizer.load_state_dict(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in state["state"].items():
        own = optimizer.state[parameters[index]] if isinstance(index, int) else {}
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, torch.Tensor) and own[key].dtype != value.dtype:
                own[key] = value.to(own[key].device)


def _told(options: dict[str, Any]) -> str:
    def told_of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.dtype
        return value != 0 if isinstance(value, float) else value

    return repr(tree_map(told_of, dict(sorted(options.items()))))


# Results of `_measured`, by the optimizer's class, then by the options and the parameter's shape, strides and dtype.
_known: weakref.WeakKeyDictionary[type, dict[Hashable, tuple[int, int, int]]] = weakref.WeakKeyDictionary()


def _stepped_bytes(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], *, foreach_by_default: bool
) -> tuple[int, int]:
    wanted, known = set(parameters), _known.setdefault(type(optimizer), {})
    state_bytes = together_bytes = alone_bytes = 0
    for group in optimizer.param_groups:
        own = {key: value for key, value in group.items() if key in optimizer.defaults}
        own |= {key: False for key in ("fused", "capturable") if key in own}  # neither works on meta tensors
        if own.get("foreach", False) is None:
            own["foreach"] = foreach_by_default and not isinstance(optimizer, torch.optim.Adafactor)  # loops by default
        options = _told(own)
        for p in wanted.intersection(group["params"]):
            kind = options, p.size(), p.stride(), p.dtype
            if kind not in known:
                known[kind] = _measured(type(optimizer), own, p)
            state, together, alone = known[kind]
            state_bytes += state
            if not group.get("fused"):
                together_bytes, alone_bytes = together_bytes + together, max(alone_bytes, alone)
    return state_bytes, together_bytes + alone_bytes


def _measured(make: type[torch.optim.Optimizer], options: dict[str, Any], like: torch.Tensor) -> tuple[int, int, int]:
    """Step copies of an optimizer of class `make` on parameters like `like`, without moving any random generator and
    without calling hooks.

    Returns bytes of state per parameter; then bytes of temporaries: per parameter if it steps all at once, else 0; and
    of two parameters if it steps one after another, else 0.
    """
    hooks = [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]
    foreign = [hook for hook in hooks if not getattr(hook, "__module__", "").startswith("hydra_tune.")]
    if make.__module__.partition(".")[0] != "torch" and foreign:
        raise RuntimeError("hooks of all optimizers would be called, if it calls its base's step")

    def step_copy(number: int) -> tuple[int, int]:
        parameters = [nn.Parameter(torch.empty_like(like, device="meta")) for _ in range(number)]
        for p in parameters:
            p.grad = torch.empty_like(p)
        optimizer: Any = make([{"params": parameters, **copy.deepcopy(options)}])  # type: ignore[call-arg]
        step = type(optimizer).step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        with LiveBytes():
            step(optimizer)  # the first step makes the state
        with LiveBytes() as temporaries:
            step(optimizer)
        return sum(tensor_bytes(v) for v in tensors_in(list(optimizer.state.values()))), temporaries.peak_bytes

    shared = PythonAndNumpyStates()
    with drawing_again(DrawRecord()), torch.no_grad():
        (_, few), (state_bytes, many) = step_copy(_FEW), step_copy(_MANY)
    shared.put_back()
    at_once = many > few * (_FEW + _MANY) / (2 * _FEW)
    return math.ceil(state_bytes / _MANY), *((math.ceil(many / _MANY), 0) if at_once else (0, few))


class LiveBytes(ThreadMode):
    """Counts the most bytes that operators' new storages take at once. Reading a number from a meta tensor gives 1."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._living: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return 1.0
        is_new = func is torch.ops.aten.lift_fresh.default  # `torch.tensor` has made its input
        given = set() if is_new else {t.untyped_storage()._cdata for t in tensors_in((args, kwargs or {}))}
        made = func(*args, **(kwargs or {}))
        storages = [t.untyped_storage() for t in tensors_in(made)]
        self._living.update({s: s.nbytes() for s in storages if s._cdata not in given})
        self.peak_bytes = max(self.peak_bytes, sum(self._living.values()))
        return made
