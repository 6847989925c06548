"""One block: the smallest module that is promoted as a whole, and every attribute in it that refers to its weights."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hydra_tune.blocks.ambient_settings import ModuleStates
from hydra_tune.blocks.stand_ins import own_forward_of
from hydra_tune.devices.tensor_bytes import (
    is_quantized_buffer,
    is_wrapper,
    same_bits,
    sites_of_parts,
    storage_bytes,
    with_parts,
)
from hydra_tune.errors import PrepareError
from hydra_tune.process.interrupts import interruptible

_REQUIRES_GRAD = attrgetter("requires_grad")


def has_hooks(parameter: torch.Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def are_trained(parameters: Sequence[torch.Tensor]) -> list[bool]:
    """For each parameter, whether it requires a gradient."""
    return list(map(_REQUIRES_GRAD, parameters))


@dataclass(eq=False)
class Block:
    """A module and its name in the model.

    held            its parameters that are on the device for the trial's life, as all buffers are
    keeps           the reason why its activations are kept until the backward; empty if its forward is repeated
    clones          repeat from clones of its inputs: it changes them in place, or a later operator does
    writes_buffers  whether its forward may write to buffers; False once a pilot has seen that it does not
    casts           (place in `slot_parameters`, dtype) of weights that it uses only as autocast's copies
    saved_counts    how many tensors a call saves for its backward, in the calls that were measured
    riders          ids of trained weights that are no part of the slot: they are promoted for each visit
    is_checked      whether a repetition was compared with its forward, and made the same
    is_current      whether the model is still cut into this block and not another way
    """

    name: str
    module: nn.Module
    held: Sequence[torch.Tensor] = ()
    keeps: str = ""
    clones: bool = False
    writes_buffers: bool = True
    casts: frozenset[tuple[int, torch.dtype]] = frozenset()
    saved_counts: frozenset[int] = frozenset()
    riders: frozenset[int] = frozenset()
    is_checked: bool = False
    is_current: bool = True

    def __post_init__(self) -> None:
        self.modules = list(self.module.modules())
        self.parameters = list(self.module.parameters())  # each once, in order of registration
        held = set(map(id, self.held))
        promoted = [p for p in self.parameters if id(p) not in held]
        # those that are promoted, with its parts in place of a quantized one, and buffers with quantized weights
        codes = [(m._buffers, name, b) for m in self.modules for name, b in m._buffers.items() if b is not None]
        codes = [(d, name, b) for d, name, b in codes if is_quantized_buffer(b) and id(b) not in held]
        every = dict.fromkeys([*with_parts(promoted), *(b for *_, b in codes)])
        self.slot_parameters: list[nn.Parameter] = list(every)  # type: ignore[arg-type]
        self.numbers = numbers = {id(p): i for i, p in enumerate(self.slot_parameters)}  # by id
        places: list[tuple[dict[str, Any], str, Any]]
        places = [(m._parameters, name, p) for m in self.modules for name, p in m._parameters.items() if p is not None]
        places += [(vars(w), name, part) for p in filter(is_wrapper, promoted) for w, name, part in sites_of_parts(p)]
        places += codes
        # (dict, name in it, number in `slot_parameters`): a shared weight has several sites
        self.sites: list[tuple[dict[str, Any], str, int]] = [
            (place, name, numbers[id(p)]) for place, name, p in places if id(p) in numbers
        ]
        self.buffers = [
            (m._buffers, name) for m in self.modules for name, b in m._buffers.items() if id(b) not in numbers
        ]
        # batch norms write to their buffers without raising the version
        self._has_norms = any(isinstance(m, _NormBase) for m in self.modules)
        self._recurrent = [m for m in self.modules if isinstance(m, nn.RNNBase)]
        self.module_states = ModuleStates(self.modules)
        self.own_forward = own_forward_of(self.module)

    @property
    def weight_bytes(self) -> int:
        """Bytes that its weights take in a slot: those of the promoted parameters, each once."""
        return sum(map(storage_bytes, self.slot_parameters))

    @interruptible
    def forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the module's own forward and not the stand-in: the one set on the instance, else its class's."""
        if self.own_forward is not None:
            return self.own_forward(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def let_ride(self, trained: Container[int]) -> None:
        """Have these of its weights promoted for each visit; the others are frozen, and in a slot."""
        self.riders = frozenset(id(p) for p in self.slot_parameters if id(p) in trained)

    def lend(self, weights: Sequence[torch.Tensor]) -> None:
        """Put these tensors in the modules' `_parameters`, in place of `slot_parameters`, until `take_back`."""
        own = self.slot_parameters
        for parameters, name, i in self.sites:
            if parameters.get(name) is not own[i]:
                self.take_back(weights)
                raise PrepareError(
                    f"a prepared model keeps its Parameter objects, but one of {self.name} was replaced since, "
                    "perhaps by torch.func.functional_call, or in each forward, as by peft's target_parameters, which "
                    "cannot run here. Call hydra_tune.release(model), replace it, and prepare the model again."
                )
            parameters[name] = weights[i]
        if self._recurrent:
            self._refresh_flat_weights()

    def take_back(self, weights: Sequence[torch.Tensor]) -> None:
        """Put the parameters back, except where the forward itself has set another one."""
        own = self.slot_parameters
        for parameters, name, i in self.sites:
            if parameters.get(name) is weights[i]:
                parameters[name] = own[i]
        if self._recurrent:
            self._refresh_flat_weights()

    def _refresh_flat_weights(self) -> None:
        for rnn in self._recurrent:  # recurrent layers have another list of their weights, beside `_parameters`
            rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]

    # ---- buffers: a repetition must find those of the first run, and leave those of now ----

    def buffers_now(self) -> list[torch.Tensor | None]:
        """The buffers' values before a forward: clones, if the forward may write to them, else the buffers themselves.
        A name may have None."""
        now = [d.get(name) for d, name in self.buffers]
        if not (now and (self.writes_buffers or self._has_norms)):
            return now
        with torch.no_grad():
            return [None if b is None else b.clone() for b in now]

    def buffers_themselves(self) -> list[torch.Tensor]:
        return [b for d, name in self.buffers if (b := d.get(name)) is not None]

    def put_back_buffers(self, then: Sequence[torch.Tensor | None]) -> None:
        """Undo a forward: set the buffers to `then`, which `buffers_now` has returned before it."""
        for (d, name), value in zip(self.buffers, then, strict=False):  # `then` is empty if the clones had no room
            now = d.get(name)
            if now is None or value is None or (now.shape, now.dtype) != (value.shape, value.dtype):
                d[name] = value
            elif now is not value and not same_bits(now, value):
                now.data.copy_(value)  # by `.data`, which does not raise the version: nothing was written after all

    def lend_buffers(self, then: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Put `then`, or clones of it, in the modules for a repetition. Returns the buffers that were there, for
        `take_back_buffers`."""
        now = [d.get(name) for d, name in self.buffers]
        copies = self.writes_buffers or self._has_norms
        for (d, name), value in zip(self.buffers, then, strict=True):
            d[name] = value.clone() if copies and value is not None else value
        return now

    def take_back_buffers(self, now: Sequence[torch.Tensor | None]) -> None:
        for (d, name), value in zip(self.buffers, now, strict=False):
            d[name] = value
