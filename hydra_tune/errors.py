"""Every error that this package raises on purpose.

Each message says the rule, what arrived, and the next step.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Sequence
from typing import Any


class HydraTuneError(Exception):
    """Base of all errors below, except `TrialStopped`."""


class ConfigError(HydraTuneError, ValueError):
    """An argument has no meaning, such as a budget that is not bytes, or an unknown device."""


class PrepareError(HydraTuneError, ValueError):
    """A model, optimizer or call cannot be trained spilled with the numbers of plain PyTorch."""


class ResumeError(PrepareError):
    """A checkpoint belongs to another model, optimizer or loader than the trial that resumes from it."""


class ReturnsWeightsError(PrepareError):
    """A block that runs without gradients returns `weights` of its own, which leave the device when its visit ends."""

    def __init__(self, block: str, weights: Collection[Any]) -> None:
        super().__init__(
            f"a block's weights are on the device while it runs, but block {block} returns one, frozen or in an "
            "object, as it did not in its first evaluation. Return a clone of it."
        )
        self.weights = weights


# What helps where there is no room, for `does_not_fit`.
LARGER = "a larger memory=: hydra_tune.plan says how large"
SMALLER_STEP = "a smaller batch, shorter inputs or half precision"
FINER = "splitting it into smaller children"


class BudgetError(HydraTuneError, ValueError, RuntimeError):
    """Something needs more bytes than the budget of the device or of the host, however it is cut or ordered.
    `does_not_fit` writes its message.

    Like PyTorch's own error it is a `RuntimeError` whose text says "out of memory". So a script that halves the batch
    on such an error (accelerate's `find_executable_batch_size`) recognises it.

    Attributes:
        lack: the share of the budget that is missing: needed / budget - 1. Where `need_bytes` is unknown it is a guess,
            1.0 without any.
        need_bytes: the least budget that would do, None if unknown: a first step that finds no room is not measured.
        argument: of `ShardPool`, the one that gives this budget.
        blocks: names of the blocks, if each of them alone needs too much.
        step: a `planning.known_steps.RefusedStep`, for a first step that finds no room.
    """

    lack = 1.0
    need_bytes: int | None = None
    argument = "memory"
    blocks: Sequence[str] = ()
    step: Any = None

    def __init__(self, message: str) -> None:
        prefix = "The pool is out of memory. "
        super().__init__(prefix + message.removeprefix(prefix))  # a copy from another process has the prefix already

    def lacking(
        self, need_bytes: int, budget_bytes: int, blocks: Sequence[str] = (), *, argument: str = "memory"
    ) -> BudgetError:
        """Set `lack`, to 0.01 at least, and the others; returns this error."""
        self.lack, self.blocks = max(need_bytes / max(1, budget_bytes) - 1.0, 0.01), blocks
        self.need_bytes, self.argument = need_bytes, argument
        return self


def does_not_fit(what: str, needs: str, there_is: str, helps: tuple[str, str, str], *, beside: str = "") -> BudgetError:
    """A refusal. All have this form, with the three things that `helps`, and what else takes the room `beside` it."""
    first, second, third = helps
    told = f"{what} does not fit: it needs {needs}, and {there_is}."
    return BudgetError(f"{told} What helps: (1) {first}; (2) {second}; (3) {third}.{beside}")


class PoolClosedError(HydraTuneError, RuntimeError):
    """A closed pool was asked to work."""


class TrialStopped(BaseException):
    """The trial must end. Raised in the trial's thread before its next task.

    A `BaseException`, so that an `except Exception` in the user's objective does not keep the trial alive.
    """


def clear_frames(error: BaseException) -> None:
    """Free the tensors that an error keeps alive: its traceback keeps frames, and frames keep local variables. Clears
    these variables, also of the errors that led to this one. The lines of the traceback stay."""
    chain = [error]
    for current in chain:  # the loop appends to it
        traceback.clear_frames(current.__traceback__)
        linked = (current.__cause__, current.__context__)
        chain += [each for each in linked if each is not None and each not in chain]
