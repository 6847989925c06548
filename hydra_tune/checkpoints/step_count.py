"""Counts the mini-batches of one prepared model: the number that `resume_step()` returns after a resume.

Where a loader was prepared, its batches are counted, else the backwards. A user's loop may draw batches that it does
not train on, or call backward several times a step; the number would then lead to the wrong batch. So each method here
says why the count cannot be trusted, if it cannot, and no checkpoint is written from there on.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra_tune.checkpoints.loader_progress import LoaderProgress


class StepCount:
    """Of a model that was prepared with these loaders, and begins after `began_at` mini-batches."""

    def __init__(self, loaders: Sequence[LoaderProgress], *, has_optimizer: bool, began_at: int) -> None:
        self.began_at = began_at
        self.backwards = began_at
        self.optimizer_steps = began_at
        self.was_called = False  # the model, to train
        self._loaders = loaders
        self._has_optimizer = has_optimizer
        self._backwards_before = began_at  # this iteration of the first loader

    @property
    def counts_batches(self) -> bool:
        """Of the first loader, from its first batch on; else backwards are counted."""
        return bool(self._loaders) and self._loaders[0].drawn > 0

    @property
    def step(self) -> int:
        return self._loaders[0].drawn if self.counts_batches else self.backwards

    @property
    def has_not_begun(self) -> bool:
        return self.backwards == self.began_at and self.step == self.began_at

    def before_iteration(self) -> str:
        """Of the first loader. Why its batches cannot be counted; empty if they can."""
        if not self.counts_batches:
            return ""
        trained = self.backwards != self._backwards_before
        self._backwards_before = self.backwards
        if self._loaders[0].was_left:
            return (
                "an iteration of the first loader was left before its end, so that resume_step() // len(loader) would "
                "not be its epoch. Give prepare a loader that is as long as an epoch"
            )
        if not trained and self.was_called:
            return (
                "the first loader was gone through without training, so that resume_step() would count those batches, "
                "too. Evaluate with a loader of its own"
            )
        return ""

    def before_forward(self) -> str:
        """Of training, between two steps. Why its batches cannot be counted; empty if they can."""
        ahead = self.step - self.began_at if self.counts_batches and not self.was_called else 0
        self.was_called = True
        if ahead > 1:
            return f"{ahead} batches were drawn before the first was trained, so that nobody knows which were"
        if self.counts_batches and not self._loaders[0].is_under_way:
            return "it trains on batches that are not the first loader's, which is what resume_step() counts"
        return ""

    @property
    def ambiguity(self) -> str:
        """Why backwards do not tell how many mini-batches there were; empty if they do, or if batches are counted."""
        if self.counts_batches or not self._has_optimizer or self.optimizer_steps == self.backwards:
            return ""
        return (
            f"{self.backwards} backwards were made for {self.optimizer_steps} steps of the optimizer, so that nobody "
            "knows which of them resume_step() shall count. Give prepare the loader of the mini-batches"
        )
