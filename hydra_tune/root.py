"""The prepared model as a whole: what stands in its `forward`, and what it must be like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from hydra_tune.block import Block
from hydra_tune.errors import PrepareError
from hydra_tune.host_buffer import is_dense
from hydra_tune.shard import TrialPlan


class Executor(Protocol):
    """What the root needs of the trial it runs for."""

    @property
    def plan(self) -> TrialPlan | None: ...

    def run_root(self, root: RootForward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any: ...

    def end(self) -> None: ...


class RootForward:
    """Stands in the prepared model's instance attribute `forward`. A copy of the model gets its own forward."""

    def __init__(self, model: nn.Module, trial: Executor) -> None:
        self._model = model
        self.trial = trial
        self.original: Callable[..., Any] = type(model).forward.__get__(model)
        self.__wrapped__ = self.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.trial.run_root(self, args, kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self._model, "forward")


class RootApply:
    """Stands in the prepared model's instance attribute `_apply`, through which `.to`, `.half` and their kin go."""

    def __init__(self, model: nn.Module, trial: Executor) -> None:
        self._model = model
        self._trial = trial

    def __call__(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            wanted = function(tensor.detach().flatten()[:0])
            moves, converts = wanted.device != tensor.device, wanted.dtype != tensor.dtype
            if moves or (converts and self._trial.plan is not None):
                raise PrepareError(
                    f"a prepared model stays as it is after its first batch, and where its weights are is the pool's "
                    f"business, but {name} was to go from {tensor.dtype} on {tensor.device} to {wanted.dtype} on "
                    f"{wanted.device}. Convert the model before prepare, or call hydra_tune.release(model) first."
                )
        model: nn.Module = type(self._model)._apply(self._model, function, recurse)
        return model

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self._model, "_apply")


def refuse_unsupported(model: nn.Module, blocks: Sequence[Block]) -> None:
    for name, module in model.named_modules():
        if _is_compiled(module):
            raise PrepareError(
                f"a prepared model runs operator by operator, but {name or type(module).__name__} was given to "
                "torch.compile, which would bypass the blocks or fall back to that by itself. Prepare the plain model."
            )
    for module in [model, *(block.module for block in blocks)]:
        own = module.__dict__.get("forward")
        if own is not None and getattr(own, "__func__", None) is type(module).forward:
            del module.__dict__["forward"]  # left in a copy of a prepared model: the class's own
        elif own is not None:
            raise PrepareError(
                f"a block's forward is its class's, but {type(module).__name__} has one set on the instance. "
                "Prepare the model before wrapping its modules' forward, or subclass the module."
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta":
            raise PrepareError(
                f"a model has weights before it is prepared, but {name} is on meta. Materialise it first."
            )
        if not is_dense(tensor) and tensor.numel() > 0:
            raise PrepareError(
                f"weights are dense and strided, but {name} is {tensor.layout}. Call .contiguous() first."
            )


def _is_compiled(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    in_place = getattr(module, "_compiled_call_impl", None) is not None or hasattr(
        forward, "_torchdynamo_orig_callable"
    )
    return in_place or type(module).__name__ == "OptimizedModule"


def refuse_global_hooks() -> None:
    """Hooks on all modules of the process fire in a pilot and in recomputed forwards too."""
    for kind in ("forward", "forward_pre", "backward", "backward_pre"):
        if getattr(torch.nn.modules.module, f"_global_{kind}_hooks"):
            raise PrepareError(
                f"hooks are on modules, but a {kind} hook is on all modules of the process "
                "(torch.nn.modules.module.register_module_..._hook), and would fire in repeated forwards too. "
                "Register it on the modules that it is for."
            )
