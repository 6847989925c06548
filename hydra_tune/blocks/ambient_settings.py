"""Settings that a block's forward depends on beside inputs and weights; its repetition must find the same ones.

Between a forward and its backward a script may leave `torch.autocast`, call `eval()` or switch an adapter off. Plain
PyTorch runs the forward once, so that this changes nothing. But a repeated forward would compute something else. So
these settings are noted in the forward, and restored around the repetition:

    attributes of the modules           of the block
    autocast, the default device        of a thread
    which kernels PyTorch chooses       of the process: checked only. Other trials compute meanwhile, so that the
                                        repetition cannot change it; it must stay the same until the backward
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
_KINDS = ("cpu", "cuda")  # of devices; autocast is set for each
_KERNEL_CHOICES = (  # which kernels PyTorch chooses: `torch._C` has a function `_get_...` for each
    "mkldnn_enabled", "math_sdp_enabled", "flash_sdp_enabled", "mem_efficient_sdp_enabled", "cudnn_sdp_enabled",
    "sdp_priority_order", "deterministic_algorithms", "cudnn_enabled", "cudnn_deterministic",
)  # fmt: skip
_PRECISIONS = ("mkldnn", "conv"), ("mkldnn", "matmul"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")

STRUCTURE = frozenset((  # attributes of a module that are not settings
    "_parameters", "_buffers", "_modules", "_apply", "_flat_weights", "_flat_weight_refs",
))  # fmt: skip
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CHILDREN = itemgetter("_modules")


@cache
def _read_kernel_choices() -> tuple[tuple[str, ...], tuple[Callable[[], Any], ...]]:
    """The names of the kernel choices, and a function to read each; called several times a task, so without wrappers.

    Choices for GPUs are left out where there is no GPU: Hugging Face's CTC losses switch cuDNN off and on, also on a
    CPU.
    """
    getter = torch._C._get_fp32_precision_getter
    reads = {name: getattr(torch._C, f"_get_{name}") for name in _KERNEL_CHOICES}
    reads |= {f"fp32_precision of {' '.join(of)}": partial(getter, *of) for of in _PRECISIONS}
    names = tuple(name for name in reads if torch.accelerator.is_available() or "cud" not in name)
    return names, tuple(reads[name] for name in names)


class TorchSettings(NamedTuple):
    """What PyTorch is set to in this thread and process.

    autocast    (whether on, dtype) for each kind of device; empty if off for all of them
    device      the default device of the thread
    choices     the values that `_read_kernel_choices` reads
    """

    autocast: tuple[tuple[bool, torch.dtype], ...]
    device: torch.device
    choices: tuple[Any, ...]

    @classmethod
    def now(cls) -> TorchSettings:
        device = torch.empty(0).device if torch._C._len_torch_function_stack() else _CPU  # a mode may have set one
        autocast = _autocast() if torch._C._is_any_autocast_enabled() else ()
        return cls(autocast, device, tuple([read() for read in _read_kernel_choices()[1]]))

    @contextmanager
    def entered(self, now: TorchSettings, block: str) -> Iterator[None]:
        """A context for the block's repetition: within, these settings; afterwards those of `now`.

        It does not use `torch.autocast`: leaving a thread's outermost autocast context clears the casts of all threads.
        A block that enters an autocast context itself would do that, too, so that the nesting is raised by one.

        Raises:
            RuntimeError: PyTorch's choice of kernels has changed.
        """
        for name, value, other in zip(_read_kernel_choices()[0], self.choices, now.choices, strict=True):
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
    """The attributes of a block's modules: training mode, flags, numbers, objects, tensors that are no buffers.

    identities  of the values, in order, to compare two states fast. An equal number in a new object counts as a
                change, which costs a needless restore; None where two states must not be taken for equal
    attributes  of each module, by name
    is_rebuilt  whether modules have other children or classes than when the block was made
    """

    identities: tuple[list[int], list[int], list[type]] | None
    attributes: list[dict[str, Any]]
    is_rebuilt: bool


class ModuleStates:
    """Reads, compares and restores the attributes of a block's modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._first_structure = self._structure_now()
        self.shared: AmbientSettings | None = None  # the latest settings, unless they would keep large objects alive

    def _structure_now(self) -> list[tuple[type, list[tuple[str, nn.Module | None]]]]:
        return [(type(module), [*module._modules.items()]) for module in self._modules]

    def _identities(self) -> tuple[list[int], list[int], list[type]]:
        """Called several times a visit, so that the loops are in C."""
        own = list(map(vars, self._modules))
        every = [*own, *map(_CHILDREN, own)]
        values = chain.from_iterable(map(dict.values, every))
        return list(map(id, values)), list(map(len, every)), list(map(type, self._modules))

    def now(self) -> ModuleState:
        return ModuleState(
            self._identities(),
            list(map(dict, map(vars, self._modules))),
            self._structure_now() != self._first_structure,
        )

    def match(self, state: ModuleState) -> bool:
        return self._identities() == state.identities

    def restore(self, state: ModuleState) -> None:
        stays = STRUCTURE | {"forward"}  # the first module is the block: its forward may have another stand-in by now
        for module, values in zip(self._modules, state.attributes, strict=True):
            own = vars(module)
            for name in [k for k, v in own.items() if not (k in values or k in stays or is_activation(v))]:
                del own[name]
            own.update((k, v) for k, v in values.items() if k not in stays)
            stays = STRUCTURE


