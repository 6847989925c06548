"""The pilot: a trial's first step of a kind, in which each block is measured in its first run.

What a step takes is unknown until it has run, and it may take more than the device has. So no other step runs on the
device during the pilot (only what other trials hold for life stays there), and the pilot promotes one block at a time.
A pilot is a real step: the trial trains with what it computes, and the step is not run again. Equal blocks with equal
inputs are measured once. A weight that a block changes in its forward, or returns, is held on the device from then on.

A call of a block leaves this folder twice, and comes back:

    trials    the block's forward --+                                         +--> runs as in any step
    planning                        +--> Pilot.run: measured already?     yes +
                                                      no |
    planning                        Measurement.run -----+  +--> Measurement.forward: counts bytes and seconds
    blocks                               +--> RepeatedCall.run promotes the weights, saves for the backward

The same code runs a call in a pilot as later, so that what is measured is what will be run. Counting begins once the
weights are on the device, so that copying them is not counted as the block's own work.
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
from hydra_tune.devices.meter import measured, needs, no_room, storages_of
from hydra_tune.devices.tensor_bytes import storage_bytes
from hydra_tune.errors import PrepareError, clear_frames
from hydra_tune.planning.fingerprint import Fingerprint
from hydra_tune.planning.known_steps import StepKind, larger_of
from hydra_tune.planning.measurement import FoundError, Measurement
from hydra_tune.planning.partition import has_children, shape_of
from hydra_tune.schedule.plan import TOO_LARGE, BlockProfile

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

_NOT_RUN = object()
_CAST = torch.ops.aten._to_copy.default


class Pilot:
    """The measurements of one step. `profiles` are by the names of blocks, in the order in which the blocks ran."""

    def __init__(self, trial: Trial, kind: StepKind, free_bytes: int) -> None:
        self.kinds = [kind]  # of the step's forwards
        self.free_bytes = free_bytes  # that the step may take on the device
        self.profiles: dict[str, BlockProfile] = {}
        self.kept_bytes = 0  # that the training loop keeps from one step to the next
        self.peak_bytes = 0  # the most that the trial took, with a block's weights and work
        self.failed = False  # an exception has ended the forward or backward: its numbers do not count
        self._trial = trial
        self._models = trial.models  # a script may drop its model before the backward, whose end makes a plan
        self._copy: tuple[Block, DeviceCopy] | None = None
        self._known: dict[Any, BlockProfile | FoundError] = {}
        self._start_bytes = trial.meter.trial_bytes
        self.note_refusal = trial.planner.note_refusal
        self.trained = set[str]()  # names of blocks that were measured with gradients
        self._totals: dict[str, int] = {}  # by block: the most bytes in a visit without gradients, beyond the start's
        self._watched: dict[int, list[weakref.ref[RepeatedCall]]] = {}  # calls, by the storages of their inputs
        self._spilled: tuple[Any, dict[int, tuple[Block, nn.Parameter]]] = (None, {})  # blocks; weights by storage
        self._measurement: Measurement | None = None  # under way
        trial.meter.pilot = weakref.ref(self)

    @property
    def trains(self) -> bool:
        return any(kind.trains for kind in self.kinds)

    def add(self, kind: StepKind) -> None:
        """Note another forward of the step."""
        if not any(own.covers(kind) for own in self.kinds):
            self.kinds.append(kind)

    # ---- room ----

    def copy_of(self, block: Block) -> DeviceCopy:
        """Promote the block, after dropping the one before. Returns its copy on the device."""
        if self._copy is None or self._copy[0] is not block:
            self._drop_copy()
            if block.weight_bytes > self.free_bytes:
                raise no_room(f"{format_bytes(block.weight_bytes, up=True)} for its weights alone")
            try:
                self._copy = block, self._trial.residency.promote(block)
            except torch.OutOfMemoryError as error:  # a backward cannot be made another way
                raise (self._trial.meter.refusal(error) if self._trial.backwards.under_way else error) from None
        return self._copy[1]

    def _drop_copy(self) -> None:
        if self._copy is not None:
            (block, copy), self._copy = self._copy, None
            copy.note_use(self._trial.id)
            self._trial.residency.drop(copy)
            self._trial.residency.device.free_slot(None, block.weight_bytes)

    def profiles_beside(self, step_bytes: int) -> dict[str, BlockProfile]:
        """The measured profiles, for a step that reserves `step_bytes`. In an evaluation a block's work is only what
        its run took beyond these bytes."""
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
        """Run a call of the block with gradients, and return its outputs. It is measured, unless an equal block with
        equal inputs was measured before."""
        trial = self._trial
        own = block.slot_parameters
        if any(place.get(name) is not own[i] for place, name, i in block.sites):  # torch.func.functional_call
            trial.planner.cut.open_block(block, f"{block.name} is called with other weights than its own")
            return block.forward(args, kwargs)
        while True:
            key = self._key(block, args, kwargs)
            found, outputs = self._known.get(key), _NOT_RUN
            if found is None:
                found, outputs = self._measure(block, args, kwargs, forward_pass)
                # The profile of a block that keeps says nothing about repeating. An equal block may repeat, so it must
                # be measured itself.
                if not block.keeps:
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
        """Measure a visit without gradients, which runs within this context."""
        meter = self._trial.meter
        with measured(meter) as used:
            yield
        profile = BlockProfile("", 0, used.num_bytes, boundary_bytes=used.left_bytes, forward_s=used.seconds, visits=1)
        self._note(block, profile)
        self._totals[block.name] = max(self._totals.get(block.name, 0), meter.window_peak - self._start_bytes)

    def watch(self, call: RepeatedCall, inputs: Iterable[torch.Tensor]) -> None:
        """Watch for changes of these inputs in place before the call's backward: then the call needs clones of them."""
        for storage in _memory_of(inputs):
            self._watched.setdefault(storage, []).append(weakref.ref(call))

    def before_writing(self, tensors: Iterable[torch.Tensor]) -> None:
        """Called before an operator changes these tensors in place. Has the watched calls clone their inputs."""
        for storage in _memory_of(tensors):
            for reference in self._watched.pop(storage, ()):
                call = reference()
                if call is not None and not call.block.clones:
                    call.keep_clones()
                    call.block.clones = True
                    self.profiles[call.block.name] = replace(self.profiles[call.block.name], clones=True)

    def before_using(self, operator: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Called before an operator is run on these tensors. Holds a spilled weight that is used outside of its block,
        as in `F.linear(x, self.embedding.weight)`.

        On a GPU every such weight must be held. On a virtual device only a weight that autocast casts, since its
        gradient would be added up in another way. If the weight belongs to a module within the block, which may be
        called by itself, the block is opened instead.

        Raises:
            PrepareError: the weight is held now, but too late for this forward.
        """
        trial, cut = self._trial, self._trial.planner.cut
        if operator is not _CAST and self._measurement is not None and self._measurement.is_running:
            self._measurement.note_reads(tensors)
        if not trial.block_calls.are_expected or (not trial.device.counts_as_gpu and operator is not _CAST):
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
        # Too late: a GPU's operator has the weight in host memory; a checkpoint has counted what the block saves
        if used and (hooks_of_checkpoint() is not None or not trial.device.is_virtual):
            raise PrepareError(
                f"a spilled weight is used by its block, but one of {used[0][0].name} was used without it, and is "
                "elsewhere from here on. Repeat the forward."
            )

    def _key(self, block: Block, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        leaves, structure = flatten_call(args, kwargs)
        places = {id(x): i for i, x in reversed([*enumerate(leaves)])}  # the first place of each argument
        given = tuple(
            (shape_of(x), x.dtype, x.requires_grad, _strides_of(x), places[id(x)])
            if isinstance(x, torch.Tensor)
            else (type(x), x if isinstance(x, (bool, int, float, str)) else None)
            for x in leaves
        )
        called = structure if isinstance(structure, tuple) else str(structure)  # that of a dict cannot be hashed
        model = Fingerprint(of_layers=True).of_model(block.module), None if block.own_forward is None else id(block)
        promoted = set(map(id, block.slot_parameters))
        held = tuple(id(p) not in promoted for p in block.parameters)
        training = tuple(m.training for m in block.modules)
        return model, held, training, called, given, casts_to() if remembers_casts() else None

    def _measure(
        self, block: Block, args: Sequence[Any], kwargs: dict[str, Any], forward_pass: ForwardPass
    ) -> tuple[BlockProfile | FoundError, Any]:
        """Run the call for the first time. Returns what was found, and the outputs.

        The outputs are `_NOT_RUN` if the run was undone. It is, if the block must be run in another way, has a user's
        hook within, or is in an activation checkpoint, which counts the tensors that are saved.
        """
        trial, settings = self._trial, AmbientSettings.now(block.module_states)
        leaves, structure = flatten_call(args, kwargs)
        stays = bool(block.keeps) or trial.block_calls.keeps(settings)
        call = RepeatedCall(block, trial, forward_pass, leaves, structure, settings)
        self._measurement = measurement = Measurement(call, leaves)
        run = partial(measurement.run, args, kwargs, repeats=not stays)
        found: BlockProfile | FoundError
        outputs: Any = None
        trial.visits.is_measuring = True
        try:
            found, outputs = trial.retry.with_room(block, run, measurement.undo)
        except FoundError as error:
            found = FoundError(error.why, holds=error.holds)  # a copy without frames
        except torch.OutOfMemoryError as error:
            clear_frames(error)
            found = FoundError(f"{TOO_LARGE}: it needs {needs(error)}")
        finally:
            trial.visits.is_measuring, call.measurement, self._measurement = False, None, None
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
            raise trial.planner.cut.refused_block(block, why)
        if isinstance(found, FoundError) or why:
            raise PrepareError(
                f"the first run of a block is taken back where it is to be run otherwise, as where it {why}, "
                f"but the forward of {block.name} has changed {measurement.changed} by then, which can't be. "
                "Let it return what it changes."
            )
        if casts:  # the run stays, and has used its weights without shared casts
            trial.casts.bar(block.slot_parameters[i] for i, _ in casts)
        stays = stays or found.keeps != ""
        call.settle(outputs, keeps=stays)
        if not stays:
            self.watch(call, call.tensors)
        return found, outputs

    def _note(self, block: Block, profile: BlockProfile) -> None:
        """Add to the block's profile. `profile` was measured on this block or on an equal one."""
        backward_work = profile.backward_work_bytes
        if hooks_of_checkpoint() is not None:  # within a checkpoint, the backward clones one weight after another
            backward_work += max(map(storage_bytes, block.slot_parameters), default=0)
        profile = replace(
            profile, name=block.name, weight_bytes=block.weight_bytes, backward_work_bytes=backward_work,
            keeps=block.keeps, clones=block.clones, casts=block.casts, saved_counts=block.saved_counts,
        )  # fmt: skip
        known = self.profiles.pop(block.name, None)
        if known is not None:
            saved = known.saved_bytes + profile.saved_bytes  # each call of a resident model keeps its own
            profile = replace(larger_of(known, profile), saved_bytes=saved)
        self.profiles[block.name] = profile
        work = block.weight_bytes + profile.work_bytes
        self.peak_bytes = max(self.peak_bytes, work + self._trial.meter.trial_bytes)


def _strides_of(tensor: torch.Tensor) -> Hashable:
    return None if tensor.is_nested or tensor.layout is not torch.strided else tensor.stride()


def _memory_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {storage._cdata for tensor in tensors for storage in storages_of(tensor)}
