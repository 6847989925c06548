"""A call on another virtual device than its trial's home: what it is given there, and what it gives back.

    forward    inputs --values copied--> there: operators --Move--> outputs at home
    backward   gradients of outputs --Move.backward--> there: operators --hook where they leave--> home

`Move` is a node behind each output, beside `Promote` the only one that plain PyTorch does not have. An input has none:
its gradients would be added up in it before those of the input's other uses are, in another order than PyTorch's. It
is the same tensor, which has other memory during the visit; and a gradient that leaves the call's part of the graph for
that of an input is moved by a hook of the operator that has computed it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from hydra_tune.device import Device
from hydra_tune.tree import map_tensors, tensors_in


class Call(Protocol):
    """What moves for a call need of it."""

    def start_backward(self) -> None:
        """Have the place of its backward, if it has none."""

    def received_there(self, gradient: torch.Tensor) -> torch.Tensor:
        """Where its backward is."""

    def received_home(self, gradient: torch.Tensor) -> torch.Tensor: ...


class Trial(Protocol):
    """What moves need of the trial."""

    @property
    def device(self) -> Device: ...

    def received(self, device: Device, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies, without a graph."""


class Move(torch.autograd.Function):
    """From an output where it was computed to its `copy` at home, in a list, or it would be an input that is returned.
    The call lives as long as its graph can be used."""

    @staticmethod
    def forward(ctx: Any, call: weakref.ref[Call], copy: list[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return copy[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None, torch.Tensor | None]:
        call: Call | None = ctx.call()
        if call is None or gradient is None:
            return None, None, gradient
        call.start_backward()
        return None, None, call.received_there(gradient)


_move: Callable[..., torch.Tensor] = super(torch.autograd.Function, Move).apply


def may_move(tensor: torch.Tensor) -> bool:
    """Whether it can have other memory for a while: others may use a leaf meanwhile."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and not (tensor.requires_grad and tensor.grad_fn is None)


@contextmanager
def brought(trial: Trial, device: Device, leaves: Sequence[Any]) -> Iterator[list[Any]]:
    """Inside, the tensors among these arguments are on the device: those with a graph themselves, copies of others."""
    if device is trial.device:
        yield list(leaves)
        return
    given = list({id(x): x for x in leaves if isinstance(x, torch.Tensor)}.values())
    copies = dict(zip(map(id, given), trial.received(device, given), strict=True))
    at_home = [(x, x.data) for x in given if x.requires_grad]
    for x in given:
        copies[id(x)].__dict__.update(x.__dict__)
    try:
        for x, _ in at_home:
            x.data = copies[id(x)]
            copies[id(x)] = x
        yield [copies[id(x)] if isinstance(x, torch.Tensor) else x for x in leaves]
    finally:
        for x, data in at_home:
            x.data = data


def copies_for_graph(trial: Trial, device: Device, leaves: Sequence[Any]) -> list[Any]:
    """Of the tensors among these arguments, on the device, for a graph of their own; at home they themselves."""
    if device is trial.device:
        return list(leaves)
    given = list({id(x): x for x in leaves if isinstance(x, torch.Tensor)}.values())
    copies = dict(zip(map(id, given), trial.received(device, given), strict=True))
    for x in given:
        copies[id(x)].requires_grad_(x.requires_grad).__dict__.update(x.__dict__)
    return [copies[id(x)] if isinstance(x, torch.Tensor) else x for x in leaves]


def returned(trial: Trial, call: Call, device: Device, inputs: Sequence[torch.Tensor], outputs: Any) -> Any:
    """The outputs at home, each behind a node of its own; where gradients leave the call for its inputs, hooks."""
    made = list({id(x): x for x in tensors_in(outputs) if not any(x is y for y in inputs)}.values())
    homes = [x.data for x in made] if device is trial.device else trial.received(trial.device, made)
    reference = weakref.ref(call)
    _hook_edges(reference, made, inputs)
    at_home = dict[int, torch.Tensor]()
    for x, home in zip(made, homes, strict=True):
        if x.requires_grad:
            home = _move(reference, [home], x)
        elif device is trial.device:
            home = x
        if home is not x:
            home.__dict__.update(x.__dict__)
        at_home[id(x)] = home
    return map_tensors(lambda x: at_home.get(id(x), x), outputs)


def _hook_edges(call: weakref.ref[Call], outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Where the graph of the outputs meets that of the inputs."""
    ends = {x.grad_fn for x in inputs if x.grad_fn is not None}
    left = [x.grad_fn for x in outputs if x.grad_fn is not None]
    met = set[Any](left)
    while left:
        node = left.pop()
        edges = [child in ends for child, _ in node.next_functions]
        if any(edges):
            node.register_hook(partial(_taken_home, call, edges))
        for (child, _), leaves in zip(node.next_functions, edges, strict=True):
            if child is not None and not leaves and child not in met:
                met.add(child)
                left.append(child)


def _taken_home(
    reference: weakref.ref[Call], edges: Sequence[bool], gradients: Sequence[torch.Tensor | None], _: Any
) -> tuple[torch.Tensor | None, ...] | None:
    call = reference()
    if call is None:
        return None
    return tuple(
        call.received_home(g) if leaves and g is not None else g for g, leaves in zip(gradients, edges, strict=True)
    )
