"""The prepared model as a whole: what stands in its `forward`, and what it must be like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from hydra_tune.block import Block
from hydra_tune.errors import PrepareError
from hydra_tune.host_buffer import is_dense


class Executor(Protocol):
    """What the root needs of the trial it runs for."""

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


def refuse_unsupported(model: nn.Module, blocks: Sequence[Block]) -> None:
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
