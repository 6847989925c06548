"""A call of a block whose forward runs once more in the backward (Chen et al., "Training Deep Nets with Sublinear
Memory Cost", arXiv 1604.06174).

What a block saves for its backward may be far larger than its weights. So it is dropped, and made again when the
backward asks for it. The repetition must make the same bits. So it gets the random state, buffers and attributes of the
first run. A weight or an input that was changed since cannot be put back: then the repetition is refused.

    forward    run      _pack: notes where a saved weight or input is, drops all other saved tensors
    backward   _unpack: the first tensor that was dropped has `_repeat` make all of them
               _repeat: `_pack_again` gets the same tensors in the same order, and ends the repetition after the last
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hydra_tune.blocks.ambient_settings import AmbientSettings, changed_in_between
from hydra_tune.blocks.block import Block
from hydra_tune.blocks.call import Call, KeptTensor, Versioned, WeightView, _pop_hooks, _push_hooks, memory_of, place_of
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.blocks.engine import ForwardPass
from hydra_tune.blocks.shared_casts import seen_as
from hydra_tune.blocks.tree import Structure, tensors_in, unflatten
from hydra_tune.devices.tensor_bytes import digest, same_bits, version_of, versions_of
from hydra_tune.randomness import DrawRecord, drawing_again
from hydra_tune.schedule.plan import Direction

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial

_DEPENDS = (
    "depends on something that has changed since, as a global, or an object, list or dict that the model changes for "
    "each layer, or on random numbers other than torch's. Give it what it depends on as an argument, or draw from "
    "torch's."
)


class SavedTensor:
    """Autograd keeps this object in place of a tensor that it saves, for as long as it would keep the tensor. `value`
    is None while the tensor is dropped."""

    __slots__ = ("__weakref__", "value")
    value: WeightView | Versioned | torch.Tensor | None


class _EnoughError(BaseException):
    """Ends a repetition once all saved tensors are there. A BaseException, so that a model's `except` misses it."""


