"""One block: the smallest module that is promoted as a whole, and every place that names one of its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from hydra_tune.edges import Edges
from hydra_tune.errors import UncuttableError
from hydra_tune.host_buffer import storage_bytes, versions_of
from hydra_tune.module_states import ModuleStates
from hydra_tune.own_forward import own_forward_of

_HAVE_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
_REQUIRES_GRAD = attrgetter("requires_grad")


def leaf_like(parameter: torch.Tensor, data: torch.Tensor) -> nn.Parameter:
    """What stands for a parameter in a local graph, with the attributes that the user has put on it."""
    leaf = nn.Parameter(data, requires_grad=parameter.requires_grad)
    if grad_dtype_of(leaf) != grad_dtype_of(parameter):
        leaf.grad_dtype = grad_dtype_of(parameter)
    if parameter.__dict__:
        leaf.__dict__.update(parameter.__dict__)
    return leaf


def grad_dtype_of(leaf: torch.Tensor) -> torch.dtype | None:
    """In which its gradients are added; None for that of the first. Before torch 2.10 always its own."""
    return leaf.grad_dtype if _HAVE_GRAD_DTYPE else leaf.dtype


def gradient_bytes(parameter: torch.Tensor) -> int:
    """Bytes of its `.grad`, if it gets one."""
    dtype = grad_dtype_of(parameter) or parameter.dtype
    return storage_bytes(parameter) * dtype.itemsize // parameter.dtype.itemsize


def has_attributes_of(leaf: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether its attributes are those that `leaf_like` would give it."""
    own, given = leaf.__dict__, parameter.__dict__
    return not (own or given) or (own.keys() == given.keys() and all(map(is_, own.values(), given.values())))


def attributes_of(parameters: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """What the user has put on each of them; nothing, if it is on none."""
    return [dict(vars(p)) for p in parameters] if any(map(vars, parameters)) else []


def give_attributes(
    leaves: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], attributes: Sequence[dict[str, Any]]
) -> None:
    """As `attributes_of` these parameters has told them."""
    if not (attributes or any(map(vars, leaves))):
        return
    for leaf, p, own in zip(leaves, parameters, attributes or [{}] * len(leaves), strict=True):
        if leaf is not p:
            leaf.__dict__.clear()
            leaf.__dict__.update(own)


def are_trained(parameters: Sequence[torch.Tensor]) -> list[bool]:
    """Which of them require a gradient."""
    return list(map(_REQUIRES_GRAD, parameters))


@dataclass(eq=False)
class Block:
    """A module under its name in the model.

    `held` are its parameters that live on the device for the trial's life, because something else uses them
    without calling the block; `borrowed` are such parameters of others, which its forward reaches.
    """

    name: str
    module: nn.Module
    held: Collection[nn.Parameter] = ()
    borrowed: Sequence[nn.Parameter] = ()
    edges: Edges = field(default_factory=Edges)
    keeps_clones: bool = False  # its inputs are changed in place by what comes after it
    reentrant: bool = False  # it has reentrant checkpoints within
    differentiates: bool = False  # it runs a backward within its forward
    rewritten: bool = False  # something changes its weights during a forward
    draws: bool = False  # random numbers
    is_checked: bool = False  # a repetition has made what its forward made
    shares_memory: bool = False  # some of its outputs do, with each other or with an input
    is_current: bool = True  # of the cut that the model has

    modules: list[nn.Module] = field(init=False)
    parameter_sites: list[tuple[nn.Module, str]] = field(init=False)
    buffer_sites: list[tuple[nn.Module, str]] = field(init=False)
    own_parameters: list[nn.Parameter] = field(init=False)  # each once, in order of registration
    parameters: list[nn.Parameter] = field(init=False)  # its own, then the borrowed
    slot_parameters: list[nn.Parameter] = field(init=False)
    in_slot: dict[int, nn.Parameter] = field(init=False)  # the same, by their ids
    recurrent: list[nn.RNNBase] = field(init=False)
    module_states: ModuleStates = field(init=False)
    own_forward: Callable[..., Any] | None = field(init=False)

    def __post_init__(self) -> None:
        self.modules = modules = list(self.module.modules())
        self.parameter_sites = [(m, n) for m in modules for n, p in m._parameters.items() if p is not None]
        self.buffer_sites = [(m, n) for m in modules for n, b in m._buffers.items() if b is not None]
        self.own_parameters = list(self.module.parameters())
        self.parameters = [*self.own_parameters, *self.borrowed]
        self.slot_parameters = [p for p in self.own_parameters if p not in set(self.held)]
        self.module_states = ModuleStates(modules)
        self.in_slot = {id(p): p for p in self.slot_parameters}
        self.own_forward = own_forward_of(self.module)
        self.recurrent = [m for m in modules if isinstance(m, nn.RNNBase)]

    @property
    def slot_sites(self) -> list[tuple[nn.Module, str]]:
        return [*((m, n) for m, n in self.parameter_sites if id(m._parameters[n]) in self.in_slot), *self.buffer_sites]

    @property
    def weight_bytes(self) -> int:
        """Bytes of its slot: parameters, once each, and buffers."""
        return sum(map(storage_bytes, self.slot_parameters)) + sum(storage_bytes(b) for b in self.buffers())

    def buffers(self) -> list[torch.Tensor]:
        """As in `buffer_sites`.

        Raises:
            UncuttableError: one was taken away since.
        """
        if not self.buffer_sites:
            return []
        buffers = [b for b in (m._buffers.get(n) for m, n in self.buffer_sites) if b is not None]
        if len(buffers) < len(self.buffer_sites):
            raise UncuttableError(
                f"a block's buffers are there from one step to the next, but one of {self.name} was taken away (set to "
                "None or deleted) during a forward. Fill it with zeros instead."
            )
        return buffers

    @property
    def names_device(self) -> bool:
        """Whether an attribute of its modules says where to make tensors, by a device's number."""
        return any(_is_numbered_device(value) for module in self.modules for value in vars(module).values())

    def forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The module's own forward, whatever stands in its place; one set on the instance goes before its class's."""
        if self.own_forward is not None:
            return self.own_forward(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def refuse_changed_weights(self, leaves: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
        if list(versions) != versions_of(leaves):
            raise UncuttableError(
                f"a block's forward leaves its weights as they are, but {self.name} changed one in place "
                "(nn.Embedding's max_norm does). Change it outside of forward, before the step."
            )

    def refuse_changed_flags(self, leaves: Sequence[torch.Tensor], trains: Sequence[bool]) -> None:
        if are_trained(leaves) != list(trains):
            raise UncuttableError(
                f"a block's forward finds its weights frozen or not, but {self.name} changed one's requires_grad. "
                "Change it outside of forward, before the step."
            )

    def refuse_gradients(self, leaves: Sequence[torch.Tensor]) -> None:
        """That a backward within a forward has left at the copies of weights."""
        if any(leaf.grad is not None for leaf in leaves):
            self.differentiates = True
            raise UncuttableError(
                f"a block's forward keeps nothing for a backward, but {self.name} runs one within its forward. Do so "
                "from the first batch on, then it stays on the device as a whole."
            )


def _is_numbered_device(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.index is not None
    return isinstance(value, str) and value.startswith("cuda:")


def owners_of(blocks: Iterable[Block]) -> Counter[int]:
    """How many blocks have each weight, by its id."""
    return Counter(id(p) for block in blocks for p in {*block.parameters})
