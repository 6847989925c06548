"""Finds in a pilot's graph what cannot be cut as it stands, and keeps a model's own state out of the pilot's way."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from hydra_tune.block import Block, owners_of
from hydra_tune.edges import Edges, TensorEdges, WeightEdges
from hydra_tune.errors import PrepareError, UncuttableError
from hydra_tune.garbage import collect_until
from hydra_tune.gradient_sums import is_edge
from hydra_tune.graph import BLOCK, CAST, GATE, leaf_of, nodes_of, users_of
from hydra_tune.host_buffer import storage_bytes
from hydra_tune.marks import HOOKS_OF_MODULES
from hydra_tune.process_state import casts_to, remembers_casts
from hydra_tune.seen_call import SeenCall
from hydra_tune.shared_random import SharedDraws
from hydra_tune.snapshot import Snapshot
from hydra_tune.tree import containers_in, tensors_in

_LIBRARIES = ("torch.", "transformers.")  # whose hooks compute weights, or collect outputs


# ---- hooks -------------------------------------------------------------------------------------------


def user_hooks(module: nn.Module) -> bool:
    """Whether the user has put a hook on this module."""
    own = vars(module)
    kinds = [kind for kind in HOOKS_OF_MODULES if own.get(kind)]
    return bool(kinds) and any(_is_users(hook) for kind in kinds for hook in own[kind].values())


def has_user_pre_hook(module: nn.Module) -> bool:
    """Whether one fires before its forward."""
    return any(map(_is_users, vars(module).get("_forward_pre_hooks", {}).values()))


def _is_users(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)  # functools.partial
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return not origin.startswith(_LIBRARIES)


def hooked_inside(blocks: Iterable[Block]) -> Iterator[tuple[Block, str]]:
    """Blocks with a user's hook on a module within, and that module's name.

    Repeating the forward would fire it again. On the block itself it fires once, as in plain PyTorch.
    """
    for block in blocks:
        for name, module in block.module.named_modules(prefix=block.name):
            if module is not block.module and user_hooks(module):
                yield block, name
                break


# ---- what a pilot must leave as it was ---------------------------------------------------------------


@contextmanager
def user_hooks_removed(model: nn.Module) -> Iterator[None]:
    """Users' hooks on modules do not fire; the snapshot of the modules' attributes puts them back."""
    for module in model.modules():
        for kind in HOOKS_OF_MODULES:
            hooks = module.__dict__.get(kind, {})
            for key in [k for k, hook in hooks.items() if _is_users(hook)]:
                del hooks[key]
    yield


@contextmanager
def parametrizations_uncached(model: nn.Module) -> Iterator[None]:
    """A pilot computes parametrized weights anew, and leaves none to the forward that follows. The count of those who
    have them cached is the process's: others may come and go meanwhile."""
    enabled = parametrize._cache_enabled if any(map(parametrize.is_parametrized, model.modules())) else 0
    parametrize._cache_enabled -= enabled
    try:
        yield
    finally:
        parametrize._cache_enabled += enabled
        if enabled and not parametrize._cache_enabled:
            parametrize._cache = {}


_FREEZES = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


