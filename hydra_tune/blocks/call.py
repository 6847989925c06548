"""One call of a block with gradients. The block's weights are on the device only while its operators need them.

    host weight --Promote--> device copy --> the block's operators, as in plain PyTorch --> output

    repeat   all that operators save is dropped; the backward runs the forward once more (`repeated_call.py`)
    keep     activations stay on the device; only weights are dropped, and promoted again

Both ways, the operators are nodes of the user's own graph. PyTorch's engine sums gradients and calls hooks, in its own
order. A weight that an operator saves is packed as a view of its parameter: at the time of the backward, the memory
where it was may belong to another shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hydra_tune.blocks.ambient_settings import casts_to, remembers_casts
from hydra_tune.blocks.block import Block, are_trained, has_hooks
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.blocks.engine import ForwardPass
from hydra_tune.blocks.shared_casts import OtherBranchError, dtype_of, seen_as
from hydra_tune.blocks.tree import map_tensors, tensors_in
from hydra_tune.devices.counting_mode import TrialMode
from hydra_tune.devices.tensor_bytes import version_of, versions_of
from hydra_tune.errors import PrepareError
from hydra_tune.process.interrupts import interrupts
from hydra_tune.schedule.plan import Direction

if TYPE_CHECKING:
    from hydra_tune.planning.measurement import Measurement
    from hydra_tune.trials.trial import Trial

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_CHECKPOINT = "torch.utils.checkpoint"


class Promote(torch.autograd.Function):
    """The only autograd node that we add to a user's graph, one for each call.

    Its inputs are the weights in host memory that require a gradient; its outputs are `copies`, the same values on the
    device. The engine calls its backward once, when all gradients of the call's weights are there.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, copies: Sequence[torch.Tensor], *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: Call | None = ctx.call
        if call is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: what a block keeps for its backward is gone. "
                "Specify retain_graph=True the first time."
            )
        sent = call.trial.gradients.send(call, gradients)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call = call.without_inputs()  # a loss that the script keeps must not keep the call's inputs alive
        if interrupts.pending:
            interrupts.check()
        return (None, None, *sent)


# `Promote.apply`, without its checks for transforms of torch.func, which take time. Transforms are refused earlier.
_promote: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, Promote).apply


class WeightView(NamedTuple):
    """A saved tensor that is a weight, or a view of one; with `is_cast`, of the weight's copy in another dtype."""

    parameter: nn.Parameter
    offset: int  # in elements of `dtype`, from the weight's first one
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_cast: bool


_new_view: Callable[[tuple[Any, ...]], WeightView] = partial(tuple.__new__, WeightView)  # takes a fifth of the time


class Versioned(NamedTuple):
    """A saved tensor and its version. Autograd itself does not check versions of what hooks have packed."""

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


class KeptTensor(Versioned):
    """A tensor that a repetition would make again, kept until it is known whether the block may be repeated."""


