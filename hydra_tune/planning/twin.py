"""A copy of a block and of what it is given, to be run once: what its forward changes goes with the copy.

the block   its modules, with all that their attributes lead to; the weights are those of its visit
arguments   tensors without a history, or clones of them; copies of objects
"""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Callable
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from hydra_tune.blocks.block import Block, has_hooks
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.fingerprint import Fingerprint
from hydra_tune.glance import keep_only_pytorchs
from hydra_tune.host_buffer import versions_of
from hydra_tune.meter import storages_of
from hydra_tune.planning.reached import STRUCTURE, Reached
from hydra_tune.tree import Structure, containers_in, flatten, is_fixed, tensors_in, unflatten

_BUFFERS = "a buffer"
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


class Twin:
    """`weights` are those of the visit, `held` those that are on the device anyway, `given` the leaves of the
    arguments, `asked` those of them that gradients are asked for.

    With `gone`, activations among the attributes are no more what they were: a repetition would not find them.
    """

    def __init__(
        self,
        block: Block,
        model: nn.Module,
        at: DeviceCopy,
        call: tuple[list[Any], Structure],
        *,
        clones: bool,
        gone: bool,
    ) -> None:
        self._block, self._at, (leaves, self._structure) = block, at, call
        self.weights = list(map(_like, at.leaves(block.slot_parameters)))
        self.held = list(map(_like, block.held))
        own = zip((*block.slot_parameters, *block.held), (*self.weights, *self.held), strict=True)
        self.asked, given = list[torch.Tensor](), dict[int, torch.Tensor]()
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in given:
                bare = leaf.detach()
                if leaf.requires_grad:
                    self.asked.append(bare.requires_grad_())
                given[id(leaf)] = bare.clone() if clones else bare
        lost = {id(v) for m in block.modules for v in vars(m).values() if _is_activation(v)} if gone else set()
        copier = _Copier({id(p): p for p in model.parameters()} | {id(p): leaf for p, leaf in own})
        with torch.no_grad(), _CopiesTensors(lost):
            self.module = copier.copy_block(block)
            copier.memo = given | copier.memo
            self.given = [given[id(x)] if isinstance(x, torch.Tensor) else copier.copy(x) for x in leaves]
        for part in self.module.modules():
            if part is not self.module:
                keep_only_pytorchs(part)
        self._buffers = [m._buffers for m in self.module.modules()]
        self._versions, self._marks = versions_of(self.weights), list(map(_marks_on, self.given))

    def note(self) -> None:
        """What is there before its forward."""
        notes = {"what is noted on a weight": [leaf.__dict__ for leaf in (*self.weights, *self.held)]}
        objects = [x for x in self.given if not isinstance(x, torch.Tensor)]
        self._reached = Reached(self.module, {"an argument": objects, _BUFFERS: self._buffers, **notes})

    def note_buffers(self) -> None:
        self._reached = Reached(nn.Module(), {_BUFFERS: self._buffers})

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that it is given."""
        return [x for x in self.given if isinstance(x, torch.Tensor)]

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [b for own in self._buffers for b in own.values() if b is not None]

    @property
    def _own_tensors(self) -> list[torch.Tensor]:
        """Beside its weights and what it is given: buffers, attributes, and tensors in these."""
        return self.buffers + [t for m in self.module.modules() for t in _tensors_of(m)]

    def forward(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Any:
        """By the module's class, or a forward of its own, with these hooks on what autograd saves."""
        args, kwargs = unflatten(self.given, self._structure)
        own, caches = self._block.own_forward, torch.is_autocast_cache_enabled()
        run = getattr(own, "__func__", None) if getattr(own, "__self__", None) is self._block.module else None
        known = parametrize._cache  # of the original, whose key a copy has; a new one once `cached` is left
        kept = dict(known)
        known.clear()
        torch.set_autocast_cache_enabled(False)  # its casts would outlive the copy
        _push_hooks(pack, unpack)
        try:
            return (run or type(self.module).forward)(self.module, *args, **kwargs)
        finally:
            _pop_hooks()
            torch.set_autocast_cache_enabled(caches)
            known.clear()
            known.update(kept)

    # ---- what its forward has done ----

    @property
    def written_weights(self) -> tuple[int, ...]:
        """Their numbers in the block."""
        now = versions_of(self.weights)
        return tuple(i for i, (a, b) in enumerate(zip(self._versions, now, strict=True)) if a != b)

    def misuse_of_weights(self) -> str:
        """What it does with its weights that it cannot do in a visit."""
        if any(self._at.has(t) for m in self.module.modules() for t in _tensors_of(m)):
            return "keeps a view of a weight in an attribute"
        return "puts a hook on a weight in its forward" if any(map(has_hooks, (*self.weights, *self.held))) else ""

    def look(self, outputs: Any) -> tuple[str, bool]:
        """What of its forward a repetition would not do alike, or undo, empty if nothing; and whether it has written
        buffers since it was noted what is there."""
        changes = self._reached.changes()
        others = [name for name in changes if name != _BUFFERS]
        others += ["a buffer into an activation"] if any(map(_is_activation, self.buffers)) else []
        return f"changes {others[0]}" if others else self._gives_away(outputs), _BUFFERS in changes

    def _gives_away(self, outputs: Any) -> str:
        memory = {s._cdata for t in (*self._own_tensors, *self.held) for s in storages_of(t)}
        if any(s._cdata in memory for t in tensors_in(outputs) for s in storages_of(t)):
            return "returns a buffer, or another tensor that it keeps"
        if self._reached.has(containers_in(outputs)):
            return "returns a list, dict or object that it keeps"
        if not all(isinstance(x, torch.Tensor) or stays_as_it_is(x) for x in flatten(outputs)[0]):
            return "returns an object"
        for module in self._block.modules:
            direct = set(map(id, vars(module).values()))
            if any(_is_activation(t) and id(t) not in direct for t in _tensors_of(module)):
                return "has an activation in an attribute"
        return "puts a hook or an attribute on an input" if list(map(_marks_on, self.given)) != self._marks else ""