class TensorHooksOff(TorchFunctionMode):
    """Hooks that a forward puts on its activations would see a pilot's gradients. `cast_by_hand` are the ids of the
    leaves that its own code has cast, not autocast. Autocast's casts of `weights` are forgotten: the forward proper
    makes its own, where plain PyTorch makes them."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._weights = set(map(id, weights))
        self._hooked: list[torch.Tensor] | None = None
        self.cast_by_hand: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook):
            self._note(args[0])
            return RemovableHandle(OrderedDict())
        if func is torch.Tensor.retain_grad:
            self._note(args[0])
            return None
        if func in _FREEZES:
            self._note(args[0])
        with self._casts_forgotten(args, kwargs):
            result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.grad_fn is not None and result.grad_fn.name() == CAST:
            self.cast_by_hand.update(id(x) for x in args if isinstance(x, torch.Tensor) and x.is_leaf)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        if self._hooked is not None:
            self._hooked.append(tensor)

    @contextmanager
    def noted(self) -> Iterator[list[torch.Tensor]]:
        """Those that a hook would have been put on within, or that were told whether to require a gradient."""
        self._hooked = []
        try:
            yield self._hooked
        finally:
            self._hooked = None

    @contextmanager
    def _casts_forgotten(self, *arguments: Any) -> Iterator[None]:
        keeps = torch.is_autocast_cache_enabled() and any(id(t) in self._weights for t in tensors_in(arguments))
        if keeps:
            torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            if keeps:
                torch.set_autocast_cache_enabled(True)


# ---- one block's own graph ---------------------------------------------------------------------------


def refuse_shared_draws(block: Block, draws: SharedDraws, *, repeats: bool = True) -> None:
    """After a forward of the block, or two: `repeats` says whether both have made the same.

    Raises:
        UncuttableError: the block has drawn from Python's or NumPy's random numbers, and would draw others again.
    """
    if draws.are_some or (draws.may_be and not repeats):
        raise UncuttableError(
            f"a block's forward may be repeated, but {block.name} draws from Python's or NumPy's random numbers, and "
            "would draw others then. Draw from torch's."
        )


def refuse_wrappers(block: Block, tensors: Iterable[torch.Tensor]) -> None:
    """Among what the block is given or makes.

    Raises:
        PrepareError: a tensor that has others inside, as one of `torch.nested` has.
    """
    for tensor in tensors:
        if tensor.is_nested or is_traceable_wrapper_subclass(tensor):
            raise PrepareError(
                f"a prepared model's blocks are given and make plain tensors, but block {block.name} has a "
                f"{type(tensor).__name__}. Pad it (torch.nested.to_padded_tensor), or call hydra_tune.release(model)."
            )


def refuse_shared_containers(block: Block, outputs: Any, given: Any, model: nn.Module) -> None:
    """Outside of the block they are others, and who puts something into one would not put it into the other.

    Raises:
        UncuttableError: the block returns a list, dict or object that it was given or that it keeps.
    """
    containers = containers_in(outputs)
    if containers and (
        Snapshot({"given": given}, model).reaches(containers)
        or Snapshot.of_modules(block.module.named_modules(), model).reaches(containers)
    ):
        raise UncuttableError(
            f"a block's outputs are its own, but {block.name} returns a list, dict or object that it was given or "
            "that it keeps. Return a copy, or its tensors."
        )


def refuse_side_channel(
    block: Block, leaves: Sequence[weakref.ref[torch.Tensor]], known: Collection[Block] = ()
) -> None:
    """After a forward and backward of the block has been forgotten: does anyone still hold its graph? A cycle does not,
    such as an exception's. To look for one in all of the heap takes long; that is done for the first block of its type
    among those that are `known` to be kept.

    Raises:
        UncuttableError: a hook, an attribute, a list or a cache does.
    """

    def are_forgotten() -> bool:
        return all(leaf() is None for leaf in leaves)

    forgotten = collect_until(are_forgotten, generation=1)  # a cycle of just now, unless other threads have made it old
    if not forgotten and type(block.module) not in {type(other.module) for other in known}:
        forgotten = collect_until(are_forgotten)
    if not forgotten:
        raise UncuttableError(
            f"a block hands activations on through its outputs, but one of {block.name} is kept beside them (by a "
            "hook, an attribute, a list or a cache), where its gradient would be lost. Return it, or detach it."
        )


def refuse_changes(block: Block, changes: Sequence[str], *, repeats: bool) -> None:
    """`changes` between two equal calls, of which the second gave the same or not: what a cache fills at the first
    stays equal.

    Raises:
        UncuttableError: a counter, a running value, a list that grows, a generator of its own.
    """
    if changes:
        raise UncuttableError(
            f"a block's forward may be repeated, but that of {block.name} changes {changes[0]} each time. "
            "Make it a buffer, or change it outside of forward."
        )
    if not repeats:
        raise UncuttableError(
            f"a block's forward may be repeated, but that of {block.name} gives something else the second time: it "
            "depends on a state that it changes."
        )


def shares_memory(made: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    """Whether what a block made is a view of what it was given, or of something else that it made."""
    storages = [x.untyped_storage()._cdata for x in (*inputs, *made) if x.layout is torch.strided]
    return len(set(storages)) < len(set(map(id, (*inputs, *made))))


# ---- the whole model's graph -------------------------------------------------------------------------


class OuterGraph:
    """What is in the graph behind a pilot's outputs, in which each call of a block is one node; it keeps none of it.

    used_outside   weights of blocks that something uses without calling the block
    changed_later  blocks whose inputs were changed in place after their forward; a backward would repeat it on others
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        blocks: Iterable[Block],
        calls: Iterable[SeenCall],
        run_back: Iterable[SeenCall],
    ) -> None:
        """An earlier forward may have given the inputs of this one, and used weights in its own way. Who else used the
        sources of calls that a backward within the forward has run back, nobody knows; nor who will, of those that
        are not behind the outputs of this batch."""
        nodes = list(nodes_of(outputs))
        called = [node for node in nodes if node.name() == BLOCK and hasattr(node, "call")]
        measured = [node for node in called if node.call is not None and node.call.seen is not None]  # not used up
        owned = {id(p): p for block in blocks for p in block.slot_parameters}
        into_blocks = {*called, *(node for node in nodes if is_edge(node) or node.name() == GATE)}
        not_others = into_blocks.union(nodes_of(inputs))
        others = [node for node in nodes if node not in not_others]
        children = [leaf_of(c) for node in others for c, _ in node.next_functions]
        self._cast_outside = {id(leaf_of(c)) for node in others if node.name() == CAST for c, _ in node.next_functions}
        self.used_outside = list(dict.fromkeys(owned[id(leaf)] for leaf in children if id(leaf) in owned))
        self.changed_later = [node.call.block for node in measured if _changed(node)]
        users = users_of(nodes, outputs)
        outside = users_of([node for node in nodes if node not in into_blocks], outputs)
        self._owners = owners_of(blocks)
        self._remembers_casts = remembers_casts() or any(call.remembers_casts for call in calls)
        self._under_autocast = casts_to() is not None or any(call.under_autocast for call in calls)
        self._calls: dict[SeenCall, list[bool]] = {}  # and whether something else uses each of its sources, of
        for node in measured:  # weights other operators than blocks, which add up theirs themselves
            num_tensors = sum(node.call.num_edges[: len(node.call.seen.tensor_uses)])
            tensors, weights = node.next_functions[:num_tensors], node.next_functions[num_tensors:]
            shared = [*(users[child] > 1 for child in tensors), *(outside[child] > 0 for child in weights)]
            self._calls[node.call.seen] = shared
        self._calls.update((call, [True] * (len(call.tensor_uses) + len(call.weight_uses))) for call in run_back)
        for call in calls:
            if call not in self._calls:
                self._calls[call] = [True] * len(call.tensor_uses) + [False] * len(call.weight_uses)

    def edges(self, *, hooked: bool) -> Iterator[tuple[Block, Edges, int]]:
        """For each call: sources that other operators use too have an edge for each use in the block; and the bytes of
        the gradients that are apart then.

        An activation that still lives, now that the graph does not, is someone's, who may give it to the loss; so
        may the user's hooks, where the model is `hooked`: they do not fire in a pilot.
        """
        for call, shared in self._calls.items():
            num_tensors = len(call.tensor_uses)
            always = [
                other or (direct > 1 and (hooked or source() is not None))
                for other, source, (direct, _) in zip(shared, call.sources, call.tensor_uses, strict=False)
            ]
            given = TensorEdges(call.places, tuple(n for n, _ in call.tensor_uses), tuple(always))
            counts = zip(call.source_bytes, given.counts, always, strict=True)
            apart = sum(size * n for size, n, is_apart in counts if is_apart and n > 1)
            weights = []
            for i, (p, other) in enumerate(zip(call.block.parameters, shared[num_tensors:], strict=True)):
                weights.append(self._weight_edges(call, i, used_by_others=other))
                apart += _bytes_apart(p, *call.weight_uses[i], used_by_others=other)
            yield call.block, Edges((given,), tuple(weights)), apart

    def _weight_edges(self, call: SeenCall, number: int, *, used_by_others: bool) -> WeightEdges:
        direct, by_cast = call.weight_uses[number]
        casts_to, may_be_cast = call.casts_to[number], call.may_be_cast[number] and self._remembers_casts
        if used_by_others:
            outside = id(call.block.parameters[number]) in self._cast_outside
            return WeightEdges(max(direct, 1), by_cast, casts_to, by_cast, outside, has_several=direct > 1)
        is_shared = self._owners[id(call.block.parameters[number])] > 1
        is_unsure = self._under_autocast and not call.under_autocast
        return WeightEdges(
            casts_to=casts_to,
            num_casts=by_cast,
            may_be_cast=may_be_cast,
            is_watched=is_unsure or is_shared or by_cast > 0 or direct != 1,
            is_mixed=is_unsure or is_shared or direct + by_cast == 0 or (may_be_cast and direct > 0),
            has_several=direct > 1,
        )


