"""What a block's forward sees beside its inputs and weights, so that its repetition sees the same.

Between a forward and its backward a script may leave `torch.autocast`, call `eval()`, switch an adapter off or
choose other kernels. Plain PyTorch computes once and does not care; a forward that is repeated has to.
"""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hydra_tune.errors import PrepareError
from hydra_tune.host_buffer import version_of
from hydra_tune.mode import TrialMode

_PLAIN = frozenset((
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, types.FunctionType,
    types.BuiltinFunctionType,
))  # fmt: skip
_STRUCTURE = frozenset((  # not what a module is set to
    "_parameters", "_buffers", "_modules", "forward", "_apply", "_flat_weights", "_flat_weight_refs",
))  # fmt: skip
_State: TypeAlias = tuple[Any, ...]
_SHARED = 5  # from here on a state is of all threads: the flags
_CPU = torch.device("cpu")
_HOOKS_OF_PYTORCH = ("torch.utils.checkpoint", "torch.autograd.graph")  # on saved tensors, and change no value
_top_saved_tensors_hooks = getattr(  # torch 2.6 has no way to ask
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None
)


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


_FLAGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any]], ...] = (  # of the process; each read, and set
    ("backends.mkldnn.enabled", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    ("backends.cuda.math_sdp", torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    ("backends.cuda.flash_sdp", torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (
        "backends.cuda.mem_efficient_sdp",
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    ("backends.cuda.cudnn_sdp", torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    ("float32_matmul_precision", _unless_by_backend(torch.get_float32_matmul_precision), _set_matmul_precision),
    ("backends.cudnn.enabled", torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    ("backends.cudnn.deterministic", torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    ("backends.cudnn.allow_tf32", _unless_by_backend(torch._C._get_cudnn_allow_tf32), _set_cudnn_allow_tf32),
    ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
)
_DEFAULT_DTYPE = len(_FLAGS) - 1


class Company:
    """How many objectives run side by side in this process. What is the process's is then nobody's to set: whoever put
    back what it had found would undo what another has set meanwhile."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def join(self) -> None:
        with self._lock:
            self.count += 1

    def part(self) -> None:
        with self._lock:
            self.count -= 1


company = Company()


class Surroundings:
    """As they are now: autocast, the default device, the choice of kernels, and what the attributes of `modules`
    are set to (training mode, flags, numbers, objects, tensors that are no buffers)."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._process = _process_now()
        self._attributes = [dict(vars(module)) for module in modules]
        self.have_gradients = False
        self._versions: list[tuple[str, torch.Tensor, int]] = []
        for own in self._attributes:
            for name, value in [item for item in own.items() if type(item[1]) is torch.Tensor]:
                self.have_gradients |= value.requires_grad
                if value.grad_fn is None:
                    self._versions.append((name, value, version_of(value)))
                else:  # an activation, which would keep its graph
                    del own[name]

    def restored(self, block: str, *, alone: bool) -> _Restored:
        """Within, all is as it was; afterwards as it is now. What is set for the whole process is left as it is where
        others run in it, so not `alone`.

        Raises:
            RuntimeError: a tensor among the attributes of this block has other values now; or others run, and it
                needs a choice of kernels that is another one now.
        """
        for name, tensor, version in self._versions:
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"a block's attributes stay as they are from its forward to its backward, which repeats the "
                    f"forward, but {name!r} of block {block} was changed in place in between. Change it after "
                    f"backward, or assign a new tensor."
                )
        process = self._process if alone else self._beside_others(block)
        return _Restored(self._modules, process, self._attributes)

    def _beside_others(self, block: str) -> _State:
        """What the block's repetition needs of the process, but for what others in it share."""
        thread, flags = self._process[:_SHARED], self._process[_SHARED:]
        now = tuple(read() for _, read, _ in _FLAGS)
        for (name, _, _), value, other in zip(_FLAGS[:_DEFAULT_DTYPE], flags, now, strict=False):
            if value != other:
                raise RuntimeError(
                    f"while other trials run, the process's settings stay as they are from a forward to its backward, "
                    f"but torch.{name} was {value} in the forward of block {block} and is {other} now: this trial or "
                    f"another one has set it. Set it once, before the search, or search with concurrency=1."
                )
        return (*thread, *now)


class _Restored:
    """A context manager, once: the process and the attributes of modules as they were then; afterwards as now."""

    __slots__ = ("_attributes", "_entered", "_modules", "_process")

    def __init__(self, modules: Sequence[nn.Module], process: _State, attributes: list[dict[str, Any]]) -> None:
        self._modules = modules
        self._process = process
        self._attributes = attributes

    def __enter__(self) -> None:
        then = self._attributes
        if not _are_set(self._modules, then):
            self._attributes = [dict(vars(module)) for module in self._modules]
            _set_attributes(self._modules, then)
        now = _process_now()
        self._entered = None if now == self._process else _process_as(self._process, now)
        if self._entered is not None:
            self._entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._entered is not None:
            self._entered.__exit__(*error)
        if not _are_set(self._modules, self._attributes):
            _set_attributes(self._modules, self._attributes)


def _process_now() -> _State:
    """What is the same for all modules: autocast for two kinds of device, the default device, the flags."""
    # a mode may have set a device; torch 2.6's get_default_device does not know of `with device`
    device = torch.empty(0).device if torch._C._len_torch_function_stack() else _CPU
    return (*autocast_state("cpu"), *autocast_state("cuda"), device, *[read() for _, read, _ in _FLAGS])


@contextmanager
def _process_as(then: _State, now: _State) -> Iterator[None]:
    """As it was then, where it is different now."""
    with ExitStack() as stack:
        if then[:4] != now[:4]:
            stack.enter_context(_autocast_as(then, now))
        if then[4] != now[4]:
            stack.enter_context(then[4])
        for (_, _, write), value, other in zip(_FLAGS, then[_SHARED:], now[_SHARED:], strict=True):
            if value != other:
                stack.callback(write, other)
                write(value)
        yield


@contextmanager
def _autocast_as(then: _State, now: _State) -> Iterator[None]:
    """Not by `torch.autocast`: who leaves the outermost one of a thread clears the casts of all threads. So would one
    that the block enters itself, were it the outermost."""
    caches = torch.is_autocast_cache_enabled()
    torch.autocast_increment_nesting()
    try:
        for kind, i in ("cpu", 0), ("cuda", 2):
            torch.set_autocast_enabled(kind, then[i])
            torch.set_autocast_dtype(kind, then[i + 1])
        torch.set_autocast_cache_enabled(False)
        yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        for kind, i in ("cpu", 0), ("cuda", 2):
            torch.set_autocast_enabled(kind, now[i])
            torch.set_autocast_dtype(kind, now[i + 1])
        torch.autocast_decrement_nesting()


def autocast_state(kind: str) -> tuple[bool, torch.dtype]:
    """Whether it is on for this kind of device, and what it casts to."""
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _are_set(modules: Sequence[nn.Module], attributes: Sequence[dict[str, Any]]) -> bool:
    """By identity: an equal number in a new object is put back for nothing."""
    return all(
        own.keys() == values.keys() and all(map(is_, own.values(), values.values()))
        for own, values in zip(map(vars, modules), attributes, strict=True)
    )


def _set_attributes(modules: Sequence[nn.Module], attributes: Sequence[dict[str, Any]]) -> None:
    for module, values in zip(modules, attributes, strict=True):
        own = vars(module)
        for name in [k for k, v in own.items() if k not in values and k not in _STRUCTURE and not _is_activation(v)]:
            del own[name]
        own.update((k, v) for k, v in values.items() if k not in _STRUCTURE)


def _is_activation(value: Any) -> bool:
    return type(value) is torch.Tensor and value.grad_fn is not None


def refuse_modes(block: str, modules: Sequence[nn.Module]) -> None:
    """What sees a block's operators, or what they keep, in its forward, but would not in its repetition.

    Raises:
        PrepareError: a mode or a pair of hooks that is not PyTorch's own.
    """
    seen: list[object] = []
    if torch._C._len_torch_function_stack():
        seen += [m for m in _get_current_function_mode_stack() if not isinstance(m, DeviceContext)]
    if torch._C._len_torch_dispatch_stack():
        seen += [m for m in _get_current_dispatch_mode_stack() if not isinstance(m, TrialMode)]
    hooks = _top_saved_tensors_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", None) not in _HOOKS_OF_PYTORCH:
        seen.append(torch.autograd.graph.saved_tensors_hooks)
    if parametrize._cache_enabled and any(map(parametrize.is_parametrized, modules)):
        raise PrepareError(
            "a block's forward is repeated in backward, with its parametrized weights, but this trial or another one "
            f"of the process is in torch.nn.utils.parametrize.cached(), which would keep them (block {block}). Leave "
            "it out, or enter it within the block's forward."
        )
    for mode in seen:
        name = getattr(mode, "__name__", type(mode).__name__)
        raise PrepareError(
            f"a block's forward is repeated in backward, and {name} around the forward would miss it (block {block}). "
            "Leave it out, use it inside of the block's forward, or call hydra_tune.release(model) first."
        )


def kept(argument: Any) -> Any:
    """An argument as it is now, should its owner change it: a shallow copy of what is neither a tensor nor plain."""
    if type(argument) in _PLAIN or isinstance(argument, (torch.Tensor, nn.Module, type)) or callable(argument):
        return argument
    try:
        return copy.copy(argument)
    except Exception:  # what can't be copied can hardly be changed
        return argument