def _like(parameter: nn.Parameter) -> nn.Parameter:
    """Over the same values, with what the user has put on it."""
    leaf = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
    leaf.__dict__.update(parameter.__dict__)
    return leaf


def weights_in(outputs: Any, at: DeviceCopy) -> list[nn.Parameter]:
    """The weights in a slot that a block returns where a copy would not do: frozen ones, into which others may write,
    and those in objects."""
    leaves = [x for x in flatten(outputs)[0] if not is_fixed(x) or isinstance(x, torch.Tensor)]
    found = [at.parameter_at(x.data_ptr())[0] for x in leaves if isinstance(x, torch.Tensor) and at.has(x)]
    objects = [x for x in leaves if not isinstance(x, torch.Tensor)]
    hidden = [t for t in Fingerprint().tensors_within(objects) if at.has(t)] if objects else []
    return [p for p in found if not p.requires_grad] + [at.parameter_at(t.data_ptr())[0] for t in hidden]


def stays_as_it_is(value: Any) -> bool:
    """Whether nobody can change what a block sees of this argument."""
    if is_fixed(value) or type(value) is object:
        return True
    if isinstance(value, (torch.dtype, torch.device, torch.layout, Enum, type, nn.Module, bytes, complex)):
        return True
    return isinstance(value, (FunctionType, BuiltinFunctionType)) and not getattr(value, "__closure__", None)


class _CopiesTensors(TorchFunctionMode):
    """Within, `deepcopy` clones tensors with a history, too."""

    def __init__(self, lost: set[int]) -> None:
        super().__init__()
        self._lost = lost  # ids of tensors of which only the shape is left

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            made = tensor.detach().clone()
            if id(tensor) in self._lost:
                made.fill_(torch.nan if made.is_floating_point() else 0)
            made.__dict__.update(copy.deepcopy(tensor.__dict__, memo))
            memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


class _Copier:
    """Copies what belongs together: what two values lead to is one in their copies, too."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self._alive = list[Any]()  # ids in the memo are of these, too

    def copy(self, value: Any) -> Any:
        """What can't be copied, as a lock, is the copy's, too; so is what is known by its identity alone."""
        made: Any = ChainMap({id(value): value} if type(value) is object else {}, self.memo)
        try:
            found = copy.deepcopy(value, made)
        except Exception:  # half of it may be in `made`
            found, made = value, ChainMap({id(value): value})
        self.memo |= made.maps[0]
        self._alive.append(made)
        return found

    def copy_block(self, block: Block) -> nn.Module:
        for value in [v for m in block.modules for k, v in vars(m).items() if k not in STRUCTURE]:
            self.copy(value)
        own = vars(block.module).pop("forward", None)
        try:
            return copy.deepcopy(block.module, self.memo)
        finally:
            if own is not None:
                vars(block.module)["forward"] = own


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Among its attributes, and in their containers; no parameters or buffers."""
    own = [v for k, v in vars(module).items() if k not in STRUCTURE]
    return tensors_in([v for v in own if isinstance(v, (torch.Tensor, list, tuple, dict))])


def _is_activation(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _marks_on(leaf: Any) -> tuple[Any, ...]:
    """What a forward may leave on a tensor that it is given."""
    if not isinstance(leaf, torch.Tensor):
        return ()
    return leaf._backward_hooks is not None, leaf.retains_grad, leaf.requires_grad, tuple(leaf.__dict__)
