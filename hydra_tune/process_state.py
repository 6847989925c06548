"""What is the same for all modules: autocast, the default device, the flags of the process.

Autocast and the default device are of a thread. The flags are of all threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import methodcaller
from typing import Any, NamedTuple

import torch

_CPU = torch.device("cpu")
_KINDS = ("cpu", "cuda")  # of devices, that autocast is on or off for
_NESTING = torch.autocast_increment_nesting, torch.autocast_decrement_nesting  # each says how deep the thread is then
_CALL = methodcaller("__call__")


def _unless_by_backend(read: Callable[[], Any]) -> Callable[[], Any]:
    """None where the precision was set by `torch.backends.*.fp32_precision`: then PyTorch refuses to say it so."""

    def read_or_none() -> Any:
        try:
            return read()
        except RuntimeError:
            return None

    return read_or_none


def _set_matmul_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _set_cudnn_allow_tf32(value: bool | None) -> None:
    if value is not None:
        torch._C._set_cudnn_allow_tf32(value)


class Flag(NamedTuple):
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    of_gpus: bool = False

    @property
    def chooses_kernels(self) -> bool:
        """Where several trials run. Hugging Face's CTC losses switch cuDNN off and on, wherever they run."""
        return self is not _DEFAULT_DTYPE and (torch.accelerator.is_available() or not self.of_gpus)


_DEFAULT_DTYPE = Flag("default dtype", torch.get_default_dtype, torch.set_default_dtype)


def _deterministic() -> tuple[bool, bool]:
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


def _set_deterministic(mode: tuple[bool, bool]) -> None:
    enabled, warn_only = mode
    torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)


def _priorities() -> list[Flag]:
    """Of `sdpa_kernel(..., set_priority=True)`, which a later torch has."""
    if not hasattr(torch._C, "_set_sdp_priority_order"):
        return []
    order = torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order
    return [Flag("nn.attention.sdpa_kernel's priorities", *order, True)]  # the CPU's choice heeds none


