"""Gives operators that draw on the CPU the generator that the calling thread draws from.

    user code, autograd, autocast, dispatch modes
        v
    BackendSelect   for the 28 operators that take a generator and have a CPU kernel: `_drawing`, in Python
        v
    CPU             PyTorch's kernels, as they are

All other operators that draw (rand, dropout, attention, recurrent layers, ...) are composed of these 28. No other
operator is slower. BackendSelect is a dispatch key that every thread has, inside compilers' tracing and below every
mode; PyTorch itself uses it for operators without tensors only. A kernel put in the place of the CPU's would have to
call the old one by `SafeKernelFunction.call_boxed`, which keeps the interpreter's lock: other threads would stand still
for as long as a large model is initialised. `redispatch_boxed` lets go of it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from hydra_tune.fork import new_in_child
from hydra_tune.randomness import proxies
from hydra_tune.randomness.sources import DEFAULT, Source, default, thread

_BACKEND_SELECT = DispatchKeySet(DispatchKey.BackendSelect)
_lock = new_in_child(threading.Lock())
installed: Any = None  # the registrations, for life


def install() -> None:
    """Once in a process, before the first thread has a source; never undone. Forked children inherit it."""
    global installed
    if installed is None:
        with _lock:
            if installed is None:
                library = torch.library.Library("aten", "IMPL")
                for operator in drawing_operators():
                    library.impl(_name(operator), _drawing(operator), "BackendSelect", with_keyset=True)
                proxies.install()
                installed = library


@functools.cache
def draws(func: Callable[..., Any]) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


@functools.cache
def drawing_operators() -> list[Any]:
    """Those whose own CPU kernel takes a generator."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    found = (_operator(name) for name in sorted(names) if name.startswith("aten::"))
    return [each for each in found if draws(each) and any(a.name == "generator" for a in each._schema.arguments)]


def _operator(name: str) -> Any:
    base, _, overload = name.removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, base, None)  # a few have no Python binding
    return getattr(packet, overload or "default", None)


def _name(operator: Any) -> str:
    return str(operator._schema.name.removeprefix("aten::") + f".{operator._schema.overload_name}".rstrip("."))


def _drawing(operator: Any) -> Callable[..., Any]:
    place = [argument.name for argument in operator._schema.arguments].index("generator")
    call = operator._handle.redispatch_boxed

    def drawing(keys: Any, *args: Any, **kwargs: Any) -> Any:
        keys = keys - _BACKEND_SELECT
        if not keys.has(DispatchKey.CPU):  # a GPU's, or no numbers at all
            return call(keys, *args, **kwargs)
        given = args[place] if len(args) > place else kwargs.get("generator")
        if given is not None and given._cdata not in proxies.STAND_FOR_DEFAULT:
            return call(keys, *args, **kwargs)
        source = thread.source
        if source is None:
            with default.lock:
                default.stamp += 1
                if given is None:
                    return call(keys, *args, **kwargs)
                return with_generator(keys, args, kwargs, DEFAULT)
        if source.shares:
            with default.lock:
                return with_source(source, keys, args, kwargs)
        return with_source(source, keys, args, kwargs)

    def with_source(source: Source, keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            thread.source = None
            return with_generator(keys, args, kwargs, source.draw())
        finally:
            thread.source = source

    def with_generator(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any], generator: torch.Generator) -> Any:
        if len(args) > place:
            return call(keys, *args[:place], generator, *args[place + 1 :], **kwargs)
        return call(keys, *args, **{**kwargs, "generator": generator})

    return drawing
