"""One call of a block with gradients: what autograd saves of it, and how that comes back in the backward.

    repeat   everything saved is dropped; the first to be asked for promotes the weights again, and runs the forward
             once more with the random state, buffers and attributes of the first time (Chen et al., "Training Deep
             Nets with Sublinear Memory Cost", arXiv 1604.06174)
    keep     activations stay on the device; only weights are dropped, and promoted again

Either way the operators are nodes of the user's own graph, and a saved weight is noted as a place in its parameter:
the memory that it was in is another shard's by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hydra_tune.blocks.block import Block, are_trained
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.blocks.promote import promote
from hydra_tune.blocks.shared_casts import SharedCasts
from hydra_tune.engine import ForwardPass
from hydra_tune.errors import PrepareError
from hydra_tune.host_buffer import digest, version_of, versions_of
from hydra_tune.mode import TrialMode
from hydra_tune.process_state import Surroundings, casts_to, remembers_casts
from hydra_tune.randomness import DrawRecord, drawing_again, noting_draws, rewind
from hydra_tune.shard import Direction
from hydra_tune.tree import Structure, map_tensors, tensors_in, unflatten

ResultT = TypeVar("ResultT")
_ref = weakref.ref
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_CHECKPOINT = "torch.utils.checkpoint"


class Executor(Protocol):
    """What a call needs of the trial that it runs for."""

    casts: SharedCasts

    def gpu_generators(self) -> Sequence[torch.Generator]:
        """Those of its device, if that has some of its own."""

    def begin_visit(self, block: Block, direction: Direction) -> DeviceCopy:
        """The block's weights are on the device, for its forward or the repetition of that, until `end_visit`."""

    def end_visit(self, copy: DeviceCopy, direction: Direction) -> None: ...

    def visit_backward(self, call: Call) -> DeviceCopy:
        """Have the block's shard on the device, from here until the next visit; its copy there."""

    def with_room(self, block: Block, run: Callable[[], ResultT], rewound: Callable[[], bool]) -> ResultT: ...

    def send_home(
        self, call: Call | UsedUpCall, gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]: ...


class Given(NamedTuple):
    """What a block is called with, and what else its forward sees."""

    leaves: Sequence[Any]
    structure: Structure
    tensors: Sequence[torch.Tensor]
    surroundings: Surroundings


class WeightView(NamedTuple):
    """A saved tensor that is a weight, or a view of one; of its cast, if that has another dtype."""

    parameter: nn.Parameter
    offset: int  # in elements of `dtype`, from where the weight begins
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_cast: bool = False


_new_view: Callable[[tuple[Any, ...]], WeightView] = partial(tuple.__new__, WeightView)  # in a fifth of the time


class Versioned(NamedTuple):
    """A saved tensor that stays, and how often it had been written: autograd does not look where there are hooks."""

    tensor: torch.Tensor
    version: int

    def read(self) -> torch.Tensor:
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.dtype} {list(self.tensor.shape)}] is at version {version_of(self.tensor)}; expected "
                f"version {self.version} instead."
            )
        return self.tensor


class Saved:
    """What autograd has instead of a tensor that it saved; lives as long as that would."""

    __slots__ = ("__weakref__", "value")
    value: WeightView | Versioned | torch.Tensor | None


class OtherBranchError(PrepareError):
    """A call may use a weight otherwise than as autocast's copy, as which it was given."""


class _EnoughError(BaseException):
    """Ends a repetition: all that was saved is there. No model catches it."""


