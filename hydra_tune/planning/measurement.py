"""Measures a block in its first run with gradients: what it takes, and whether its forward may be repeated.

A forward that is repeated in the backward must make what it made at first. One that counts its calls, changes a list or
draws from another generator does not, and its model would train on other numbers. So the first run is looked at for
what it changes, and the repetition is tried at once, with a backward of its own:

    first run    the step's own; all that it saves for the backward is kept
    repetition   part of no graph of the step's: does it make the same, and in how many bytes and seconds?
    verdict      repeat: what was kept is dropped | keep: it stays
                 hold weights | open the block: the first run is taken back, as if it had not been

A block that changes something is not repeated, so that a list that grows with each call has grown once. What was
changed can't be taken back: where a first run would have to be, the model is refused.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hydra_tune.blocks.ambient_settings import casts_to, is_activation, remembers_casts
from hydra_tune.blocks.block import Block, has_hooks
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.blocks.early_repetition import repeat_early
from hydra_tune.blocks.repeated_call import RepeatedCall
from hydra_tune.blocks.tree import flatten, tensors_in
from hydra_tune.blocks.weight_uses import weight_uses
from hydra_tune.devices.meter import CountingPaused, TrialMeter, storages_of
from hydra_tune.devices.tensor_bytes import same_bits, storage_bytes, versions_of
from hydra_tune.planning.fingerprint import HOOKS_OF_MODULES, origin_of
from hydra_tune.planning.reached_weights import NO_STATE, Reached, globals_of, stays_as_it_is, weights_in
from hydra_tune.randomness.shared_random import SharedRandom
from hydra_tune.schedule.plan import BlockProfile


class FoundError(Exception):
    """Why the block is none, but opened into its children, or on the device as a whole, with its own graph; or why it
    is one only without the weights with these numbers, which the device holds."""

    def __init__(self, why: str, *, holds: Sequence[int] = ()) -> None:
        super().__init__(why)
        self.why, self.holds = why, tuple(holds)


class Measurement:
    """Of one call, with the tensors and objects that it is given."""

    def __init__(self, call: RepeatedCall, given: Sequence[Any]) -> None:
        self._call, self._block, self._meter = call, call.block, call.trial.meter
        self._given = [x for x in given if isinstance(x, torch.Tensor)]
        self._objects = [x for x in given if not isinstance(x, torch.Tensor)]
        # Hooks within that are not PyTorch's, which compute weights, tell somebody of a call, as those by which
        # transformers collects outputs: it runs without.
        self.is_quiet = any(len(own) < len(hooks) for _, _, hooks, own in _hooks_within(call.block))
        self.is_running = False
        self.changed = ""  # what can't be taken back
        self.casts: frozenset[tuple[int, torch.dtype]] = frozenset()
        self.casts_again = False  # a weight that it has cast, for another use
        call.measurement, call.casts = self, {}  # its weights are as they are, so that each use of them is seen
        block = self._block
        with CountingPaused():
            others = {
                "an argument": self._objects,
                "its forward": block.own_forward,
                "what is noted on a weight": [p.__dict__ for p in block.parameters],
            }
            self._reached = Reached(block.module, others, globals_of(block.module, block.own_forward))
            self._held = [(p.data, p.data.clone()) for p in block.held]  # some operators raise no version
            self._buffers = [b for m in block.modules for b in m._buffers.values() if b is not None]
        self._versions = versions_of(self._buffers)
        self._attributes = [dict(vars(module)) for module in block.modules]
        self._marks, self._random = self._marks_now(), SharedRandom()

    # ---- the first run ----

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], *, repeats: bool) -> tuple[BlockProfile, Any]:
        """What it shows, and its outputs; `repeats` it, if it may be.

        Raises:
            torch.OutOfMemoryError: it has no room.
            FoundError: it is no block, or not with all its weights.
        """
        call, block = self._call, self._block
        outputs = call.run(args, kwargs)
        made, used = tensors_in(outputs), self._used
        boundary = sum(map(storage_bytes, made))
        keeps = self._changes(outputs)
        own_bytes = sum(storage_bytes(p) for p in block.parameters if p.requires_grad)
        profile = BlockProfile(
            block.name,
            block.weight_bytes,
            forward_work_bytes=max(0, used.num_bytes - boundary),  # what it leaves is the step's from then on
            backward_work_bytes=used.num_bytes + own_bytes + sum(map(storage_bytes, self._given)),  # but see below
            saved_bytes=used.left_bytes,
            boundary_bytes=boundary,
            forward_s=used.seconds,
            backward_s=2 * used.seconds,
            keeps=keeps and f"{block.name} {keeps}",
            clones=block.clones,
            writes_buffers=call.has_written_buffers or versions_of(self._buffers) != self._versions,
            saved_counts=frozenset([call.num_saved]),
            visits=1 + call.promotes_again,
            casts=self.casts,
        )
        return self._repeat(profile, outputs) if repeats and not keeps else profile, outputs

    def forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """That of the block, in its visit."""
        self._meter.within_checkpoint, self.is_running = False, True
        try:
            with (
                _silenced(self._block) if self.is_quiet else nullcontext(),
                measured(self._meter) as self._used,
            ):
                return self._block.forward(args, kwargs)
        except RuntimeError as error:
            if "saved tensor hooks" in str(error):
                raise FoundError("takes gradients within its forward by torch.func") from None
            raise
        finally:
            self.is_running = False

    def runs_backward_within(self) -> FoundError:
        return FoundError("runs a backward within its forward")

    def look(self, outputs: Any, weights: Sequence[torch.Tensor], copy: DeviceCopy) -> None:
        """At what it has done with its weights, before its visit ends."""
        parameters = self._block.slot_parameters
        if self._meter.within_checkpoint:
            raise FoundError("has a checkpoint within")
        with CountingPaused():
            written = [i for i, p in enumerate(parameters) if not same_bits(copy.weight(p), p)]
            if written:
                copy.fill()
        if written:
            raise FoundError("changes a weight in its forward", holds=written)
        if returned := set(map(id, weights_in(outputs, copy))):
            raise FoundError(
                "returns one of its weights", holds=[i for i, p in enumerate(parameters) if id(p) in returned]
            )
        own = [{k: v for k, v in vars(m).items() if k not in NO_STATE} for m in self._block.modules]
        if any(map(copy.has, tensors_in(own))):
            raise FoundError("keeps a view of a weight in an attribute")
        if any(map(has_hooks, weights)):
            raise FoundError("puts a hook on a weight in its forward")
        self.casts = self._casts(outputs, weights)

    def take_back(self) -> bool:
        """As if it had not run; False, and nothing is done, if it has changed what can't be put back."""
        if self._call.has_changed_inputs:
            self.changed = "what it is given"
        elif self._random.have_moved():
            self.changed = "Python's or NumPy's random numbers"
        elif self._marks_now() != self._marks:
            self.changed = "hooks, or attributes of what it is given"
        else:
            with CountingPaused():
                self.changed = next(iter(self._reached.changes()), "")
        if self.changed:
            return False
        self._call.rewind()
        for module, before in zip(self._block.modules, self._attributes, strict=True):
            vars(module).clear()
            vars(module).update(before)
        with CountingPaused():
            for now, then in [held for held in self._held if not same_bits(*held)]:
                now.copy_(then)
        return True

    # ---- what of it a repetition would find changed, or change again ----

    def _changes(self, outputs: Any) -> str:
        block = self._block
        with CountingPaused():
            changed = self._reached.changes()
            if changed:
                return f"changes {changed[0]}"
            if any(map(is_activation, block.buffers_themselves())):
                return "changes a buffer into an activation"
            if not all(same_bits(*held) for held in self._held):
                return "changes a weight"
            if gives := self._gives_away(outputs):
                return gives
        if self._call.has_changed_inputs:
            return "changes an input in place"
        if block.module_states.now().is_rebuilt:
            return "makes, or exchanges, a child of a module"
        changing = next((type(x).__name__ for x in self._objects if not stays_as_it_is(x)), None)
        if changing:
            return f"is given an object, a {changing}, that others may change"
        direct = {id(value) for own in self._attributes for value in own.values()}
        if any(number not in direct and is_activation(x) for number, x in self._reached.met.items()):
            return "has an activation in an attribute"
        return (
            "puts a hook or an attribute on an input, or a hook on a module" if self._marks_now() != self._marks else ""
        )

    def _gives_away(self, outputs: Any) -> str:
        kept = self._reached.met
        own = [x for x in (*kept.values(), *self._block.held, *self._buffers) if isinstance(x, torch.Tensor)]
        own = [x for x in own if not any(x is given for given in self._given)]
        memory = {s._cdata for x in own for s in storages_of(x)}
        within = Reached(torch.nn.Module(), {"": outputs}).met.items()
        same = any(number in kept and not stays_as_it_is(x) for number, x in within if not isinstance(x, torch.Tensor))
        if same or any(s._cdata in memory for t in tensors_in(outputs) for s in storages_of(t)):
            return "returns a buffer, or another tensor, list, dict or object that it keeps"
        if not all(isinstance(x, torch.Tensor) or stays_as_it_is(x) for x in flatten(outputs)[0]):
            return "returns an object"
        return ""

    def _marks_now(self) -> list[tuple[Any, ...]]:
        """What a forward may leave on a tensor that it is given, or on a module of its own."""
        given = [(x._backward_hooks is not None, x.retains_grad, x.requires_grad, *x.__dict__) for x in self._given]
        return given + [tuple(vars(m).get(kind, ())) for m in self._block.modules for kind in HOOKS_OF_MODULES]

    # ---- the repetition ----

    def _repeat(self, profile: BlockProfile, outputs: Any) -> BlockProfile:
        """What it shows beside. Nothing is changed by it, for the first run has changed nothing."""
        first, found, drew = tensors_in(outputs), dict[str, Any](), self._random.have_moved()
        if not drew:  # else it may be that it has, which can't be done again
            self._call.drop()
        shared = SharedRandom()

        def run(args: Sequence[Any], kwargs: dict[str, Any], asked: Sequence[torch.Tensor]) -> None:
            self._lose_activations()
            with _silenced(self._block), measured(self._meter) as used:
                again = tensors_in(self._block.forward(args, kwargs))
                same = len(first) == len(again) and all(map(same_bits, first, again))
                found["keeps"] = "" if same else f"{self._block.name} makes other values when it is repeated"
                held = [p for p in self._block.held if not has_hooks(p)]
                wanted, inputs = ([x for x in of if x.requires_grad] for of in (again, [*asked, *held]))
                del again
                if wanted and inputs:
                    torch.autograd.grad(wanted, inputs, [torch.ones_like(x) for x in wanted], allow_unused=True)
                del wanted
                lent = versions_of(self._block.buffers_themselves())  # clones; its backward may write there, too
            found["writes_buffers"] = profile.writes_buffers or any(lent) or self._call.has_written_buffers
            found["backward_work_bytes"], found["backward_s"] = used.num_bytes, used.seconds

        with torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False):
            puts_hooks = repeat_early(self._call, run)
            found["writes_buffers"] |= puts_hooks  # for all that is known of these
        if drew and shared.have_moved():
            shared.put_back()
            found["keeps"] = f"{self._block.name} draws from Python's or NumPy's random numbers"
        elif drew:  # it was another thread
            self._call.drop()
        return BlockProfile(**{**vars(profile), **found})

    def _lose_activations(self) -> None:
        """Those among the attributes may be others by then."""
        for module in self._block.modules:
            for name, value in [item for item in vars(module).items() if is_activation(item[1])]:
                vars(module)[name] = torch.full_like(value, torch.nan if value.is_floating_point() else 0)

    # ---- how it uses its weights ----

    def _casts(self, outputs: Any, weights: Sequence[torch.Tensor]) -> frozenset[tuple[int, torch.dtype]]:
        """Of the weights that are promoted, those whose every use is a cast to autocast's dtype. Held are those whose
        gradients plain PyTorch adds up as a visit would not."""
        block, dtype = self._block, casts_to() if remembers_casts() else None
        uses = weight_uses(weights, self._given, tensors_in(outputs))
        if uses.has_checkpoint:
            raise FoundError("has a checkpoint within")
        casts, held = set[int](), set[int]()
        most = 0 if remembers_casts() else 1  # other casts: one that lasts as long as the context has other calls, too
        for i, to_each in uses.casts.items():
            others = [x for x in to_each if x is None or x is not dtype]
            if not others:
                casts.add(i)
            elif len(others) < len(to_each) or len(others) - others.count(None) > most:
                held.add(i)
        self.casts_again = any(len(uses.casts[i]) > 1 for i in casts)
        trained = [i for i, weight in enumerate(weights) if weight.requires_grad]
        hooked = [i for i in trained if has_hooks(block.slot_parameters[i])]
        if not uses.casts.keys() >= set(hooked):  # not every call uses all such weights
            held.update(hooked)
        if held:
            raise FoundError(
                "uses a weight so that its gradients are added up otherwise than in a visit", holds=sorted(held)
            )
        return frozenset((i, dtype) for i in casts) if dtype is not None else frozenset()


