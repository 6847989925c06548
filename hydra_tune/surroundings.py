"""What a block's forward sees beside its inputs and weights, so that its repetition sees the same.

Between a forward and its backward a script may leave `torch.autocast`, call `eval()` or switch an adapter off. Plain
PyTorch computes once and does not care; a forward that is repeated has to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hydra_tune.host_buffer import version_of
from hydra_tune.module_states import ModuleStates
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

    @contextmanager
    def restored(self, block: str) -> Iterator[None]:
        """Within, all is as it was; afterwards as it is now.

        Raises:
            RuntimeError: a tensor among the attributes of this block has other values now, or the process another
                choice of kernels.
        """
        for name, tensor, version in self._versions:
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"a block's attributes stay as they are from its forward to its backward, which repeats the "
                    f"forward, but {name!r} of block {block} was changed in place in between. Change it after "
                    f"backward, or assign a new tensor."
                )
        modules, attributes, build = self._modules, self._attributes, self._modules.build_now()
        if build is not self._build:
            modules.rebuild(self._build)
        if not modules.are(attributes):
            attributes = modules.now()
            modules.set(self._attributes)
        try:
            with self._process.entered(block):
                yield
        finally:
            if not modules.are(attributes):
                modules.set(attributes)
            if not modules.have(build):
                modules.rebuild(build)