class Call:
    """The part that repeating and keeping share. Lives as long as the graph of the call."""

    def __init__(self, block: Block, trial: Executor, forward_pass: ForwardPass) -> None:
        self.block = block
        self.trial = trial
        self.forward_pass = forward_pass
        self._versions: Sequence[int] = ()  # of the weights in host memory
        self.promoted: list[nn.Parameter] = []
        self._num_saved = 0
        dtype = casts_to() if block.casts and remembers_casts() else None
        self._casts = {i: dtype for i in sorted(i for i, of in block.casts if of is dtype)} if dtype else {}
        self._shares_casts = False  # with an earlier call

    @property
    def has_casts(self) -> bool:
        """Whether some gradients are those of autocast's copies."""
        return bool(self._casts)

    # ---- forward ----

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The block's forward in the user's graph, in a visit."""
        block, trial = self.block, self.trial
        copy = trial.begin_visit(block, Direction.FORWARD)
        try:
            self._enter(copy)
            self._versions = versions_of(block.slot_parameters)
            weights = self._promoted(copy)
            block.lend(weights)
            _push_hooks(self._pack, self._unpack)
            try:
                outputs = block.forward(args, kwargs)
            finally:
                _pop_hooks()
                block.take_back(weights)
                del self._cast_memory
                for weight, p in zip(weights, block.slot_parameters, strict=True):
                    if weight.__dict__ or p.__dict__:  # what the forward has noted on it
                        p.__dict__ = dict(weight.__dict__)
                for i in self._casts:
                    trial.casts.free(block.slot_parameters[i])
            refuse_hooks(block, weights)
            if self._casts and self._num_saved not in block.saved_counts:
                raise OtherBranchError(
                    f"a block uses its weights in one way in an autocast context, but this call of {block.name} saves "
                    f"{self._num_saved} tensors for its backward, where {sorted(block.saved_counts)} were measured: it "
                    "has taken another branch, in which autocast's copy of a weight may not do, and an earlier call "
                    "has it, too. Enter torch.autocast for each forward, or raise the pool's memory= until the model "
                    "is resident."
                )
            if are_trained(weights) != self._trained:
                raise PrepareError(
                    f"a weight requires a gradient or does not before its block runs, but {block.name} changed one's "
                    "requires_grad. Change it outside of forward."
                )
            if copy.num_bytes and any(map(copy.has, tensors_in(outputs))):
                outputs = map_tensors(_apart_from(copy), outputs)
            return outputs
        finally:
            del self._copy
            trial.end_visit(copy, Direction.FORWARD)

    def _enter(self, copy: DeviceCopy) -> None:
        self._copy, self._start = copy, copy.start
        self._end = copy.start + copy.num_bytes
        self._weight_at = copy.weight_starting_at

    def _promoted(self, copy: DeviceCopy) -> list[torch.Tensor]:
        """The block's weights as its operators are to see them: outputs of `Promote`, where they are trained."""
        parameters = self.block.slot_parameters
        weights = copy.aliases(parameters)
        self._trained = are_trained(parameters)
        trained = [*self._trained] if self._casts else self._trained
        for i, dtype in self._casts.items():
            known = self.trial.casts.get(parameters[i], weights[i], dtype) if trained[i] else None
            self._shares_casts |= known is not None
            weights[i] = weights[i].to(dtype) if known is None else known
            trained[i] = trained[i] and known is None
        numbers = [i for i, flag in enumerate(trained) if flag]
        self.promoted = [parameters[i] for i in numbers]
        if numbers:
            given = promote(self, [weights[i] for i in numbers], *self.promoted)
            for i, weight in zip(numbers, given, strict=True):
                weights[i] = weight
                if i in self._casts:
                    self.trial.casts.put(parameters[i], weight)
        self._trained = are_trained(weights)
        self._cast_places = [(*_memory_of(weights[i]), parameters[i]) for i in self._casts]
        # no activation may come to lie there, where a forward sets the weight's `data`
        self._cast_memory = [weights[i].untyped_storage() for i in self._casts]
        self._attributes = {}
        for i, p in enumerate(parameters):
            if p.__dict__ or weights[i].__dict__:
                self._attributes[i] = weights[i].__dict__ = dict(p.__dict__)
        if self._attributes:
            self._attributes = {i: dict(own) for i, own in self._attributes.items()}
        return weights

    def _weight_view(self, tensor: torch.Tensor, place: int) -> WeightView | None:
        """None of what is no weight."""
        if self._cast_places:
            for start, end, parameter in self._cast_places:
                if start <= place < end:
                    offset = (place - start) // tensor.element_size()
                    return WeightView(parameter, offset, tensor.size(), tensor.stride(), tensor.dtype, is_cast=True)
        if not self._start <= place < self._end:
            return None
        whole = self._weight_at.get(place)
        if whole is not None:
            return _new_view((whole, 0, tensor.size(), tensor.stride(), tensor.dtype, False))
        parameter, start = self._copy.parameter_at(place)
        offset = (place - start) // tensor.element_size()
        return WeightView(parameter, offset, tensor.size(), tensor.stride(), tensor.dtype)

    # ---- backward ----

    def weight(self, view: WeightView) -> torch.Tensor:
        """Where it is now; of its own where a graph of gradients may save it once more."""
        if self._versions != versions_of(self.block.slot_parameters):
            raise self._changed_weight()
        weight = self.trial.visit_backward(self).weight(view.parameter)
        if view.is_cast:
            weight = weight.to(view.dtype)
        elif weight.dtype is not view.dtype:
            weight = weight.view(view.dtype)
        found = weight.as_strided(view.size, view.stride, weight.storage_offset() + view.offset)
        return found.clone() if torch.is_grad_enabled() else found

    def _changed_weight(self) -> RuntimeError:
        return RuntimeError(
            f"a weight of block {self.block.name} was changed in place between forward and backward. Call backward "
            "before optimizer.step(), or repeat the forward."
        )

    def sent_home(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        return self.trial.send_home(self, gradients)

    def used_up(self) -> UsedUpCall | None:
        return UsedUpCall(self) if self._casts else None

    def forget(self) -> None:
        """What a repetition has made and nobody has asked for; another backward repeats it."""

    def _pack(self, tensor: torch.Tensor) -> Any:
        raise NotImplementedError

    def _unpack(self, packed: Any) -> torch.Tensor:
        raise NotImplementedError


class UsedUpCall:
    """What is left of a call whose graph was used up, while others of its autocast context have its casts in theirs."""

    has_casts = True

    def __init__(self, call: Call) -> None:
        self.trial, self.block, self.forward_pass, self.promoted = (
            call.trial, call.block, call.forward_pass, call.promoted
        )  # fmt: skip

    def sent_home(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        return self.trial.send_home(self, gradients)

    def used_up(self) -> UsedUpCall:
        return self

    def forget(self) -> None:
        """It has nothing."""


class KeptCall(Call):
    def _pack(self, tensor: torch.Tensor) -> WeightView | Versioned:
        self._num_saved += 1
        return self._weight_view(tensor, _place_of(tensor)) or Versioned(tensor, version_of(tensor))

    def _unpack(self, packed: WeightView | Versioned) -> torch.Tensor:
        return packed.read() if type(packed) is Versioned else self.weight(packed)  # type: ignore[arg-type]


class CheckpointedCall(KeptCall):
    """Within a checkpoint of the user's, which drops what is saved, and calls the block again: only weights are not
    the checkpoint's business."""

    def __init__(
        self, block: Block, trial: Executor, forward_pass: ForwardPass, hooks: tuple[Callable[..., Any], ...]
    ) -> None:
        super().__init__(block, trial, forward_pass)
        self._outer_pack, self._outer_unpack = hooks

    def _pack(self, tensor: torch.Tensor) -> Any:
        self._num_saved += 1
        return self._weight_view(tensor, _place_of(tensor)) or self._outer_pack(tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        """A weight that an operator has asked for is gone where what it asks for next is recomputed: other blocks have
        been visited by then."""
        return self.weight(packed).clone() if type(packed) is WeightView else self._outer_unpack(packed)


def hooks_of_checkpoint() -> tuple[Callable[..., Any], ...] | None:
    """Of the user's checkpoint around, whose forward or repetition this is; None, if there is none."""
    hooks: tuple[Callable[..., Any], ...] | None = _top_hooks(False)
    if hooks is None:
        return None
    origin = getattr(hooks[0], "__module__", None)
    if origin not in (_CHECKPOINT, "torch.autograd.graph"):  # save_on_cpu changes no value
        raise PrepareError(
            "what blocks save for the backward is the pool's business, but saved_tensors_hooks are around the model's "
            "forward, which would see none of it. Leave them out, or call hydra_tune.release(model) first."
        )
    return hooks if origin == _CHECKPOINT else None


def refuse_hooks(block: Block, weights: Sequence[torch.Tensor]) -> None:
    """That a forward has put on its weights, for they are others in the next visit."""
    if any(w._backward_hooks or w._post_accumulate_grad_hooks for w in weights):
        for weight in weights:
            weight._backward_hooks = weight._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        raise PrepareError(
            f"hooks on weights are put there between forwards, but {block.name} puts one on a weight in a forward. "
            "Register it on the Parameter, before the step."
        )


def is_watched() -> bool:
    """Whether a mode that is not ours sees the operators here, or parametrized weights are cached: a repetition would
    be without either."""
    if torch._C._len_torch_function_stack() and any(
        not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()
    ):
        return True
    if torch._C._len_torch_dispatch_stack() and any(
        not isinstance(mode, TrialMode) for mode in _get_current_dispatch_mode_stack()
    ):
        return True
    return bool(parametrize._cache_enabled)


class RepeatedCall(Call):
    """`_saved` are all that autograd has saved, in order, as long as it has them. What is a weight, or lies in the
    memory of an input or buffer, is there without a repetition."""

    def __init__(self, block: Block, trial: Executor, forward_pass: ForwardPass, given: Given) -> None:
        super().__init__(block, trial, forward_pass)
        self._leaves, self._structure = given.leaves, given.structure
        self._given, self._given_versions = given.tensors, versions_of(given.tensors)
        self._surroundings = given.surroundings
        self._buffers: Sequence[torch.Tensor | None] = ()
        self._draws = DrawRecord()
        self._saved: list[weakref.ref[Saved]] = []
        self._looks: list[Any] = []  # at what it made, until a repetition was seen to make the same
        self._gave_weights = False  # to an operator of the backward under way
        self._drops = False  # something that a repetition must make
        self._next = 0  # to be made by the repetition under way
        self._inputs: list[tuple[int, int]] = []  # where their memory is

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        block = self.block
        self._inputs = list(map(_memory_of, self._given))
        self._input_versions = self._given_versions
        if block.clones:
            self.keep_clones()
        self._buffers = block.buffers_now()
        self._inputs += map(_memory_of, block.buffers_themselves())
        self._buffer_versions = versions_of([b for b in self._buffers if b is not None])
        self._held_versions = versions_of(block.held)
        with noting_draws(self._draws, self.trial.gpu_generators()):
            outputs = super().run(args, kwargs)
        del self._inputs, self._given
        if self._drops and not block.is_checked:
            self._looks = list(map(_look_at, tensors_in(outputs)))
        return outputs

    def rewind(self) -> bool:
        """As if it had not run, for it had no room; unless it has changed what it was given."""
        self._saved, self._looks, self._num_saved = [], [], 0
        rewind(self._draws, self.trial.gpu_generators())
        self.block.put_back_buffers(self._buffers)
        self.trial.casts.forget(self.promoted)
        return self._given_versions == versions_of(self._given)

    def do_without_casts(self) -> bool:
        """After another branch: autocast casts within the call, as often as that uses a weight. Not where an earlier
        call of the context has had the same casts, or what the call was given has changed."""
        may = not self._shares_casts and self.rewind()
        self.trial.casts.bar(self.block.slot_parameters[i] for i in self._casts)
        self._casts = {}
        return may

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What it was given, for the repetition."""
        return [x for x in self._leaves if isinstance(x, torch.Tensor)]

    def keep_clones(self) -> None:
        """Of the inputs, which are about to be changed in place."""
        self._leaves = [_clone_of(x) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        self._input_versions = versions_of(self.tensors)

    def _pack(self, tensor: torch.Tensor) -> Saved:
        saved = Saved()
        saved.value = None
        self._num_saved += 1
        place = _place_of(tensor)
        if self._start <= place < self._end or self._cast_places:
            saved.value = self._weight_view(tensor, place)
        if saved.value is None:
            for start, end in self._inputs:
                if start <= place < end:
                    saved.value = Versioned(tensor, version_of(tensor))
                    break
            else:
                self._drops = True
        self._saved.append(_ref(saved))
        return saved

    def _unpack(self, saved: Saved) -> torch.Tensor:
        if saved.value is None:
            self.trial.with_room(self.block, self._repeat, self._rewound)
        value = saved.value
        if type(value) is WeightView:
            self._gave_weights = True
            return self.weight(value)
        if type(value) is Versioned:
            return value.read()
        if value is None:
            raise self._made_other("fewer tensors")
        return value  # type: ignore[return-value]

    def _rewound(self) -> bool:
        """Not where an operator has a weight already, which would be gone."""
        gave_weights = self._gave_weights
        self.forget()
        return not gave_weights

    def forget(self) -> None:
        self._gave_weights = False
        for reference in self._saved:
            saved = reference()
            if saved is not None and isinstance(saved.value, torch.Tensor):
                saved.value = None

    # ---- the repetition ----

    def _repeat(self) -> None:
        block, trial = self.block, self.trial
        if self._versions != versions_of(block.slot_parameters) or self._held_versions != versions_of(block.held):
            raise self._changed_weight()
        if self._input_versions != versions_of(self.tensors):
            raise RuntimeError(
                f"a block's inputs stay as they are from its forward to its backward, which repeats the forward, but "
                f"one of block {block.name} was changed in place in between. Give the model a copy of it."
            )
        if self._buffer_versions != versions_of([b for b in self._buffers if b is not None]):
            raise RuntimeError(
                f"a block's buffers stay as they are from its forward to its backward, which repeats the forward, but "
                f"one of block {block.name} was changed in place in between. Change it after backward, or assign a new "
                "tensor."
            )
        trial.visit_backward(self)
        copy = trial.begin_visit(block, Direction.BACKWARD)
        try:
            self._enter(copy)
            self._next = 0
            drawing = drawing_again(self._draws, trial.gpu_generators())
            with self._surroundings.restored(block.name), drawing:
                self._run_again(copy)
        finally:
            del self._copy
            trial.end_visit(copy, Direction.BACKWARD)
        if self._next < len(self._saved):
            raise self._made_other("fewer tensors")

    def _run_again(self, copy: DeviceCopy) -> None:
        block, caches, gradients = self.block, torch.is_autocast_cache_enabled(), torch.is_grad_enabled()
        weights = self._leaves_of(copy)
        buffers = block.lend_buffers(self._buffers)
        block.lend(weights)
        torch.set_autocast_cache_enabled(False)  # its casts would outlive the visit
        torch._C._set_grad_enabled(True)
        _push_hooks(self._pack_again, _is_never_unpacked)
        try:
            args, kwargs = self._arguments()
            self._check(block.forward(args, kwargs))
        except _EnoughError:
            pass
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _explain(error, block.name)
            raise
        finally:
            _pop_hooks()
            torch._C._set_grad_enabled(gradients)
            torch.set_autocast_cache_enabled(caches)
            block.take_back(weights)
            block.take_back_buffers(buffers)

    def _check(self, outputs: Any) -> None:
        """That the first of a block's repetitions has made what its forward made; later ones end as soon as they may.
        What is saved may be uninitialised memory, and tells nothing."""
        looks, self._looks = self._looks, []
        if looks and not _look_alike(looks, list(map(_look_at, tensors_in(outputs)))):
            raise self._made_other("other values")
        self.block.is_checked = True

    def _leaves_of(self, copy: DeviceCopy) -> list[torch.Tensor]:
        weights: list[torch.Tensor] = [*copy.leaves(self.block.slot_parameters, self._trained)]
        for i, leaf in enumerate(weights):
            if i in self._attributes or leaf.__dict__:
                leaf.__dict__ = dict(self._attributes.get(i, {}))
        for i, dtype in self._casts.items():
            weights[i] = weights[i].detach().to(dtype).requires_grad_(weights[i].requires_grad)
        return weights

    def _arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        leaves = self._leaves
        if self.block.clones:  # no leaves, which may not be changed in place
            leaves = [_nonleaf_of(x) if isinstance(x, torch.Tensor) else x for x in leaves]
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
            f"a block's forward may be repeated, but block {self.block.name} made {what} when it was: it depends on "
            "something that has changed since, as a global, or an object, list or dict that the model changes for each "
            "layer, or on random numbers other than torch's. Give it what it depends on as an argument, or draw from "
            "torch's."
        )


def _place_of(tensor: torch.Tensor) -> int:
    """0 of what has no memory of its own, or none at all."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _is_never_unpacked(_: Any) -> torch.Tensor:
    raise AssertionError("a repetition's own graph has no backward")


def _apart_from(copy: DeviceCopy) -> Callable[[torch.Tensor], torch.Tensor]:
    """Outputs that are weights, or views of them, are copies: the slot will be another shard's."""
    return lambda tensor: tensor.clone() if copy.has(tensor) else tensor


def _clone_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _nonleaf_of(tensor: torch.Tensor) -> torch.Tensor:
    """A clone that may be changed in place."""
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.layout is not torch.strided:
        return 0, 0
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _look_at(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, float | None]:
    return tensor.shape, tensor.dtype, digest(tensor.detach())


def _look_alike(then: Sequence[Any], now: Sequence[Any]) -> bool:
    pairs = zip(then, now, strict=False)
    return len(then) == len(now) and all(a[:2] == b[:2] and (a[2] == b[2] or a[2] != a[2]) for a, b in pairs)


def _explain(error: Exception, block: str) -> None:
    add_note = getattr(error, "add_note", None)  # Python 3.10 has none
    if add_note is not None and not isinstance(error, torch.OutOfMemoryError):
        add_note(
            f"Block {block} raised this where its forward is repeated, in backward, and not at first: it may depend on "
            "something that has changed since, as a global, or an object, list or dict that the model changes for each "
            "layer. Give it what it depends on as an argument."
        )
