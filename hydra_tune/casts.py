"""Autocast's copies of weights: from which contexts they are, and those in the forward of a resident trial.

Autocast casts a weight once a context, for all its uses, and adds their gradients in the lower precision. But PyTorch
keeps the casts of all threads together, and whoever leaves a thread's outermost `torch.autocast` clears them all: a
weight that is used again is then cast again, and its gradients are added in float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hydra_tune.graph import CAST, leaf_of, nodes_of, saved
from hydra_tune.process_state import autocast_state, remembers_casts


class Contexts:
    """Tells the autocast contexts of one forward apart, by whether PyTorch still remembers a cast made before."""

    def __init__(self) -> None:
        self._is_within_one = remembers_casts()  # the script's; another thread may clear its casts all the same
        self._number = 0
        self._cast: Any = None

    def current(self) -> int:
        """In a context."""
        if not self._is_within_one:
            if self._cast is None:
                with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                    self._probe = torch.ones(1, 1, requires_grad=True)
            enabled = torch.is_autocast_enabled("cpu")
            try:
                torch.set_autocast_enabled("cpu", True)
                cast = _cast_of(self._probe)
            finally:
                torch.set_autocast_enabled("cpu", enabled)
            self._number += cast is not self._cast
            self._cast = cast
        return self._number


class CastsOfForward:
    """From its making until `join`, one forward in this thread, within whatever autocast is around it."""

    def __init__(self, device: torch.device) -> None:
        kinds = [kind for kind in ("cpu", device.type) if autocast_state(kind)[0]]
        if not (kinds and torch.is_autocast_cache_enabled() and torch.is_grad_enabled()):
            self._probe = None
            return
        self._dtype = autocast_state(kinds[-1])[1]
        self._first_node = torch._C._autograd._get_sequence_nr()
        where = device if kinds[-1] == device.type else torch.device("cpu")
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # it is nobody's to see
            self._probe = torch.ones(1, 1, device=where, requires_grad=True)
        self._cast = _cast_of(self._probe)

    def join(self, outputs: Sequence[torch.Tensor]) -> list[Any]:
        """Where others have cleared the casts meanwhile, let the gradients of each weight be added as those of one, for
        as long as the caller keeps what this returns: it may not be kept by the graph behind `outputs`."""
        remembers = torch.is_autocast_cache_enabled()  # the model may have switched it off
        if self._probe is None or not remembers or _cast_of(self._probe) is self._cast:
            return []
        nodes, casts = list(nodes_of(outputs)), dict[int, _Casts]()
        for node in [node for node in nodes if node.name() == CAST]:
            leaf, made = leaf_of(node.next_functions[0][0]), node._input_metadata[0].dtype
            is_of_this = node._sequence_nr() >= self._first_node and made is self._dtype
            if is_of_this and leaf is not None and leaf.dtype is torch.float32:
                casts.setdefault(id(leaf), _Casts()).append(node)
        joined = [several for several in casts.values() if len(several) > 1]
        for several in joined:
            _OneCast(several, nodes)
        return joined


def _cast_of(probe: torch.Tensor) -> Any:
    """The node of the cast that autocast makes of it, or has made and remembers. What that keeps is not for the hooks
    of a checkpoint around it, which counts what it has seen kept."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.enable_grad(), saved():
        product = torch.mm(probe, probe)
    return product.grad_fn.next_functions[0][0]  # type: ignore[union-attr]


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
