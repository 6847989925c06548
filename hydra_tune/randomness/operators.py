"""Gives operators that draw on the CPU the generator that the calling thread draws from: once this is imported, for
good, and in forked children.

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

`torch.manual_seed`, `get_rng_state`, `fork_rng` and their kin are no operators: they call methods of
`torch.random.default_generator`. What stands there acts on the calling thread's generator.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from hydra_tune.process.fork import gate, new_in_child

if TYPE_CHECKING:
    from hydra_tune.randomness.trial_state import RandomState

DEFAULT: torch.Generator = torch.default_generator  # the object itself, whatever stands in its place later
Note = Callable[[torch.Generator], object]
_BACKEND_SELECT = DispatchKeySet(DispatchKey.BackendSelect)


class _DrawingThread(threading.local):
    """What the calling thread draws from, the trial that this is of, and who is told before each draw."""

    generator = DEFAULT
    trial_state: RandomState | None = None
    notes: tuple[Note, ...] = ()


thread = _DrawingThread()
os.register_at_fork(after_in_child=lambda: thread.__dict__.clear())  # a loader's worker is no trial
_default_lock = new_in_child(threading.RLock())  # draws of all threads from the default generator, one after another
gate.guard(_default_lock)  # a fork waits for the draw under way, which has the generator's own lock, too
_unlocked = nullcontext()


def drawing_operators() -> dict[str, Any]:
    """Those whose own CPU kernel takes a generator, by name."""
    found = {}
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        namespace, _, name = name.partition("::")
        base, _, overload = name.partition(".")
        operator: Any = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)  # some have none
        draws = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
        if namespace == "aten" and draws and any(a.name == "generator" for a in operator._schema.arguments):
            found[name] = operator
    return found


def _drawing(operator: Any) -> Callable[..., Any]:
    place = [argument.name for argument in operator._schema.arguments].index("generator")
    call = operator._handle.redispatch_boxed

    def drawing(keys: Any, *args: Any, **kwargs: Any) -> Any:
        keys = keys - _BACKEND_SELECT
        given = args[place] if len(args) > place else kwargs.get("generator")
        is_default = given is None or given._cdata in _DEFAULTS
        if not (is_default and keys.has(DispatchKey.CPU)):  # the caller's, a GPU's, or no numbers at all
            return call(keys, *args, **kwargs)
        generator, notes = thread.generator, thread.notes
        with _default_lock if generator is DEFAULT else _unlocked:
            for note in notes:
                note(generator)
            kwargs["generator"] = generator
            thread.notes = ()  # kernels that this one calls in turn are part of the same draw
            try:
                return call(keys, *args[:place], **kwargs)  # no positional argument comes after the generator
            finally:
                thread.notes = notes

    return drawing


class _GeneratorStandIn(torch.Generator):
    """For the default generator. May be given to operators, too: they take it for that one."""


def _of_thread(name: str) -> Callable[..., Any]:
    def method(self: torch.Generator, *args: Any) -> Any:
        with _default_lock:
            for note in thread.notes:  # it is read or set
                note(thread.generator)
            found = getattr(thread.generator, name)(*args)
        return self if name in ("set_state", "manual_seed") else found

    return method


for _method in ("get_state", "set_state", "manual_seed", "seed", "initial_seed", "clone_state", "__reduce__"):
    setattr(_GeneratorStandIn, _method, _of_thread(_method))
_stand_in = _GeneratorStandIn()
# Operators see a new wrapper of the same generator.
_DEFAULTS = frozenset(each._cdata for each in (DEFAULT, _stand_in))  # type: ignore[attr-defined]
torch.random.default_generator = _stand_in  # type: ignore[attr-defined]
_library = torch.library.Library("aten", "IMPL")  # its end would be that of the kernels
for _name, _operator in drawing_operators().items():
    _library.impl(_name, _drawing(_operator), "BackendSelect", with_keyset=True)
