"""What a block's forward sees beside its inputs and weights, so that its repetition sees the same.

Between a forward and its backward a script may leave `torch.autocast`, call `eval()`, switch an adapter off or
choose other kernels. Plain PyTorch computes once and does not care; a forward that is repeated has to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hydra_tune.host_buffer import version_of
from hydra_tune.module_states import Build, ModuleStates, State
from hydra_tune.process_state import ProcessState


class Surroundings:
    """As they are now: autocast, the default device, the choice of kernels, and what the attributes of modules are set
    to (training mode, flags, numbers, objects, tensors that are no buffers)."""

    def __init__(self, modules: ModuleStates) -> None:
        self._modules = modules
        self._process = ProcessState.now()
        self._attributes = modules.now()
        self._build = modules.build_now()
        self._versions: Sequence[tuple[str, torch.Tensor, int]] = ()
        for own in () if modules.are_plain(self._attributes) else self._attributes:
            for name, value in [item for item in own.items() if type(item[1]) is torch.Tensor]:
                if value.grad_fn is None:
                    self._versions = *self._versions, (name, value, version_of(value))
                else:  # an activation, which would keep its graph
                    del own[name]

    @property
    def are_rebuilt(self) -> bool:
        """Some modules have other children, or are of other classes, than at first: nobody has noted what those are
        set to."""
        return not self._modules.was_first(self._build)

    def restored(self, block: str, *, alone: bool) -> _Restored:
        """Within, all is as it was; afterwards as it is now. What is set for the whole process is left as it is where
        others run in it, so not `alone`.

        Raises:
            RuntimeError: a tensor among the attributes of this block has other values now; or others run, and it
                needs a choice of kernels that is another one now.
        """
        for name, tensor, version in self._versions:
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"a block's attributes stay as they are from its forward to its backward, which repeats the "
                    f"forward, but {name!r} of block {block} was changed in place in between. Change it after "
                    f"backward, or assign a new tensor."
                )
        process = self._process if alone else self._process.beside_others(block)
        return _Restored(self._modules, process, self._attributes, self._build)


class _Restored:
    """A context manager, once: the process and the attributes of modules as they were then; afterwards as now."""

    __slots__ = ("_attributes", "_build", "_entered", "_modules", "_process")

    def __init__(self, modules: ModuleStates, process: ProcessState, attributes: list[State], build: Build) -> None:
        self._modules = modules
        self._process = process
        self._attributes = attributes
        self._build = build

    def __enter__(self) -> None:
        built = self._build
        self._build = self._modules.build_now()
        if self._build is not built:
            self._modules.rebuild(built)
        then = self._attributes
        if not self._modules.are(then):
            self._attributes = self._modules.now()
            self._modules.set(then)
        now = ProcessState.now()
        self._entered = None if now == self._process else self._process.entered(now)
        if self._entered is not None:
            self._entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._entered is not None:
            self._entered.__exit__(*error)
        if not self._modules.are(self._attributes):
            self._modules.set(self._attributes)
        if not self._modules.have(self._build):
            self._modules.rebuild(self._build)
