"""Measures a block in its first run with gradients: bytes, seconds, and how it must be run from then on.

    first run    belongs to the step; all that it saves for the backward is kept
    second run   belongs to no graph of the step's: does it make the same, and in how many bytes and seconds?
    result       repeat: what was kept is dropped | keep: it stays            (`repeat_or_keep.py`)
                 hold weights | open the block: the first run is undone, as if it had not been

If a first run must be undone, but has changed what cannot be put back, the model is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hydra_tune.blocks.ambient_settings import casts_to, remembers_casts
from hydra_tune.blocks.block import has_hooks
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
    """Why the block is none, but opened into its children, or on the device as a whole, with its own graph; or why it
    is one only without the weights with these numbers, which the device holds."""

    def __init__(self, why: str, *, holds: Sequence[int] = ()) -> None:
        super().__init__(why)
        self.why, self.holds = why, tuple(holds)


class Measurement:
    """Of one call of a block, with the tensors and objects that it is given."""

    def __init__(self, call: RepeatedCall, given: Sequence[Any]) -> None:
        self._call, self._block, self._meter = call, call.block, call.trial.meter
        self.has_users_hooks_within = has_users_hooks_within(call.block)  # then it runs without them, and is undone
        self.is_running = False
        self.changed = ""  # what cannot be put back, once somebody has tried
        self.casts: frozenset[tuple[int, torch.dtype]] = frozenset()
        self.casts_again = False  # a weight that it has cast, for another use
        call.measurement, call.casts = self, {}  # its weights are as they are, so that each use of them is seen
        self._effects = SideEffects(call, given)

    # ---- the first run ----

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], *, repeats: bool) -> tuple[BlockProfile, Any]:
        """Run the block. Returns what that shows, and the outputs. With `repeats`, it is tried whether it may repeat.

        Raises:
            torch.OutOfMemoryError: it has no room.
            FoundError: it is no block, or not with all its weights.
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
            forward_work_bytes=max(0, used.num_bytes - boundary),  # what it leaves is the step's from then on
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
        if repeats and not keeps:  # which measures the backward, too
            profile = try_repetition(call, self._effects, self._meter, profile, outputs)
        return profile, outputs

    def forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """That of the block, in its visit."""
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

    def undo(self) -> bool:
        """As if it had not run; False, and nothing is done, if it has changed what can't be put back."""
        self.changed = self._effects.undo()
        return not self.changed

    # ---- how it uses its weights ----

    def _casts(self, outputs: Any, weights: Sequence[torch.Tensor]) -> frozenset[tuple[int, torch.dtype]]:
        """Of the weights that are promoted, those whose every use is a cast to autocast's dtype. Held are those whose
        gradients plain PyTorch adds up as a visit would not."""
        block, dtype = self._block, casts_to() if remembers_casts() else None
        uses = weight_uses(weights, self._effects.given, tensors_in(outputs))
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
