"""Measures a model's blocks on its first batch, one block at a time on the device, and finds what cannot be cut.

The root module runs once as it would in training. Before each block's own call the pilot runs it forward,
and forward with gradients and backward, and notes bytes and seconds. Nothing of it stays: random state,
buffers, attributes and inputs are put back, `p.grad` is never written, and the outputs are thrown away.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import nn

from hydra_tune import reentrant
from hydra_tune.arguments import refuse_hidden_outputs, taken_out
from hydra_tune.block import Block, gradient_bytes, owners_of
from hydra_tune.call import BlockCall
from hydra_tune.config import format_bytes
from hydra_tune.errors import HydraTuneError, SecondGradientError, UncuttableError
from hydra_tune.forward_pass import AbandonedForward
from hydra_tune.garbage import collect_until
from hydra_tune.graph import (
    ForgottenError,
    Uses,
    borrowed_by,
    detached,
    forget_interrupted_backward,
    gradients_of,
    is_checkpointed,
    saved,
    uncached,
)
from hydra_tune.host_buffer import same_values, storage_bytes, versions_kept, versions_of
from hydra_tune.journal import Journal
from hydra_tune.leaves import Leaves
from hydra_tune.marks import hooks_of, refuse_marks
from hydra_tune.meter import TrialMeter
from hydra_tune.partition import has_children
from hydra_tune.probe import (
    OuterGraph,
    TensorHooksOff,
    parametrizations_uncached,
    refuse_changes,
    refuse_own_leaves,
    refuse_shared_containers,
    refuse_shared_draws,
    refuse_side_channel,
    refuse_wrappers,
    shares_memory,
    user_hooks,
    user_hooks_removed,
)
from hydra_tune.process_state import casts_to, remembers_casts, thread_settings_kept
from hydra_tune.randomness.trial_state import random_state_kept
from hydra_tune.residency import Residency
from hydra_tune.rewind import Rewind
from hydra_tune.seen_call import SeenCall
from hydra_tune.shard import BlockProfile
from hydra_tune.shared_random import SharedDraws
from hydra_tune.snapshot import Snapshot
from hydra_tune.spill import DeviceCopy
from hydra_tune.transfer import copied_bytes
from hydra_tune.tree import map_tensors, tensors_in

OUTPUT_COPIES = 3  # what a loss makes of the model's outputs: log-probabilities, their gradient, one more


class DoesNotFitError(AbandonedForward):
    """The pilot has less free memory than a block needs; `work_bytes` is what it needs to compute, or `lacking` says
    that it needs more than these."""

    def __init__(self, block: Block, work_bytes: int, *, lacking: bool = True) -> None:
        gradients = sum(gradient_bytes(p) for p in block.slot_parameters if p.requires_grad)
        self.need_bytes = block.weight_bytes + max(work_bytes, gradients)  # at least
        work = f" and {'more than ' if lacking else ''}{format_bytes(work_bytes)} to compute" if work_bytes > 0 else ""
        super().__init__(f"block {block.name} needs {format_bytes(block.weight_bytes)} of weights{work}")
        self.block = block


@dataclass
class Findings:
    """What must be cut otherwise, each with the reason, before the model can be trained spilled."""

    uncuttable: dict[Block, str] = field(default_factory=dict)
    held: dict[nn.Parameter, str] = field(default_factory=dict)
    borrowed: dict[Block, list[nn.Parameter]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.uncuttable or self.held or self.borrowed)


@dataclass
class Pilot:
    """One pass over a model. Afterwards: profiles in the order in which blocks ran, and the step's bytes; or
    findings, after which the model is to be cut anew."""

    model: nn.Module
    blocks: Sequence[Block]
    residency: Residency
    free_bytes: int
    beside: bool  # other trials have the rest of the device
    forward_only: bool = False  # no gradients follow: nothing is repeated, nor needs to be
    profiles: dict[Block, BlockProfile] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)
    step_bytes: int = 0
    kept_bytes: int = 0  # what a training loop keeps from one step to the next: batches and outputs
    peak_bytes: int = 0
    undone: bool = False  # what its forward has changed was put back
    written: Sequence[nn.Parameter] = ()  # weights that the forward itself writes into
    calls: list[SeenCall] = field(default_factory=list)
    run_back: list[SeenCall] = field(default_factory=list)  # by backwards within the forward
    _journal: Journal = field(default_factory=lambda: Journal((), (), (), Leaves(())))
    _copy: tuple[Block, DeviceCopy] | None = None
    _hooks_off: TensorHooksOff = field(init=False)
    _start_bytes: int = 0
    _made: list[torch.Tensor] = field(default_factory=list)  # what the block under measurement made at first
    _repeats: bool = True  # did it make the same the second time?
    _draws: SharedDraws = field(default_factory=SharedDraws)  # of its first forward

    def __post_init__(self) -> None:
        self._hooks_off = TensorHooksOff(self.model.parameters())

    @contextmanager
    def limited(self) -> Iterator[None]:
        """What it needs more of, others may have."""
        self._start_bytes = self.residency.meter.trial_bytes
        self._limit(self.free_bytes)
        try:
            yield
        finally:
            self.residency.meter.limit(None)

    def run(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Users' hooks do not fire, nor does a backward within the forward go on into what its inputs were made from,
        unless the model can't do without that."""
        before = self.residency.meter.trial_bytes
        grown = torch.is_grad_enabled() and any(t.grad_fn is not None for t in tensors_in((args, kwargs)))
        ways = list(product([False, True][: 1 + self._has_hooks], [False, True][: 1 + grown]))
        with versions_kept(self.model.buffers()):  # a graph may wait for its backward
            for fires_hooks, goes_on in ways:
                last = (fires_hooks, goes_on) == ways[-1]
                try:
                    self._run(forward, args, kwargs, fires_hooks=fires_hooks, goes_on=goes_on, last=last)
                    return
                except Exception as error:
                    if _is_of_pilots(error) or self.findings or last:
                        raise
                free_remains(self.residency.meter, before)
                self.profiles, self.findings, self.calls, self.run_back = {}, Findings(), [], []

    def _run(
        self,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        fires_hooks: bool,
        goes_on: bool,
        last: bool,
    ) -> None:
        meter = self.residency.meter
        inputs, hooked = tensors_in((args, kwargs)), self._has_hooks
        with (
            self._put_back(args, kwargs, last=last) as journal,
            nullcontext() if fires_hooks else user_hooks_removed(self.model),
            self._hooks_off,
            parametrizations_uncached(self.model),
            thread_settings_kept(),
            torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False),  # NaNs are found later
        ):
            before = meter.trial_bytes
            meter.watch_outside()
            try:
                inference = self.forward_only and torch.is_inference_mode_enabled()
                with torch.inference_mode(inference), torch.set_grad_enabled(not self.forward_only):
                    args, kwargs = map_tensors(cache(partial(_apart, goes_on=goes_on)), (args, kwargs))
                    outputs = tensors_in(forward(*args, **kwargs))
            except SecondGradientError as error:  # within the forward, which no cut would allow
                for block in self.blocks:
                    if block in error.blocks:  # another model's may be behind them, too
                        block.differentiates = True
                        self.findings.uncuttable[block] = str(error)
                if not self.findings:
                    raise
                return
            except RuntimeError as error:  # as a GPU's of weights in host memory
                self._hold(journal.read(on_device=True))
                if not self.findings.held:  # or of what was made of them
                    self._hold(journal.read(on_device=False))
                if isinstance(error, torch.OutOfMemoryError) or not self.findings.held:
                    raise
                return
            self._hold(journal.read(on_device=True))
            self._drop_copy()
            self._note_rewritten(journal.written)
            for block in self.blocks:
                if block.name in journal.changed_shared:
                    self.findings.uncuttable[block] = (
                        "a block's outputs have memory of their own where they are changed in place, but one of "
                        f"{block.name} shares its with an input or with another output"
                    )
            forward_peak, held = meter.outside_peak(), meter.trial_bytes - before
            output_bytes = sum(map(storage_bytes, outputs))
            self.kept_bytes = 2 * sum(map(storage_bytes, inputs)) + output_bytes
            boundaries = [p.boundary_bytes for p in self.profiles.values()]
            saved_between = max(0, held - sum(boundaries))
            loss_bytes = max(OUTPUT_COPIES * output_bytes, saved_between)
            self.step_bytes = forward_peak + loss_bytes + 2 * max(boundaries, default=0)
            graph = None if self.findings else OuterGraph(inputs, outputs, self.blocks, self.calls, self.run_back)
            del outputs
            if graph is not None:
                self._read(graph, hooked=hooked)
        self._profile_uncalled()

    @contextmanager
    def _put_back(self, args: Sequence[Any], kwargs: dict[str, Any], *, last: bool) -> Iterator[Journal]:
        """Afterwards all is as it was; not if the `last` pilot is ended by the model's own exception, as this forward
        has run as far as in plain PyTorch."""
        meter = self.residency.meter
        rewind = Rewind(self.model, (args, kwargs), meter, self.residency.device.generators())
        model = self.model
        journal = Journal(model.parameters(), model.buffers(), rewind.tensors, rewind.leaves)
        meter.journal = self._journal = journal
        is_of_model = False
        with SharedDraws() as draws, rewind.leaves.hooks_removed():
            try:
                yield journal
            except Exception as error:
                is_of_model = last and not self.findings and not _is_of_pilots(error)
                raise
            finally:
                meter.journal = None
                self._drop_copy()
                self.written, self.undone = journal.written, not is_of_model
                if self.undone:
                    journal.undo()
                    draws.take_back()
                    rewind.restore()

    @property
    def _has_hooks(self) -> bool:
        return any(map(user_hooks, self.model.modules()))

    def _hold(self, read: Sequence[nn.Parameter]) -> None:
        """Weights of blocks that operators were given as they are: in a visit a block has copies of its own. And those
        of the same module: an operator that fails has been seen with some of its inputs. A block that was not called
        itself is opened: perhaps its parts were."""
        spilled = {id(p) for block in self.blocks for p in block.slot_parameters}
        known = {id(p) for borrowed in self.findings.borrowed.values() for p in borrowed}
        found = {id(p) for p in read} & (spilled - known)
        for block in self.blocks if found else ():
            uncalled = block not in self.profiles and block not in self.findings.uncuttable
            if uncalled and has_children(block.module) and any(id(p) in found for p in block.slot_parameters):
                self.findings.uncuttable[block] = f"its weights are used, but {block.name} itself is not called"
                found.difference_update(map(id, block.slot_parameters))
        for module in (module for block in self.blocks for module in block.modules) if found else ():
            own = [p for p in module._parameters.values() if p is not None]
            if any(id(p) in found for p in own):
                for parameter in own:
                    if id(parameter) in spilled - known:
                        self.findings.held[parameter] = "used without calling the module that owns it"

    def _read(self, graph: OuterGraph, *, hooked: bool) -> None:
        measured = {block: profile.backward_work_bytes for block, profile in self.profiles.items()}
        self._hold(graph.used_outside)
        for block, edges, extra_bytes in graph.edges(hooked=hooked):
            profile = self.profiles[block]
            self.profiles[block] = replace(
                profile,
                edges=profile.edges | edges,
                backward_work_bytes=max(profile.backward_work_bytes, measured[block] + extra_bytes),
            )
        for block in graph.changed_later:
            self.profiles[block] = replace(self.profiles[block], keeps_clones=True)

    def _note_rewritten(self, written: Sequence[nn.Parameter]) -> None:
        """Blocks whose weights something else than the optimizer changes, in each forward."""
        changed = set(map(id, written))
        for block, profile in self.profiles.items():
            if any(id(p) in changed for p in block.slot_parameters):
                self.profiles[block] = replace(profile, rewritten=True)

    def _profile_uncalled(self) -> None:
        """A block that this batch has passed over is like a called one of its kind, or unknown. How it uses its weights
        is to be seen when it is called: it may loop."""
        owners = owners_of(self.blocks)
        known = {_kind(block, owners): profile for block, profile in self.profiles.items()}
        uncalled = {}
        for block in self.blocks:
            if block not in self.profiles:
                like = known.get(_kind(block, owners), BlockProfile("", block.weight_bytes, measured=False))
                known_edges = map(like.edges.of_weight, range(len(block.parameters)))
                weights = tuple(edges._replace(is_watched=True, is_mixed=True) for edges in known_edges)
                edges = replace(like.edges, weights=weights)
                uncalled[block] = replace(like, name=block.name, visits=0, edges=edges)
        self.profiles = uncalled | self.profiles

    # ---- one block ----

    def copy_of(self, block: Block) -> DeviceCopy:
        """The block alone on the device."""
        if self._copy is None or self._copy[0] is not block:
            self._drop_copy()
            if block.weight_bytes > self.free_bytes:
                raise DoesNotFitError(block, 0)
            self._limit(self.free_bytes - block.weight_bytes)
            self._copy = block, self.residency.promote(block)
        return self._copy[1]

    def _drop_copy(self) -> None:
        if self._copy is not None:
            block, copy = self._copy
            self._copy = None
            copy.used = copy.device.mark()
            copy.retire()
            self.residency.device.free_slot(None, block.weight_bytes)
            self._limit(self.free_bytes)

    def _limit(self, num_bytes: int) -> None:
        if self.beside:
            self.residency.meter.limit(self._start_bytes + num_bytes)

    def measure(self, call: BlockCall) -> bool:
        """Profile one call of a block; of several calls, the largest figures count. False if it can't be cut so."""
        block, meter = call.block, self.residency.meter
        if block in self.findings.uncuttable:
            return False
        if self.forward_only and not torch.is_grad_enabled():
            return True  # it is measured while it runs
        meter.outside_ends()
        try:
            profile = self._profile(call)
        except UncuttableError as error:
            self.findings.uncuttable[block] = str(error)
            return False
        except Exception as error:
            if _is_of_pilots(error):
                raise
            raised = f"{type(error).__name__}: {error}".partition("\n")[0]
            self.findings.uncuttable[block] = f"a block is run apart, but the forward of {block.name} raised {raised}"
            return False
        finally:
            meter.outside_starts()
        self._note(block, profile)
        assert call.seen is not None
        self.calls.append(call.seen)
        return True

    @contextmanager
    def measuring(self, call: BlockCall) -> Iterator[None]:
        """Profile a call without gradients, in a visit, while it runs."""
        block, start = call.block, time.perf_counter()
        try:
            with self._measured() as used:
                yield
            self.copy_of(block).refuse_kept_weights(block)
            self.copy_of(block).refuse_returned_weights(block, call.made)
        except torch.OutOfMemoryError:
            raise DoesNotFitError(block, self.free_bytes - block.weight_bytes) from None
        self.residency.device.synchronize()
        seconds, boundary = time.perf_counter() - start, sum(map(storage_bytes, call.made))
        self._note(
            block, BlockProfile(block.name, block.weight_bytes, used[0], 0, 0, boundary, forward_s=seconds, visits=1)
        )

    def _note(self, block: Block, profile: BlockProfile) -> None:
        known = self.profiles.get(block)
        self.profiles[block] = profile
        if known is not None:  # resident, each call keeps its own
            saved_bytes = known.saved_bytes + profile.saved_bytes
            self.profiles[block] = replace(larger_of(known, profile), saved_bytes=saved_bytes)
        trial_bytes = self.residency.meter.trial_bytes
        self.peak_bytes = max(self.peak_bytes, block.weight_bytes + profile.work_bytes + trial_bytes)
        if block.weight_bytes + profile.work_bytes > self.free_bytes:
            raise DoesNotFitError(block, profile.work_bytes, lacking=False)

    def _tensors_behind(self, value: Any) -> list[torch.Tensor]:
        return Snapshot({"": value}, self.model).tensors

    def _profile(self, call: BlockCall) -> BlockProfile:
        block = call.block
        with self.residency.meter.paused():
            call.arguments.refuse_hidden_tensors(lambda x: bool(self._tensors_behind(x)))
        refuse_wrappers(block, call.tensors)
        copy = self.copy_of(block)
        self._journal.drew, self._journal.updated = False, []
        meter = self.residency.meter
        with random_state_kept(self.residency.device.generators()):
            now = [(i, copy.buffer(*site).clone()) for i, site in enumerate(block.buffer_sites)]
            before = {storage._cdata for storage in meter.meter.storages(meter.trial)}
            with self.residency.meter.paused():
                given = Snapshot({"an object that it is given": call.arguments.objects}, block.module)
            try:
                with random_state_kept(self.residency.device.generators()):
                    forward_s, forward_work, boundary, carried = self._forward(call, copy)
                kept = any(storage._cdata not in before for storage in meter.meter.storages(meter.trial))
                with self.residency.meter.paused():
                    changes = [*given.changes(), *given.names_of(self._journal.updated)]
                    given.restore()
                    attributes = Snapshot.of_modules(block.module.named_modules(), block.module)
                copy.swap_buffers(block, now)
                backward_s, backward_work, saved_bytes, leaves, has_checkpoints = self._backward(call, copy)
                copy.refuse_kept_weights(block)
            except torch.OutOfMemoryError:
                raise DoesNotFitError(block, self.free_bytes - block.weight_bytes) from None
            finally:
                copy.swap_buffers(
                    block, [(i, b) for i, b in now if copy.buffer(*block.buffer_sites[i]).shape == b.shape]
                )
                copy.renew_leaves()
                given.restore()
        refuse_shared_draws(block, self._draws, repeats=self._repeats)
        changes += [*attributes.changes(), *attributes.names_of(self._journal.updated)]
        self._journal.updated = []  # of the slot
        refuse_changes(block, changes, repeats=self._repeats)
        refuse_side_channel(block, leaves, self.findings.uncuttable)
        uses_home = kept or call.shares_memory or block.held or block.borrowed or self._journal.looked_around
        uses_home = uses_home or block.names_device
        return BlockProfile(
            block.name, block.weight_bytes, forward_work, backward_work, saved_bytes, boundary, carried,
            bool(uses_home), forward_s, backward_s,
            visits=1 + any(t.requires_grad for t in (*call.tensors, *block.parameters)), reentrant=has_checkpoints,
            draws=self._journal.drew, shares_memory=call.shares_memory,
        )  # fmt: skip

    def _forward(self, call: BlockCall, copy: DeviceCopy) -> tuple[float, int, int, int]:
        meter = self.residency.meter
        around = self._journal.looking_around(meter.meter.storages(meter.trial), call.tensors)
        copy.note_buffers(call.block)
        with self.residency.inside(call.block, copy) as visit, self._measured() as used, around:
            weight_versions = versions_of(visit.leaves)
            self.residency.device.synchronize()  # others' tasks may be under way
            versions, start = versions_of(call.tensors), time.perf_counter()
            given, hooks = detached(call.tensors), hooks_of(call.block.modules)
            self._journal.wrote_masters = False
            arguments = call.arguments.filled(given)
            try:
                with SharedDraws() as self._draws, self._hooks_off.noted() as hooked:
                    outputs = call.forward_unsaved(arguments)
            except ForgottenError as error:
                call.block.differentiates = True
                raise UncuttableError(
                    f"a block's forward keeps nothing for a backward, but {call.block.name} runs one within its forward"
                ) from error
            refuse_shared_draws(call.block, self._draws)
            stand_for = [*call.tensors, *call.block.parameters]
            refuse_marks(call.block, [*given, *visit.leaves], stand_for, hooks, hooked)
            call.block.refuse_changed_weights(visit.leaves, weight_versions)
            if self._journal.wrote_masters:
                raise UncuttableError(
                    f"a block's forward leaves others' weights and buffers alone, but {call.block.name} wrote into one."
                )
            with self.residency.meter.paused():
                copy.refuse_changed_values(call.block)
                copy.changed_buffers(call.block)
            call.refuse_changed_inputs(call.tensors, versions)
            call.arguments.refuse_changed_containers(given, arguments)
            self.residency.device.synchronize()
            seconds = time.perf_counter() - start
            made = tensors_in(outputs)
            refuse_wrappers(call.block, made)
            copy.refuse_returned_weights(call.block, made)
            with self.residency.meter.paused():
                refuse_hidden_outputs(call.block.name, outputs, copy.has, self._tensors_behind)
                refuse_shared_containers(call.block, outputs, arguments, self.model)
            boundary = sum(map(storage_bytes, made))
            carried = max(copied_bytes(given), copied_bytes(made))
            with self.residency.meter.paused():
                self._made = [x.detach().to("cpu", copy=True) for x in made]
        return seconds, used[0], boundary, carried

    def _backward(
        self, call: BlockCall, copy: DeviceCopy
    ) -> tuple[float, int, int, list[weakref.ref[torch.Tensor]], bool]:
        block, meter, device = call.block, self.residency.meter, self.residency.device
        inputs = list(map(uncached, detached(call.tensors)))
        casts, around = remembers_casts(), casts_to()
        is_repeated, buffers = is_checkpointed(), list[tuple[int, int]]()

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            buffers[:] = call.found_buffers()
            return tensor.detach()

        keeping = saved(keep) if is_repeated else saved()
        with torch.enable_grad(), keeping, self.residency.inside(block, copy) as visit, self._measured() as used:
            buffers += call.found_buffers()
            leaves = [*inputs, *visit.leaves]
            device.synchronize()
            before, start = meter.trial_bytes, time.perf_counter()
            first_node = torch._C._autograd._get_sequence_nr()
            self._hooks_off.cast_by_hand.clear()
            outputs = block.forward(*call.arguments.filled(inputs))
            saved_bytes = meter.trial_bytes - before
            if is_repeated and buffers != call.found_buffers():
                raise UncuttableError(
                    "a checkpoint repeats a forward up to the last tensor that is saved for backward, but a block as a "
                    f"whole, and {block.name} writes a buffer after that."
                )
            with meter.paused():
                again = tensors_in(outputs)
                self._repeats = len(again) == len(self._made) and all(map(same_values, self._made, again))
                del again
            self._made = []
            made, _ = taken_out(outputs, inputs)
            del outputs
            call.shares_memory = shares_memory(made, inputs)
            differentiable = [x for x in made if x.requires_grad]
            refuse_own_leaves(block.name, differentiable, leaves)
            del made
            borrowed = borrowed_by(block.name, differentiable, leaves, first_node)
            if borrowed:
                self.findings.borrowed[block] = borrowed
            by_hand = self._hooks_off.cast_by_hand
            weights = {i for i in range(len(inputs), len(leaves)) if id(leaves[i]) not in by_hand}
            uses = Uses(differentiable, leaves, cast_once=dict.fromkeys(weights if casts else ()))
            counts = [(uses.count(i, cast=False), uses.count(i, cast=True)) for i in range(len(leaves))]
            dtypes = [uses.cast_to.get(i) for i in range(len(inputs), len(leaves))]
            call.seen = SeenCall(
                block, call.arguments.places, casts, around is not None,
                list(map(weakref.ref, call.tensors)), list(map(storage_bytes, inputs)),
                counts[: len(inputs)], counts[len(inputs) :],
                [frozenset({(around, dtype)} if dtype not in (None, around) else ()) for dtype in dtypes],
                [i in weights for i in range(len(inputs), len(leaves))],
            )  # fmt: skip
            has_checkpoints = reentrant.are_behind(differentiable)
            if differentiable:
                ones = [torch.ones_like(x) for x in differentiable]
                needed = [x.requires_grad for x in leaves]
                if has_checkpoints:
                    reentrant.gradients_of(differentiable, ones, leaves, needed, len(inputs))
                else:
                    gradients_of(differentiable, ones, leaves, needed)
            device.synchronize()
            seconds = time.perf_counter() - start
            slot_leaves = [
                x for x, p in zip(visit.leaves, block.parameters, strict=True) if x is not p
            ]  # not the borrowed
            refs = [weakref.ref(x) for x in (*inputs, *slot_leaves)]
        return seconds, used[0], saved_bytes, refs, has_checkpoints

    @contextmanager
    def _measured(self) -> Iterator[list[int]]:
        """The most bytes beyond those there at the start, known at the end."""
        used = [0]
        before = self.residency.meter.start_window()
        yield used
        used[0] = self.residency.meter.window_peak - before


