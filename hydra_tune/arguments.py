"""What a call of a block is given, and what it makes: the tensors, each once, and what is left without them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hydra_tune.errors import UncuttableError
from hydra_tune.snapshot import hold_the_same
from hydra_tune.tree import Structure, flatten, flatten_call, is_fixed, unflatten

_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size))


class _Place:
    """Where a tensor was, by its number."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return "tensor"


class _Kept:
    """An argument of a forward, should its owner change it before the repetition."""

    __slots__ = ("_argument", "_copy")

    def __init__(self, argument: Any) -> None:
        self._argument = argument
        try:
            self._copy = copy.copy(argument)
        except Exception:  # what can't be copied can hardly be changed
            self._copy = argument

    def as_it_was(self) -> Any:
        """Itself, if it is so still: it may be known by its identity, as a default is that stands for none."""
        return self._argument if hold_the_same(self._argument, self._copy) else self._copy


def _kept(argument: Any) -> Any:
    """An argument as it is, or what is kept of it if it is neither a tensor nor plain."""
    if type(argument) in _PLAIN or isinstance(argument, (torch.Tensor, nn.Module, type)) or callable(argument):
        return argument
    return _Kept(argument)


class Arguments:
    """Of a call of this block. `places` tell calls apart whose tensors were given otherwise: see `edges.Places`."""

    def __init__(self, block: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._block = block
        leaves, self._structure = flatten_call(args, kwargs)
        self.may_change = not (all(map(is_fixed, args)) and all(map(is_fixed, kwargs.values())))
        places: dict[int, _Place] = {}
        tensors: list[torch.Tensor] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in places:
                places[id(leaf)] = _Place(len(tensors))
                tensors.append(leaf)
        self.tensors: Sequence[torch.Tensor] = tensors
        self._leaves = [places.get(id(leaf), leaf) for leaf in leaves]
        numbers = tuple([leaf.index if isinstance(leaf, _Place) else -1 for leaf in self._leaves])
        self.places = self._structure.key, numbers, tuple([t.requires_grad for t in tensors])

    @property
    def objects(self) -> list[Any]:
        """What is given beside tensors."""
        return [leaf for leaf in self._leaves if not isinstance(leaf, _Place)]

    def kept(self) -> list[Any]:
        """The leaves, and what is kept of them as they are now, for `filled`."""
        return [leaf if isinstance(leaf, _Place) else _kept(leaf) for leaf in self._leaves]

    def filled(
        self, tensors: Sequence[torch.Tensor], leaves: Sequence[Any] = ()
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments with these tensors, and these leaves, if given."""
        given = [leaf.as_it_was() if isinstance(leaf, _Kept) else leaf for leaf in leaves or self._leaves]
        args, kwargs = unflatten(_filled(tensors, given), self._structure)
        return args, kwargs

    def refuse_hidden_tensors(self, leads_to_some: Callable[[Any], bool] = lambda _: False) -> None:
        """A mutable object with tensors inside (a cache) would be changed twice, by forward and recompute. Here they
        are looked for one level down; `leads_to_some` tells of those that are deeper in an object."""
        for leaf in self.objects:
            if _holds_tensors(leaf) or leads_to_some(leaf):
                raise UncuttableError(
                    f"a block's arguments are tensors, plain data, and tuples, lists, dicts and dataclasses of them; "
                    f"block {self._block} was given a {type(leaf).__name__} that holds tensors. Pass its tensors, "
                    "or turn the feature off while training (use_cache=False)."
                )

    def refuse_changed_containers(self, tensors: Sequence[torch.Tensor], arguments: tuple[Any, Any]) -> None:
        """Where the block had these `arguments`, as `filled` gave them for these `tensors`."""
        leaves, structure = flatten(arguments)
        given = _filled(tensors, self._leaves)
        if structure.spec != self._structure.spec or any(a is not b for a, b in zip(leaves, given, strict=False)):
            raise UncuttableError(
                f"a block leaves the lists, dicts and objects that it is given as they are, but {self._block} "
                "changed one. Return what it has to say."
            )


@dataclass(frozen=True)
class Outputs:
    """Without their tensors."""

    leaves: Sequence[Any]
    structure: Structure

    def filled(self, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> Any:
        return unflatten(_filled([*given, *made], self.leaves), self.structure)


def taken_out(outputs: Any, given: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Outputs]:
    """The tensors that were made, neither given nor met before, in order; and what is left."""
    places = {id(t): _Place(i) for i, t in enumerate(given)}
    leaves, structure = flatten(outputs)
    made: list[torch.Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in places:
            places[id(leaf)] = _Place(len(given) + len(made))
            made.append(leaf)
    return made, Outputs([places.get(id(leaf), leaf) for leaf in leaves], structure)


def refuse_hidden_outputs(
    block: str,
    outputs: Any,
    moves: Callable[[torch.Tensor], bool],
    behind: Callable[[Any], Iterable[torch.Tensor]] = lambda _: (),
) -> None:
    """An object with tensors inside is handed on as it is: these without their graph, and with memory that `moves`.
    They are looked for one level down; `behind` finds those that are deeper in an object.

    Raises:
        UncuttableError: there is one among what the block returns.
    """
    for leaf in flatten(outputs)[0]:
        if not isinstance(leaf, torch.Tensor) and any(
            x.requires_grad or moves(x) for x in (*_tensors_in(leaf), *behind(leaf))
        ):
            raise UncuttableError(
                f"a block's outputs are tensors, plain data, and tuples, lists, dicts and dataclasses of them, but "
                f"{block} returns a {type(leaf).__name__} that holds tensors. Return its tensors."
            )


def _filled(tensors: Sequence[torch.Tensor], leaves: Sequence[Any]) -> list[Any]:
    return [tensors[leaf.index] if isinstance(leaf, _Place) else leaf for leaf in leaves]


def _holds_tensors(leaf: object) -> bool:
    """Among an object's attributes, or in the lists and dicts among them, one level down."""
    return bool(_tensors_in(leaf))


def _tensors_in(leaf: object) -> list[torch.Tensor]:
    return [value for value in _contents(leaf) if isinstance(value, torch.Tensor)]


def _contents(leaf: object) -> Iterator[object]:
    """The values of an object's attributes, and of the lists and dicts among them, one level down."""
    for value in getattr(leaf, "__dict__", {}).values():
        yield value
        if isinstance(value, (list, tuple)):
            for item in value:
                yield item
                yield from getattr(item, "__dict__", {}).values()
        elif isinstance(value, dict):
            yield from value.values()
