"""One block: the smallest module that is promoted as a whole, and every place that names one of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hydra_tune.blocks.ambient_settings import ModuleStates
from hydra_tune.blocks.stand_ins import own_forward_of
from hydra_tune.devices.tensor_bytes import same_bits, storage_bytes
from hydra_tune.errors import PrepareError
from hydra_tune.process.interrupts import interruptible

_REQUIRES_GRAD = attrgetter("requires_grad")


def has_hooks(parameter: torch.Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def are_trained(parameters: Sequence[torch.Tensor]) -> list[bool]:
    """Which of them require a gradient."""
    return list(map(_REQUIRES_GRAD, parameters))


@dataclass(eq=False)
class Block:
    """A module under its name in the model.

    held    its parameters that live on the device for the trial's life, as all buffers do
    keeps   why its activations are kept from forward to backward; empty where the forward is repeated
    clones  its inputs are changed in place, by itself or by what comes after it
    """

    name: str
    module: nn.Module
    held: Sequence[nn.Parameter] = ()
    keeps: str = ""
    clones: bool = False
    writes_buffers: bool = True  # its forward does, for all that is known
    casts: frozenset[tuple[int, torch.dtype]] = frozenset()  # `slot_parameters` that it uses only as autocast's
    saved_counts: frozenset[int] = frozenset()  # tensors that calls save for the backward, as far as measured
    is_checked: bool = False  # a repetition has made what the forward made
    is_current: bool = True  # of the cut that the model has

    def __post_init__(self) -> None:
        self.modules = list(self.module.modules())
        self.parameters = list(self.module.parameters())  # each once, in order of registration
        held = set(map(id, self.held))
        self.slot_parameters = [p for p in self.parameters if id(p) not in held]  # those that are promoted
        numbers = {id(p): i for i, p in enumerate(self.slot_parameters)}
        self.sites = [  # where modules have them, by their number
            (m, name, numbers[id(p)])
            for m in self.modules
            for name, p in m._parameters.items()
            if p is not None and id(p) in numbers
        ]
        self.buffers = [(m._buffers, name) for m in self.modules for name in m._buffers]
        self._has_norms = any(isinstance(m, _NormBase) for m in self.modules)  # which write unseen
        self._recurrent = [m for m in self.modules if isinstance(m, nn.RNNBase)]
        self.module_states = ModuleStates(self.modules)
        self.own_forward = own_forward_of(self.module)

    @property
    def weight_bytes(self) -> int:
        """Bytes of its slot: the promoted parameters, each once."""
        return sum(map(storage_bytes, self.slot_parameters))

    @interruptible
    def forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The module's own forward, whatever stands in its place; one set on the instance goes before its class's."""
        if self.own_forward is not None:
            return self.own_forward(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def lend(self, weights: Sequence[torch.Tensor]) -> None:
        """Its modules have these in the places of their parameters, until `take_back`."""
        own = self.slot_parameters
        for module, name, i in self.sites:
            parameters = module._parameters
            if parameters.get(name) is not own[i]:
                self.take_back(weights)
                raise PrepareError(
                    f"a prepared model keeps its Parameter objects, but one of {self.name} was replaced since, "
                    "perhaps by torch.func.functional_call. Call hydra_tune.release(model), replace it, and "
                    "prepare the model again."
                )
            parameters[name] = weights[i]  # type: ignore[assignment]
        if self._recurrent:
            self._refresh_flat_weights()

    def take_back(self, weights: Sequence[torch.Tensor]) -> None:
        """What the forward itself has set stays."""
        own = self.slot_parameters
        for module, name, i in self.sites:
            parameters = module._parameters
            if parameters.get(name) is weights[i]:
                parameters[name] = own[i]
        if self._recurrent:
            self._refresh_flat_weights()

    def _refresh_flat_weights(self) -> None:
        for rnn in self._recurrent:  # these keep a list of their own beside `_parameters`
            rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]

    # ---- buffers, which a repetition must find as the first run did, and leave as they are now ----

    def buffers_now(self) -> list[torch.Tensor | None]:
        """What a forward finds: copies, where it may write them, by operators that raise no version too."""
        now = [d.get(name) for d, name in self.buffers]
        if not (now and (self.writes_buffers or self._has_norms)):
            return now
        with torch.no_grad():
            return [None if b is None else b.clone() for b in now]

    def buffers_themselves(self) -> list[torch.Tensor]:
        return [b for d, name in self.buffers if (b := d.get(name)) is not None]

    def put_back_buffers(self, then: Sequence[torch.Tensor | None]) -> None:
        """The forward has not run after all."""
        for (d, name), value in zip(self.buffers, then, strict=False):  # none, where it had no room for their copies
            now = d.get(name)
            if now is None or value is None or (now.shape, now.dtype) != (value.shape, value.dtype):
                d[name] = value
            elif now is not value and not same_bits(now, value):
                now.data.copy_(value)  # as if nothing had been written, so no version says so

    def lend_buffers(self, then: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Its modules have what `buffers_now` has told, or copies of it; those of before, for `take_back_buffers`."""
        now = [d.get(name) for d, name in self.buffers]
        copies = self.writes_buffers or self._has_norms
        for (d, name), value in zip(self.buffers, then, strict=True):
            d[name] = value.clone() if copies and value is not None else value
        return now

    def take_back_buffers(self, now: Sequence[torch.Tensor | None]) -> None:
        for (d, name), value in zip(self.buffers, now, strict=False):
            d[name] = value