def _bytes_apart(weight: torch.Tensor, direct: int, by_cast: int, *, used_by_others: bool) -> int:
    """Of gradients of its uses that are apart; those of a cast are half as large."""
    if not used_by_others:
        return storage_bytes(weight) if by_cast and direct + by_cast > 1 else 0
    return storage_bytes(weight) * (direct if direct > 1 else 0) + storage_bytes(weight) * by_cast // 2


def refuse_own_leaves(name: str, made: Iterable[torch.Tensor], leaves: Iterable[torch.Tensor]) -> None:
    """Among the outputs that a block has `made` of its inputs and weights, the `leaves`.

    Raises:
        UncuttableError: one is a leaf itself.
    """
    known = set(map(id, leaves))
    if any(x.is_leaf and id(x) not in known for x in made):
        raise UncuttableError(
            f"a block's outputs that require a gradient come from its operators, but block {name} makes one that is a "
            "leaf (.requires_grad_()), which would be none outside of the block and have no .grad. Make it outside."
        )


def _changed(node: Any) -> bool:
    """Whether something that the node has saved was changed in place since. Not where a checkpoint makes that anew: to
    ask would make it do so, for all of them at once."""
    if node.call.is_checkpointed:
        return False
    try:
        _ = node.saved_tensors
    except RuntimeError:
        return True
    return False
