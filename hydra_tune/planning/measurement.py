"""Measures a block in its first run with gradients: bytes, seconds, and how it must be run from then on.

    first run    is a part of the user's step. All that it saves for the backward is kept
    second run   is a part of no graph. Does it make the same outputs? How many bytes and seconds does it take?
    result       repeat: what was kept is dropped | keep: it stays            (`repeat_or_keep.py`)
                 hold weights | open the block: the first run is undone

If a first run must be undone, but has changed something that cannot be put back, the model is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hydra_tune.blocks.ambient_settings import casts_to, remembers_casts
from hydra_tune.blocks.block import has_hooks
from hydra_tune.blocks.call import place_of
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.blocks.repeated_call import RepeatedCall
from hydra_tune.blocks.tree import tensors_in
from hydra_tune.blocks.weight_uses import weight_uses
from hydra_tune.devices.meter import CountingPaused, measured
from hydra_tune.devices.tensor_bytes import same_bits, storage_bytes
from hydra_tune.planning.reached_weights import NO_STATE, weights_in
from hydra_tune.planning.repeat_or_keep import SideEffects, has_users_hooks_within, try_repetition, without_hooks_within
from hydra_tune.schedule.plan import BlockProfile


class FoundError(Exception):
    """Says why a module cannot be a block as it is.

    With `holds`, it is a block without the weights of these numbers, which the device holds. Else it is opened: its
    children are blocks, or, if it has none, it stays on the device as a whole.
    """

    def __init__(self, why: str, *, holds: Sequence[int] = ()) -> None:
        super().__init__(why)
        self.why, self.holds = why, tuple(holds)


class Measurement:
    """Measures one call of a block. `given` are the tensors and objects among the call's arguments."""

    def __init__(self, call: RepeatedCall, given: Sequence[Any]) -> None:
        self._call, self._block, self._meter = call, call.block, call.trial.meter
        self.has_users_hooks_within = has_users_hooks_within(call.block)  # if so, runs without them and is undone
        self.is_running = False
        self.changed = ""  # what `undo` could not put back
        self.casts: frozenset[tuple[int, torch.dtype]] = frozenset()
        self.casts_again = False  # whether it casts one weight for several uses
        self._read: set[int] = set()  # numbers of weights that an operator other than a cast was given
        call.measurement, call.casts = self, {}  # without shared casts: the graph shows each use of a weight
        self._effects = SideEffects(call, given)

    # ---- the first run ----

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], *, repeats: bool) -> tuple[BlockProfile, Any]:
        """Run the block. Returns its profile and its outputs. With `repeats`, a second run finds out whether the block
        may repeat its forward.

        Raises:
            torch.OutOfMemoryError: the block has no room.
            FoundError: the module cannot be a block, or not with all its weights.
        """
        call, block = self._call, self._block
        outputs = call.run(args, kwargs)
        made, used = tensors_in(outputs), self._used
        boundary = sum(map(storage_bytes, made))
        keeps = self._effects.reason_to_keep(outputs)
        own_bytes = sum(storage_bytes(p) for p in block.parameters if p.requires_grad)
        profile = BlockProfile(
            block.name,
            block.weight_bytes,
            forward_work_bytes=max(0, used.num_bytes - boundary),  # its outputs count as the step's
            backward_work_bytes=used.num_bytes + own_bytes + sum(map(storage_bytes, self._effects.given)),
            saved_bytes=used.left_bytes,
            boundary_bytes=boundary,
            forward_s=used.seconds,
            backward_s=2 * used.seconds,
            keeps=keeps and f"{block.name} {keeps}",
            clones=block.clones,
            writes_buffers=self._effects.on_buffers,
            saved_counts=frozenset([call.num_saved]),
            visits=1 + call.promotes_again,
            casts=self.casts,
        )
        if repeats and not keeps:  # this measures the backward, too
            profile = try_repetition(call, self._effects, self._meter, profile, outputs)
        return profile, outputs

    def forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the block's forward within its visit, and measure it."""
        self._meter.within_checkpoint, self.is_running = False, True
        try:
            with (
                without_hooks_within(self._block) if self.has_users_hooks_within else nullcontext(),
                measured(self._meter) as self._used,
            ):
                return self._block.forward(args, kwargs)
        except RuntimeError as error:
            if "saved tensor hooks" in str(error):
                raise FoundError("takes gradients within its forward by torch.func") from None
            raise
        finally:
            self.is_running = False

    def note_reads(self, tensors: Sequence[torch.Tensor]) -> None:
        """In the run: an operator other than a cast was given these tensors. The graph does not show what is read
        without a gradient, as the norm of ``weight.detach()``."""
        if remembers_casts():
            numbers = [self._call.number_at(place_of(tensor)) for tensor in tensors]
            self._read.update(number for number in numbers if number is not None)

    def runs_backward_within(self) -> FoundError:
        return FoundError("runs a backward within its forward")

    def look(self, outputs: Any, weights: Sequence[torch.Tensor], copy: DeviceCopy) -> None:
        """Look at what the forward has done with its weights, before its visit ends.

        Raises:
            FoundError: it has done something with a weight that a visit cannot give.
        """
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

    def undo(self) -> bool:
        """Undo the first run. Returns False, and undoes nothing, if it has changed what cannot be put back."""
        self.changed = self._effects.undo()
        return not self.changed

    # ---- how it uses its weights ----

    def _casts(self, outputs: Any, weights: Sequence[torch.Tensor]) -> frozenset[tuple[int, torch.dtype]]:
        """Numbers, with autocast's dtype, of the promoted weights whose every use is a cast to that dtype.

        Raises:
            FoundError: of some weights plain PyTorch adds up gradients in another way than a visit does. The device
                has to hold these.
        """
        block, dtype = self._block, casts_to() if remembers_casts() else None
        uses = weight_uses(weights, self._effects.given, tensors_in(outputs))
        if uses.has_checkpoint:
            raise FoundError("has a checkpoint within")
        casts, held = set[int](), set[int]()
        # How many casts to other dtypes are allowed. With autocast's cache none: a cached cast lasts as long as the
        # autocast context, and other calls use it, too.
        most = 0 if remembers_casts() else 1
        for i, to_each in uses.casts.items():
            others = [x for x in to_each if x is None or x is not dtype]
            if not others and i in self._read:
                held.add(i)
            elif not others:
                casts.add(i)
            elif len(others) < len(to_each) or len(others) - others.count(None) > most:
                held.add(i)
        self.casts_again = any(len(uses.casts[i]) > 1 for i in casts)
        trained = [i for i, weight in enumerate(weights) if weight.requires_grad]
        hooked = [i for i in trained if has_hooks(block.slot_parameters[i])]
        if not uses.casts.keys() >= set(hooked):  # this call leaves a weight with a hook unused
            held.update(hooked)
        if held:
            raise FoundError(
                "uses a weight so that its gradients are added up otherwise than in a visit", holds=sorted(held)
            )
        return frozenset((i, dtype) for i in casts) if dtype is not None else frozenset()
