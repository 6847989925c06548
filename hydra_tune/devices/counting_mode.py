"""Sees every operator in a trial's thread to count its bytes: in first steps, and under `HYDRA_TUNE_CHECKS`."""

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
# Whole layers in evaluation: kernels of their own on each device, which call others.
_LAYERS = (_aten._transformer_encoder_layer_fwd, _aten._native_multi_head_attention)
# PyTorch's own explicit composites (autograd does not take them apart before a mode sees them) within which autocast
# casts, as measured. Others call none that it casts; or are called by one that it has cast, within which it is off: no
# mode can tell.
_CASTS_WITHIN = (*_LAYERS, _aten._sparse_addmm, _aten.affine_grid_generator, _aten.linalg_pinv, _aten.mv)
_IMPLICIT = DispatchKey.CompositeImplicitAutograd  # autograd, where it is on, tells apart what it is composed of
_EXPLICIT = (DispatchKey.CompositeExplicitAutograd, DispatchKey.CompositeExplicitAutogradNonFunctional)
_NOTES_VIEWS = DispatchKey.ADInplaceOrView
_RESOLVE = DispatchKeySet(DispatchKey.Conjugate) | DispatchKeySet(DispatchKey.Negative)


class ThreadMode(TorchDispatchMode):
    """Enters and leaves the thread's stack, and that is all: PyTorch's own modes note for the process, too, that
    one is active, and put back what each has found; where threads come and go, that stays wrong."""

    def __enter__(self) -> Any:
        _push_mode(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _pop_mode()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import its compiler at the first operator, which takes seconds, and ask it at each."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled, and is not seen."""
        return True


class TrialMode(ThreadMode):
    """Counts in a meter where that is counting. A prepared model watches its thread by it from a first step's forward
    on, until that ends; under checks, until the trial does. Costs about four microseconds an operator."""

    def __init__(self, meter: TrialMeter) -> None:
        self.meter: TrialMeter | None = meter  # None once its trial is gone: the next `watch` there takes it away

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, meter = kwargs or {}, self.meter
        if meter is None or not meter.counting:
            with _as_outside(func):
                return func(*args, **kwargs)
        first, inputs = meter.pilot(), _tensors((args, *kwargs.values()))
        if first is not None and isinstance(func, OpOverload) and func._schema.is_mutable:
            first.before_writing(_written_by(func, args, kwargs))
        try:
            if first is not None:
                first.before_using(func, inputs)
            makes_there = meter.makes_there(inputs)
            with _as_outside(func):
                out = func(*args, **kwargs)
            if makes_there and (made := [t for t in _tensors((out,)) if not is_counted(t)]):
                # some may be inputs in host memory that it gives back
                elsewhere = {storage._cdata for t in inputs if not is_counted(t) for storage in storages_of(t)}
                meter.add([t for t in made if elsewhere.isdisjoint(storage._cdata for storage in storages_of(t))])
        except torch.OutOfMemoryError as error:
            raise meter.refusal_of(error) from None
        return out


def _as_outside(func: Any) -> AbstractContextManager[None]:
    """With dispatch keys that work within an operator which calls others, outside of modes; within one they are off.
    They resolve conjugate views, and cast what autocast casts. One that is run as a whole, in inference mode, may
    choose kernels by whether a view of a weight requires a gradient: none does, unless views are noted (again is an
    error)."""
    if not _calls_others(func):
        return nullcontext()
    keys = _RESOLVE
    if torch.is_inference_mode_enabled() and _has(func, _IMPLICIT) and not _has(func, _NOTES_VIEWS):
        keys = keys | DispatchKeySet(_NOTES_VIEWS)
    if _casts_within(func):
        with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]  # within a mode autocast seems off
            for kind, key in (("cpu", DispatchKey.AutocastCPU), ("cuda", DispatchKey.AutocastCUDA)):
                if torch.is_autocast_enabled(kind):
                    keys = keys | DispatchKeySet(key)
    without = torch._C._dispatch_tls_local_exclude_set() - keys
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), without)


@cache
def _has(func: OpOverload, *keys: DispatchKey) -> bool:
    """A kernel for any of these."""
    return any(map(func.has_kernel_for_dispatch_key, keys))


@cache
def _calls_others(func: Any) -> bool:
    """Whether an operator is composed of others, and has no kernel of its own on our devices."""
    if not isinstance(func, OpOverload) or not torch._C._dispatch_has_kernel(func.name()):
        return False  # of TorchScript alone, as a subclass is asked for its layout by
    is_view = any(made.alias_info and not made.alias_info.is_write for made in func._schema.returns)
    is_explicit = _has(func, *_EXPLICIT) and not _has(func, DispatchKey.CPU, DispatchKey.CUDA) and not is_view
    return func.overloadpacket in _LAYERS or _has(func, _IMPLICIT) or is_explicit


@cache
def _casts_within(func: OpOverload) -> bool:
    of_pytorch = func.namespace == "aten" and not func._overloadname.endswith("out")
    return not of_pytorch or _has(func, _IMPLICIT) or func.overloadpacket in _CASTS_WITHIN


def watch(mode: TrialMode) -> None:
    """From here on, beneath the modes that are active: who has entered one of those leaves it before this one. Those of
    trials that are gone are left no more."""
    _keep(lambda each: not isinstance(each, TrialMode) or each.meter is not None, mode)


def unwatch(mode: TrialMode) -> None:
    """No more, in this thread, wherever it is among the modes."""
    _keep(lambda each: each is not mode)


class Counting:
    """Of one trial's operators in a thread, also between forward and backward, from `start` to `stop`. The engine runs
    nodes with the modes that were there when a backward was called."""

    def __init__(self, meter: TrialMeter) -> None:
        self._meter = meter
        self._mode: TrialMode | None = None

    def start(self) -> None:
        if self._mode is None:
            self._mode = TrialMode(self._meter)
            weakref.finalize(self, setattr, self._mode, "meter", None).atexit = False
            watch(self._mode)

    def stop(self, *, for_good: bool) -> None:
        """Not for good within a backward: at its end the engine puts back what is on the stack."""
        if self._mode is not None:
            unwatch(self._mode)
            if for_good:
                self._mode.meter = None  # it may be on another thread's stack, where it does nothing from here on
                self._mode = None


def _keep(wanted: Callable[[TorchDispatchMode], bool], *more: TorchDispatchMode) -> None:
    """Of the thread's modes, above these."""
    stack = _get_current_dispatch_mode_stack()
    modes = [*more, *filter(wanted, stack)]
    if modes != stack:
        for _ in stack:
            _pop_mode()
        for mode in modes:
            _push_mode(mode)


# a forked loader worker inherits its parent's modes, but not the trial
os.register_at_fork(after_in_child=lambda: _keep(lambda each: not isinstance(each, TrialMode)))


def _written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that it changes in place."""
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return _tensors([given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write])


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results: themselves, or in a list or tuple."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found
