"""What operators do to weights in host memory during a pilot: what they write is undone, what they read is found."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from hydra_tune.host_buffer import once
from hydra_tune.leaves import Leaves
from hydra_tune.randomness import draws

TensorT = TypeVar("TensorT", bound=torch.Tensor)
_NORMALISES = {  # and writes running statistics, of which its schema says nothing
    getattr(torch.ops.aten, name)
    for name in (
        "batch_norm", "_batch_norm_impl_index", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm",
        "instance_norm", "batch_norm_update_stats", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts",
    )
}  # fmt: skip


class Journal:
    """Of these weights; and of `others`, and of the gradients of `leaves` as they are come upon, what is written; and
    whether something of the model's `buffers` is. A dispatch mode shows it every operator before it runs; copies are
    made only of what is written."""

    def __init__(
        self,
        weights: Iterable[torch.nn.Parameter],
        buffers: Iterable[torch.Tensor],
        others: Iterable[torch.Tensor],
        leaves: Leaves,
    ) -> None:
        self._weights = _by_storage(weights)
        self._masters = {*self._weights, *_by_storage(buffers)}
        self._others = _by_storage(others)
        self._leaves = leaves
        self._generators: dict[torch.Generator, torch.Tensor] = {}  # states of those that operators were given
        self._before: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # values of what was written, by storage
        self._read: dict[int, bool] = {}  # by storage: beside a tensor on the device?
        self._around: dict[int, torch.UntypedStorage] = {}  # see `looking_around`
        self.looked_around = False
        self.drew = False  # random numbers, since somebody set it to False
        self.wrote_masters = False  # weights or buffers, not copies of them; likewise
        self.updated: list[torch.Tensor] = []  # running statistics, since somebody emptied it: no version tells of them
        self._shared: dict[int, tuple[str, weakref.ref[torch.UntypedStorage]]] = {}  # see `watch`
        self.changed_shared: set[str] = set()  # those blocks of which something was written later

    def note(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        inputs: Iterable[torch.Tensor],
        *,
        on_device: bool,
    ) -> None:
        """`inputs` are the tensors among the arguments; `on_device` says that the operator computes there."""
        if draws(func):
            self.drew = True
            self._keep_generator(kwargs.get("generator"))
        for tensor in inputs:
            key = _key(tensor)
            self.looked_around |= key in self._around
            if key in self._weights:
                self._read[key] = on_device or self._read.get(key, False)
            if tensor.requires_grad:
                for gradient in self._leaves.come_upon(tensor):
                    self._others.setdefault(_key(gradient), []).append(gradient)
        schema = getattr(func, "_schema", None)
        if schema is None:
            return
        if getattr(func, "overloadpacket", None) in _NORMALISES:
            self._note_updated(
                {argument.name: _given(i, argument, args, kwargs) for i, argument in enumerate(schema.arguments)}
            )
        if not schema.is_mutable:
            return
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = _given(i, argument, args, kwargs)
                for written in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(written, torch.Tensor):
                        self._keep(_key(written))

    def _note_updated(self, given: dict[str, Any]) -> None:
        if given.get("training", given.get("use_input_stats", True)):
            for tensor in (given["running_mean"], given["running_var"]):
                if tensor is not None:
                    self.updated.append(tensor)
                    self._keep(_key(tensor))

    @contextmanager
    def looking_around(self, storages: Iterable[torch.UntypedStorage], given: Iterable[torch.Tensor]) -> Iterator[None]:
        """`looked_around` tells afterwards whether an operator has had one of these storages among its inputs that was
        not given to it."""
        allowed = set(map(_key, given))
        self._around = {s._cdata: s for s in storages if s._cdata not in allowed}
        self.looked_around = False
        try:
            yield
        finally:
            self._around = {}

    def watch(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Note whether something writes into these inputs and outputs of a block, some of which share their memory;
        for as long as that is theirs."""
        for tensor in tensors:
            if key := _key(tensor):
                gone = partial(self._forget, key)
                self._shared[key] = name, weakref.ref(tensor.untyped_storage(), gone)

    def _forget(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        if key in self._shared and self._shared[key][1] is reference:
            del self._shared[key]

    def _keep(self, key: int) -> None:
        self.wrote_masters |= key in self._masters
        if key in self._shared:
            self.changed_shared.add(self._shared[key][0])
        if key not in self._before:
            tensors = [once(t.data) for t in (*self._weights.get(key, ()), *self._others.get(key, ()))]
            self._before[key] = [(memory, memory.clone()) for memory in tensors]

    def read(self, *, on_device: bool) -> list[torch.nn.Parameter]:
        """What operators had among their inputs; with `on_device`, beside a tensor on the device."""
        return [
            weight for key, beside in self._read.items() if beside or not on_device for weight in self._weights[key]
        ]

    def _keep_generator(self, generator: torch.Generator | None) -> None:
        """One that no attribute or argument leads to, a global one, is met here."""
        if generator is not None and generator not in self._generators:
            self._generators[generator] = generator.get_state()

    @property
    def written(self) -> list[torch.nn.Parameter]:
        return [weight for key in self._before for weight in self._weights.get(key, ())]

    def undo(self) -> None:
        for generator, state in self._generators.items():
            generator.set_state(state)
        with torch.no_grad():
            for written in self._before.values():
                for memory, value in written:
                    memory.copy_(value)


def _given(i: int, argument: torch._C.Argument, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an operator was given for its argument of this number; None for nothing."""
    return args[i] if i < len(args) else kwargs.get(argument.name)


def _by_storage(tensors: Iterable[TensorT]) -> dict[int, list[TensorT]]:
    found: dict[int, list[TensorT]] = {}
    for tensor in tensors:
        if _key(tensor):
            found.setdefault(_key(tensor), []).append(tensor)
    return found


def _key(tensor: torch.Tensor) -> int:
    """0 for what is not watched."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided and not tensor.is_meta else 0
