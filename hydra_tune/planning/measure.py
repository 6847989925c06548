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
from hydra_tune.host_buffer import digest, same_bits, storage_bytes, versions_of
from hydra_tune.meter import TrialMeter, storages_of
from hydra_tune.planning.twin import Reached, Twin, globals_of, stays_as_it_is, weights_in
from hydra_tune.process_state import casts_to, is_activation, remembers_casts
from hydra_tune.randomness import DrawRecord, state_kept
from hydra_tune.shard import BlockProfile
from hydra_tune.shared_random import watching_draws
from hydra_tune.tree import flatten_call, tensors_in

_CHECKPOINT = "CheckpointFunctionBackward"  # of a reentrant one, in a graph


class WritesInputError(Exception):
    """The block is about to change an input in place, which was not copied: it is to be measured on clones."""


class FoundError(Exception):
    """Why the block is none, but opened into its children, or on the device as a whole, with its own graph; or why it
    is one only without the weights with these numbers, which the device holds."""

    def __init__(self, why: str, *, holds: tuple[int, ...] = ()) -> None:
        super().__init__(why)
        self.why, self.holds = why, holds


class ProfileOfOneCall(BlockProfile):
    """It tells nothing of the next one: the forward raised."""


class Measurement:
    """Of one block with these arguments, in a visit, with gradients on; `model` is what it is a part of."""

    def __init__(self, block: Block, model: nn.Module, at: DeviceCopy, device: Device, meter: TrialMeter) -> None:
        self._block, self._model, self._at, self._device, self._meter = block, model, at, device, meter

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], *, clones: bool = False) -> BlockProfile | FoundError:
        """With `clones` of its inputs, where it changes these in place.

        Raises:
            torch.OutOfMemoryError: it has no room.
            WritesInputError: it needs clones.
            PrepareError: it has changed what no copy was made of.
        """
        block, self._clones, self._call = self._block, clones, flatten_call(args, kwargs)
        objects = [x for x in self._call[0] if not isinstance(x, torch.Tensor)]
        own = {"an argument": objects, "its forward": block.own_forward}
        with self._meter.paused():
            shared = Reached(block.module, own, globals_of(block.module, block.own_forward))
        with (
            state_kept(self._device.generators),
            torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False),
        ):
            try:
                measure, drew = watching_draws(self._measure)
            finally:
                with self._meter.paused():
                    changes = shared.changes()
                if changes:
                    raise PrepareError(
                        f"a block is measured on a copy of it before its first run, but the forward of {block.name} "
                        f"has changed {changes[0]}, which the copy shares with it. Make it an attribute of the module: "
                        "a number, a tensor, a generator, a list, a dict, or an object that copy.deepcopy copies."
                    )
        if isinstance(measure, FoundError):
            return measure
        direct = {id(value) for module in block.modules for value in vars(module).values()}
        within = any(number not in direct and is_activation(x) for number, x in shared.met.items())
        changing = next((type(x).__name__ for x in objects if not stays_as_it_is(x)), None)
        if drew:  # of all reasons the one that says most
            return replace(measure, keeps=f"{block.name} draws from Python's or NumPy's random numbers")
        if changing and not measure.keeps:
            return replace(measure, keeps=f"{block.name} is given an object, a {changing}, that others may change")
        return replace(measure, keeps=measure.keeps or (f"{block.name} has an activation in an attribute" * within))

    def _measure(self) -> BlockProfile | FoundError:
        block, draws = self._block, DrawRecord()
        measure: BlockProfile | FoundError
        with self._meter.paused():
            before = list(map(digest, self._at.leaves(block.slot_parameters)))
            held = [(p.data, p.data.clone()) for p in block.held]
        try:
            with draws:
                measure = self._forward_and_backward(*self._forward_alone(), draws)
        except (torch.OutOfMemoryError, WritesInputError):
            raise
        except FoundError as found:
            measure = found.with_traceback(None)
        except Exception as error:  # as its own forward will, before anybody repeats it
            if not self._clones and "leaf Variable that requires grad" in str(error):
                raise WritesInputError from None
            if "saved tensor hooks" in str(error):
                measure = FoundError(f"{block.name} takes gradients within its forward by torch.func")
            else:
                measure = ProfileOfOneCall(block.name, 0, keeps=f"{block.name} raises {type(error).__name__}")
        finally:
            with self._meter.paused():
                changed = [(now, then) for now, then in held if not same_bits(now, then)]
                for now, then in changed:  # they live on the device, and no copy was made of them
                    now.copy_(then)
                after = list(map(digest, self._at.leaves(block.slot_parameters)))
                if after != before:
                    self._at.fill()
        written = tuple(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b and a == a)
        if written and not getattr(measure, "holds", ()):
            return FoundError("its block changes it in its forward", holds=written)
        if changed and isinstance(measure, BlockProfile):
            return replace(measure, keeps=f"{block.name} changes a weight")
        return measure

    def _twin(self, *, gone: bool) -> Twin:
        try:
            return Twin(self._block, self._model, self._at, self._call, clones=self._clones, gone=gone)
        except (torch.OutOfMemoryError, WritesInputError):
            raise
        except Exception as error:
            raise FoundError(f"copy.deepcopy can't copy {self._block.name}, or what it is given: {error}") from None

    def _forward_alone(self) -> tuple[BlockProfile, list[torch.Tensor]]:
        """As in training, but what is saved is dropped: what that tells, and its outputs."""
        block = self._block
        twin = self._twin(gone=False)
        with self._meter.paused():
            twin.note()
        stay = {s._cdata for x in (*twin.given, *twin.buffers) if isinstance(x, torch.Tensor) for s in storages_of(x)}
        num_saved, promotes_again = 0, False

        def drop(tensor: torch.Tensor) -> None:
            nonlocal num_saved, promotes_again
            num_saved += 1
            promotes_again |= any(s._cdata not in stay for s in storages_of(tensor))

        def refuse(_: Any) -> torch.Tensor:
            raise FoundError(f"{block.name} runs a backward within its forward")

        self._meter.within_checkpoint = False
        with measured(self._meter, self._device) as used:
            outputs = twin.forward(drop, refuse)
        made = tensors_in(outputs)
        boundary = sum(map(storage_bytes, made))
        if holds := tuple(i for i, version in enumerate(versions_of(twin.weights)) if version):
            raise FoundError(f"{block.name} changes a weight in its forward", holds=holds)
        if returned := set(map(id, weights_in(outputs, self._at))):
            holds = tuple(i for i, p in enumerate(block.slot_parameters) if id(p) in returned)
            raise FoundError(f"{block.name} returns one of its weights", holds=holds)
        if misuse := "has a checkpoint within" if self._meter.within_checkpoint else twin.misuse():
            raise FoundError(f"{block.name} {misuse}")
        with self._meter.paused():
            why, writes_buffers = twin.look(outputs)
        profile = BlockProfile(
            block.name,
            block.weight_bytes,
            forward_work_bytes=max(0, used.num_bytes - boundary),  # what it leaves is the step's from then on
            boundary_bytes=boundary,
            forward_s=used.seconds,
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
        with self._meter.paused():
            buffers = Reached(nn.Module(), {"": twin.buffers_of_modules})
        with measured(self._meter, self._device) as used:
            start = self._meter.trial_bytes
            outputs = tensors_in(twin.forward(lambda x: x, lambda x: x))  # or a checkpoint around took it for its own
            saved = self._meter.trial_bytes - start
            same = len(first) == len(outputs) and all(map(same_bits, first, outputs))
            other = "" if draws.states or same else f"{self._block.name} makes other values when it is repeated"
            wanted = [x for x in outputs if x.requires_grad]
            del outputs
            casts = self._casts(wanted, twin.weights)
            inputs = [x for x in (*twin.asked, *twin.weights, *twin.held) if x.requires_grad]
            if wanted and inputs:
                torch.autograd.grad(wanted, inputs, [torch.ones_like(x) for x in wanted], allow_unused=True)
            del wanted
        with self._meter.paused():  # a hook or a Function may write some in the backward
            writes_buffers = alone.writes_buffers or bool(buffers.changes())
        return replace(
            alone, backward_work_bytes=used.num_bytes, backward_s=used.seconds, saved_bytes=saved,
            keeps=alone.keeps or other, casts=casts, writes_buffers=writes_buffers,
        )  # fmt: skip

    def _casts(
        self, outputs: Sequence[torch.Tensor], own: Sequence[nn.Parameter]
    ) -> frozenset[tuple[int, torch.dtype]]:
        """Of the weights that are promoted, those whose every use is a cast to autocast's dtype. Held are those whose
        gradients plain PyTorch adds up as a visit would not."""
        block, dtype = self._block, casts_to() if remembers_casts() else None
        numbers = {id(leaf): i for i, leaf in enumerate(own) if leaf.requires_grad}
        uses: dict[int, list[torch.dtype | None]] = {}  # what each use casts it to, if it does
        left, met = [x.grad_fn for x in outputs if x.grad_fn is not None], set[Any]()
        while left:
            node = left.pop()
            if node in met:
                continue
            met.add(node)
            if node.name() == _CHECKPOINT:
                raise FoundError(f"{block.name} has a checkpoint within")
            for child, _ in node.next_functions:
                number = numbers.get(id(getattr(child, "variable", None)))
                if number is not None:
                    is_cast = node.name() == "ToCopyBackward0"
                    uses.setdefault(number, []).append(node._input_metadata[0].dtype if is_cast else None)
                elif child is not None:
                    left.append(child)
        casts, held = set[int](), set[int]()
        most = 0 if remembers_casts() else 1  # other casts: one that lasts as long as the context has other calls, too
        for i, to in uses.items():
            others = [x for x in to if x is None or x is not dtype]
            odd = gradient_dtype(block.slot_parameters[i]) is not own[i].dtype
            if not others:
                casts.add(i)
            elif len(others) < len(to) or len(others) - others.count(None) > most or (len(others) > 1 and odd):
                held.add(i)
        hooked = [i for i in numbers.values() if has_hooks(block.slot_parameters[i])]
        if not uses.keys() >= set(hooked):  # not every call uses all such weights
            held.update(hooked)
        if held:
            raise FoundError("its gradients are added up otherwise than in a visit", holds=tuple(sorted(held)))
        return frozenset((i, dtype) for i in casts) if dtype is not None else frozenset()


@dataclass
class Used:
    """The most bytes beyond those there at the start, those that are left, and seconds."""

    num_bytes: int = 0
    left_bytes: int = 0
    seconds: float = 0.0


@contextmanager
def measured(meter: TrialMeter, device: Device) -> Iterator[Used]:
    """What is used within; known at the end."""
    used = Used()
    device.synchronize()
    before, start_s = meter.start_window(), time.perf_counter()
    yield used
    device.synchronize()
    used.seconds = time.perf_counter() - start_s
    used.num_bytes, used.left_bytes = meter.window_peak - before, max(0, meter.trial_bytes - before)
