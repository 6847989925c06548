"""Gives each operator that draws on the CPU the generator of the calling thread.

PyTorch's default generator is shared by all threads, so that trials would change each other's numbers. Importing this
file replaces the kernels of the operators that draw, for good, also in forked children.

    user code, autograd, autocast, dispatch modes
        v
    BackendSelect   for the 28 operators that take a generator and have a CPU kernel: `_drawing`, in Python
        v
    CPU             PyTorch's kernels, unchanged

All other operators that draw (rand, dropout, attention, recurrent layers, ...) are composed of these 28. No other
operator becomes slower.

Why BackendSelect: every thread has this dispatch key, also while a compiler traces, and it is below every mode. PyTorch
itself uses it only for operators without tensors. A kernel in place of the CPU's own would have to call the old one by
`SafeKernelFunction.call_boxed`, which keeps the interpreter lock: while one thread initialises a large model, all
others would stand still. `redispatch_boxed` releases the lock.

`torch.manual_seed`, `get_rng_state`, `fork_rng` and similar functions are no operators. They call methods of
`torch.random.default_generator`. A stand-in there acts on the calling thread's generator.
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
    from hydra_tune.randomness.random_state import RandomState

DEFAULT: torch.Generator = torch.default_generator  # PyTorch's own object; below, a stand-in takes its place
Note = Callable[[torch.Generator], object]
_BACKEND_SELECT = DispatchKeySet(DispatchKey.BackendSelect)


class _DrawingThread(threading.local):
    """The generator that the calling thread draws from, the trial whose generator it is (None: no trial's), and the
    functions to call with the generator before each draw."""

    generator = DEFAULT
    trial_state: RandomState | None = None
    notes: tuple[Note, ...] = ()


thread = _DrawingThread()
os.register_at_fork(after_in_child=lambda: thread.__dict__.clear())  # a loader's worker works for no trial
_default_lock = new_in_child(threading.RLock())  # held for each draw from the default generator
# A draw also holds the generator's own lock, which a forked child would inherit. So a fork waits for the draw to end.
gate.guard(_default_lock)
_unlocked = nullcontext()


def drawing_operators() -> dict[str, Any]:
    """The operators of aten whose CPU kernel takes a generator, by name with overload, such as "normal_"."""
    found = {}
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        namespace, _, name = name.partition("::")
        base, _, overload = name.partition(".")
        # None for a kernel whose operator Python cannot reach
        operator: Any = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        draws = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
        if namespace == "aten" and draws and any(a.name == "generator" for a in operator._schema.arguments):
            found[name] = operator
    return found


def _drawing(operator: Any) -> Callable[..., Any]:
    """A kernel that calls the operator's own one with the calling thread's generator, unless the caller gave one."""
    place = [argument.name for argument in operator._schema.arguments].index("generator")
    call = operator._handle.redispatch_boxed

    def drawing(keys: Any, *args: Any, **kwargs: Any) -> Any:
        keys = keys - _BACKEND_SELECT
        given = args[place] if len(args) > place else kwargs.get("generator")
        is_default = given is None or given._cdata in _DEFAULT_IDS
        # a generator of the caller's, one of a GPU, or a call that draws nothing, as on meta tensors
        if not (is_default and keys.has(DispatchKey.CPU)):
            return call(keys, *args, **kwargs)
        generator, notes = thread.generator, thread.notes
        with _default_lock if generator is DEFAULT else _unlocked:
            for note in notes:
                note(generator)
            kwargs["generator"] = generator
            thread.notes = ()  # if the kernel calls other drawing operators, they are part of the same draw
            try:
                return call(keys, *args[:place], **kwargs)  # no positional argument comes after the generator
            finally:
                thread.notes = notes

    return drawing


class _GeneratorStandIn(torch.Generator):
    """Stands in for the default generator. Operators may be given this object as well: it counts as the default."""


def _method_for_thread(name: str) -> Callable[..., Any]:
    """The method of this name, called on the calling thread's generator."""

    def method(self: torch.Generator, *args: Any) -> Any:
        with _default_lock:
            for note in thread.notes:  # to read or set the state counts as a draw
                note(thread.generator)
            found = getattr(thread.generator, name)(*args)
        return self if name in ("set_state", "manual_seed") else found

    return method


for _method in ("get_state", "set_state", "manual_seed", "seed", "initial_seed", "clone_state", "__reduce__"):
    setattr(_GeneratorStandIn, _method, _method_for_thread(_method))
_stand_in = _GeneratorStandIn()
# A kernel gets a new Python object for the generator it was given; the generator inside, `_cdata`, is the same.
_DEFAULT_IDS = frozenset(each._cdata for each in (DEFAULT, _stand_in))  # type: ignore[attr-defined]
torch.random.default_generator = _stand_in  # type: ignore[attr-defined]
_library = torch.library.Library("aten", "IMPL")  # kept for good: its kernels would end with it
for _name, _operator in drawing_operators().items():
    _library.impl(_name, _drawing(_operator), "BackendSelect", with_keyset=True)
