"""Refuses models that cannot be prepared, and calls from where a prepared model cannot run. Errors name a way out."""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy

from hydra_tune.devices.tensor_bytes import is_dense, is_wrapper, sites_of_parts, with_parts
from hydra_tune.errors import PrepareError
from hydra_tune.planning.fingerprint import HOOKS_OF_MODULES, PLAIN, Fingerprint
from hydra_tune.sharing.base_storages import is_base

_NOT_THE_USERS = frozenset((*vars(nn.Module()), "forward", "_apply"))


def refuse_unsupported(model: nn.Module) -> None:
    """Refuse compiled modules, __slots__, odd tensors, and weights or buffers that share memory.

    Raises:
        PrepareError: the model has one of these.
    """
    for name, module in model.named_modules():
        what = name or type(module).__name__
        if _is_compiled(module) or isinstance(module, torch.jit.ScriptModule):
            raise PrepareError(
                f"a prepared model runs operator by operator, but {what} was made by torch.jit or given to "
                "torch.compile, which would bypass the blocks. Prepare the plain model."
            )
        if slots := copyreg._slotnames(type(module)):  # type: ignore[attr-defined]
            raise PrepareError(
                f"a module's attributes are in its __dict__, where they can be put back, but {what} has "
                f"{', '.join(slots)} in __slots__. Take the __slots__ away."
            )
    tensors = {id(t): (name, t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    for name, tensor in tensors.values():
        if what := _odd(tensor):
            raise PrepareError(
                "weights and buffers are dense, plain torch tensors that fill their memory, and gradients have their "
                f"dtype, but {name} is {what}. Materialise it (a lazy one, by a call of the model), make it dense "
                "(.to_dense()), have it fill its memory (.contiguous()), leave its grad_dtype as it was, or make a "
                "module of what its class does, first. If it is quantized, freeze it, and quantize it with torchao, or "
                "another library whose tensors have __tensor_flatten__."
            )
    for name in [name for name, buffer in model.named_buffers() if buffer.requires_grad and buffer.is_leaf]:
        raise PrepareError(f"what requires a gradient is a parameter, but the buffer {name} does. Register it as one.")
    parts = [(name, part) for name, t in tensors.values() for part in with_parts([t])]
    # several modules over one base have its weights, each with Parameters of its own
    bases = {_place_of(part): name for name, part in parts if part.numel() and is_base(part) and not part.requires_grad}
    own = [(*_place_of(part), name) for name, part in parts if part.numel() and _place_of(part) not in bases]
    places = sorted([*own, *((*place, name) for place, name in bases.items())])
    shared = [(name, other) for (_, end, name), (start, _, other) in pairwise(places) if start < end]
    reached, met = Fingerprint(), {*tensors, *(id(part) for _, part in parts)}
    reached.most_items = 100_000  # of a container: it may hold a tensor that shares a weight's memory
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            # torch.nn.utils.spectral_norm computes its attribute anew in each forward
            if type(value) in PLAIN or key in _NOT_THE_USERS or f"{key}_orig" in module._parameters:
                continue
            for tensor in reached.tensors_within([value]):
                has_memory = tensor.layout is torch.strided and not is_wrapper(tensor) and tensor.numel()
                if has_memory and id(tensor) not in met:
                    first, last = _place_of(tensor)
                    other = f"{name}.{key}".lstrip(".")
                    shared += [(weight, other) for start, end, weight in places if start < last and first < end]
                met.add(id(tensor))
    for name, other in shared:  # a weight moves to new memory; a tensor that shares its memory would stay behind
        raise PrepareError(
            f"weights and buffers have memory of their own, but {name} and {other} share theirs without being one "
            "tensor. Tie them by assigning the Parameter or buffer itself, or clone one."
        )


def _odd(tensor: torch.Tensor) -> str:
    """Why a weight or buffer is not supported, as the end of an error's sentence; "" if it is supported."""
    if tensor.device.type == "meta" or is_lazy(tensor):
        return "lazy" if is_lazy(tensor) else "on meta"
    if is_wrapper(tensor) and not tensor.requires_grad:  # quantized, and frozen: its parts are promoted
        sites = list(sites_of_parts(tensor))
        if all(vars(wrapper).get(name) is part for wrapper, name, part in sites):
            return next(filter(None, (_odd(part) for *_, part in sites)), "")
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return f"a {type(tensor).__name__}" + (", and trained" if tensor.requires_grad else "")
    if tensor.is_leaf and getattr(tensor, "grad_dtype", tensor.dtype) is not tensor.dtype:  # torch 2.10 and later
        return f"to have one in {tensor.grad_dtype}"
    return "" if is_dense(tensor) or not tensor.numel() else f"not ({tensor.layout})"


def _place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the tensor's first byte, and the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _is_compiled(module: nn.Module) -> bool:
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    of_forward = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    return in_place or of_forward or type(module).__name__ == "OptimizedModule"


def refuse_computed_weights(model: nn.Module) -> None:
    """Refuse weights that were computed from other tensors, in a model that is not resident: gradients of their device
    copies would reach neither the weights nor the tensors that these were computed from."""
    for name, weight in model.named_parameters():
        if not weight.is_leaf:
            raise PrepareError(
                f"a prepared model's weights are leaves, but {name} was computed from others, perhaps for "
                "torch.func.functional_call. Call a copy.deepcopy(model) so, which is a plain model, or "
                "hydra_tune.release(model) first."
            )


def refuse_global_hooks() -> None:
    """Refuse hooks on all modules of the process: they would also fire when a block is measured or repeated."""
    for kind in HOOKS_OF_MODULES:
        for hook in [*getattr(torch.nn.modules.module, f"_global{kind}").values()]:
            raise PrepareError(
                f"hooks are on modules, but {getattr(hook, '__qualname__', hook)} is on all modules of the process, "
                "and would fire in repeated forwards too. Register it on the modules that it is for. "
                "FlopCounterMode has such a hook while it counts: count in a process of its own, or before the search."
            )


def refuse_transforms(tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
    """Refuse a call within a transform that changes what operators do (torch.compile, torch.func ..): the transform
    would not apply to a block's device weights, nor to its repetition.

    That forward-mode differentiation is on may be due to another thread. So then it counts only if one of `tensors` has
    a tangent.
    """
    dynamo = sys.modules.get("torch._C._dynamo.eval_frame")
    if (
        torch.compiler.is_dynamo_compiling()
        or (dynamo is not None and dynamo.get_eval_frame_callback())
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors()))
    ):
        raise PrepareError(
            "a prepared model runs operator by operator, but it was called within torch.compile, torch.export, "
            "torch.jit.trace, torch.func (grad, vmap, jvp) or forward-mode automatic differentiation. Call "
            "hydra_tune.release(model) first, or use that inside of a module's forward."
        )
