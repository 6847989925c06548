"""Autocast's copies of weights: in which contexts they are made, and those of one forward, joined.

Autocast casts a weight once a context, for all its uses, and adds their gradients in the lower precision. But PyTorch
keeps the casts of all threads together, and whoever leaves a thread's outermost `torch.autocast` clears them all: a
weight that is used again is then cast again, and its gradients are added in float32. So contexts are told apart by
what a thread has cleared itself, and casts that others have parted are joined.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch

from hydra_tune.fork import new_in_child
from hydra_tune.graph import CAST, leaf_of, nodes_of


class _Cleared(threading.local):
    """By this thread: how often, and at which of autograd's sequence numbers of late."""

    def __init__(self) -> None:
        self.count = 0
        self.at: deque[int] = deque(maxlen=1_000)


_here = _Cleared()
_by_all = 0
_lock = new_in_child(threading.Lock())


def watch_clearings() -> None:
    """Count who clears autocast's casts, from here on. `torch.autocast` looks the function up each time."""
    with _lock:
        clear = torch.clear_autocast_cache
        if getattr(clear, "is_counted", False):
            return

        @wraps(clear)
        def counted() -> None:
            global _by_all
            with _lock:
                _by_all += 1
            _here.count += 1
            _here.at.append(torch._C._autograd._get_sequence_nr())
            clear()

        counted.is_counted = True  # type: ignore[attr-defined]
        torch.clear_autocast_cache = counted


def context_number() -> int:
    """One for each autocast context of this thread, where it is in one."""
    return _here.count


class Clearings:
    """From its making on, in this thread."""

    def __init__(self) -> None:
        self._own, self._all = _here.count, _by_all

    @property
    def by_others(self) -> bool:
        return _by_all - self._all != _here.count - self._own


class CastsOfForward:
    """From its making until `join`, one forward in this thread."""

    def __init__(self) -> None:
        self._first_node = torch._C._autograd._get_sequence_nr()
        self._clearings = Clearings()

    def join(self, outputs: Sequence[torch.Tensor]) -> list[Any]:
        """Where others have cleared the casts meanwhile, let the gradients of each weight be added as those of one, for
        as long as the caller keeps what this returns: it may not be kept by the graph behind `outputs`."""
        remembers = torch.is_autocast_cache_enabled()  # the model may have switched it off
        if not remembers or not self._clearings.by_others:
            return []
        nodes, casts = list(nodes_of(outputs)), dict[tuple[int, torch.dtype, int], _Casts]()
        for node in [node for node in nodes if node.name() == CAST]:
            leaf, made = leaf_of(node.next_functions[0][0]), node._input_metadata[0].dtype
            number = node._sequence_nr()
            if leaf is None or number < self._first_node or leaf.dtype is not torch.float32:
                continue
            if made in (torch.bfloat16, torch.float16):
                context = bisect_right(_here.at, number)
                casts.setdefault((id(leaf), made, context), _Casts()).append(node)
        joined = [several for several in casts.values() if len(several) > 1]
        for several in joined:
            _OneCast(several, nodes)
        return joined


class _Casts(list[Any]):
    """Nodes. Whoever hooks refer to must not keep them, or the graph would keep itself."""


class _OneCast:
    """Adds what the uses of several casts of one weight give, use by use; the last of these casts has the sum."""

    def __init__(self, casts: _Casts, nodes: Sequence[Any]) -> None:
        self._casts = weakref.ref(casts)
        self._backward = self._counted = -1
        self._sum: torch.Tensor | None = None
        self._yet_to_come: set[int] = set()
        among = set(casts)
        for node in nodes:
            places = [i for i, (child, _) in enumerate(node.next_functions) if child in among]
            if places:
                node.register_hook(self._adding(places))
        for i, cast in enumerate(casts):
            cast.register_prehook(partial(self._give, i))

    def _begin(self) -> bool:
        """False where the graph's outputs are gone."""
        current, casts = torch._C._current_graph_task_id(), self._casts()
        if current != self._backward:
            self._backward, self._sum = current, None
        if current != self._counted and casts is not None:
            self._counted = current
            self._yet_to_come = {i for i, cast in enumerate(casts) if torch._C._will_engine_execute_node(cast)}
        return casts is not None

    def _adding(self, places: Sequence[int]) -> Callable[[Any, Any], None]:
        def add(grad_inputs: Sequence[torch.Tensor | None], _: Any) -> None:
            if self._begin():
                for gradient in [grad_inputs[i] for i in places]:
                    if gradient is not None:
                        self._sum = gradient if self._sum is None else self._sum + gradient

        return add

    def _give(self, cast: int, _: Any) -> tuple[torch.Tensor | None] | None:
        if not self._begin():
            return None
        self._yet_to_come.discard(cast)
        if self._yet_to_come:
            return (None,)
        total, self._sum = self._sum, None
        return (total,)
