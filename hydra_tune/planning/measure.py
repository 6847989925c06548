"""Measures a block on copies of it and of its arguments, so that nothing is left to undo.

    the block   --copy--> its modules, attributes and buffers; the weights are those of its visit
    arguments   --copy--> tensors without a history

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
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from hydra_tune.blocks.block import Block, gradient_dtype, has_hooks
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.device import Device
from hydra_tune.fork import new_in_child
from hydra_tune.host_buffer import same_bits, same_values, storage_bytes, versions_of
from hydra_tune.meter import TrialMeter
from hydra_tune.process_state import casts_to, remembers_casts
from hydra_tune.randomness import DrawRecord, noting_draws, state_kept
from hydra_tune.shared_random import SharedDraws
from hydra_tune.snapshot import Snapshot
from hydra_tune.tree import flatten_call, tensors_in, unflatten

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


@dataclass(frozen=True)
class BlockMeasure:
    """Of one call of a block. Bytes are beyond its slot and its inputs.

    whole     why it is to stay on the device with its own graph, or to be opened into its children; empty if not
    keeps     why its activations are kept; empty if its forward may be repeated
    clones    it changes an input in place
    casts     weights that it uses only through autocast's copy, by their numbers in the block
    held      weights that are to stay on the device, and why
    is_of_its_own  it tells nothing of the next call: the forward raised
    """

    forward_work_bytes: int = 0
    backward_work_bytes: int = 0
    saved_bytes: int = 0
    boundary_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    whole: str = ""
    keeps: str = ""
    clones: bool = False
    writes_buffers: bool = True
    casts: tuple[tuple[int, torch.dtype], ...] = ()
    held: tuple[tuple[int, str], ...] = ()
    is_of_its_own: bool = False


class _FoundError(Exception):
    """The block is not to be run apart: why."""


class Measurement:
    """Of one block with these arguments, in a visit; `model` is what it is a part of."""

    def __init__(self, block: Block, model: nn.Module, at: DeviceCopy, device: Device, meter: TrialMeter) -> None:
        self._block, self._model, self._at, self._device, self._meter = block, model, at, device, meter

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> BlockMeasure:
        """
        Raises:
            torch.OutOfMemoryError: it has no room.
        """
        block, records = self._block, DrawRecord()
        leaves, structure = flatten_call(args, kwargs)
        self._args, self._structure = leaves, structure
        try:
            twin = self._twin()
        except Exception as error:  # an attribute that can't be copied, as a lock
            return BlockMeasure(keeps=f"{block.name} can't be copied ({type(error).__name__}: {error})")
        if torch.is_grad_enabled() and _has_generator(twin):
            return BlockMeasure(keeps=f"{block.name} draws from a generator of its own")
        with (
            state_kept(self._device.generators()),
            SharedDraws() as shared,
            torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False),
        ):
            try:
                with noting_draws(records):
                    measure = self._train(twin, records) if torch.is_grad_enabled() else self._evaluate(twin)
            except _FoundError as found:
                measure = BlockMeasure(whole=str(found))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # as its own forward will, before anybody repeats it
                if "saved tensor hooks" in str(error):
                    return BlockMeasure(whole=f"{block.name} takes gradients within its forward by torch.func")
                return BlockMeasure(keeps=f"{block.name} raises {type(error).__name__}", is_of_its_own=True)
            finally:
                drew = shared.are_some
                shared.take_back()
        if drew and not measure.keeps:
            return BlockMeasure(
                **{**vars(measure), "keeps": f"{block.name} draws from Python's or NumPy's random numbers"}
            )
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
            own.__dict__.update(_copy_of(p.__dict__))
            self._leaves.append(own)
        for p in block.held:
            memo[id(p)] = own = nn.Parameter(p.data, requires_grad=p.requires_grad)
            own.__dict__.update(_copy_of(p.__dict__))
            self._leaves.append(own)
        with torch.no_grad():
            for module in block.modules:
                for value in (*module._buffers.values(), *_tensors_of(module)):
                    if value is not None and id(value) not in memo:
                        memo[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
                        memo.setdefault(-id(value), value)  # lives as long as its id counts
        own_forward, block.module.__dict__["forward"] = block.module.__dict__.pop("forward", None), None
        try:
            del block.module.__dict__["forward"]
            twin: nn.Module = copy.deepcopy(block.module, memo)
        finally:
            if own_forward is not None:
                block.module.__dict__["forward"] = own_forward
        for module in twin.modules():
            for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                if module is not twin and vars(module).get(hooks):
                    getattr(module, hooks).clear()
        self._forward = _forward_of(block, twin)
        return twin

    def _arguments(self) -> tuple[list[torch.Tensor], list[Any], tuple[Any, dict[str, Any]]]:
        """Leaves that gradients are asked for, all leaves of the arguments, and the arguments."""
        asked, given, known = list[torch.Tensor](), list[Any](), dict[int, torch.Tensor]()
        for leaf in self._args:
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in known:
                    own = leaf.detach()
                    if leaf.requires_grad and torch.is_grad_enabled():
                        asked.append(own.requires_grad_())
                    known[id(leaf)] = own.clone()
                given.append(known[id(leaf)])
            else:
                given.append(_copy_of(leaf))
        return asked, given, unflatten(given, self._structure)

    # ---- runs ----

    def _train(self, twin: nn.Module, records: DrawRecord) -> BlockMeasure:
        block, before = self._block, Snapshot.of_modules(twin.named_modules(), twin)
        buffers = [(d, n, b, None if b is None else b.detach().clone()) for d, n, b in _buffers_of(twin)]
        asked, given, arguments = self._arguments()
        objects = Snapshot({"an argument": [x for x in given if not isinstance(x, torch.Tensor)]}, twin)
        notes = Snapshot({"an attribute of a weight": [leaf.__dict__ for leaf in self._leaves]}, twin)
        versions, weights = _versions(given), versions_of(self._leaves)
        with self._measured() as used, _without_checkpoints(block):
            caches = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)
            _push_hooks(_drop, _refuse_unpacking(block))
            try:
                outputs = self._forward(*arguments)
            finally:
                _pop_hooks()
                torch.set_autocast_cache_enabled(caches)
            self._device.synchronize()
        forward_work, forward_s = used
        made = tensors_in(outputs)
        boundary = sum(map(storage_bytes, made))
        if versions_of(self._leaves) != weights:
            raise _FoundError(f"{block.name} changes a weight in its forward")
        if any(self._at.has(t) for m in twin.modules() for t in _tensors_of(m)):
            raise _FoundError(f"{block.name} keeps a view of a weight in an attribute")
        clones = _versions(given) != versions
        if any(leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in self._leaves):
            raise _FoundError(f"{block.name} puts a hook on a weight in its forward")
        changed = [*before.changes_in_place(), *objects.changes_in_place(), *notes.changes_in_place()]
        keeps = f"{block.name} changes {changed[0]}" if changed else ""
        now = [d.get(n) for d, n, _, _ in buffers]
        if any(b is not None and b.grad_fn is not None for b in now):
            keeps = keeps or f"{block.name} keeps an activation in a buffer"
        writes_buffers = any(
            b is not then or not _is_equal(b, saved) for b, (_, _, then, saved) in zip(now, buffers, strict=True)
        )
        del now
        first = [x.detach().clone() for x in made]
        del outputs, made, given, arguments, asked
        for snapshot in before, notes:
            snapshot.restore()
        for d, n, b, then in buffers:
            d[n] = b if _is_equal(b, then) else then
        asked, given, arguments = self._arguments()
        del given
        with self._measured() as used:
            start, caches = self._meter.trial_bytes, torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)  # its casts would outlive the copy
            _push_hooks(_as_it_is, _as_it_is)  # or a checkpoint around the block would take it for its own
            try:
                outputs = self._forward(*arguments)
            finally:
                _pop_hooks()
                torch.set_autocast_cache_enabled(caches)
            saved = self._meter.trial_bytes - start
            again = tensors_in(outputs)
            if not (keeps or records.state is not None) and not _are_same(first, again):
                keeps = f"{block.name} makes other values when it is repeated"
            wanted = [x for x in again if x.requires_grad]
            del outputs, again, arguments
            casts, held = self._uses(wanted)
            inputs = [x for x in (*asked, *self._leaves) if x.requires_grad]
            if wanted and inputs:
                torch.autograd.grad(wanted, inputs, [torch.ones_like(x) for x in wanted], allow_unused=True)
            del wanted
            self._device.synchronize()
        backward_work, backward_s = used
        return BlockMeasure(
            forward_work, backward_work, saved, boundary, forward_s, backward_s,
            keeps=keeps, clones=clones, writes_buffers=writes_buffers, casts=casts, held=held,
        )  # fmt: skip

    def _uses(self, outputs: Sequence[torch.Tensor]) -> tuple[tuple[tuple[int, torch.dtype], ...], ...]:
        """Of the weights that are promoted, those whose every use is a cast to autocast's dtype; and those that are to
        stay on the device, for plain PyTorch adds up their gradients as a visit would not."""
        dtype = casts_to() if remembers_casts() else None
        own = self._leaves[: len(self._block.slot_parameters)]
        numbers = {id(leaf): i for i, leaf in enumerate(own) if leaf.requires_grad}
        direct, cast = dict[int, int](), dict[int, int]()
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
        held = {i: "it is used both as it is and as autocast's copy" for i in cast if i in direct}
        for i, times in direct.items():
            if times > 1 and gradient_dtype(self._block.slot_parameters[i]) is not own[i].dtype:
                held[i] = "its gradients are added up in a dtype that is not its own"
        hooked = [i for i in numbers.values() if has_hooks(self._block.slot_parameters[i])]
        if not all(i in direct or i in cast for i in hooked):
            held |= dict.fromkeys(hooked, "it has a hook, and not every call uses all such weights")
        casts = tuple((i, dtype) for i in sorted(cast) if i not in held) if dtype is not None else ()
        return casts, tuple(sorted(held.items()))  # type: ignore[return-value]

    def _evaluate(self, twin: nn.Module) -> BlockMeasure:
        _, _, arguments = self._arguments()
        with self._measured() as used:
            outputs = self._forward(*arguments)
            self._device.synchronize()
        boundary = sum(map(storage_bytes, tensors_in(outputs)))
        return BlockMeasure(used[0], 0, 0, boundary, used[1])

    @contextmanager
    def _measured(self) -> Iterator[list[Any]]:
        """The most bytes beyond those there at the start, and seconds; both known at the end."""
        used: list[Any] = [0, 0.0]
        self._device.synchronize()
        before, start_s = self._meter.start_window(), time.perf_counter()
        yield used
        used[:] = self._meter.window_peak - before, time.perf_counter() - start_s


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


def _versions(leaves: Sequence[Any]) -> list[int]:
    return versions_of([x for x in leaves if isinstance(x, torch.Tensor)])


def _copy_of(value: Any) -> Any:
    if isinstance(value, nn.Module) or callable(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # what can't be copied can hardly be changed
        return value


def _has_generator(module: nn.Module) -> bool:
    return any(isinstance(v, torch.Generator) for m in module.modules() for v in vars(m).values())


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _drop(_: torch.Tensor) -> None:
    return None


def _refuse_unpacking(block: Block) -> Callable[[Any], torch.Tensor]:
    def refuse(_: Any) -> torch.Tensor:
        raise _FoundError(f"{block.name} runs a backward within its forward")

    return refuse


def _are_same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(same_values, a, b))


class _Here(threading.local):
    block: Block | None = None  # that this thread measures


_here = _Here()


@contextmanager
def _without_checkpoints(block: Block) -> Iterator[None]:
    """One within a block would repeat its part outside of any visit. Other threads' go on."""
    _watch_checkpoints()
    _here.block = block
    try:
        yield
    finally:
        _here.block = None


def _watch_checkpoints() -> None:
    """Once, for all threads."""
    with _lock:
        hook = torch_checkpoint._checkpoint_hook.__init__
        if not getattr(hook, "refuses_in_measures", False):
            torch_checkpoint._checkpoint_hook.__init__ = _unless_measured(hook)  # type: ignore[method-assign]
            torch_checkpoint.CheckpointFunction.apply = _unless_measured(torch_checkpoint.CheckpointFunction.apply)


def _unless_measured(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if _here.block is not None:
            raise _FoundError(f"{_here.block.name} has a checkpoint within")
        return function(*args, **kwargs)

    called.refuses_in_measures = True  # type: ignore[attr-defined]
    return called


_lock = new_in_child(threading.Lock())
