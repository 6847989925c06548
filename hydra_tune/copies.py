"""Copies of weights and buffers that blocks return: a write into one would be lost."""

from __future__ import annotations

import torch

from hydra_tune.errors import PrepareError
from hydra_tune.host_buffer import version_of


class Copies:
    """Those of blocks of which no pilot has seen that they do so: in `eval()`, or every tenth step."""

    def __init__(self) -> None:
        self._watched: list[tuple[str, torch.Tensor, int]] = []  # block, what has the copy's version, and which it was

    def watch(self, block_name: str, copy: torch.Tensor) -> None:
        if not copy.is_inference():
            alias = copy.detach()
            alias.data = alias.new_empty(0)  # its bytes are not kept
            self._watched.append((block_name, alias, version_of(alias)))

    def refuse_writes(self) -> None:
        """
        Raises:
            PrepareError: one was written since it was made.
        """
        for name, alias, version in self._watched:
            if version_of(alias) != version:
                self.forget()
                raise PrepareError(
                    f"a block's weights and buffers move, but {name} returned one, or a view of one, which it did not "
                    "on its first batch, and it was written in place: in vain, as it was a copy. Write into it in the "
                    "block's forward, or return a copy (.clone()); or call hydra_tune.release(model)."
                )

    def forget(self) -> None:
        if self._watched:
            self._watched.clear()
