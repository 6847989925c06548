"""The pilot: a trial's first step of a kind, in which each block is measured in its first run.

What a step takes is unknown until it has run, and it may take more than the device has. So the pilot has the device to
itself, but for what other trials hold for life, and promotes one block at a time. It is a real step: what it computes
is the trial's, and nothing of it is undone. Equal blocks with equal inputs are measured once. A weight that a block
changes in its forward, or returns, is held on the device from then on.

A call of a block leaves this room twice, and comes back:

    trials    the block's forward --+                                         +--> runs as in any step
    planning                        +--> Pilot.run: is its like measured? yes +
                                                      no |
    planning                        Measurement.run -----+  +--> Measurement.forward: counts bytes and seconds
    blocks                               +--> RepeatedCall.run promotes the weights, saves for the backward

What runs a call is the same in a pilot as later, so that what is measured is what will be run. Bytes are counted within
it, once the weights are there, so that copying them is not taken for the block's own work.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hydra_tune.blocks.ambient_settings import AmbientSettings, casts_to, remembers_casts
from hydra_tune.blocks.block import Block
from hydra_tune.blocks.call import hooks_of_checkpoint
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.blocks.engine import ForwardPass
from hydra_tune.blocks.repeated_call import RepeatedCall
from hydra_tune.blocks.tree import flatten_call
from hydra_tune.config import format_bytes
from hydra_tune.devices.meter import measured, storages_of
from hydra_tune.devices.tensor_bytes import storage_bytes
from hydra_tune.errors import PrepareError, clear_frames
from hydra_tune.planning.fingerprint import Fingerprint
from hydra_tune.planning.measurement import FoundError, Measurement
from hydra_tune.planning.partition import has_children, shape_of
from hydra_tune.planning.step_kind import StepKind, larger_of
from hydra_tune.schedule.plan import TOO_LARGE, BlockProfile

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

_NOT_RUN = object()
_CAST = torch.ops.aten._to_copy.default


class Pilot:
    """Of one step. `profiles` by the names of blocks, in the order in which they ran."""

    def __init__(self, trial: Trial, kind: StepKind, free_bytes: int) -> None:
        self.kinds = [kind]
        self.free_bytes = free_bytes
        self.profiles: dict[str, BlockProfile] = {}
        self.kept_bytes = 0
        self.peak_bytes = 0
        self.failed = False  # an exception has ended its forward or backward: it tells nothing
        self._trial = trial
        self._copy: tuple[Block, DeviceCopy] | None = None
        self._known: dict[Any, BlockProfile | FoundError] = {}
        self._start_bytes = trial.meter.trial_bytes
        self.trained = set[str]()  # names of blocks that were measured with gradients
        self._totals: dict[str, int] = {}  # the most bytes in a visit without gradients, by the names of blocks
        self._watched: dict[int, list[weakref.ref[RepeatedCall]]] = {}  # by the memory of their inputs
        # weights, by memory, in these blocks
        self._spilled: tuple[Any, dict[int, tuple[Block, nn.Parameter]]] = (None, {})
        trial.meter.pilot = weakref.ref(self)

    @property
    def trains(self) -> bool:
        return any(kind.trains for kind in self.kinds)

    def add(self, kind: StepKind) -> None:
        """Another forward of the step."""
        if not any(own.covers(kind) for own in self.kinds):
            self.kinds.append(kind)

    # ---- room ----

    def copy_of(self, block: Block) -> DeviceCopy:
        """The block alone on the device."""
        if self._copy is None or self._copy[0] is not block:
            self._drop_copy()
            if block.weight_bytes > self.free_bytes:
                free, weights = map(format_bytes, (self.free_bytes, block.weight_bytes))
                raise torch.OutOfMemoryError(f"its weights take {weights}, and no more than {free} are free.")
            self._copy = block, self._trial.residency.promote(block)
        return self._copy[1]

    def _drop_copy(self) -> None:
        if self._copy is not None:
            (block, copy), self._copy = self._copy, None
            copy.used = copy.device.mark()
            self._trial.residency.drop(copy)
            self._trial.residency.device.free_slot(None, block.weight_bytes)

    def profiles_beside(self, step_bytes: int) -> dict[str, BlockProfile]:
        """The measured blocks, beside a step that reserves so many bytes. In an evaluation a block needs only what its
        run took beyond that."""
        if self.trains:
            return self.profiles
        beyond = {name: max(0, self._totals.get(name, 0) - step_bytes) for name in self.profiles}
        return {
            name: replace(p, forward_work_bytes=min(p.forward_work_bytes, beyond[name]))
            for name, p in self.profiles.items()
        }

    def end(self) -> None:
        self._trial.meter.pilot = lambda: None
        self._drop_copy()

    # ---- blocks ----

    def run(self, block: Block, args: Sequence[Any], kwargs: dict[str, Any], forward_pass: ForwardPass) -> Any:
        """A call of the block with gradients; measured, unless its like is known."""
        trial = self._trial
        own = block.slot_parameters
        if any(m._parameters.get(name) is not own[i] for m, name, i in block.sites):  # by torch.func.functional_call
            trial.planner.cut.open_block(block, f"{block.name} is called with other weights than its own")
            return block.forward(args, kwargs)
        while True:
            key = self._key(block, args, kwargs)
            found, outputs = self._known.get(key), _NOT_RUN
            if found is None:
                found, outputs = self._measure(block, args, kwargs, forward_pass)
                if not block.keeps:  # else others like it may not keep, and were not repeated
                    self._known[key] = found
            if isinstance(found, BlockProfile):
                break
            why = found.why if found.why.startswith(TOO_LARGE) else f"{block.name} {found.why}"
            if not found.holds:
                trial.planner.cut.open_block(block, why)
                return block.forward(args, kwargs)
            for weight in [block.slot_parameters[i] for i in found.holds]:
                block = trial.planner.cut.hold_weight(block, weight, why)
        self.trained.add(block.name)
        block.keeps = block.keeps or found.keeps
        block.clones |= found.clones
        block.casts |= found.casts
        block.saved_counts |= found.saved_counts
        self._note(block, found)
        if outputs is not _NOT_RUN:
            return outputs
        return trial.block_calls.run_trained(block, args, kwargs, forward_pass, *flatten_call(args, kwargs))

    @contextmanager
    def measuring(self, block: Block) -> Iterator[None]:
        """Around a visit without gradients."""
        meter = self._trial.meter
        with measured(meter) as used:
            yield
        profile = BlockProfile("", 0, used.num_bytes, boundary_bytes=used.left_bytes, forward_s=used.seconds, visits=1)
        self._note(block, profile)
        total = self._totals.get(block.name, 0)
        self._totals[block.name] = max(total, meter.window_peak - self._start_bytes)

    def watch(self, call: RepeatedCall, inputs: Iterable[torch.Tensor]) -> None:
        """Should one of its inputs be changed in place before its backward, the call needs clones of them."""
        for storage in _memory_of(inputs):
            self._watched.setdefault(storage, []).append(weakref.ref(call))

    def before_writing(self, tensors: Iterable[torch.Tensor]) -> None:
        """An operator is about to change these in place."""
        for storage in _memory_of(tensors):
            for reference in self._watched.pop(storage, ()):
                call = reference()
                if call is not None and not call.block.clones:
                    call.keep_clones()
                    call.block.clones = True
                    name = call.block.name
                    self.profiles[name] = replace(self.profiles[name], clones=True)

    def before_using(self, operator: Any, tensors: Sequence[torch.Tensor]) -> None:
        """An operator is about to be run on these. A spilled weight that is used outside of its block, as in
        `F.linear(x, self.embedding.weight)`, is held from here on: where autocast casts it, for its gradient's sake; on
        a GPU in any case. Where it is a part of the block that has it, which may be called by itself, the block is
        opened."""
        trial, cut = self._trial, self._trial.planner.cut
        if not trial.block_calls.are_expected or (trial.device.is_virtual and operator is not _CAST):
            return
        if self._spilled[0] is not cut.blocks:
            own = {s._cdata: (b, p) for b in cut.blocks for p in b.slot_parameters for s in storages_of(p)}
            self._spilled = cut.blocks, own
        used = [self._spilled[1][key] for key in _memory_of(tensors) if key in self._spilled[1]]
        for block, weight in used:
            if not any(weight is p for p in block.module._parameters.values()) and has_children(block.module):
                cut.open_block(block, f"a part of {block.name} is used without it")
                break
            cut.hold_weight(block, weight, f"{block.name}'s weight is used without it")
        # on a GPU the operator has it where it was; a checkpoint has counted what its block has saved without it
        if used and (hooks_of_checkpoint() is not None or not trial.device.is_virtual):
            raise PrepareError(
                f"a spilled weight is used by its block, but one of {used[0][0].name} was used without it, and is "
                "elsewhere from here on. Repeat the forward."
            )

    def _key(self, block: Block, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        leaves, structure = flatten_call(args, kwargs)
        places = {id(x): i for i, x in reversed([*enumerate(leaves)])}  # where each is given first
        given = tuple(
            (shape_of(x), x.dtype, x.requires_grad, _strides_of(x), places[id(x)])
            if isinstance(x, torch.Tensor)
            else (type(x), x if isinstance(x, (bool, int, float, str)) else None)
            for x in leaves
        )
        called = structure if isinstance(structure, tuple) else str(structure)  # a dict's has no hash
        model = Fingerprint(of_layers=True).of_model(block.module), None if block.own_forward is None else id(block)
        promoted = set(map(id, block.slot_parameters))
        held = tuple(id(p) not in promoted for p in block.parameters)
        training = tuple(m.training for m in block.modules)
        return model, held, training, called, given, casts_to() if remembers_casts() else None

    def _measure(
        self, block: Block, args: Sequence[Any], kwargs: dict[str, Any], forward_pass: ForwardPass
    ) -> tuple[BlockProfile | FoundError, Any]:
        """Run the call for the first time. Returns what that shows, and its outputs; `_NOT_RUN` if the run was undone,
        because the block must be run in another way, has a user's hook within, or is in an activation checkpoint, which
        counts the tensors that are saved."""
        trial, settings = self._trial, AmbientSettings.now(block.module_states)
        leaves, structure = flatten_call(args, kwargs)
        stays = bool(block.keeps) or trial.block_calls.keeps(settings)
        call = RepeatedCall(block, trial, forward_pass, leaves, structure, settings)
        measurement = Measurement(call, leaves)
        run = partial(measurement.run, args, kwargs, repeats=not stays)
        found: BlockProfile | FoundError
        outputs: Any = None
        trial.visits.is_measuring = True
        try:
            found, outputs = trial.retry.with_room(block, run, measurement.undo)
        except FoundError as error:
            found = FoundError(error.why, holds=error.holds)  # without its frames
        except torch.OutOfMemoryError as error:
            clear_frames(error)
            found = FoundError(f"{TOO_LARGE}: {error}")
        finally:
            trial.visits.is_measuring, call.measurement = False, None
            trial.meter.outside_starts()
        if isinstance(found, FoundError):
            why = found.why
        elif hooks_of_checkpoint() is not None:
            why = "is in a checkpoint"
        elif measurement.has_users_hooks_within:
            why = "has a hook within"
        else:
            why = found.keeps if call.has_dropped else ""
        casts = block.casts if isinstance(found, FoundError) else block.casts | found.casts
        if (why or casts) and measurement.undo():
            return found, _NOT_RUN
        why = why or ("casts a weight for several uses" if measurement.casts_again else "")
        if why.startswith(TOO_LARGE):
            raise trial.planner.cut.no_room(block, why)
        if isinstance(found, FoundError) or why:
            raise PrepareError(
                f"the first run of a block is taken back where it is to be run otherwise, as where it {why}, "
                f"but the forward of {block.name} has changed {measurement.changed} by then, which can't be. "
                "Let it return what it changes."
            )
        if casts:  # its weights were used without them
            trial.casts.bar(block.slot_parameters[i] for i, _ in casts)
        stays = stays or found.keeps != ""
        call.settle(outputs, keeps=stays)
        if not stays:
            self.watch(call, call.tensors)
        return found, outputs

    def _note(self, block: Block, profile: BlockProfile) -> None:
        """Of this block, or of one like it."""
        backward_work = profile.backward_work_bytes
        if hooks_of_checkpoint() is not None:  # its backward clones one weight after another
            backward_work += max(map(storage_bytes, block.slot_parameters), default=0)
        profile = replace(
            profile, name=block.name, weight_bytes=block.weight_bytes, backward_work_bytes=backward_work,
            keeps=block.keeps, clones=block.clones, casts=block.casts, saved_counts=block.saved_counts,
        )  # fmt: skip
        known = self.profiles.pop(block.name, None)
        if known is not None:
            saved = known.saved_bytes + profile.saved_bytes  # where all is resident, each call keeps its own
            profile = replace(larger_of(known, profile), saved_bytes=saved)
        self.profiles[block.name] = profile
        work = block.weight_bytes + profile.work_bytes
        self.peak_bytes = max(self.peak_bytes, work + self._trial.meter.trial_bytes)


def _strides_of(tensor: torch.Tensor) -> Hashable:
    return None if tensor.is_nested or tensor.layout is not torch.strided else tensor.stride()


def _memory_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {storage._cdata for tensor in tensors for storage in storages_of(tensor)}
