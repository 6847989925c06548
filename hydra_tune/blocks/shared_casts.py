"""Autocast's copies of weights: one for all calls in an autocast context, as in plain PyTorch.

Plain PyTorch casts a weight once in an autocast context, and sums the gradients of all its uses in the lower precision.
But it remembers casts of leaf tensors only, and in a visit a weight is the output of a node. It would be cast in each
call, and its gradients would be summed in the higher precision: other numbers.

So if a block uses a weight only through its cast, the block is given the cast, the same tensor in each call of the
context. Between calls that tensor has no memory. Its `dtype` is that of the weight, for adapters of peft convert their
inputs to a weight's dtype.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Iterable
from functools import cache, wraps

import torch
from torch import nn

from hydra_tune.errors import PrepareError


class OtherBranchError(PrepareError):
    """A call was given a weight's cast, but may use the weight in another way as well."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"in one autocast context all calls use a weight through the same cast, but a call took another branch "
            f"than was measured: {found}. Enter torch.autocast for each forward, or raise the pool's memory= until the "
            "model is resident."
        )


dtype_of = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]  # the real dtype, also of what `seen_as` returns


@cache
def _seen_as(dtype: torch.dtype) -> type[torch.Tensor]:
    plain = torch._C._disabled_torch_function_impl
    own = {"__torch_function__": plain, "dtype": property(lambda _: dtype)}
    return types.new_class("Parameter", (nn.Parameter,), exec_body=lambda names: names.update(own))


def seen_as(dtype: torch.dtype, cast: torch.Tensor) -> torch.Tensor:
    """The tensor `cast` itself, changed so that its attribute `dtype` is this dtype."""
    cast.__class__ = _seen_as(dtype)
    return cast


class SharedCasts:
    """One trial's casts in the autocast context of its thread. Emptied when the thread leaves the context."""

    def __init__(self) -> None:
        self._casts: dict[int, tuple[torch.Tensor, int]] = {}  # by the id of the weight: its cast, its version then
        self._barred = set[int]()  # ids of weights that a call has used without the shared cast

    def get(self, weight: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The weight's cast, filled with `values`; None if this context has none of this dtype yet."""
        if id(weight) in self._barred:
            raise OtherBranchError("one was used without it before")
        cast, version = self._casts.get(id(weight), (None, -1))
        if cast is None or version != weight._version or dtype_of(cast) is not dtype:
            return None
        cast.data = values.to(dtype)
        return cast

    def bar(self, weights: Iterable[torch.Tensor]) -> None:
        """One call uses these weights without their casts. From here on no other call of the context may use them."""
        numbers = set(map(id, weights))
        if not self._barred.isdisjoint(numbers):
            raise OtherBranchError("two calls were without it")
        self._barred |= numbers
        _thread_casts.casts[id(self)] = weakref.ref(self)

    def put(self, weight: torch.Tensor, cast: torch.Tensor) -> None:
        """Let later calls of the context use this cast."""
        _thread_casts.casts[id(self)] = weakref.ref(self)
        self._casts[id(weight)] = cast, weight._version

    def free(self, weight: torch.Tensor) -> None:
        """Free the memory of the weight's cast until the next call."""
        if (found := self._casts.get(id(weight))) is not None:
            found[0].data = found[0].data.new_empty(0)

    def has(self, weight: torch.Tensor) -> bool:
        return id(weight) in self._casts

    def forget(self, weights: Iterable[torch.Tensor]) -> None:
        """Drop the casts that a forward has made, before the forward runs once more."""
        for weight in weights:
            self._casts.pop(id(weight), None)

    def clear(self) -> None:
        self._casts.clear()
        self._barred.clear()


class _CastsOfThread(threading.local):
    """Which trials' casts must be cleared at the end of the thread's autocast context."""

    def __init__(self) -> None:
        self.casts: dict[int, weakref.ref[SharedCasts]] = {}  # by id


_thread_casts = _CastsOfThread()
_clear = torch.clear_autocast_cache


@wraps(_clear)
def _clear_all() -> None:
    while _thread_casts.casts:
        _, reference = _thread_casts.casts.popitem()
        if (casts := reference()) is not None:
            casts.clear()
    _clear()


torch.clear_autocast_cache = _clear_all  # `torch.autocast` looks it up when a thread leaves its outermost context
