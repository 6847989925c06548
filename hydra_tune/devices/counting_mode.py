"""A dispatch mode that counts the bytes each operator makes: in pilots, and always under `HYDRA_TUNE_CHECKS=1`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from hydra_tune.devices.meter import TrialMeter, is_counted, storages_of

_aten = torch.ops.aten
# Fused layers of evaluation. They have a kernel for each device, and that kernel calls other operators.
_LAYERS = (_aten._transformer_encoder_layer_fwd, _aten._native_multi_head_attention)
# PyTorch's explicit composites inside which autocast casts; found by measuring. (Autograd does not decompose such a
# composite before a mode sees it.) The other ones call no operator that autocast casts, or are called by an operator
# that it has cast already; autocast is off within that one, and a mode cannot see so.
_CASTS_WITHIN = (*_LAYERS, _aten._sparse_addmm, _aten.affine_grid_generator, _aten.linalg_pinv, _aten.mv)
_IMPLICIT = DispatchKey.CompositeImplicitAutograd  # with autograd on, a mode sees the parts instead of the composite
_EXPLICIT = (DispatchKey.CompositeExplicitAutograd, DispatchKey.CompositeExplicitAutogradNonFunctional)
_VIEW_KEY = DispatchKey.ADInplaceOrView
_RESOLVE_KEYS = DispatchKeySet(DispatchKey.Conjugate) | DispatchKeySet(DispatchKey.Negative)


class ThreadMode(TorchDispatchMode):
    """A mode that changes nothing but its thread's stack of modes.

    PyTorch's own modes also note in process-wide variables that a mode is active, and restore the value they found.
    Where several threads enter and leave modes, the restored values are wrong for good.
    """

    def __enter__(self) -> Any:
        _push_mode(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _pop_mode()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else PyTorch imports its compiler at the first operator, which takes seconds, and asks it at each."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled; this mode does not see its operators."""
        return True


class TrialMode(ThreadMode):
    """Counts operators' bytes in a trial's meter, as long as the meter has `counting` set.

    Active from the forward of a pilot to the pilot's end; with `HYDRA_TUNE_CHECKS=1`, to the trial's end. Costs about
    four microseconds an operator.
    """

    def __init__(self, meter: TrialMeter) -> None:
        self.meter: TrialMeter | None = meter  # None once the trial is gone; the thread's next `watch` removes the mode

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, meter = kwargs or {}, self.meter
        if meter is None or not meter.counting:
            with _as_without_mode(func):
                return func(*args, **kwargs)
        pilot, inputs = meter.pilot(), _tensors_in((args, *kwargs.values()))
        if pilot is not None and isinstance(func, OpOverload) and func._schema.is_mutable:
            pilot.before_writing(_written_by(func, args, kwargs))
        try:
            if pilot is not None:
                pilot.before_using(func, inputs)
            makes_on_device = meter.makes_on_device(inputs)
            with _as_without_mode(func):
                out = func(*args, **kwargs)
            if makes_on_device and (made := [t for t in _tensors_in((out,)) if not is_counted(t)]):
                # an operator may return some of its inputs, and those may lie in host memory
                elsewhere = {storage._cdata for t in inputs if not is_counted(t) for storage in storages_of(t)}
                meter.add([t for t in made if elsewhere.isdisjoint(storage._cdata for storage in storages_of(t))])
        except torch.OutOfMemoryError as error:
            raise meter.out_of_memory_error(error) from None
        return out


