"""Every error this package raises on purpose, in one place.

Each message says the rule, what arrived, and the next step.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Sequence
from typing import Any


class HydraTuneError(Exception):
    """Base of all errors below, except `TrialStopped`."""


class ConfigError(HydraTuneError, ValueError):
    """An argument that cannot mean anything (a budget that is not bytes, an unknown device)."""


class PrepareError(HydraTuneError, ValueError):
    """A model, optimizer or call that cannot be trained spilled with plain PyTorch's numbers."""


class ResumeError(PrepareError):
    """A checkpoint is of another model, optimizer or loader than those that go on from it."""


class ReturnsWeightsError(PrepareError):
    """A block without gradients returns these `weights`, which are on the device for its visit alone."""

    def __init__(self, block: str, weights: Collection[Any]) -> None:
        super().__init__(
            f"a block's weights are on the device while it runs, but block {block} returns one, frozen or in an "
            "object, as it did not in its first evaluation. Return a clone of it."
        )
        self.weights = weights


class BudgetError(HydraTuneError, ValueError, RuntimeError):
    """Something needs more bytes than the device's budget, or the host's, however it is cut or ordered: `blocks`, if
    each does alone. `lack` is how much more: what it needs, or a guess at it, over what there is, less 1; 1.0 where
    there is none. Who halves a batch on a GPU's error (accelerate's `find_executable_batch_size`) knows it by its kind
    and text."""

    lack = 1.0
    blocks: Sequence[str] = ()

    def __init__(self, message: str) -> None:
        said = "The pool is out of memory. "
        super().__init__(said + message.removeprefix(said))  # a copy from another process says so already

    def lacking(self, need_bytes: int, budget_bytes: int, blocks: Sequence[str] = ()) -> BudgetError:
        """This error, with its numbers."""
        self.lack, self.blocks = max(need_bytes / max(1, budget_bytes) - 1.0, 0.01), blocks  # it lacks some
        return self


class PoolClosedError(HydraTuneError, RuntimeError):
    """A closed pool was asked to work."""


class TrialStopped(BaseException):
    """Raised in a trial's thread at its next task boundary once the trial must end.

    A `BaseException`, so that an objective's own `except Exception` cannot keep the trial alive.
    """


def clear_frames(error: BaseException) -> None:
    """Exceptions keep frames, frames keep tensors: let go of the locals, keep the traceback's lines."""
    chain = [error]
    for current in chain:  # which grows meanwhile
        traceback.clear_frames(current.__traceback__)
        linked = (current.__cause__, current.__context__)
        chain += [each for each in linked if each is not None and each not in chain]