_FLAGS = (
    Flag("backends.mkldnn.enabled", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    Flag("backends.cuda.math_sdp", torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    Flag("backends.cuda.flash_sdp", torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    Flag(
        "backends.cuda.mem_efficient_sdp",
        torch._C._get_mem_efficient_sdp_enabled,
        torch._C._set_sdp_use_mem_efficient,
    ),
    Flag("backends.cuda.cudnn_sdp", torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn, True),
    *_priorities(),
    Flag("float32_matmul_precision", _unless_by_backend(torch._C._get_float32_matmul_precision), _set_matmul_precision),
    Flag("backends.cudnn.enabled", torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled, True),
    Flag("backends.cudnn.deterministic", torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic, True),
    Flag("backends.cudnn.allow_tf32", _unless_by_backend(torch._C._get_cudnn_allow_tf32), _set_cudnn_allow_tf32, True),
    Flag("use_deterministic_algorithms", _deterministic, _set_deterministic),
    _DEFAULT_DTYPE,
)
_READS = tuple(flag.read for flag in _FLAGS)  # several times a task, so by PyTorch's own functions, without a wrapper


_latest: ProcessState | None = None


class ProcessState(NamedTuple):
    """`autocast` is a pair for each kind of device, `context` whether the thread is in an autocast context, and whether
    casts are remembered in one."""

    autocast: tuple[tuple[bool, torch.dtype], ...]
    context: tuple[bool, bool]
    device: torch.device
    flags: tuple[Any, ...]

    @classmethod
    def now(cls) -> ProcessState:
        global _latest
        # a mode may have set a device; torch 2.6's get_default_device does not know of `with device`
        device = torch.empty(0).device if torch._C._len_torch_function_stack() else _CPU
        context = _nesting() > 0, torch.is_autocast_cache_enabled()
        state = cls(tuple(map(autocast_state, _KINDS)), context, device, tuple(map(_CALL, _READS)))
        latest = _latest  # of any thread
        if state == latest:  # one for all who keep it: each is ten objects to the garbage collector
            return latest
        _latest = state
        return state

    def beside_others(self, block: str) -> ProcessState:
        """What the block's repetition needs of the process, but for what others in it share.

        Raises:
            RuntimeError: a choice of kernels is another one now.
        """
        now = tuple(map(_CALL, _READS))
        for flag, value, other in zip(_FLAGS, self.flags, now, strict=True):
            if value != other and flag.chooses_kernels:
                raise RuntimeError(
                    f"while other trials run, the process's settings stay as they are from a forward to its backward, "
                    f"but torch.{flag.name} was {value} in the forward of block {block} and is {other} now: this trial "
                    f"or another one has set it. Set it once, before the search, or search with concurrency=1."
                )
        return self._replace(flags=now)

    @contextmanager
    def entered(self, now: ProcessState) -> Iterator[None]:
        """As it was then, where it is different now."""
        with ExitStack() as stack:
            if (self.autocast, self.context) != (now.autocast, now.context):
                stack.enter_context(_autocast_as(self, now))
            if self.device != now.device:
                stack.enter_context(self.device)
            for flag, value, other in zip(_FLAGS, self.flags, now.flags, strict=True):
                if value != other:
                    stack.callback(flag.write, other)
                    flag.write(value)
            yield


@contextmanager
def _autocast_as(then: ProcessState, now: ProcessState) -> Iterator[None]:
    """Not by `torch.autocast`: who leaves the outermost one of a thread clears the casts of all threads. So would one
    that the block enters itself, were it the outermost. Where that was the outermost one, it is so again."""
    (inside, caches), (_, caches_now), nesting = then.context, now.context, _nesting()
    try:
        _nest(nesting + 1 if inside else 0)
        _set_autocast(then)
        torch.set_autocast_cache_enabled(caches and not inside)
        yield
    finally:
        torch.set_autocast_cache_enabled(caches_now)
        _set_autocast(now)
        _nest(nesting)


class ThreadSettings:
    """What this thread has set now: whether gradients are on, autocast, the default device."""

    def __init__(self) -> None:
        self._gradients, self._nesting = torch.is_grad_enabled(), _nesting()
        self._state, self._device = ProcessState.now(), _device_context()

    def restore(self) -> None:
        torch._C._set_grad_enabled(self._gradients)
        torch.set_autocast_cache_enabled(self._state.context[1])
        _set_autocast(self._state)
        if _nesting() != self._nesting:
            _nest(self._nesting)
            torch.clear_autocast_cache()  # as who leaves a context does
        if _device_context() is not self._device:
            torch.set_default_device(None if self._device is None else self._device.device)
            if self._device is None:  # as it was: torch 2.6 fails where it finds None there
                vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)


def _device_context() -> Any:
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _nest(deep: int) -> None:
    while _nesting() < deep:
        torch.autocast_increment_nesting()
    while _nesting() > deep:
        torch.autocast_decrement_nesting()


def _set_autocast(state: ProcessState) -> None:
    for kind, (enabled, dtype) in zip(_KINDS, state.autocast, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def remembers_casts() -> bool:
    """Whether this thread is in an autocast context, be it one that is switched off, at whose end PyTorch forgets the
    casts of weights that were made since."""
    return _nesting() > 0 and torch.is_autocast_cache_enabled()


def _nesting() -> int:
    """How many autocast contexts this thread is in."""
    deeper, same = map(_CALL, _NESTING)  # no line of ours in between, where an interruption would leave it deeper
    assert deeper == same + 1
    return int(same)


def casts_to() -> torch.dtype | None:
    """What autocast makes of weights here, if it is on."""
    return next((dtype for on, dtype in map(autocast_state, _KINDS) if on), None)


def autocast_mode() -> tuple[Any, ...]:
    """What decides how weights are cast here: the dtype for each kind of device, and whether casts are remembered."""
    return (*(dtype if on else None for on, dtype in map(autocast_state, _KINDS)), remembers_casts())


def autocast_state(kind: str) -> tuple[bool, torch.dtype]:
    """Whether it is on for this kind of device, and what it casts to."""
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