class Call:
    """What repeated and kept calls share. A call lives as long as its graph.

    measurement   in a pilot: measures the forward
    num_saved     how many tensors its operators have saved for the backward
    promoted      the parameters that are inputs of its `Promote`
    casts         by place in `slot_parameters`: the dtype of a cast that all calls of the autocast context share
    """

    _pack: Callable[[torch.Tensor], Any]  # saved-tensor hooks
    _unpack: Callable[[Any], torch.Tensor]
    # Defaults are on the class: a graph keeps all of its calls, and each object of a call is work for the garbage
    # collector.
    measurement: Measurement | None = None
    num_saved = 0
    promoted: Sequence[nn.Parameter] = ()
    _versions: Sequence[int] = ()  # of the weights in host memory, at the forward
    _attributes: Mapping[int, dict[str, Any]] = MappingProxyType({})  # attributes that weights had at the forward
    casts: Mapping[int, torch.dtype] = MappingProxyType({})
    _cast_places: Sequence[tuple[int, int, nn.Parameter]] = ()  # first address, end, parameter of each cast
    _shares_casts = False  # whether an earlier call of the autocast context has made some of its casts

    def __init__(self, block: Block, trial: Trial, forward_pass: ForwardPass) -> None:
        self.block = block
        self.trial = trial
        self.forward_pass = forward_pass
        if block.casts and remembers_casts():
            dtype = casts_to()
            self.casts = {i: of for i, of in sorted(block.casts, key=itemgetter(0)) if of is dtype}

    # ---- forward ----

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the block's forward in a visit, as a part of the user's graph."""
        block, trial = self.block, self.trial
        copy = trial.visits.begin(block, Direction.FORWARD)
        try:
            self._enter(copy)
            self._versions = versions_of(block.slot_parameters)
            weights = self._promoted(copy)
            block.lend(weights)
            _push_hooks(self._pack, self._unpack)
            try:
                measured = self.measurement
                outputs = block.forward(args, kwargs) if measured is None else measured.forward(args, kwargs)
            finally:
                _pop_hooks()
                block.take_back(weights)
                if self.casts:
                    del self._cast_memory
                    for i in self.casts:
                        trial.casts.free(block.slot_parameters[i])
            if measured is not None:
                measured.look(outputs, weights, copy)
            refuse_hooks(block, weights)
            if self.casts and self.num_saved not in block.saved_counts:
                raise OtherBranchError(
                    f"{block.name} saves {self.num_saved} tensors for its backward, where "
                    f"{sorted(block.saved_counts)} were measured, and an earlier call has this context's cast"
                )
            if are_trained(weights) != self._trained:
                raise _changed_in_forward(block, "changes requires_grad of")
            has_slot = copy.num_bytes or copy.riders
            if has_slot and any(map(copy.has, tensors_in(outputs))):  # the slot will hold another shard
                outputs = map_tensors(lambda t: t.clone() if copy.has(t) else t, outputs)
            return outputs
        finally:
            del self._copy
            trial.visits.end(copy, Direction.FORWARD)

    def _enter(self, copy: DeviceCopy) -> None:
        self._copy, self._start = copy, copy.start
        self._end = copy.start + copy.num_bytes
        self._weight_at = copy.weight_starting_at

    def _promoted(self, copy: DeviceCopy) -> list[torch.Tensor]:
        """The weights on the device for the block's operators. Those that require a gradient are outputs of
        `Promote`."""
        parameters, casts = self.block.slot_parameters, self.trial.casts
        weights = copy.aliases(parameters)
        trained = are_trained(parameters)
        for i, dtype in self.casts.items():  # mostly empty
            known = casts.get(parameters[i], weights[i], dtype) if trained[i] else None
            self._shares_casts |= known is not None
            weights[i] = weights[i].to(dtype) if known is None else known
            trained[i] = trained[i] and known is None
        if all(trained):
            self.promoted = parameters
            weights = [*_promote(self, weights, *parameters)] if parameters else weights
        elif any(trained):
            self.promoted = list(compress(parameters, trained))
            given = iter(_promote(self, list(compress(weights, trained)), *self.promoted))
            weights = [next(given) if flag else weight for flag, weight in zip(trained, weights, strict=True)]
        if self.casts:
            for i in [i for i in self.casts if trained[i]]:
                casts.put(parameters[i], seen_as(parameters[i].dtype, weights[i]))
            self._cast_places = [(*memory_of(weights[i]), parameters[i]) for i in self.casts]
            # a forward may set the weight's `data`; then no activation may get the memory of the cast
            self._cast_memory = [weights[i].untyped_storage() for i in self.casts]
        self._trained = are_trained(weights)
        for i, (weight, p) in enumerate(zip(weights, parameters, strict=True)):
            if type(p) is nn.Parameter and type(weight) is torch.Tensor:
                weight.__class__ = nn.Parameter  # a forward may ask for it, as peft's DoRA
            weight.__dict__ = own = p.__dict__  # an attribute that the forward sets on the weight is the parameter's
            if own:
                self._attributes = {**self._attributes, i: dict(own)}
        return weights

    def number_at(self, place: int) -> int | None:
        """The number of the weight in the slot, or of a rider, that has this address; None if it is none's. In a
        visit."""
        is_in_slot = self._start <= place < self._end
        found = self._copy.parameter_at(place) if is_in_slot else self._copy.rider_at(place)
        return None if found is None else self.block.numbers[id(found[0])]

    def _weight_view(self, tensor: torch.Tensor, place: int) -> WeightView | None:
        """How to find a saved tensor again that lies at the address `place`; None if it is no weight."""
        for start, end, parameter in self._cast_places:
            if start <= place < end:
                offset = (place - start) // tensor.element_size()
                return _new_view((parameter, offset, tensor.size(), tensor.stride(), dtype_of(tensor), True))
        whole, offset = self._weight_at.get(place), 0
        if whole is None:
            is_in_slot = self._start <= place < self._end
            found = self._copy.parameter_at(place) if is_in_slot else self._copy.rider_at(place)
            if found is None:
                return None
            whole, start = found
            offset = (place - start) // tensor.element_size()
        return _new_view((whole, offset, tensor.size(), tensor.stride(), tensor.dtype, False))

    # ---- backward ----

    def weight(self, view: WeightView) -> torch.Tensor:
        """The saved weight, promoted again. With `create_graph` a clone, since the gradients' graph may save it."""
        if self._versions != versions_of(self.block.slot_parameters):
            raise self._changed_weight()
        weight = self.trial.backwards.visit(self).weight(view.parameter)
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

    def without_inputs(self) -> Call | None:
        """What must stay of the call after a backward has freed its graph: nothing (None), unless it has casts. Other
        calls in the autocast context use these casts, so their graphs go through this call's `Promote`."""
        if not self.casts:
            return None
        left = Call(self.block, self.trial, self.forward_pass)
        left.promoted, left.casts = self.promoted, self.casts
        return left

    def forget(self) -> None:
        """Drop tensors that a repetition has made and the backward has not asked for. Another backward repeats them."""


