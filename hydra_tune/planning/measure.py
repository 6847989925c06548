"""Measures a block on copies of it and of its arguments, so that nothing is left to undo.

    the block   --copy--> its modules, attributes and buffers; the weights are those of its visit
    arguments   --copy--> tensors without a history; clones, if the block changes them in place

The copy runs forward as in training, with what autograd saves dropped; then forward and backward, as a repetition
does. Random numbers that it draws are taken back. What it shows beside bytes and seconds, as a list that grows with
each call, decides how the block may be run.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils import checkpoint as torch_checkpoint

from hydra_tune.blocks.block import Block, gradient_dtype, has_hooks
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.device import Device
from hydra_tune.errors import PrepareError
from hydra_tune.fork import new_in_child
from hydra_tune.glance import keep_only_pytorchs
from hydra_tune.host_buffer import digest, same_bits, same_values, storage_bytes, versions_of
from hydra_tune.meter import TrialMeter, storages_of
from hydra_tune.planning.around import Around, weights_in
from hydra_tune.process_state import casts_to, remembers_casts
from hydra_tune.randomness import DrawRecord, noting_draws, state_kept
from hydra_tune.shared_random import watching_draws
from hydra_tune.tree import containers_in, flatten, flatten_call, is_fixed, tensors_in, unflatten

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_STRUCTURE = frozenset((  # attributes of modules that `deepcopy` of a module may follow
    "_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs", "forward", "_apply",
))  # fmt: skip


@dataclass(frozen=True)
class BlockMeasure:
    """Of one call of a block. Bytes are beyond its slot and its inputs.

    whole     why it is to stay on the device with its own graph, or to be opened into its children; empty if not
    opens     its children do instead
    holds     weights that it changes in its forward or returns, by their numbers in the block: these stay on the device
    keeps     why its activations are kept; empty if its forward may be repeated
    clones    it changes an input in place
    casts     weights that it uses only through autocast's copy, by their numbers in the block, and that one's dtype
    is_of_its_own  it tells nothing of the next call: the forward raised
    """

    forward_work_bytes: int = 0
    backward_work_bytes: int = 0
    saved_bytes: int = 0
    boundary_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    whole: str = ""
    opens: bool = True
    holds: tuple[int, ...] = ()
    keeps: str = ""
    clones: bool = False
    writes_buffers: bool = True
    casts: frozenset[tuple[int, torch.dtype]] = frozenset()
    why: str = ""
    num_saved: int = 0
    promotes_again: bool = False  # in the backward: it saves a weight, or what only a repetition makes
    is_of_its_own: bool = False


class WritesInputError(Exception):
    """The block is about to change an input in place, which was not copied: it is to be measured on clones."""


class _FoundError(Exception):
    """The block is not to be run apart: why. Nor are its children, unless it `opens`; or only without these weights."""

    def __init__(self, why: str, *, opens: bool = True, holds: tuple[int, ...] = ()) -> None:
        super().__init__(why)
        self.measure = BlockMeasure(holds=holds, why=why) if holds else BlockMeasure(whole=why, opens=opens)


class Measurement:
    """Of one block with these arguments, in a visit, with gradients on; `model` is what it is a part of."""

    def __init__(self, block: Block, model: nn.Module, at: DeviceCopy, device: Device, meter: TrialMeter) -> None:
        self._block, self._model, self._at, self._device, self._meter = block, model, at, device, meter

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], *, clones: bool = False) -> BlockMeasure:
        """With `clones` of its inputs, where it changes these in place.

        Raises:
            torch.OutOfMemoryError: it has no room.
            WritesInputError: it needs clones.
        """
        measure, draws = watching_draws(lambda: self._run(args, kwargs, clones=clones))
        if draws:  # of all reasons the one that says most
            return replace(measure, keeps=f"{self._block.name} draws from Python's or NumPy's random numbers")
        return measure

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any], *, clones: bool) -> BlockMeasure:
        self._clones = clones
        block, records = self._block, DrawRecord()
        leaves, structure = flatten_call(args, kwargs)
        self._args, self._structure = leaves, structure
        objects = [x for x in leaves if not isinstance(x, torch.Tensor)]
        _refuse_iterators(block, objects)
        twin = self._twin()
        if _has_generator(twin):
            return BlockMeasure(keeps=f"{block.name} draws from a generator of its own")
        with self._meter.paused():
            own = self._leaves[: len(block.slot_parameters)]
            held = [leaf.data for leaf in self._leaves[len(own) :]]
            self._around = Around(twin, objects, block.own_forward, held)
            weights = list(map(digest, own))
        with (
            self._around,
            state_kept(self._device.generators()),
            torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False),
        ):
            try:
                with noting_draws(records):
                    measure = self._train(twin, records)
            except RuntimeError as error:
                if not clones and "leaf Variable that requires grad" in str(error):
                    raise WritesInputError from None
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                measure = _after(error, block.name)
            except _FoundError as found:
                measure = found.measure
            except (torch.OutOfMemoryError, WritesInputError):
                raise
            except Exception as error:  # as its own forward will, before anybody repeats it
                measure = _after(error, block.name)
        with self._meter.paused():
            now = list(map(digest, own))
            if now != weights:
                self._at.fill()
                written = [i for i, (a, b) in enumerate(zip(weights, now, strict=True)) if a != b and a == a]
                if written:
                    return BlockMeasure(holds=tuple(written))
        changing = next((type(x).__name__ for x in objects if not _stays_as_it_is(x)), None)
        if changing and not measure.keeps:
            measure = replace(measure, keeps=f"{block.name} is given an object, a {changing}, that others may change")
        return measure

    # ---- copies ----

    def _twin(self) -> nn.Module:
        """Of the block's module: with weights of the visit, clones of buffers, and attributes of its own; modules
        outside of the block are themselves."""
        block, inside = self._block, set(map(id, self._block.modules))
        memo: dict[int, Any] = {id(m): m for m in self._model.modules() if id(m) not in inside}
        for p in self._model.parameters():
            memo[id(p)] = p
        self._leaves = []
        for p, leaf in zip(block.slot_parameters, self._at.leaves(block.slot_parameters), strict=True):
            memo[id(p)] = own = nn.Parameter(leaf.data, requires_grad=leaf.requires_grad)
            own.__dict__.update(p.__dict__)
            self._leaves.append(own)
        for p in block.held:
            memo[id(p)] = own = nn.Parameter(p.data, requires_grad=p.requires_grad)
            own.__dict__.update(p.__dict__)
            self._leaves.append(own)
        with torch.no_grad():
            for module in block.modules:
                for value in (*module._buffers.values(), *_tensors_of(module)):
                    if value is not None and id(value) not in memo:
                        memo[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
                        memo.setdefault(-id(value), value)  # lives as long as its id counts
        for value in [v for m in block.modules for k, v in vars(m).items() if k not in _STRUCTURE]:
            try:
                copy.deepcopy(value, memo)
            except Exception:  # a lock, a tensor with a history in an object: it is put back afterwards
                memo[id(value)] = value
        own_forward, block.module.__dict__["forward"] = block.module.__dict__.pop("forward", None), None
        try:
            del block.module.__dict__["forward"]
            twin: nn.Module = copy.deepcopy(block.module, memo)
        finally:
            if own_forward is not None:
                block.module.__dict__["forward"] = own_forward
        for module in twin.modules():
            if module is not twin:
                keep_only_pytorchs(module)
        self._forward = _forward_of(block, twin)
        return twin

    def _arguments(self) -> tuple[list[torch.Tensor], list[Any], tuple[Any, dict[str, Any]]]:
        """Leaves that gradients are asked for, all leaves of the arguments, and the arguments."""
        asked, given, known = list[torch.Tensor](), list[Any](), dict[int, torch.Tensor]()
        for leaf in self._args:
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in known:
                    own = leaf.detach()
                    if leaf.requires_grad:
                        asked.append(own.requires_grad_())
                    known[id(leaf)] = own.clone() if self._clones else own
                given.append(known[id(leaf)])
            else:
                given.append(leaf)
        return asked, given, unflatten(given, self._structure)

    # ---- runs ----

    def _train(self, twin: nn.Module, records: DrawRecord) -> BlockMeasure:
        block = self._block
        buffers = [(d, n, b, None if b is None else b.detach().clone()) for d, n, b in _buffers_of(twin)]
        notes = [dict(leaf.__dict__) for leaf in self._leaves]
        asked, given, arguments = self._arguments()
        marks = list(map(_marks_on, given))
        weights = versions_of(self._leaves)
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        with self._measured() as used, _without_checkpoints(block):
            caches = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)
            num_saved, promotes_again = [0], [False]
            known = [*tensors, *(b for _, _, b, _ in buffers if b is not None)]
            stay = {s._cdata for x in known for s in storages_of(x)}

            def drop(tensor: torch.Tensor) -> None:
                num_saved[0] += 1
                promotes_again[0] |= any(s._cdata not in stay for s in storages_of(tensor))

            _push_hooks(drop, _refuse_unpacking(block))
            try:
                with _no_parametrizations_cached():
                    outputs = self._forward(*arguments)
            finally:
                _pop_hooks()
                torch.set_autocast_cache_enabled(caches)
            self._device.synchronize()
        forward_work, forward_s = used
        made = tensors_in(outputs)
        boundary = sum(map(storage_bytes, made))
        forward_work = max(0, forward_work - boundary)  # what it makes and leaves is the step's from then on
        del tensors
        own = versions_of(self._leaves)[: len(block.slot_parameters)]
        if own != weights[: len(own)]:
            holds = tuple(i for i, (a, b) in enumerate(zip(weights, own, strict=False)) if a != b)
            self._at.fill()
            raise _FoundError(f"{block.name} changes a weight in its forward", holds=holds)
        returned = set(map(id, weights_in(outputs, self._at)))
        if returned:
            holds = tuple(i for i, p in enumerate(block.slot_parameters) if id(p) in returned)
            raise _FoundError(f"{block.name} returns one of its weights", holds=holds)
        if any(self._at.has(t) for m in twin.modules() for t in _tensors_of(m)):
            raise _FoundError(f"{block.name} keeps a view of a weight in an attribute")
        if any(leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in self._leaves):
            raise _FoundError(f"{block.name} puts a hook on a weight in its forward")
        change = self._around.change()
        if any(
            {**leaf.__dict__}.keys() != own.keys() or any(leaf.__dict__[k] is not v for k, v in own.items())
            for leaf, own in zip(self._leaves, notes, strict=True)
        ):
            change = change or "what is noted on a weight"
        if any(b is not None and b.grad_fn is not None for b in (d.get(n) for d, n, _, _ in buffers)):
            change = change or "a buffer into an activation"
        keeps = f"{block.name} changes {change}" if change else self._gives_away(twin, outputs)
        held = [v for m in block.modules for v in vars(m).values() if type(v) is torch.Tensor]
        if any(t.grad_fn is not None and not any(t is v for v in held) for m in block.modules for t in _tensors_of(m)):
            keeps = keeps or f"{block.name} has an activation in an attribute"
        if list(map(_marks_on, given)) != marks:
            keeps = keeps or f"{block.name} puts a hook or an attribute on an input"
        writes_buffers = any(d.get(n) is not b or not _is_equal(b, then) for d, n, b, then in buffers)
        first = [x.detach().clone() for x in made]
        del outputs, made, given, arguments, asked
        self._around.restore()
        for leaf, noted in zip(self._leaves, notes, strict=True):
            if leaf.__dict__ or noted:
                leaf.__dict__ = noted
        for d, n, b, then in buffers:
            d[n] = b if _is_equal(b, then) else then
        for module, its_twin in zip(block.modules, twin.modules(), strict=True):
            for name, value in vars(module).items():
                if type(value) is torch.Tensor and value.grad_fn is not None:  # gone in the backward; who reads it?
                    vars(its_twin)[name] = torch.full_like(
                        value.detach(), torch.nan if value.is_floating_point() else 0
                    )
        there = [d.get(n) for d, n, _, _ in buffers]
        counts = versions_of([b for b in there if b is not None])
        asked, given, arguments = self._arguments()
        del given
        with self._measured() as used:
            start, caches = self._meter.trial_bytes, torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)  # its casts would outlive the copy
            _push_hooks(_as_it_is, _as_it_is)  # or a checkpoint around the block would take it for its own
            try:
                with _no_parametrizations_cached():
                    outputs = self._forward(*arguments)
            finally:
                _pop_hooks()
                torch.set_autocast_cache_enabled(caches)
            saved = self._meter.trial_bytes - start
            again = tensors_in(outputs)
            if not (keeps or records.states) and not _are_same(first, again):
                keeps = f"{block.name} makes other values when it is repeated"
            wanted = [x for x in again if x.requires_grad]
            del outputs, again, arguments
            casts = self._casts(wanted)
            inputs = [x for x in (*asked, *self._leaves) if x.requires_grad]
            if wanted and inputs:
                torch.autograd.grad(wanted, inputs, [torch.ones_like(x) for x in wanted], allow_unused=True)
            del wanted
            self._device.synchronize()
        found = [d.get(n) for d, n, _, _ in buffers]
        writes_buffers |= list(map(id, found)) != list(map(id, there))
        writes_buffers |= versions_of([b for b in found if b is not None]) != counts  # in its backward
        backward_work, backward_s = used
        return BlockMeasure(
            forward_work, backward_work, saved, boundary, forward_s, backward_s,
            keeps=keeps, clones=self._clones, writes_buffers=writes_buffers, casts=casts,
            num_saved=num_saved[0],
            promotes_again=promotes_again[0],
        )  # fmt: skip

    def _gives_away(self, twin: nn.Module, outputs: Any) -> str:
        """Whether it returns something of its own, into which others may write."""
        name, leaves = self._block.name, flatten(outputs)[0]
        own = [b for _, _, b in _buffers_of(twin) if b is not None] + [
            t for m in twin.modules() for t in _tensors_of(m)
        ]
        own += self._leaves[len(self._block.slot_parameters) :]
        memory = {s._cdata for t in own for s in storages_of(t)}
        if any(s._cdata in memory for t in tensors_in(outputs) for s in storages_of(t)):
            return f"{name} returns a buffer, or another tensor that it keeps"
        if self._around.has(containers_in(outputs)):
            return f"{name} returns a list, dict or object that it keeps"
        if not all(isinstance(x, torch.Tensor) or _stays_as_it_is(x) for x in leaves):
            return f"{name} returns an object"
        return ""

    def _casts(self, outputs: Sequence[torch.Tensor]) -> frozenset[tuple[int, torch.dtype]]:
        """Of the weights that are promoted, those whose every use is a cast to autocast's dtype. Held are those whose
        gradients plain PyTorch adds up as a visit would not."""
        dtype = casts_to() if remembers_casts() else None
        own = self._leaves[: len(self._block.slot_parameters)]
        numbers = {id(leaf): i for i, leaf in enumerate(own) if leaf.requires_grad}
        direct, cast, recast = dict[int, int](), dict[int, int](), dict[int, int]()
        left, met = [x.grad_fn for x in outputs if x.grad_fn is not None], set[Any]()
        while left:
            node = left.pop()
            if node in met:
                continue
            met.add(node)
            for child, _ in node.next_functions:
                number = numbers.get(id(getattr(child, "variable", None)))
                if number is None:
                    left += [child] if child is not None else []
                elif node.name() == "ToCopyBackward0" and node._input_metadata[0].dtype is dtype:
                    cast[number] = cast.get(number, 0) + 1
                else:
                    direct[number] = direct.get(number, 0) + 1
                    recast[number] = recast.get(number, 0) + (node.name() == "ToCopyBackward0")
        held = {i: "it is used both as it is and as autocast's copy" for i in cast if i in direct}
        held |= {i: "it is cast several times, perhaps by autocast" for i, times in recast.items() if times > 1}
        for i, times in direct.items():
            if times > 1 and gradient_dtype(self._block.slot_parameters[i]) is not own[i].dtype:
                held[i] = "its gradients are added up in a dtype that is not its own"
        hooked = [i for i in numbers.values() if has_hooks(self._block.slot_parameters[i])]
        if not all(i in direct or i in cast for i in hooked):
            held |= dict.fromkeys(hooked, "it has a hook, and not every call uses all such weights")
        if held:
            raise _FoundError("; ".join(sorted({*held.values()})), holds=tuple(sorted(held)))
        return frozenset((i, dtype) for i in cast) if dtype is not None else frozenset()

    @contextmanager
    def _measured(self) -> Iterator[list[Any]]:
        """The most bytes beyond those there at the start, and seconds; both known at the end."""
        used: list[Any] = [0, 0.0]
        self._device.synchronize()
        before, start_s = self._meter.start_window(), time.perf_counter()
        yield used
        used[:] = self._meter.window_peak - before, time.perf_counter() - start_s


@contextmanager
def _no_parametrizations_cached() -> Iterator[None]:
    """A copy of a module has the key of its original, which would use what was made of the
    copy's weights."""
    cache = parametrize._cache  # a new one as soon as the last `cached` is left
    kept = dict(cache)
    cache.clear()
    try:
        yield
    finally:
        cache.clear()
        cache.update(kept)


