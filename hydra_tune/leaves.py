"""The leaves that a forward comes upon: a backward within it adds to their gradients, and fires their hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hydra_tune.graph import leaf_of, nodes_of


class Leaves:
    """These, and those that it is told of later: what is in their gradients can be put back, and hooks kept off them.
    They are kept by whom they belong to."""

    def __init__(self, leaves: Iterable[torch.Tensor]) -> None:
        self._gradients = WeakTensorKeyDictionary()
        self._hooks: list[tuple[dict[int, Any], dict[int, Any]]] | None = None  # and what was in them; if they are off
        self._first_node = torch._C._autograd._get_sequence_nr()
        self._earlier: set[Any] = set()  # nodes from before, behind which all leaves are known
        for leaf in leaves:
            self._add(leaf)

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [gradient for gradient in self._gradients.values() if gradient is not None]

    def come_upon(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """A tensor that requires a gradient: a leaf, or one with leaves behind it if it was there before. The gradients
        of those that were not known."""
        node = tensor.grad_fn
        if node is None:
            return self._add(tensor)
        if node._sequence_nr() >= self._first_node or node in self._earlier:
            return []
        behind = list(nodes_of([tensor]))
        self._earlier.update(behind)
        return [gradient for leaf in map(leaf_of, behind) if leaf is not None for gradient in self._add(leaf)]

    def _add(self, leaf: torch.Tensor) -> list[torch.Tensor]:
        if leaf in self._gradients:
            return []
        self._gradients[leaf] = leaf.grad
        if self._hooks is not None:
            self._take_hooks(leaf)
        return [leaf.grad] if leaf.grad is not None else []

    @contextmanager
    def hooks_removed(self) -> Iterator[None]:
        """No backward inside fires their hooks; afterwards they have them again."""
        self._hooks = []
        for leaf in self._gradients:
            self._take_hooks(leaf)
        try:
            yield
        finally:
            for hooks, then in self._hooks:
                hooks.update(then)
            self._hooks = None
            self._earlier.clear()

    def _take_hooks(self, leaf: torch.Tensor) -> None:
        assert self._hooks is not None
        for hooks in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks):
            if hooks:
                self._hooks.append((hooks, dict(hooks)))
                hooks.clear()

    def restore(self) -> None:
        """Which tensors their gradients are; not what is in those."""
        for leaf, gradient in self._gradients.items():
            if leaf.grad is not gradient:
                leaf.grad = gradient