def _as_without_mode(func: Any) -> AbstractContextManager[None]:
    """A context in which a composite operator calls its parts as it would without a mode.

    Within a mode some dispatch keys are off that the parts need: those that resolve conjugate and negative views, and
    autocast's. They are put back. In inference mode a composite is run as a whole, and may choose kernels by whether a
    view of a weight requires a gradient. No view does unless `ADInplaceOrView` is on as well; but an operator that has
    a kernel for that key would raise.
    """
    if not _is_composite(func):
        return nullcontext()
    keys = _RESOLVE_KEYS
    if torch.is_inference_mode_enabled() and _has_kernel(func, _IMPLICIT) and not _has_kernel(func, _VIEW_KEY):
        keys = keys | DispatchKeySet(_VIEW_KEY)
    if _casts_within(func):
        with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]  # within a mode autocast seems off
            for kind, key in (("cpu", DispatchKey.AutocastCPU), ("cuda", DispatchKey.AutocastCUDA)):
                if torch.is_autocast_enabled(kind):
                    keys = keys | DispatchKeySet(key)
    without = torch._C._dispatch_tls_local_exclude_set() - keys
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), without)


@cache
def _has_kernel(func: OpOverload, *keys: DispatchKey) -> bool:
    """Whether the operator has a kernel for any of these keys."""
    return any(map(func.has_kernel_for_dispatch_key, keys))


@cache
def _is_composite(func: Any) -> bool:
    """Whether an operator is a composite: it calls other operators, and has no kernel of its own for our devices."""
    if not isinstance(func, OpOverload) or not torch._C._dispatch_has_kernel(func.name()):
        return False  # known to TorchScript alone, such as the one that asks a tensor subclass for its layout
    is_view = any(made.alias_info and not made.alias_info.is_write for made in func._schema.returns)
    is_explicit = (
        _has_kernel(func, *_EXPLICIT) and not _has_kernel(func, DispatchKey.CPU, DispatchKey.CUDA) and not is_view
    )
    return func.overloadpacket in _LAYERS or _has_kernel(func, _IMPLICIT) or is_explicit


@cache
def _casts_within(func: OpOverload) -> bool:
    """Whether autocast may cast inputs of the operators that this composite calls."""
    of_pytorch = func.namespace == "aten" and not func._overloadname.endswith("out")
    return not of_pytorch or _has_kernel(func, _IMPLICIT) or func.overloadpacket in _CASTS_WITHIN


def watch(mode: TrialMode) -> None:
    """Put the mode at the bottom of the calling thread's stack, and remove the modes of trials that are gone.

    At the bottom: whoever has entered one of the active modes leaves it before this one is left.
    """
    _replace_modes(lambda each: not isinstance(each, TrialMode) or each.meter is not None, mode)


def unwatch(mode: TrialMode) -> None:
    """Remove the mode from the calling thread's stack, wherever it is in it."""
    _replace_modes(lambda each: each is not mode)


class Counting:
    """Counts one trial's operators in its thread from `start` to `stop`, also between a forward and its backward.

    PyTorch's engine runs the nodes of a backward with the modes that were active when backward was called.
    """

    def __init__(self, meter: TrialMeter) -> None:
        self._meter = meter
        self._mode: TrialMode | None = None

    def start(self) -> None:
        if self._mode is None:
            self._mode = TrialMode(self._meter)
            weakref.finalize(self, setattr, self._mode, "meter", None).atexit = False
            watch(self._mode)

    def stop(self, *, for_good: bool) -> None:
        """Remove the mode. Within a backward it comes back at the end, as the engine restores the stack: there, not
        `for_good`."""
        if self._mode is not None:
            unwatch(self._mode)
            if for_good:
                self._mode.meter = None  # on another thread's stack it does nothing from here on
                self._mode = None


def _replace_modes(wanted: Callable[[TorchDispatchMode], bool], *more: TorchDispatchMode) -> None:
    """Replace the calling thread's stack: at the bottom `more`, above it those of its modes that are `wanted`."""
    stack = _get_current_dispatch_mode_stack()
    modes = [*more, *filter(wanted, stack)]
    if modes != stack:
        for _ in stack:
            _pop_mode()
        for mode in modes:
            _push_mode(mode)


# a forked loader worker inherits the modes of its parent, but it works for no trial
os.register_at_fork(after_in_child=lambda: _replace_modes(lambda each: not isinstance(each, TrialMode)))


def _written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that the operator changes in place."""
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return _tensors_in([given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write])


def _tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results, also those in lists and tuples."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors_in(value)
    return found