def _is_of_pilots(error: Exception) -> bool:
    """Not of the model: its own code did not fail."""
    return isinstance(error, (HydraTuneError, AbandonedForward, torch.OutOfMemoryError))


def _apart(tensor: torch.Tensor, *, goes_on: bool) -> torch.Tensor:
    """The same memory; what a pilot writes there does not become part of the tensor's history, and no backward within
    it `goes_on` into that, unless told so. An inference tensor can't be in one."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return tensor.clone()
    if not tensor.requires_grad:
        return tensor.detach()
    if tensor.is_leaf or goes_on or not torch.is_grad_enabled() or tensor.layout is not torch.strided:
        return tensor
    leaf = tensor.detach().requires_grad_()
    apart: torch.Tensor = torch.ops.aten._unsafe_view(leaf, leaf.shape)  # neither a leaf nor one's view
    apart.__dict__.update(tensor.__dict__)
    return apart


def free_remains(meter: TrialMeter, num_bytes: int) -> None:
    """Free what a pilot that has failed keeps on the device, until the trial has no more than these bytes."""
    if meter.trial_bytes > num_bytes:
        with meter.paused():
            forget_interrupted_backward()
        for generation in (1, 2):  # frames are in cycles
            collect_until(lambda: meter.trial_bytes <= num_bytes, generation)


def _kind(block: Block, owners: Mapping[int, int]) -> tuple[Any, ...]:
    weights = ((tuple(p.shape), p.dtype, p.requires_grad, owners[id(p)] > 1) for p in block.parameters)
    return type(block.module), *weights


def larger_of(a: BlockProfile, b: BlockProfile) -> BlockProfile:
    """Enough for both."""
    figures = {k: max(v, getattr(b, k)) for k, v in vars(a).items() if k not in ("name", "edges", "modes")}
    return replace(a, **figures, edges=a.edges | b.edges, modes=a.modes | b.modes)
