"""When a trial writes a checkpoint, and how it goes on from one; both in the trial's own thread.

The process of a trial may die at any time. Without a checkpoint all its work is lost; with one that was taken in the
middle of a mini-batch its numbers would differ from then on. So a checkpoint is taken between two mini-batches, when
all work of the last one is done: schedules, reports, the evaluation at an epoch's end.

    loader   0 1 2 | 3 ...    a checkpoint after three mini-batches is staged (written, but not counted yet) when the
    trains   0 1 2 |   3      fourth has arrived. It is published once the model is called to train: until then the
                              fourth may be for an evaluation
Without a prepared loader it is written when the model is called to train; its random state is then the one after the
last thing that was seen of the trial (a backward, an optimizer's step, an evaluation, a report).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from hydra_tune.checkpoints.checkpoint_folder import CheckpointFolder, Position
from hydra_tune.checkpoints.contents import Contents, OtherStateError, read_weights
from hydra_tune.checkpoints.extra_state import GeneratorState
from hydra_tune.checkpoints.hyperparameters import Hyperparameters
from hydra_tune.checkpoints.interval import CheckpointTimer, Interval
from hydra_tune.checkpoints.loader_progress import LoaderProgress
from hydra_tune.checkpoints.step_count import StepCount
from hydra_tune.errors import ResumeError
from hydra_tune.randomness import RandomState

logger = logging.getLogger("hydra_tune")
# What to do about a checkpoint of something else.
_OF_PERTURBED = (
    "A trial that goes on with another configuration has the same layers, loaders and kind of optimizer: leave "
    "what changes them out of the mutations, or report a checkpoint of your own"
)
_OF_SEARCH = (
    "Restore the objective as it was and start the search again, or remove the trial's folder in checkpoint_dir to "
    "give it up"
)
_OF_FUNCTION = "Run the function that it was written of"


class Source(Protocol):
    """Has what a trial may go on from: a folder of checkpoints, or what a pool has kept in memory."""

    def newest(self) -> tuple[Position, Any] | None: ...


class Resumption:
    """Of one trial: reads the newest checkpoint of any of some sources, writes to a folder.

    Args:
        writes: where; None if the trial's state is only asked for.
        reads: those of the trials that this one continues, the nearest first.
        every: at least so often; as soon as it can between two steps.
        random_state: the trial's.
        name: the trial's, for messages.
        weights: where those of the trial are that it was cloned from, if it was.
        perturbed: what it reads may be another trial's, or of another configuration; it has hyperparameters of its own.
        counted: `resume_step` tells where it goes on; else it is told so by others, and may train in any order.
    """

    def __init__(
        self,
        writes: CheckpointFolder | None,
        reads: Sequence[Source],
        every: Interval,
        random_state: RandomState,
        name: str,
        weights: CheckpointFolder | None = None,
        *,
        perturbed: bool = False,
        counted: bool = True,
    ) -> None:
        self._folder = writes
        self.folder = None if writes is None else writes.path
        self.folders = [each.path for each in (writes, *reads) if isinstance(each, CheckpointFolder)]
        self._weights = weights
        self.every = every
        self._perturbed = perturbed
        self._counted = counted
        self._random_state = random_state
        self._name = name
        sources: Sequence[Source] = reads if writes is None else (writes, *reads)
        found = (source.newest() for source in sources)
        self._from: tuple[Position, Any] | None = next((each for each in found if each is not None), None)
        self._thread = threading.get_ident()
        self._asked = False  # where to go on
        self._stop_reason = ""  # of no more checkpoints
        self._model = -1  # the number of the one that is prepared now
        self._restored = self._has_optimizer = False
        self._loaders: list[LoaderProgress] = []
        self._contents: Contents | None = None
        self._staged: Position | None = None
        self._start(0)

    def _start(self, step: int) -> None:
        """A model begins, or goes on, after so many mini-batches."""
        self._count = StepCount(self._loaders, has_optimizer=self._has_optimizer, began_at=step)
        self._timer = CheckpointTimer(self.every, step)
        self._idles = False  # it draws batches, but has trained none since a checkpoint was last staged
        self._latest = self._random_state.states()

    # ---- where it goes on ----

    @property
    def position(self) -> Position | None:
        """That the trial goes on from, if it does."""
        return self._from[0] if self._from else None

    def _steps_behind(self, model: int) -> int:
        return self.position.step if self.position is not None and self.position.model == model else 0

    @property
    def next_steps_behind(self) -> int:
        """Mini-batches that the model has made which is prepared next."""
        return self._steps_behind(self._model + 1)

    @property
    def began_at(self) -> int:
        """The mini-batch at which the model that was prepared last went on; 0 if it began."""
        return self._count.began_at

    def resume_step(self) -> int:
        """Mini-batches that the model has made which was prepared last, or will be first; from there on all is drawn as
        if nothing had been since the checkpoint."""
        self._asked = True
        if self._restored and self._count.has_not_begun:
            self._random_state.set_states(self._latest)
        return self._steps_behind(max(0, self._model))

    # ---- in `prepare` ----

    def begin(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, loaders: Sequence[Any], extra: Sequence[Any]
    ) -> list[LoaderProgress]:
        """A model is prepared; it goes on from the checkpoint if that is of this one. The progress of each loader."""
        self._model += 1
        self._restored = False
        self._random_state.users = [each.generator for each in extra if isinstance(each, GeneratorState)]
        self._loaders = [LoaderProgress(loader, self._random_state) for loader in loaders]
        self._has_optimizer = optimizer is not None
        self._contents = contents = Contents(self._loaders, list(extra), Hyperparameters.of(optimizer, extra))
        self._start(0)
        try:
            if self._from is not None and self._from[0].model == self._model:
                position, state = self._from
                contents.put_back(state, model, optimizer, perturbed=self._perturbed)
                self._go_on(position, state["random"])
            elif self._weights is not None and self._model == 0:
                read_weights(self._weights, model, self._name)
        except OtherStateError as other:
            raise self._does_not_fit(other) from None
        if any(getattr(loader, "persistent_workers", False) for loader in loaders):
            self._stop("a loader's persistent workers keep random states from epoch to epoch, which nobody can restore")
        return self._loaders

    def _go_on(self, position: Position, random_states: Sequence[torch.Tensor]) -> None:
        self._random_state.set_states(random_states)
        self._restored = True
        self._start(position.step)
        logger.info("%s: goes on from mini-batch %d", self._name, position.step)
        self._from = position, None

    def leave_to_framework(self, *, goes_on: bool) -> None:
        """Checkpoints of this trial are a framework's own; it may go on from one."""
        self._counted = False
        if goes_on:
            self._weights = None  # they are older

    def _does_not_fit(self, other: OtherStateError) -> ResumeError:
        remedy = _OF_PERTURBED if self._perturbed else _OF_FUNCTION if self._folder is None else _OF_SEARCH
        return ResumeError(f"a trial goes on from a checkpoint with what that was written of, but {other}. {remedy}.")

    # ---- as the trial goes on ----

    def note(self) -> None:
        """Something of the trial has just ended, from which its random state may be taken."""
        if not self._count.counts_batches:
            self._latest = self._random_state.states()

    def has_trained(self) -> None:
        """One mini-batch."""
        self._count.backwards += 1

    def has_stepped(self) -> None:
        """The optimizer."""
        self._count.optimizer_steps += 1
        self.note()

    def before_iteration(self, progress: LoaderProgress) -> None:
        """Of one of the loaders. Where the first one's do not train, each to its end, their number says nothing."""
        if progress.is_iterator and progress.was_left:
            self._stop(
                "an iterator was left and is gone on with, so that nobody knows how far it is. Give prepare what it "
                "iterates over"
            )
        if progress is self._loaders[0] and self._counted and (why := self._count.before_iteration()):
            self._stop(why)

    def before_batch(self, progress: LoaderProgress) -> list[dict[str, Any]] | None:
        """Of one of the loaders: the states of all, if a checkpoint is due now that is to be written if it arrives."""
        if threading.get_ident() != self._thread:
            self._stop(
                "a batch was drawn in another thread than the objective's, so that nobody knows which were trained"
            )
        progress.is_asked()
        if progress is not self._loaders[0]:
            return None
        if self._staged is not None and self._folder is not None:  # nothing was trained on the batch before
            self._staged, self._idles = None, True
            self._folder.discard()
        return [loader.now() for loader in self._loaders] if self._is_due() else None

    def before_forward(self) -> list[dict[str, Any]] | None:
        """Of training, between two steps: the states of all loaders, if a checkpoint is due now."""
        if not self._counted:
            return None
        self._idles = False
        if why := self._count.before_forward():
            self._stop(why)
        self.publish()
        if self._count.counts_batches or not self._is_due():
            return None
        return [loader.now() for loader in self._loaders]

    def _is_due(self) -> bool:
        step = self._count.step
        if self._folder is None or self._stop_reason or self._idles or step <= max(self._timer.last_step, 0):
            return False
        if not self._timer.is_due(step):
            return False
        if not self._asked:
            self._stop(
                "the objective would not know where to go on: it never calls hydra_tune.resume_step(). "
                "Begin its loop there: for step in range(hydra_tune.resume_step(), STEPS)"
            )
        if why := self._ambiguity:
            self._stop(why)
        return not self._stop_reason and (self.position is None or Position(self._model, step) > self.position)

    @property
    def _ambiguity(self) -> str:
        return self._count.ambiguity if self._counted else ""

    def _stop(self, reason: str) -> None:
        """Write no checkpoints any more."""
        if not self._stop_reason:
            self._stop_reason, self._staged = reason, None
            if self._folder is not None:
                logger.warning("%s: no checkpoints from here on: %s", self._name, reason)

    # ---- the checkpoints ----

    def stage(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, now: Sequence[dict[str, Any]]) -> None:
        """A checkpoint with all loaders in these states, to be published. One that fails is the last."""
        assert self._folder is not None
        random = now[0]["random"] if self._count.counts_batches else self._latest
        position, state = self._state(model, optimizer, now, random)
        try:
            self._folder.stage(position, state)
            self._staged = position
        except Exception as error:  # of a full disk, or what no checkpoint can hold
            self._stop(str(error))

    def publish(self) -> None:
        """What was staged counts from here on."""
        if self._staged is not None and self._folder is not None:
            position, self._staged = self._staged, None
            self._timer.restart(position.step)
            try:
                self._folder.publish(position)
            except OSError as error:
                self._stop(str(error))

    def now(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[Position, Any]:
        """What a checkpoint would hold if it were written now, in the trial's thread and between two steps; the tensors
        are the trial's own.

        Raises:
            ResumeError: nobody could go on from it; says why.
        """
        if not self._asked and self._counted:
            raise ResumeError("it never calls hydra_tune.resume_step(), so that it would not know where to go on")
        if why := self._stop_reason or self._ambiguity:
            raise ResumeError(why)
        return self._state(model, optimizer, [each.now() for each in self._loaders], self._random_state.states())

    def _state(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        loader_states: Sequence[dict[str, Any]],
        random_states: Sequence[torch.Tensor],
    ) -> tuple[Position, Any]:
        assert self._contents is not None
        state = self._contents.state(model, optimizer, loader_states, random_states)
        return Position(self._model, self._count.step), state