class RepeatedCall(Call):
    """A call whose forward is repeated in the backward.

    `_saved` has what autograd has saved, in order, by weak references. A saved tensor that is a weight, or lies in the
    memory of an input or a buffer, needs no repetition.
    """

    _buffers: Sequence[torch.Tensor | None] = ()
    _buffer_versions: Sequence[int] = ()
    _held_versions: Sequence[int] = ()
    _looks: Sequence[Any] = ()  # digests of the outputs, until a repetition has made equal ones
    _gave_weights = False  # whether an operator of the backward under way was given a weight
    _drops = False  # whether a saved tensor must be made by a repetition
    has_dropped = False
    _next = 0  # the place in `_saved` that the repetition under way makes next

    def __init__(
        self,
        block: Block,
        trial: Trial,
        forward_pass: ForwardPass,
        leaves: Sequence[Any],
        structure: Structure,
        settings: AmbientSettings,
    ) -> None:
        super().__init__(block, trial, forward_pass)
        self.leaves, self._structure, self._settings = leaves, structure, settings
        self._given = self.tensors
        self._input_versions = self._given_versions = versions_of(self._given)
        self._draws = DrawRecord(trial.device.generators)
        self._saved: list[weakref.ref[SavedTensor]] = []

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        block = self.block
        self._inputs = list(map(memory_of, self._given))
        if block.clones:
            self.keep_clones()
        if block.buffers:
            self._buffers = block.buffers_now()
            self._inputs += map(memory_of, block.buffers_themselves())
            self._buffer_versions = versions_of([b for b in self._buffers if b is not None])
        if block.held:
            self._held_versions = versions_of(block.held)
        with self._draws:
            outputs = super().run(args, kwargs)
        if self.measurement is None:
            self.settle(outputs, keeps=False)
        return outputs

    def rewind(self) -> bool:
        """Undo the forward. Returns False if it has changed an input: that cannot be undone."""
        self._saved, self._looks, self.num_saved, self._drops = [], (), 0, False
        self._draws.rewind()
        self.block.put_back_buffers(self._buffers)
        cast = {id(self.block.slot_parameters[i]) for i in self.casts}
        self.trial.casts.forget(p for p in self.promoted if id(p) in cast)
        return not self.has_changed_inputs

    @property
    def has_changed_inputs(self) -> bool:
        return self._given_versions != versions_of(self._given)

    # ---- for a measured first run, which keeps all saved tensors ----

    @property
    def promotes_again(self) -> bool:
        """Whether the backward must promote the block: a weight was saved, or a tensor that a repetition makes."""
        return self._drops or any(type(saved.value) is WeightView for saved in self._alive())

    @property
    def has_written_buffers(self) -> bool:
        pairs = zip(self._buffers, self.block.buffers_now(), strict=True)
        return any(a is not b and (a is None or b is None or not same_bits(a, b)) for a, b in pairs)

    def drop(self) -> None:
        """Drop the saved tensors that a repetition makes."""
        self.has_dropped = True
        for saved in self._alive():
            if type(saved.value) is KeptTensor:
                saved.value = None

    def settle(self, outputs: Any, *, keeps: bool) -> None:
        """End the forward, after a measured one too: drop what only a forward needs. With `keeps`, the call keeps all
        saved tensors and is never repeated."""
        del self._inputs, self._given
        if keeps:
            self.leaves = []
        elif self._drops and not self.block.is_checked:
            self._looks = list(map(_look_at, tensors_in(outputs)))

    def do_without_casts(self) -> bool:
        """Undo the forward, which took another branch, so that it can run without shared casts: then autocast casts a
        weight at each use. False if that is not possible: an earlier call shares the casts, or an input has changed."""
        may = not self._shares_casts and self.rewind()
        self.trial.casts.bar(self.block.slot_parameters[i] for i in self.casts)
        self.casts, self._cast_places = {}, ()
        return may

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, for the repetition."""
        return [x for x in self.leaves if isinstance(x, torch.Tensor)]

    def keep_clones(self) -> None:
        """Replace the inputs by clones, since they are about to be changed in place."""
        self.leaves = without_history(self.leaves, clones=True)
        self._input_versions = versions_of(self.tensors)

    def _pack(self, tensor: torch.Tensor) -> SavedTensor:
        saved = SavedTensor()
        saved.value = None
        self.num_saved += 1
        place = place_of(tensor)
        if self._start <= place < self._end or self._cast_places or self._copy.riders:
            saved.value = self._weight_view(tensor, place)
        if saved.value is None:
            for start, end in self._inputs:
                if start <= place < end:
                    saved.value = Versioned(tensor, version_of(tensor))
                    break
            else:
                self._drops = True
                if self.measurement is not None:
                    saved.value = KeptTensor(tensor, version_of(tensor))
        self._saved.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: SavedTensor) -> torch.Tensor:
        if self.measurement is not None and self.measurement.is_running:
            raise self.measurement.runs_backward_within()
        if saved.value is None:
            self.trial.retry.with_room(self.block, self._repeat, self._rewound)
        value = saved.value
        if type(value) is WeightView:
            self._gave_weights = True
            return self.weight(value)
        if isinstance(value, Versioned):
            return value.read()
        if value is None:
            raise self._made_other("fewer tensors")
        return value  # type: ignore[return-value]

    def _rewound(self) -> bool:
        """Undo a repetition that had no room. Returns False if an operator was already given a weight: it would lose
        that in the next attempt."""
        gave_weights = self._gave_weights
        self.forget()
        return not gave_weights

    def forget(self) -> None:
        self._gave_weights = False
        for saved in self._alive():
            if isinstance(saved.value, torch.Tensor):
                saved.value = None

    def _alive(self) -> list[SavedTensor]:
        return [saved for reference in self._saved if (saved := reference()) is not None]

    # ---- the repetition ----

    def _repeat(self) -> None:
        block, trial = self.block, self.trial
        if [*self._versions, *self._held_versions] != versions_of([*block.slot_parameters, *block.held]):
            raise self._changed_weight()
        if self._input_versions != versions_of(self.tensors):
            raise changed_in_between("inputs", "one", block.name, "Give the model a copy of it.")
        if [*self._buffer_versions] != versions_of([b for b in self._buffers if b is not None]):
            raise changed_in_between("buffers", "one", block.name)
        trial.backwards.visit(self)
        copy = trial.visits.begin(block, Direction.BACKWARD)
        try:
            self._enter(copy)
            self._next = 0
            with self.as_at_first(copy, self._pack_again):
                args, kwargs = self.arguments(without_history(self.leaves) if block.clones else self.leaves)
                outputs = block.forward(args, kwargs)
                # Only the block's first repetition runs to its end, and compares outputs. Saved tensors are not
                # compared: they may be uninitialised memory.
                looks, self._looks = self._looks, ()
                if looks and looks != list(map(_look_at, tensors_in(outputs))):
                    raise self._made_other("other values")
                block.is_checked = True
        except _EnoughError:
            pass
        finally:
            del self._copy
            trial.visits.end(copy, Direction.BACKWARD)
        if self._next < len(self._saved):
            raise self._made_other("fewer tensors")

    @contextmanager
    def as_at_first(self, copy: DeviceCopy, pack: Callable[[torch.Tensor], Any]) -> Iterator[list[torch.Tensor]]:
        """Within, everything except the arguments is as in the first run. Yields the weights: leaves of a graph of the
        repetition's own."""
        block, caches, gradients = self.block, torch.is_autocast_cache_enabled(), torch.is_grad_enabled()
        with self._settings.restored(block.module_states, block.name), drawing_again(self._draws):
            weights = self._leaves_of(copy)
            buffers = block.lend_buffers(self._buffers)
            block.lend(weights)
            torch.set_autocast_cache_enabled(False)  # cached casts would outlive the visit
            torch._C._set_grad_enabled(True)
            # Also where nothing is dropped: else a checkpoint around this would pack the tensors as its own.
            _push_hooks(pack, as_it_is)
            try:
                yield weights
            except Exception as error:
                if not isinstance(error, torch.OutOfMemoryError) and hasattr(error, "add_note"):  # Python 3.10 has none
                    error.add_note(
                        f"Block {block.name} raised this where its forward is repeated, in backward, and not at first: "
                        f"it may be that it {_DEPENDS}"
                    )
                raise
            finally:
                _pop_hooks()
                torch._C._set_grad_enabled(gradients)
                torch.set_autocast_cache_enabled(caches)
                block.take_back(weights)
                block.take_back_buffers(buffers)

    def _leaves_of(self, copy: DeviceCopy) -> list[torch.Tensor]:
        weights: list[torch.Tensor] = [*copy.leaves(self.block.slot_parameters, self._trained)]
        for i, dtype in self.casts.items():
            cast = weights[i].detach().to(dtype).requires_grad_(weights[i].requires_grad)
            weights[i] = seen_as(weights[i].dtype, cast)
        for i, weight in enumerate(weights):
            weight.__dict__ = dict(self._attributes[i]) if i in self._attributes else {}
        return weights

    def arguments(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        if self.block.clones:  # the forward changes inputs in place, which is an error for leaves of a graph
            made = {id(x): x.clone() for x in leaves if isinstance(x, torch.Tensor)}
            leaves = [made.get(id(x), x) for x in leaves]
        args, kwargs = unflatten(leaves, self._structure)
        return args, kwargs

    def _pack_again(self, tensor: torch.Tensor) -> None:
        if self._next >= len(self._saved):
            raise self._made_other("more tensors")
        saved = self._saved[self._next]()
        self._next += 1
        if saved is not None and saved.value is None:
            saved.value = tensor
        if self._next == len(self._saved) and not self._looks:
            raise _EnoughError

    def _made_other(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"a block's forward may be repeated, but block {self.block.name} made {what} when it was: it {_DEPENDS}"
        )


def without_history(leaves: Sequence[Any], *, clones: bool = False) -> list[Any]:
    """The arguments, with each tensor detached, or cloned. An argument that is given twice stays one tensor."""
    made = {
        id(x): (x.detach().clone() if clones else x.detach()).requires_grad_(x.requires_grad)
        for x in leaves
        if isinstance(x, torch.Tensor)
    }
    return [made.get(id(x), x) for x in leaves]


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _look_at(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, str]:
    return tensor.shape, tensor.dtype, str(digest(tensor.detach()))  # a text, since NaN != NaN
