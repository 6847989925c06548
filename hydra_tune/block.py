"""One block: the smallest module that is promoted as a whole, and every place that names one of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from hydra_tune.errors import PrepareError
from hydra_tune.host_buffer import storage_bytes


class Substitute(Protocol):
    """Device copies of a block's tensors, by what they stand in for."""

    def leaf(self, parameter: nn.Parameter | None) -> nn.Parameter: ...

    def buffer(self, module: nn.Module, name: str) -> torch.Tensor: ...


@dataclass(eq=False)
class Block:
    """A module under its name in the model; `nondifferentiable` is known after the pilot."""

    name: str
    module: nn.Module
    parameter_sites: list[tuple[nn.Module, str]] = field(init=False)
    buffer_sites: list[tuple[nn.Module, str]] = field(init=False)
    parameters: list[nn.Parameter] = field(init=False)  # each once, in order of registration
    recurrent: list[nn.RNNBase] = field(init=False)
    nondifferentiable: tuple[int, ...] = ()  # outputs through which plain PyTorch sends no gradient

    def __post_init__(self) -> None:
        modules = list(self.module.modules())
        self.parameter_sites = [(m, n) for m in modules for n, p in m._parameters.items() if p is not None]
        self.buffer_sites = [(m, n) for m in modules for n, b in m._buffers.items() if b is not None]
        self.parameters = list(self.module.parameters())
        self.recurrent = [m for m in modules if isinstance(m, nn.RNNBase)]

    @property
    def weight_bytes(self) -> int:
        """Bytes of its slot: parameters, once each, and buffers."""
        return sum(map(storage_bytes, self.parameters)) + sum(storage_bytes(b) for b in self.buffers())

    def buffers(self) -> list[torch.Tensor]:
        return [b for b in (m._buffers[n] for m, n in self.buffer_sites) if b is not None]

    def forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The module's own forward, whatever stands in its place."""
        return type(self.module).forward(self.module, *args, **kwargs)

    @contextmanager
    def substituted(self, copy: Substitute) -> Iterator[None]:
        """Let the module reach the device copies under its own names."""
        host_parameters = [m._parameters[n] for m, n in self.parameter_sites]
        host_buffers = [m._buffers[n] for m, n in self.buffer_sites]
        caches_casts = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # it would outlive the visit; the slot does not
        try:
            for (m, n), p in zip(self.parameter_sites, host_parameters, strict=True):
                m._parameters[n] = copy.leaf(p)
            for m, n in self.buffer_sites:
                m._buffers[n] = copy.buffer(m, n)
            self._refresh_flat_weights()
            leaves = [copy.leaf(p) for p in self.parameters]
            versions = [leaf._version for leaf in leaves]
            yield
            if versions != [leaf._version for leaf in leaves]:
                raise PrepareError(
                    f"a block's forward leaves its weights as they are, but {self.name} changed one in place "
                    "(nn.Embedding's max_norm does). Change it outside of forward, before the step."
                )
        finally:
            torch.set_autocast_cache_enabled(caches_casts)
            for (m, n), p in zip(self.parameter_sites, host_parameters, strict=True):
                m._parameters[n] = p
            for (m, n), b in zip(self.buffer_sites, host_buffers, strict=True):
                m._buffers[n] = b
            self._refresh_flat_weights()

    def _refresh_flat_weights(self) -> None:
        for rnn in self.recurrent:  # these keep a list of their own beside `_parameters`
            rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]
