"""What a block's forward sees beside its inputs and weights, so that its repetition sees the same: what its modules are
set to, and the process.

Between a forward and its backward a script may leave `torch.autocast`, call `eval()` or switch an adapter off. Plain
PyTorch computes once and does not care; a forward that is repeated has to. Autocast and the default device are of a
thread. The choice of kernels is of all threads: a repetition can't have another one than its neighbours, so it stays
as it is from a forward to its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from hydra_tune.devices.tensor_bytes import version_of

_CPU = torch.device("cpu")
_KINDS = ("cpu", "cuda")  # of devices, that autocast is on or off for
_CHOICES = (  # of kernels, as PyTorch itself asks for them
    "mkldnn_enabled", "math_sdp_enabled", "flash_sdp_enabled", "mem_efficient_sdp_enabled", "cudnn_sdp_enabled",
    "sdp_priority_order", "deterministic_algorithms", "cudnn_enabled", "cudnn_deterministic",
)  # fmt: skip
_PRECISIONS = ("mkldnn", "conv"), ("mkldnn", "matmul"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")

STRUCTURE = frozenset((  # not what a module is set to
    "_parameters", "_buffers", "_modules", "_apply", "_flat_weights", "_flat_weight_refs",
))  # fmt: skip
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CHILDREN = itemgetter("_modules")


@cache
def _choices() -> tuple[tuple[str, ...], tuple[Callable[[], Any], ...]]:
    """Their names and what reads them, without a wrapper: several times a task. Those of GPUs where there is one:
    Hugging Face's CTC losses switch cuDNN off and on, wherever they run."""
    getter = torch._C._get_fp32_precision_getter
    reads = {name: getattr(torch._C, f"_get_{name}") for name in _CHOICES}
    reads |= {f"fp32_precision of {' '.join(of)}": partial(getter, *of) for of in _PRECISIONS}
    names = tuple(name for name in reads if torch.accelerator.is_available() or "cud" not in name)
    return names, tuple(reads[name] for name in names)


class TorchSettings(NamedTuple):
    """`autocast` is a pair for each kind of device; nothing where it is off for all."""

    autocast: tuple[tuple[bool, torch.dtype], ...]
    device: torch.device
    choices: tuple[Any, ...]

    @classmethod
    def now(cls) -> TorchSettings:
        device = torch.empty(0).device if torch._C._len_torch_function_stack() else _CPU  # a mode may have set one
        autocast = _autocast() if torch._C._is_any_autocast_enabled() else ()
        return cls(autocast, device, tuple([read() for read in _choices()[1]]))

    @contextmanager
    def entered(self, now: TorchSettings, block: str) -> Iterator[None]:
        """For the block's repetition: as it was then; afterwards as now. Not by `torch.autocast`: who leaves the
        outermost one of a thread clears the casts of all threads, as the block would that enters one itself.

        Raises:
            RuntimeError: a choice of kernels is another one now.
        """
        for name, value, other in zip(_choices()[0], self.choices, now.choices, strict=True):
            if value != other:
                raise RuntimeError(
                    f"PyTorch's choice of kernels stays as it is from a forward to its backward, which repeats the "
                    f"forward, but {name} was {value} in the forward of block {block} and is {other} now: this trial "
                    "or another one has set it. Set it once, before the first step or the search."
                )
        before = _autocast()
        torch.autocast_increment_nesting()
        try:
            _set_autocast(self.autocast or tuple((False, dtype) for _, dtype in before))
            with nullcontext() if self.device == now.device else self.device:
                yield
        finally:
            _set_autocast(before)
            torch.autocast_decrement_nesting()


class ModuleState(NamedTuple):
    """What modules are set to: training mode, flags, numbers, objects, tensors that are no buffers. `found` is by
    identity and order: an equal number in a new object is put back for nothing."""

    found: tuple[list[int], list[int], list[type]] | None
    attributes: list[dict[str, Any]]  # of each module by name
    is_rebuilt: bool  # has other children, or classes, than at first