class KeptCall(Call):
    """A call whose activations are kept.

    Within the user's own `torch.utils.checkpoint` only weights are packed here. All other tensors go to the
    checkpoint's `hooks`: it drops them, and calls the block again in the backward.
    """

    def __init__(
        self, block: Block, trial: Trial, forward_pass: ForwardPass, hooks: tuple[Callable[..., Any], ...] | None
    ) -> None:
        super().__init__(block, trial, forward_pass)
        self._pack_other: Callable[[torch.Tensor], Any]
        self._unpack_other: Callable[[Any], torch.Tensor]
        self._pack_other, self._unpack_other = hooks or (lambda t: Versioned(t, version_of(t)), Versioned.read)
        self._clones = hooks is not None

    def _pack(self, tensor: torch.Tensor) -> Any:
        self.num_saved += 1
        return self._weight_view(tensor, place_of(tensor)) or self._pack_other(tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        """Within a checkpoint a weight is returned as a clone. The operator may ask for another tensor next, which the
        checkpoint recomputes by visits to other blocks, and then the slot of this weight is gone."""
        if type(packed) is not WeightView:
            return self._unpack_other(packed)
        return self.weight(packed).clone() if self._clones else self.weight(packed)


def hooks_of_checkpoint() -> tuple[Callable[..., Any], ...] | None:
    """The saved-tensor hooks of the user's `torch.utils.checkpoint` around this call; None if there is no checkpoint.

    Raises:
        PrepareError: there are saved-tensor hooks of another kind.
    """
    hooks: tuple[Callable[..., Any], ...] | None = _top_hooks(False)
    if hooks is None:
        return None
    origin = getattr(hooks[0], "__module__", None)
    if origin not in (_CHECKPOINT, "torch.autograd.graph"):  # save_on_cpu changes no value
        raise PrepareError(
            "the pool keeps what a prepared model saves for its backward, but the model was called within "
            "saved_tensors_hooks, which would not see it. Leave them out, or call hydra_tune.release(model) first."
        )
    return hooks if origin == _CHECKPOINT else None


def refuse_hooks(block: Block, weights: Sequence[torch.Tensor]) -> None:
    """Raise if a forward has put hooks on its weights: in the next visit the weights are new tensors, without hooks."""
    if any(map(has_hooks, weights)):
        for weight in weights:
            weight._backward_hooks = weight._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        raise _changed_in_forward(block, "puts a hook on")


def _changed_in_forward(block: Block, does: str) -> PrepareError:
    return PrepareError(
        f"weights get hooks and requires_grad between forwards, but {block.name} {does} a weight in its forward. Set "
        "it on the Parameter, before the step."
    )


def is_watched() -> bool:
    """Whether a user's mode for torch functions or operators is active, or a cache of parametrized weights. A
    repetition would run without it, so the call must keep its activations."""
    if torch._C._len_torch_function_stack() and any(
        not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()
    ):
        return True
    if torch._C._len_torch_dispatch_stack() and any(
        not isinstance(mode, TrialMode) for mode in _get_current_dispatch_mode_stack()
    ):
        return True
    return bool(parametrize._cache_enabled)


def place_of(tensor: torch.Tensor) -> int:
    """The address of the tensor's first element; 0 if it has no memory."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of the tensor's storage, and the one after the last; (0, 0) for sparse tensors."""
    if tensor.layout is not torch.strided:
        return 0, 0
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