def _may_hold_memory(value: Any) -> bool:
    """Whether a value may hold much memory, which must not live longer because of a noted state."""
    return (
        any(map(_may_hold_memory, value))
        if isinstance(value, tuple)
        else isinstance(value, (torch.Tensor, list, dict, set))
    )


def is_activation(value: Any) -> bool:
    """Whether it is a tensor with a graph."""
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


class AmbientSettings(NamedTuple):
    """All settings that a call of a block depends on.

    process     autocast, the default device, the choice of kernels
    state       attributes of the block's modules
    versions    (name, tensor, version) of each tensor among these attributes
    """

    process: TorchSettings
    state: ModuleState
    versions: list[tuple[str, torch.Tensor, int]]

    @classmethod
    def now(cls, modules: ModuleStates) -> AmbientSettings:
        """The settings now. Calls that find equal settings share one object: most attributes never change, and all
        that each call keeps until its backward is work for the garbage collector."""
        process, latest = TorchSettings.now(), modules.shared
        if latest is not None and latest.process == process and modules.match(latest.state):
            return latest
        state = modules.now()
        versions: list[tuple[str, torch.Tensor, int]] = []
        keeps = any(
            _may_hold_memory(v) for own in state.attributes for k, v in own.items() if k not in _OF_EVERY_MODULE
        )
        for own in state.attributes:
            for name, value in [item for item in own.items() if type(item[1]) is torch.Tensor]:
                if value.grad_fn is None:
                    versions.append((name, value, version_of(value)))
                else:  # an activation is left out: it would keep its graph alive
                    del own[name]
                    state = state._replace(identities=None)
        latest = cls(process, state, versions)
        modules.shared = None if keeps else latest
        return latest

    @contextmanager
    def restored(self, modules: ModuleStates, block: str) -> Iterator[None]:
        """A context for the repetition of this block: within, these settings; afterwards those of now.

        Raises:
            RuntimeError: since the forward, a tensor among the attributes was changed in place, a module has got other
                children or another class, or PyTorch's choice of kernels has changed.
        """
        for name, tensor, version in self.versions:
            if version_of(tensor) != version:
                raise changed_in_between("attributes", repr(name), block)
        present, process, now = self.state, self.process, TorchSettings.now()
        if not modules.match(present):
            present = modules.now()
            if present.is_rebuilt:
                which = "a child, or the class of a module,"
                raise changed_in_between("modules", which, block, "Change it after backward.")
            modules.restore(self.state)
        try:
            with nullcontext() if process == now else process.entered(now, block):
                yield
        finally:
            if not modules.match(present):
                modules.restore(present)


def changed_in_between(
    what: str, which: str, block: str, advice: str = "Change it after backward, or assign a new tensor."
) -> RuntimeError:
    return RuntimeError(
        f"a block's {what} stay as they are from its forward to its backward, which repeats the forward, but {which} "
        f"of block {block} was changed in place in between. {advice}"
    )


@contextmanager
def thread_settings_kept() -> Iterator[None]:
    """A context that restores the thread's settings at its end: grad mode, autocast, the default device."""
    autocast, caches = _autocast(), torch.is_autocast_cache_enabled()
    nesting, own = _nesting(), torch._GLOBAL_DEVICE_CONTEXT  # in spite of its name, this is a thread-local
    device = getattr(own, "device_context", None)
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        _set_autocast(autocast)
        while _nesting() > nesting:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()  # as `torch.autocast` does on exit
        if getattr(own, "device_context", None) is not device:
            torch.set_default_device(None if device is None else device.device)


def _set_autocast(states: tuple[tuple[bool, torch.dtype], ...]) -> None:
    for kind, (enabled, dtype) in zip(_KINDS, states, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def remembers_casts() -> bool:
    """Whether PyTorch remembers casts of weights here. It does in any autocast context, also in one that is switched
    off, and forgets them when the outermost context ends."""
    return _nesting() > 0 and torch.is_autocast_cache_enabled()


def _nesting() -> int:
    """How many autocast contexts the thread is in."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def casts_to() -> torch.dtype | None:
    """The dtype that autocast casts weights to here; None if it is off."""
    return next((dtype for on, dtype in _autocast() if on), None)


def autocast_mode() -> tuple[Any, ...]:
    """What decides how weights are cast here: for each kind of device the dtype, or None; whether casts are remembered.
    Two equal values mean equal casts."""
    return (*(dtype if on else None for on, dtype in _autocast()), remembers_casts())


def _autocast() -> tuple[tuple[bool, torch.dtype], ...]:
    """(whether on, dtype) for each kind of device."""
    return tuple([(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS])