def _after(error: Exception, name: str) -> BlockMeasure:
    if "saved tensor hooks" in str(error):
        return BlockMeasure(whole=f"{name} takes gradients within its forward by torch.func")
    return BlockMeasure(keeps=f"{name} raises {type(error).__name__}", is_of_its_own=True)


def _forward_of(block: Block, twin: nn.Module) -> Callable[..., Any]:
    """The forward of the block's copy, called with positional arguments and keywords."""
    own = getattr(block.own_forward, "__func__", None)

    def forward(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if own is not None and getattr(block.own_forward, "__self__", None) is block.module:
            return own(twin, *args, **kwargs)
        return type(twin).forward(twin, *args, **kwargs)

    return forward


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Among its attributes, and in their containers; no parameters or buffers."""
    own = [v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules", "_flat_weights")]
    return tensors_in([v for v in own if isinstance(v, (torch.Tensor, list, tuple, dict))])


def _buffers_of(module: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor | None]]:
    return [(m._buffers, name, b) for m in module.modules() for name, b in m._buffers.items()]


def _is_equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and (a.layout is not torch.strided or same_bits(a.contiguous(), b.contiguous()))


def _marks_on(leaf: Any) -> tuple[Any, ...]:
    """What a forward may leave on a tensor that it is given."""
    if not isinstance(leaf, torch.Tensor):
        return ()
    return leaf._backward_hooks is not None, leaf.retains_grad, leaf.requires_grad, tuple(leaf.__dict__)


def _refuse_iterators(block: Block, objects: Sequence[Any]) -> None:
    for x in objects:
        if isinstance(x, Iterator):
            raise PrepareError(
                f"a block's inputs are read when it is measured and when it runs, but block {block.name} is given a "
                f"{type(x).__name__}, which can be read only once. Give it a list."
            )


def _stays_as_it_is(value: Any) -> bool:
    """Whether nobody can change what a block sees of this argument."""
    if is_fixed(value) or type(value) is object:
        return True
    if isinstance(value, (torch.dtype, torch.device, torch.layout, Enum, type, nn.Module, bytes, complex)):
        return True
    return isinstance(value, (FunctionType, BuiltinFunctionType)) and not getattr(value, "__closure__", None)


def _has_generator(module: nn.Module) -> bool:
    return any(isinstance(v, torch.Generator) for m in module.modules() for v in vars(m).values())


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _refuse_unpacking(block: Block) -> Callable[[Any], torch.Tensor]:
    def refuse(_: Any) -> torch.Tensor:
        raise _FoundError(f"{block.name} runs a backward within its forward")

    return refuse


def _are_same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(same_values, a, b))


class _Here(threading.local):
    """The block that the thread measures."""

    block: Block | None = None


_here = _Here()
_lock = new_in_child(threading.Lock())
_watching: list[Callable[[], None]] = []  # one a thread that measures: what the first has set goes with the last


@contextmanager
def _without_checkpoints(block: Block) -> Iterator[None]:
    """One within a block would repeat its part outside of any visit. Other threads' go on."""
    with _lock:
        _watching.append(_watching[0] if _watching else _watch_checkpoints())
    _here.block = block
    try:
        yield
    finally:
        _here.block = None
        with _lock:
            unwatch = _watching.pop()
            if not _watching:
                unwatch()


def _watch_checkpoints() -> Callable[[], None]:
    """What undoes it."""
    hook, function = torch_checkpoint._checkpoint_hook.__init__, torch_checkpoint.CheckpointFunction

    def unless_measured(called: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _here.block is not None:
                raise _FoundError(f"{_here.block.name} has a checkpoint within")
            return called(*args, **kwargs)

        return call

    def unwatch() -> None:
        torch_checkpoint._checkpoint_hook.__init__ = hook  # type: ignore[method-assign]
        del function.apply

    torch_checkpoint._checkpoint_hook.__init__ = unless_measured(hook)  # type: ignore[method-assign]
    function.apply = unless_measured(function.apply)  # type: ignore[method-assign]
    return unwatch
