"""Measures a block on copies of it and of its arguments, which it may change as it likes.

One copy runs forward as in training, with what autograd saves dropped; another one forward and backward, as a
repetition does. Random numbers that they draw are taken back. What they show beside bytes and seconds, as a list that
grows with each call, decides how the block may be run. What no copy was made of, as a global, they may not change.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hydra_tune.blocks.block import Block, gradient_dtype, has_hooks
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.device import Device
from hydra_tune.errors import PrepareError
from hydra_tune.glance import HOOKS_OF_MODULES
from hydra_tune.host_buffer import digest, same_bits, storage_bytes
from hydra_tune.meter import TrialMeter, storages_of
from hydra_tune.planning.reached import Reached, globals_of
from hydra_tune.planning.twin import Twin, stays_as_it_is, weights_in
from hydra_tune.process_state import casts_to, remembers_casts
from hydra_tune.randomness import DrawRecord, noting_draws, state_kept
from hydra_tune.shard import BlockProfile
from hydra_tune.shared_random import watching_draws
from hydra_tune.tree import flatten_call, tensors_in

_CHECKPOINT = "CheckpointFunctionBackward"  # of a reentrant one, in a graph


@dataclass(frozen=True)
class BlockMeasure:
    """Of one call of a block.

    profile   bytes and seconds; why its activations are kept, if they are; casts are of weights that it uses only
              through autocast's copy, by their numbers in the block
    whole     why it is to be opened into its children, or to stay on the device with its own graph; empty if not
    holds     weights that it changes in its forward or returns, by their numbers in the block: these stay on the
              device, `why`
    is_of_its_own  it tells nothing of the next call: the forward raised
    """

    profile: BlockProfile = BlockProfile("", 0)  # noqa: RUF009
    whole: str = ""
    holds: tuple[int, ...] = ()
    why: str = ""
    is_of_its_own: bool = False


class WritesInputError(Exception):
    """The block is about to change an input in place, which was not copied: it is to be measured on clones."""


class _FoundError(Exception):
    """The block is not to be run apart, or only without these weights: why."""

    def __init__(self, why: str, *, holds: tuple[int, ...] = ()) -> None:
        super().__init__(why)
        self.measure = BlockMeasure(holds=holds, why=why) if holds else BlockMeasure(whole=why)


class Measurement:
    """Of one block with these arguments, in a visit, with gradients on; `model` is what it is a part of."""

    def __init__(self, block: Block, model: nn.Module, at: DeviceCopy, device: Device, meter: TrialMeter) -> None:
        self._block, self._model, self._at, self._device, self._meter = block, model, at, device, meter

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], *, clones: bool = False) -> BlockMeasure:
        """With `clones` of its inputs, where it changes these in place.

        Raises:
            torch.OutOfMemoryError: it has no room.
            WritesInputError: it needs clones.
            PrepareError: it has changed what no copy was made of.
        """
        self._clones, self._filled, self._is_table = clones, "", False
        self._call = flatten_call(args, kwargs)
        block, objects = self._block, [x for x in self._call[0] if not isinstance(x, torch.Tensor)]
        _refuse_iterators(block, objects)
        own = {"an argument": objects, "its forward": block.own_forward}
        with self._meter.paused():  # what hooks lead to no copy changes
            others = {**own, **globals_of(block.module, block.own_forward)}
            self._shared = Reached(block.module, others, without=HOOKS_OF_MODULES)
        with (
            state_kept(self._device.generators),
            torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False),
        ):
            try:
                measure, drew = watching_draws(self._measure)
            except WritesInputError:
                raise
            except Exception:
                self._refuse_change(self._shared_change())
                raise
        if not measure.holds:  # else it is measured once more
            self._refuse_change(self._shared_change() or ("" if self._is_table and not drew else self._filled))
        keeps = measure.profile.keeps
        changing = next((type(x).__name__ for x in objects if not stays_as_it_is(x)), None)
        if drew:  # of all reasons the one that says most
            keeps = f"{block.name} draws from Python's or NumPy's random numbers"
        elif changing and not keeps:
            keeps = f"{block.name} is given an object, a {changing}, that others may change"
        return replace(measure, profile=replace(measure.profile, keeps=keeps))

    def _shared_change(self) -> str:
        with self._meter.paused():
            return next(iter(self._shared.changes()), "")

    def _refuse_change(self, change: str) -> None:
        if change:
            raise PrepareError(
                f"a block is measured on a copy of it before its first run, but the forward of {self._block.name} has "
                f"changed {change}, which the copy shares with it. Make it an attribute of the module: a number, a "
                "tensor, a generator, a list, a dict, or an object that copy.deepcopy copies."
            )

    def _measure(self) -> BlockMeasure:
        block, draws = self._block, DrawRecord()
        with self._meter.paused():
            weights = list(map(digest, self._at.leaves(block.slot_parameters)))
            self._held = [(p.data, p.data.clone()) for p in block.held]
        try:
            with noting_draws(draws):
                measure = BlockMeasure(self._forward_and_backward(*self._forward_alone(), draws))
        except (torch.OutOfMemoryError, WritesInputError):
            raise
        except _FoundError as found:
            measure = found.measure
        except Exception as error:  # as its own forward will, before anybody repeats it
            if not self._clones and "leaf Variable that requires grad" in str(error):
                raise WritesInputError from None
            measure = _after(error, block.name)
        finally:
            self._put_back_held()
        with self._meter.paused():
            now = list(map(digest, self._at.leaves(block.slot_parameters)))
            if now != weights:
                self._at.fill()
            written = tuple(i for i, (a, b) in enumerate(zip(weights, now, strict=True)) if a != b and a == a)
        return BlockMeasure(holds=written) if written else measure

    def _put_back_held(self) -> bool:
        """They live on the device, and no copy was made of them; whether some were changed."""
        with self._meter.paused():
            changed = [(now, then) for now, then in self._held if not same_bits(now, then)]
            for now, then in changed:
                now.copy_(then)
        return bool(changed)

    def _twin(self, *, gone: bool = False) -> Twin:
        twin = Twin(self._block, self._model, self._at, self._call, clones=self._clones, gone=gone)
        with self._meter.paused():
            twin.note_buffers() if gone else twin.note()
        return twin

    def _forward_alone(self) -> tuple[BlockProfile, list[torch.Tensor]]:
        """As in training, but what is saved is dropped: what that tells, and its outputs."""
        block, twin = self._block, self._twin()
        stay = {s._cdata for x in (*twin.tensors, *twin.buffers) for s in storages_of(x)}
        num_saved, promotes_again = 0, False

        def drop(tensor: torch.Tensor) -> None:
            nonlocal num_saved, promotes_again
            num_saved += 1
            promotes_again |= any(s._cdata not in stay for s in storages_of(tensor))

        def refuse(_: Any) -> torch.Tensor:
            raise _FoundError(f"{block.name} runs a backward within its forward")

        self._meter.within_checkpoint = False
        with self._measured() as used:
            outputs = twin.forward(drop, refuse)
            self._device.synchronize()
        forward_work, forward_s = used
        made = tensors_in(outputs)
        boundary = sum(map(storage_bytes, made))
        if holds := twin.written_weights:
            self._at.fill()
            raise _FoundError(f"{block.name} changes a weight in its forward", holds=holds)
        if returned := set(map(id, weights_in(outputs, self._at))):
            holds = tuple(i for i, p in enumerate(block.slot_parameters) if id(p) in returned)
            raise _FoundError(f"{block.name} returns one of its weights", holds=holds)
        if self._meter.within_checkpoint:
            raise _FoundError(f"{block.name} has a checkpoint within")
        if misuse := twin.misuse_of_weights():
            raise _FoundError(f"{block.name} {misuse}")
        self._filled = self._shared_change()
        with self._meter.paused():
            why, writes_buffers = twin.look(outputs)
        if self._put_back_held():
            why = "changes a weight that is held"
        profile = BlockProfile(
            block.name,
            block.weight_bytes,
            forward_work_bytes=max(0, forward_work - boundary),  # what it makes and leaves is the step's from then on
            boundary_bytes=boundary,
            forward_s=forward_s,
            keeps=why and f"{block.name} {why}",
            clones=self._clones,
            writes_buffers=writes_buffers,
            saved_counts=frozenset([num_saved]),
            visits=1 + promotes_again,  # in the backward, if it saves a weight, or what only a repetition makes
        )
        return profile, [x.detach().clone() for x in made]

    def _forward_and_backward(
        self, alone: BlockProfile, first: Sequence[torch.Tensor], draws: DrawRecord
    ) -> BlockProfile:
        """As a repetition and its backward."""
        twin = self._twin(gone=True)
        with self._measured() as used:
            start = self._meter.trial_bytes
            outputs = tensors_in(twin.forward(_as_it_is, _as_it_is))  # or a checkpoint around took it for its own
            saved = self._meter.trial_bytes - start
            keeps, name, same = alone.keeps, self._block.name, _are_same(first, outputs)
            if not keeps and not draws.states and not same:
                keeps = f"{name} makes other values when it is repeated"
            if self._filled and not draws.states and same:  # who finds it filled computes what who fills it does
                self._is_table, keeps = True, keeps or f"{name} changes {self._filled}"
            wanted = [x for x in outputs if x.requires_grad]
            del outputs
            casts = self._casts(wanted, twin.weights)
            inputs = [x for x in (*twin.asked, *twin.weights, *twin.held) if x.requires_grad]
            if wanted and inputs:
                torch.autograd.grad(wanted, inputs, [torch.ones_like(x) for x in wanted], allow_unused=True)
            del wanted
            self._device.synchronize()
        backward_work, backward_s = used
        with self._meter.paused():
            _, writes_buffers = twin.look(None)
        return replace(
            alone, backward_work_bytes=backward_work, backward_s=backward_s, saved_bytes=saved, keeps=keeps,
            writes_buffers=alone.writes_buffers or writes_buffers, casts=casts,
        )  # fmt: skip

    def _casts(
        self, outputs: Sequence[torch.Tensor], own: Sequence[nn.Parameter]
    ) -> frozenset[tuple[int, torch.dtype]]:
        """Of the weights that are promoted, those whose every use is a cast to autocast's dtype. Held are those whose
        gradients plain PyTorch adds up as a visit would not."""
        dtype = casts_to() if remembers_casts() else None
        numbers = {id(leaf): i for i, leaf in enumerate(own) if leaf.requires_grad}
        direct, cast, recast = dict[int, int](), dict[int, int](), dict[int, int]()
        left, met = [x.grad_fn for x in outputs if x.grad_fn is not None], set[Any]()
        while left:
            node = left.pop()
            if node in met:
                continue
            met.add(node)
            if node.name() == _CHECKPOINT:
                raise _FoundError(f"{self._block.name} has a checkpoint within")
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
        most = 0 if remembers_casts() else 1  # casts: one that lasts as long as the context around has other calls, too
        held |= {i: "it is cast several times, perhaps by autocast" for i, times in recast.items() if times > most}
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


def _after(error: Exception, name: str) -> BlockMeasure:
    if "saved tensor hooks" in str(error):
        return BlockMeasure(whole=f"{name} takes gradients within its forward by torch.func")
    keeps = f"{name} raises {type(error).__name__}"
    return BlockMeasure(BlockProfile(name, 0, keeps=keeps), is_of_its_own=True)


def _refuse_iterators(block: Block, objects: Sequence[Any]) -> None:
    for x in objects:
        if isinstance(x, Iterator):
            raise PrepareError(
                f"a block's inputs are read when it is measured and when it runs, but block {block.name} is given a "
                f"{type(x).__name__}, which can be read only once. Give it a list."
            )


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _are_same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(same_bits, a, b))
