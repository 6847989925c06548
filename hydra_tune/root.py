"""The prepared model as a whole: what stands in its `forward`, and what it must be like."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import update_wrapper
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hydra_tune.errors import PrepareError, UntraceableError
from hydra_tune.fingerprint import slots_of
from hydra_tune.glance import Unchanged
from hydra_tune.host_buffer import is_dense
from hydra_tune.interrupts import interrupts
from hydra_tune.own_forward import StandIn, own_forward_of
from hydra_tune.shard import TrialPlan

_NOT_THE_USERS = frozenset((*vars(nn.Module()), "forward", "_apply"))
_MOST_CALLS = 64  # that differ, of one model
_MOST_ITEMS = 1_000  # of a container, and of what an attribute leads to


class Executor(Protocol):
    """What the root needs of the trial it runs for."""

    @property
    def plan(self) -> TrialPlan | None: ...

    @property
    def is_plain(self) -> bool: ...

    def run_root(self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any: ...

    def end(self) -> None: ...


class SeveralModels(nn.Module):
    """Those of one trial, as one: never called."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self._modules = {str(i): model for i, model in enumerate(models)}


class RootForward(StandIn):
    """Stands in the prepared model's instance attribute `forward`."""

    def __init__(self, model: nn.Module, trial: Executor) -> None:
        super().__init__(model)
        self.trial = trial
        update_wrapper(self, self.original, updated=())
        self._unchanged: Unchanged | None = None  # here, lest a trial that outlives its model keeps that
        self._kinds: dict[Any, Any] = {}

    def kind_of(self, call: Any, find: Callable[[], Any]) -> Any:
        """What `find` has found for such a call, while the model is as it was then."""
        if self._unchanged is not None and call in self._kinds and self._unchanged.holds():
            return self._kinds[call]
        kind = find()
        if self._unchanged is None or not self._unchanged.holds() or len(self._kinds) > _MOST_CALLS:
            self._unchanged, self._kinds = Unchanged.since_now(self.module), {}
        if call is not None:
            self._kinds[call] = kind
        return kind

    def __getattr__(self, name: str) -> Any:
        if name in ("__code__", "__globals__"):
            raise UntraceableError(
                "a prepared model runs operator by operator, but something reads its forward's code, as torch.export "
                "and torch.jit.script do. Call hydra_tune.release(model) first."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:  # bound to the model, as `Accelerator.unwrap_model` leaves it
            args = args[1:]
        if self.trial.is_plain:  # what somebody has put around this one leads here still
            return self.original(*args, **kwargs)
        outputs = self.trial.run_root(self, args, kwargs)
        if interrupts.pending:
            interrupts.check()
        return outputs


class RootApply:
    """Stands in the prepared model's instance attribute `_apply`, through which `.to`, `.half` and their kin go."""

    def __init__(self, model: nn.Module, trial: Executor) -> None:
        self.trial = trial
        self._model = model
        self._own: Callable[..., nn.Module] | None = vars(model).get("_apply")

    def __call__(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            wanted = function(tensor.detach().flatten()[:0])
            moves, converts = wanted.device != tensor.device, wanted.dtype != tensor.dtype
            if moves or (converts and self.trial.plan is not None):
                raise PrepareError(
                    f"a prepared model stays as it is after its first batch, and where its weights are is the pool's "
                    f"business, but {name} was to go from {tensor.dtype} on {tensor.device} to {wanted.dtype} on "
                    f"{wanted.device}. Convert the model before prepare, or call hydra_tune.release(model) first."
                )
        return self._own_apply(function, recurse)

    @property
    def _own_apply(self) -> Callable[..., nn.Module]:
        return self._own or type(self._model)._apply.__get__(self._model)

    def give_back(self) -> None:
        """The model is as it was."""
        if self._own is None:
            del vars(self._model)["_apply"]
        else:
            vars(self._model)["_apply"] = self._own

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self._model, "_apply")


def trial_of(model: nn.Module) -> Any:
    """The one that has prepared it and has not let go of it since, if there is one: also where somebody has put a
    forward around ours."""
    for stand_in in (vars(model).get("forward"), vars(model).get("_apply")):
        if isinstance(stand_in, (RootForward, RootApply)) and not stand_in.trial.is_plain:
            return stand_in.trial
    return None


def give_back(model: nn.Module, trial: Executor) -> None:
    """What the model had on itself before this trial has prepared it."""
    forward, apply = vars(model).get("forward"), vars(model).get("_apply")
    forward = getattr(forward, "__func__", forward)
    if isinstance(apply, RootApply) and apply.trial is trial:
        apply.give_back()
    if isinstance(forward, RootForward) and forward.trial is trial:
        forward.give_back()


def _refuse_lazy_forward(model: nn.Module) -> None:
    forward = own_forward_of(model) or type(model).forward
    if any(kind(forward) for kind in (isgeneratorfunction, iscoroutinefunction, isasyncgenfunction)):
        raise PrepareError(
            f"a prepared model's forward computes when it is called, but that of {type(model).__name__} is a "
            "generator or a coroutine. Return a list, or await elsewhere."
        )


def refuse_unsupported(model: nn.Module) -> None:
    _refuse_lazy_forward(model)
    for name, module in model.named_modules():
        what = name or type(module).__name__
        if _is_compiled(module):
            raise PrepareError(
                f"a prepared model runs operator by operator, but {what} was given to "
                "torch.compile, which would bypass the blocks or fall back to that by itself. Prepare the plain model."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise PrepareError(
                f"a prepared model runs operator by operator, but {what} was made by torch.jit, whose weights can't be "
                "put elsewhere. Prepare the plain module."
            )
        slots = slots_of(type(module))
        if slots:
            raise PrepareError(
                f"a module's attributes are in its __dict__, where they can be put back, but {what} has "
                f"{', '.join(slots)} in __slots__. Take the __slots__ away."
            )
    tensors = {id(t): (name, t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    for name, tensor in tensors.values():
        if tensor.device.type == "meta":
            raise PrepareError(
                f"a model has weights before it is prepared, but {name} is on meta. Materialise it first."
            )
        if is_lazy(tensor):
            raise PrepareError(
                f"a model has weights before it is prepared, but {name} is lazy. Call the model once on a batch."
            )
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise PrepareError(
                f"weights are torch.nn.Parameter and plain tensors, but {name} is a {type(tensor).__name__}, whose "
                "copies on the device would be plain. Make a module of what it does."
            )
        if not is_dense(tensor) and tensor.numel() > 0:
            way = "dense (.to_dense())" if tensor.layout is not torch.strided else "fill its memory (.contiguous())"
            raise PrepareError(
                f"weights and buffers are dense and fill their memory, but {name} has layout {tensor.layout} and "
                f"strides {tensor.stride() if tensor.layout is torch.strided else None}. Make it {way} first."
            )
    for name, buffer in model.named_buffers():
        if buffer.requires_grad and buffer.is_leaf:
            raise PrepareError(
                f"what requires a gradient is a torch.nn.Parameter, but the buffer {name} does. Register it as a "
                "parameter."
            )
    attributes = {
        id(tensor): (f"{name}.{key}".lstrip("."), tensor)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _NOT_THE_USERS
        and f"{key}_orig" not in module._parameters  # torch.nn.utils.spectral_norm computes it anew in each forward
        for tensor in _tensors_of(value)
        if tensor.layout is torch.strided
    }
    _refuse_shared_memory(tensors.values(), [x for key, x in attributes.items() if key not in tensors])


def refuse_computed_weights(model: nn.Module) -> None:
    """Of a model that is not resident: what computes with their copies would reach neither them nor what is behind."""
    for name, weight in model.named_parameters():
        if not weight.is_leaf:
            raise PrepareError(
                f"a prepared model's weights are leaves, but {name} was computed from others, perhaps for "
                "torch.func.functional_call. Call a copy.deepcopy(model) so, which is a plain model, or "
                "hydra_tune.release(model) first."
            )


def _tensors_of(attribute: Any) -> Iterator[torch.Tensor]:
    """Itself, or those in its lists, tuples and dicts, as long as these are no data, and in an object's among them."""
    left, met = [(attribute, True)], set[int]()
    while left and len(met) < _MOST_ITEMS:
        value, opens = left.pop()
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            yield value
        elif issubclass(kind, (list, tuple, dict)) or (opens and not issubclass(kind, (nn.Module, type))):
            is_object = not issubclass(kind, (list, tuple, dict))
            if id(value) not in met:
                left += [(x, opens and not is_object) for x in _contents_of(value)]
            met.add(id(value))


def _contents_of(value: Any) -> list[Any]:
    """Of a list, a tuple, a dict or an object's attributes; nothing of what is so large that it is data."""
    try:
        inside = value if isinstance(value, (list, tuple, dict)) else vars(value)
        if len(inside) > _MOST_ITEMS:
            return []
        return [*inside.values()] if isinstance(inside, dict) else [*inside]
    except Exception:  # it has no attributes, or answers for itself
        return []


def _refuse_shared_memory(
    tensors: Iterable[tuple[str, torch.Tensor]], attributes: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Each weight gets memory of its own: what follows it by sharing its memory would not any more."""
    places = sorted((*_place_of(t), name) for name, t in tensors if t.numel())
    pairs = [(name, other) for (_, end, name), (start, _, other) in pairwise(places) if start < end]
    starts = [start for start, _, _ in places]
    for name, tensor in attributes:
        start, end = _place_of(tensor)
        i = bisect_left(starts, end) - 1  # the last that starts before its end
        if i >= 0 and start < places[i][1] and tensor.numel():
            pairs.append((places[i][2], name))
    for name, other in sorted(pairs)[:1]:
        raise PrepareError(
            f"weights and buffers have memory of their own, but {name} and {other} share theirs without being one "
            "tensor. Tie them by assigning the Parameter or buffer itself, or clone one."
        )


def _place_of(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _is_compiled(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    in_place = getattr(module, "_compiled_call_impl", None) is not None or hasattr(
        forward, "_torchdynamo_orig_callable"
    )
    return in_place or type(module).__name__ == "OptimizedModule"


def refuse_global_hooks() -> None:
    """Hooks on all modules of the process fire where blocks are measured and repeated, too."""
    for kind in ("forward", "forward_pre", "backward", "backward_pre"):
        for hook in list(getattr(torch.nn.modules.module, f"_global_{kind}_hooks").values()):
            raise PrepareError(
                f"hooks are on modules, but the {kind} hook {getattr(hook, '__qualname__', hook)} is on all modules of "
                "the process (torch.nn.modules.module.register_module_..._hook), and would fire in repeated forwards "
                "too. Register it on the modules that it is for. FlopCounterMode has such a hook while it counts, in "
                "any thread: count in a process of its own, or before the search."
            )


def transform_around(tensors: Callable[[], Iterable[torch.Tensor]]) -> str | None:
    """What changes the meaning of operators here, and reaches neither a block's weights nor its repetition. Other
    threads may be in forward mode, too; `tensors` are asked for tangents then."""
    if torch.compiler.is_dynamo_compiling():
        return "torch.compile or torch.export"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func (grad, vmap, jvp)"
    if torch.autograd.forward_ad._current_level >= 0 and any(map(_has_tangent, tensors())):
        return "forward-mode automatic differentiation"
    if (compiler := sys.modules.get("torch._C._dynamo.eval_frame")) and compiler.get_eval_frame_callback():
        return "torch.compile"
    return None


def _has_tangent(tensor: torch.Tensor) -> bool:
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def refuse_transforms(tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
    transform = transform_around(tensors)
    if transform is not None:
        raise PrepareError(
            f"a prepared model runs operator by operator, but it was called within {transform}. Call "
            "hydra_tune.release(model) first, or use that inside of a module's forward."
        )