@contextmanager
def _silenced(block: Block) -> Iterator[None]:
    found = list(_hooks_within(block))
    for module, kind, _, own in found:
        vars(module)[kind] = own
    try:
        yield
    finally:
        for module, kind, hooks, _ in found:
            vars(module)[kind] = hooks


def _hooks_within(block: Block) -> Iterator[tuple[torch.nn.Module, str, Any, Any]]:
    for module in block.modules[1:]:
        for kind in HOOKS_OF_MODULES:
            hooks = vars(module).get(kind)
            if hooks:
                own = ((key, hook) for key, hook in hooks.items() if origin_of(hook).startswith("torch."))
                yield module, kind, hooks, OrderedDict(own)


@dataclass
class Used:
    """The most bytes beyond those there at the start, those that are left, and seconds."""

    num_bytes: int = 0
    left_bytes: int = 0
    seconds: float = 0.0


@contextmanager
def measured(meter: TrialMeter) -> Iterator[Used]:
    """What is used within; known at the end."""
    used, device = Used(), meter.device
    device.synchronize()
    meter.window_peak = before = meter.trial_bytes
    start_s = time.perf_counter()
    yield used
    device.synchronize()
    used.seconds = time.perf_counter() - start_s
    used.num_bytes, used.left_bytes = meter.window_peak - before, max(0, meter.trial_bytes - before)
