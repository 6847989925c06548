"""A module's Parameters over a base's memory: what writes into one gives it memory of its own first.

Scripts initialise heads anew, load weights, merge adapters, through `.data` and through views. None of that may reach
the base. So shared Parameters are of a class that sees operators before they run. It costs some microseconds an
operator. So while a prepared model computes, they are plain Parameters (`GuardedBase`); between its forwards and
backwards they are shared ones.

    p                  SharedParameter    a write: p gets its own copy of the memory, then the operator runs
    p.data, p.view()   SharedView of p    a write: the same, and the view is moved into p's copy
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hydra_tune.blocks.tree import tensors_in
from hydra_tune.devices.tensor_bytes import is_wrapper, same_bits
from hydra_tune.sharing.base_storages import is_base

# Parameters that may lie in a base's memory, by id
_shared: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
_hook: torch.utils.hooks.RemovableHandle | None = None
_READ_ONLY = frozenset(["requires_grad_", "retain_grad", "share_memory_", "detach_", "pin_memory_"])


class _SeesWrites:
    """What `SharedParameter` and `SharedView` have in common."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", "")
            written = _written(func, name, args, kwargs)
            if written:
                if name == "copy_" and len(args) > 1 and _is_same(args[0], args[1]):
                    return args[0]  # it is loaded with what it has
                for tensor in written:
                    _give_own_memory(tensor)
            elif _unfreezes(func, name, args, kwargs):
                _give_own_memory(args[0])
            result = func(*args, **kwargs)
            return _as_views(result, args) if type(result) is torch.Tensor else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.detach().as_subclass(torch.Tensor)  # type: ignore[attr-defined]
            if isinstance(self, nn.Parameter):
                plain = nn.Parameter(plain, self.requires_grad)
            return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            copied: torch.Tensor = self.detach().as_subclass(torch.Tensor).clone()  # type: ignore[attr-defined]
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
            return copied


class SharedParameter(_SeesWrites, nn.Parameter):
    """A Parameter that may lie in a base's memory."""


class SharedView(_SeesWrites, torch.Tensor):
    """`offset` is the place in its owner's memory, in elements."""

    owner: torch.Tensor
    offset: int


def shared_parameter(weight: torch.Tensor) -> nn.Parameter:
    """A frozen Parameter of a trial's own, in the memory of a base's weight."""
    own = nn.Parameter(weight.data, requires_grad=False)
    if not is_wrapper(weight):  # the parts of a quantized weight are among its attributes
        own.__dict__.update(weight.__dict__)
        own.__class__ = SharedParameter
    note_shared(own)
    return own


def note_shared(parameter: torch.Tensor) -> None:
    """From here on an optimizer that steps the Parameter gives it memory of its own, if it is in a base's then."""
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_before_step)
    _shared[id(parameter)] = parameter


def make_plain(parameters: Iterable[nn.Parameter]) -> None:
    """For `prepare`: they are plain Parameters from here on. What is trained has memory of its own."""
    for p in parameters:
        if isinstance(p, SharedParameter):
            p.__class__ = nn.Parameter  # type: ignore[assignment]
        if p.requires_grad and id(p) in _shared:
            _give_own_memory(p)


class GuardedBase:
    """The shared Parameters of one trial's models: plain from `open` to the `close` of the same forward or backward,
    which may be within another one."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self._places: list[int] = []  # the address of each when it was last looked at
        self._opened = 0

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Guard those that are in a base, and the ones before, from here on."""
        known = set(map(id, self.parameters))
        plain = [p for p in parameters if type(p) is nn.Parameter and id(p) in _shared and id(p) not in known]
        new = [p for p in plain if not p.requires_grad and is_base(p)]
        self.parameters += new
        self._places += [p.data_ptr() for p in new]
        if not self._opened:
            _set_class(new, SharedParameter)

    def forget_all_but(self, parameters: Iterable[nn.Parameter]) -> None:
        kept = set(map(id, parameters))
        self.parameters = [p for p in self.parameters if id(p) in kept]
        self._places = [p.data_ptr() for p in self.parameters]

    def open(self) -> bool:
        """Returns whether one of them has other memory than at the last `close`: the script has given it other values,
        or has unfrozen it."""
        self._opened += 1
        if self._opened > 1:
            return False
        _set_class(self.parameters, nn.Parameter)
        return self._note_places()

    def close(self) -> None:
        self._opened -= 1
        if self._opened:
            return
        self._note_places()
        _set_class(self.parameters, SharedParameter)

    def _note_places(self) -> bool:
        """Guard no longer those that are in no base any more. Returns whether a place has changed."""
        places = [p.data_ptr() for p in self.parameters]
        if places == self._places:
            return False
        self.parameters = [p for p in self.parameters if not p.requires_grad and is_base(p)]
        self._places = [p.data_ptr() for p in self.parameters]
        return True


def _set_class(parameters: Iterable[nn.Parameter], kind: type[nn.Parameter]) -> None:
    for p in parameters:
        p.__class__ = kind


def make_shared(parameters: Iterable[nn.Parameter]) -> None:
    """At the end of a trial: those that are in a base's memory are not to be written again."""
    for p in parameters:
        if type(p) is nn.Parameter and id(p) in _shared and is_base(p):
            p.__class__ = SharedParameter


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) in _shared and p.requires_grad:
                _give_own_memory(p)


def _give_own_memory(tensor: torch.Tensor) -> None:
    """Of a shared Parameter, or of a view of one: no write reaches the base from here on."""
    owner: torch.Tensor = getattr(tensor, "owner", tensor)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if is_base(owner) and not is_wrapper(owner):
            owner.data = owner.detach().as_subclass(torch.Tensor).clone()
        if isinstance(tensor, SharedView) and is_base(tensor):
            own = owner.detach().as_subclass(torch.Tensor)
            tensor.data = own.as_strided(tensor.size(), tensor.stride(), own.storage_offset() + tensor.offset)


def _written(func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The shared tensors that the call writes into."""
    in_place = (name.endswith("_") and not name.endswith("__") and name not in _READ_ONLY) or name in (
        "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
    )  # fmt: skip
    written = tensors_in(args[:1] or list(kwargs.values())) if in_place else []  # functions of nn.init are given names
    return [t for t in (*written, *tensors_in(kwargs.get("out"))) if isinstance(t, _SeesWrites)]


def _unfreezes(func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name == "requires_grad_":
        return bool(kwargs.get("requires_grad", args[1] if len(args) > 1 else True))
    of = getattr(func, "__self__", None)
    return name == "__set__" and of is torch.Tensor.requires_grad and len(args) > 1 and bool(args[1])


def _is_same(a: torch.Tensor, b: Any) -> bool:
    return isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype and same_bits(a, b)


def _as_views(result: torch.Tensor, args: Any) -> torch.Tensor:
    """The result, as a view of the shared Parameter in whose memory it lies, if it lies in one."""
    if result.layout is not torch.strided or not is_base(result):
        return result
    for given in tensors_in(args):
        is_in_it = result.untyped_storage()._cdata == given.untyped_storage()._cdata
        if isinstance(given, (SharedParameter, SharedView)) and is_in_it:
            view = result.as_subclass(SharedView)
            view.owner = given.owner if isinstance(given, SharedView) else given
            view.offset = int(result.storage_offset() - view.owner.storage_offset())
            return view
    return result
