"""Autocast's copies of weights, one for all calls of an autocast context, as plain PyTorch has them.

PyTorch casts a weight once a context, and adds the gradients of all its uses in the lower precision. But it remembers
the casts of leaves only, and a weight in a visit is none. So a weight that a block uses through its cast alone comes
to the block in the lower precision, the same tensor in each call of the context; between calls it has no memory. Its
`dtype` says what the weight's does: adapters of peft convert their inputs to that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from functools import cache, wraps

import torch

from hydra_tune.errors import PrepareError


class OtherBranchError(PrepareError):
    """A call may use a weight otherwise than as autocast's copy, as which it was given."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"a weight has one use in an autocast context, as its cast, but a call took another branch than was "
            f"measured: {found}. Enter torch.autocast for each forward, or raise the pool's memory= until the model "
            "is resident."
        )


dtype_of = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]  # in truth


@cache
def _seen_as(dtype: torch.dtype) -> type[torch.Tensor]:
    plain = torch._C._disabled_torch_function_impl
    return type("Tensor", (torch.Tensor,), {"__torch_function__": plain, "dtype": property(lambda _: dtype)})


def seen_as(dtype: torch.dtype, cast: torch.Tensor) -> torch.Tensor:
    """The same tensor, to whoever asks for its dtype."""
    cast.__class__ = _seen_as(dtype)
    return cast


class SharedCasts:
    """Of one trial, by the id of the weight. Empty again when the thread leaves its autocast context."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[torch.Tensor, int]] = {}  # with the weight's version
        self._barred = set[int]()  # weights that were used without this context's cast

    def get(self, weight: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """With these `values` of the weight, cast; None where this context has none yet."""
        if id(weight) in self._barred:
            raise OtherBranchError("one was used without it before")
        cast, version = self._of.get(id(weight), (None, -1))
        if cast is None or version != weight._version or dtype_of(cast) is not dtype:
            return None
        cast.data = values.to(dtype)
        return cast

    def bar(self, weights: Iterable[torch.Tensor]) -> None:
        """They are used without it from here on, by one call alone."""
        numbers = set(map(id, weights))
        if not self._barred.isdisjoint(numbers):
            raise OtherBranchError("two calls were without it")
        self._barred |= numbers
        _here.casts[id(self)] = weakref.ref(self)

    def put(self, weight: torch.Tensor, cast: torch.Tensor) -> None:
        _here.casts[id(self)] = weakref.ref(self)
        self._of[id(weight)] = cast, weight._version

    def free(self, weight: torch.Tensor) -> None:
        """Its memory, until the next call."""
        if (found := self._of.get(id(weight))) is not None:
            found[0].data = found[0].data.new_empty(0)

    def has(self, weight: torch.Tensor) -> bool:
        return id(weight) in self._of

    def forget(self, weights: Iterable[torch.Tensor]) -> None:
        """What a forward has cast that is to run anew."""
        for weight in weights:
            self._of.pop(id(weight), None)

    def clear(self) -> None:
        self._of.clear()
        self._barred.clear()


class _CastsOfThread(threading.local):
    """What is to be cleared with the thread's autocast context."""

    def __init__(self) -> None:
        self.casts: dict[int, weakref.ref[SharedCasts]] = {}  # by id


_here = _CastsOfThread()
_clear = torch.clear_autocast_cache


@wraps(_clear)
def _clear_all() -> None:
    while _here.casts:
        _, reference = _here.casts.popitem()
        if (casts := reference()) is not None:
            casts.clear()
    _clear()


torch.clear_autocast_cache = _clear_all  # `torch.autocast` looks it up when a thread leaves its outermost context