class ModuleStates:
    """Of the modules of a block."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._first = self._build()
        self.shared: AmbientSettings | None = None  # the latest, if they keep nothing large alive

    def _build(self) -> list[tuple[type, list[tuple[str, nn.Module | None]]]]:
        return [(type(module), [*module._modules.items()]) for module in self._modules]

    def _found(self) -> tuple[list[int], list[int], list[type]]:
        """In PyTorch's and Python's own functions: it is asked several times a visit."""
        own = list(map(vars, self._modules))
        every = [*own, *map(_CHILDREN, own)]
        values = chain.from_iterable(map(dict.values, every))
        return list(map(id, values)), list(map(len, every)), list(map(type, self._modules))

    def now(self) -> ModuleState:
        return ModuleState(self._found(), list(map(dict, map(vars, self._modules))), self._build() != self._first)

    def are(self, state: ModuleState) -> bool:
        return self._found() == state.found

    def set(self, state: ModuleState) -> None:
        stays = STRUCTURE | {"forward"}  # the first one is the block, which may be cut otherwise since
        for module, values in zip(self._modules, state.attributes, strict=True):
            own = vars(module)
            for name in [k for k, v in own.items() if not (k in values or k in stays or is_activation(v))]:
                del own[name]
            own.update((k, v) for k, v in values.items() if k not in stays)
            stays = STRUCTURE


def _keeps(value: Any) -> bool:
    """Memory, which shall not live longer for it."""
    return any(map(_keeps, value)) if isinstance(value, tuple) else isinstance(value, (torch.Tensor, list, dict, set))


def is_activation(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


class AmbientSettings(NamedTuple):
    """Autocast, the default device, the choice of kernels, and the modules of a block; `versions` are those of tensors
    among the attributes of these."""

    process: TorchSettings
    state: ModuleState
    versions: list[tuple[str, torch.Tensor, int]]

    @classmethod
    def now(cls, modules: ModuleStates) -> AmbientSettings:
        """As they are now. Calls that find the same share them: most attributes never change, and what each call keeps
        until its backward is work for the garbage collector."""
        process, latest = TorchSettings.now(), modules.shared
        if latest is not None and latest.process == process and modules.are(latest.state):
            return latest
        state = modules.now()
        versions: list[tuple[str, torch.Tensor, int]] = []
        keeps = any(_keeps(v) for own in state.attributes for k, v in own.items() if k not in _OF_EVERY_MODULE)
        for own in state.attributes:
            for name, value in [item for item in own.items() if type(item[1]) is torch.Tensor]:
                if value.grad_fn is None:
                    versions.append((name, value, version_of(value)))
                else:  # an activation, which would keep its graph
                    del own[name]
                    state = state._replace(found=None)
        latest = cls(process, state, versions)
        modules.shared = None if keeps else latest
        return latest

    @contextmanager
    def restored(self, modules: ModuleStates, block: str) -> Iterator[None]:
        """Within, all is as it was; afterwards as it is now. Of the modules of this block.

        Raises:
            RuntimeError: a tensor among the attributes of this block has other values now, a module of it other
                children or another class, or the process another choice of kernels.
        """
        for name, tensor, version in self.versions:
            if version_of(tensor) != version:
                raise changed_in_between("attributes", repr(name), block)
        present, process, now = self.state, self.process, TorchSettings.now()
        if not modules.are(present):
            present = modules.now()
            if present.is_rebuilt:
                which = "a child, or the class of a module,"
                raise changed_in_between("modules", which, block, "Change it after backward.")
            modules.set(self.state)
        try:
            with nullcontext() if process == now else process.entered(now, block):
                yield
        finally:
            if not modules.are(present):
                modules.set(present)


def changed_in_between(
    what: str, which: str, block: str, advice: str = "Change it after backward, or assign a new tensor."
) -> RuntimeError:
    return RuntimeError(
        f"a block's {what} stay as they are from its forward to its backward, which repeats the forward, but {which} "
        f"of block {block} was changed in place in between. {advice}"
    )


@contextmanager
def thread_settings_kept() -> Iterator[None]:
    """Afterwards this thread has set what it has now: whether gradients are on, autocast, the default device."""
    autocast, caches = _autocast(), torch.is_autocast_cache_enabled()
    nesting, own = _nesting(), torch._GLOBAL_DEVICE_CONTEXT  # a thread's
    device = getattr(own, "device_context", None)
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        _set_autocast(autocast)
        while _nesting() > nesting:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()  # as who leaves a context does
        if getattr(own, "device_context", None) is not device:
            torch.set_default_device(None if device is None else device.device)


def _set_autocast(states: tuple[tuple[bool, torch.dtype], ...]) -> None:
    for kind, (enabled, dtype) in zip(_KINDS, states, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def remembers_casts() -> bool:
    """Whether this thread is in an autocast context, be it one that is switched off, at whose end PyTorch forgets the
    casts of weights that were made since."""
    return _nesting() > 0 and torch.is_autocast_cache_enabled()


def _nesting() -> int:
    """How many autocast contexts this thread is in."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def casts_to() -> torch.dtype | None:
    """What autocast makes of weights here, if it is on."""
    return next((dtype for on, dtype in _autocast() if on), None)


def autocast_mode() -> tuple[Any, ...]:
    """What decides how weights are cast here: the dtype for each kind of device, and whether casts are remembered."""
    return (*(dtype if on else None for on, dtype in _autocast()), remembers_casts())


def _autocast() -> tuple[tuple[bool, torch.dtype], ...]:
    """Whether it is on, and what it casts to, for each kind of device."""
    return tuple([(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS])
