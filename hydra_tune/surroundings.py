"""What a block's forward sees beside its inputs and weights, so that its repetition sees the same.

Between a forward and its backward a script may leave `torch.autocast`, call `eval()`, switch an adapter off or
choose other kernels. Plain PyTorch computes once and does not care; a forward that is repeated has to.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

_PLAIN = frozenset((
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, types.FunctionType,
    types.BuiltinFunctionType,
))  # fmt: skip
_CPU = torch.device("cpu")
_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (  # of the process; each read, and set
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_default_dtype, torch.set_default_dtype),
)


class Surroundings:
    """As they are now: autocast, the default device, the choice of kernels, and the plain attributes of `modules`
    (training mode, flags, numbers, names)."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._autocast = autocast_state()
        self._device = _default_device()
        self._flags = [read() for read, _ in _FLAGS]
        self._attributes = _plain_attributes(modules)

    @property
    def _of_process(self) -> tuple[object, ...]:
        return self._autocast, self._device, self._flags

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within, all is as it was; afterwards as it is now."""
        now = Surroundings(self._modules)
        try:
            if now._attributes != self._attributes:
                _set_attributes(self._modules, self._attributes)
            with self._entered(now) if now._of_process != self._of_process else nullcontext():
                yield
        finally:
            if _plain_attributes(self._modules) != now._attributes:
                _set_attributes(self._modules, now._attributes)

    @contextmanager
    def _entered(self, now: Surroundings) -> Iterator[None]:
        """What is not an attribute, where it differs from what it is `now`."""
        with ExitStack() as stack:
            for (kind, enabled, dtype), (_, is_enabled, _) in zip(self._autocast, now._autocast, strict=True):
                if enabled or is_enabled:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            if self._device != now._device:
                stack.enter_context(self._device)
            for (_, write), then, value in zip(_FLAGS, self._flags, now._flags, strict=True):
                if then != value:
                    stack.callback(write, value)
                    write(then)
            yield


def _default_device() -> torch.device:
    """As PyTorch tells it, in a tenth of the time where no mode may have set one."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU


def autocast_state() -> list[tuple[str, bool, torch.dtype]]:
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]


def _plain_attributes(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    return [{k: v for k, v in vars(m).items() if type(v) in _PLAIN} for m in modules]


def _set_attributes(modules: Sequence[nn.Module], attributes: Sequence[dict[str, Any]]) -> None:
    for module, values in zip(modules, attributes, strict=True):
        own = vars(module)
        for name in [k for k, v in own.items() if type(v) in _PLAIN and k not in values]:
            del own[name]
        own.update(values)


def kept(argument: Any) -> Any:
    """An argument as it is now, should its owner change it: a shallow copy of what is neither a tensor nor plain."""
    if type(argument) in _PLAIN or isinstance(argument, (torch.Tensor, nn.Module, type)) or callable(argument):
        return argument
    try:
        return copy.copy(argument)
    except Exception:  # what can't be copied can hardly be changed
        return argument
