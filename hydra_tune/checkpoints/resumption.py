"""What a trial goes on from, and what it leaves for whoever has to: its checkpoints, in its own thread.

    loader   0 1 2 | 3 ...    a checkpoint after three mini-batches is written when the fourth has arrived, for then
    trains   0 1 2 |   3      all work of the third is done: schedules, reports, the evaluation at an epoch's end.
                              It counts once the model is called to train, so that the fourth is no evaluation's
Without a prepared loader it is written when the model is called to train; its random state is then the one after the
last thing that was seen of the trial (a backward, an optimizer's step, an evaluation, a report).
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import nn

from hydra_tune.checkpoints.checkpoint import CheckpointFolder, Position
from hydra_tune.checkpoints.hyperparameters import Hyperparameters
from hydra_tune.checkpoints.loader_progress import LoaderProgress
from hydra_tune.errors import ConfigError, PrepareError, ResumeError
from hydra_tune.planning.optimizer_memory import load_exactly
from hydra_tune.randomness import RandomState

logger = logging.getLogger("hydra_tune")


@dataclass(frozen=True)
class Interval:
    """Between two checkpoints of a trial: so many mini-batches, or so much time."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, every: int | timedelta | None) -> Interval:
        """Five minutes if None.

        Raises:
            ConfigError: neither a positive whole number of mini-batches nor a positive `datetime.timedelta`.
        """
        if every is None:
            every = timedelta(minutes=5)
        if isinstance(every, timedelta) and every > timedelta(0):
            return cls(seconds=every.total_seconds())
        if isinstance(every, int) and not isinstance(every, bool) and every > 0:
            return cls(steps=every)
        raise ConfigError(
            f"checkpoint_every is a positive number of mini-batches or a positive datetime.timedelta, got {every!r}."
        )


class Source(Protocol):
    """Of what a trial goes on from."""

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
        self._asked = self._was_called = False
        self._stop_reason = ""
        self._model = -1  # the number of the one that is prepared now
        self._restored = self._steps = False  # whether there is an optimizer to count by
        self._loaders: list[LoaderProgress] = []
        self._extra: list[Any] = []
        self._given: Hyperparameters | None = None
        self._staged: Position | None = None
        self._start(0)

    def _start(self, step: int) -> None:
        self._trained = self._stepped = self._began_at = self._last_step = step
        self._was_called = self._idles = False
        self._trained_before = step  # this iteration of the first loader
        self._last_s = time.monotonic()
        self._latest = self._random_state.states()

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

    def resume_step(self) -> int:
        """Mini-batches that the model has made which was prepared last, or will be first; from there on all is drawn as
        if nothing had been since the checkpoint."""
        self._asked = True
        if self._restored and self._has_not_begun:
            self._random_state.set_states(self._latest)
        return self._steps_behind(max(0, self._model))

    @property
    def _has_not_begun(self) -> bool:
        return self._trained == self._began_at and self._step == self._began_at

    # ---- in `prepare` ----

    def begin(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, loaders: Sequence[Any], extra: Sequence[Any]
    ) -> list[LoaderProgress]:
        """A model is prepared; it goes on from the checkpoint if that is of this one. The progress of each loader."""
        self._model += 1
        self._restored = False
        self._random_state.users = [each.generator for each in extra if isinstance(each, _GeneratorState)]
        self._loaders = [LoaderProgress(loader, self._random_state) for loader in loaders]
        self._extra, self._steps = list(extra), optimizer is not None
        self._given = Hyperparameters.of(optimizer, self._extra)
        self._start(0)
        if self._from is not None and self._from[0].model == self._model:
            position, state = self._from
            try:
                _refuse_changed(state, _made_of(model, optimizer, self._loaders), but_model=self._perturbed)
                _restore(state, model, optimizer, self._loaders, self._extra)
            except _OtherError as other:
                raise self._does_not_fit(other) from None
            if self._perturbed:
                self._given.stay(state["given"], optimizer, self._extra)
            self._random_state.set_states(state["random"])
            self._restored = True
            self._start(position.step)
            logger.info("%s: goes on from mini-batch %d", self._name, position.step)
            self._from = position, None
        elif self._weights is not None and self._model == 0:
            copied = self._weights.newest()
            if copied is None:
                raise PrepareError(f"{self._name} starts from another's weights, but {self._weights.path} has none.")
            try:
                _restore_model(copied[1], model)
            except _OtherError as other:
                raise self._does_not_fit(other) from None
        if any(getattr(loader, "persistent_workers", False) for loader in loaders):
            self._stop("a loader's persistent workers keep random states from epoch to epoch, which nobody can restore")
        return self._loaders

    def leave_to_framework(self, *, goes_on: bool) -> None:
        """Checkpoints of this trial are a framework's own; it may go on from one."""
        self._counted = False
        if goes_on:
            self._weights = None  # they are older

    def _does_not_fit(self, other: _OtherError) -> ResumeError:
        remedy = (
            "A trial that goes on with another configuration has the same layers, loaders and kind of optimizer: leave "
            "what changes them out of the mutations, or report a checkpoint of your own"
            if self._perturbed
            else "Restore the objective as it was and start the search again, or remove the trial's folder in "
            "checkpoint_dir to give it up"
            if self._folder is not None
            else "Run the function that it was written of"
        )
        return ResumeError(f"a trial goes on from a checkpoint with what that was written of, but {other}. {remedy}.")

    @property
    def began_at(self) -> int:
        """The mini-batch at which the model that was prepared last went on; 0 if it began."""
        return self._began_at

    # ---- as the trial goes on ----

    def note(self) -> None:
        """Something of the trial has just ended, from which its random state may be taken."""
        if not self._is_fed:
            self._latest = self._random_state.states()

    def has_trained(self) -> None:
        """One mini-batch."""
        self._trained += 1

    def has_stepped(self) -> None:
        """The optimizer."""
        self._stepped += 1
        self.note()

    @property
    def _is_fed(self) -> bool:
        """By its first loader."""
        return bool(self._loaders) and self._loaders[0].drawn > 0

    @property
    def _step(self) -> int:
        return self._loaders[0].drawn if self._is_fed else self._trained

    def before_iteration(self, progress: LoaderProgress) -> None:
        """Of one of the loaders. Where the first one's do not train, each to its end, their number says nothing."""
        if progress.is_iterator and progress.was_left:
            self._stop(
                "an iterator was left and is gone on with, so that nobody knows how far it is. Give prepare what it "
                "iterates over"
            )
        if progress is not self._loaders[0] or not self._is_fed or not self._counted:
            return
        if progress.was_left:
            self._stop(
                "an iteration of the first loader was left before its end, so that resume_step() // len(loader) would "
                "not be its epoch. Give prepare a loader that is as long as an epoch"
            )
        elif self._trained == self._trained_before and self._was_called:
            self._stop(
                "the first loader was gone through without training, so that resume_step() would count those batches, "
                "too. Evaluate with a loader of its own"
            )
        self._trained_before = self._trained

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
        ahead = self._step - self._began_at if self._is_fed and not self._was_called else 0
        self._was_called, self._idles = True, False
        if ahead > 1:
            self._stop(f"{ahead} batches were drawn before the first was trained, so that nobody knows which were")
        if self._is_fed and not self._loaders[0].is_under_way:
            self._stop("it trains on batches that are not the first loader's, which is what resume_step() counts")
        self.publish()
        return None if self._is_fed or not self._is_due() else [loader.now() for loader in self._loaders]

    def _is_due(self) -> bool:
        step = self._step
        if self._folder is None or self._stop_reason or self._idles or step <= max(self._last_step, 0):
            return False
        if self.every.steps is not None:
            due = step - self._last_step >= self.every.steps
        else:
            assert self.every.seconds is not None
            due = time.monotonic() - self._last_s >= self.every.seconds
        if due and not self._asked:
            self._stop(
                "the objective would not know where to go on: it never calls hydra_tune.resume_step(). "
                "Begin its loop there: for step in range(hydra_tune.resume_step(), STEPS)"
            )
        if due and (why := self._uncountable):
            self._stop(why)
        return due and not self._stop_reason and (self.position is None or Position(self._model, step) > self.position)

    @property
    def _uncountable(self) -> str:
        """Why nobody can tell how many mini-batches there were; empty if somebody can."""
        if self._is_fed or not self._steps or self._stepped == self._trained or not self._counted:
            return ""
        return (
            f"{self._trained} backwards were made for {self._stepped} steps of the optimizer, so that nobody knows "
            "which of them resume_step() shall count. Give prepare the loader of the mini-batches"
        )

    def _stop(self, reason: str) -> None:
        if not self._stop_reason:
            self._stop_reason, self._staged = reason, None
            if self._folder is not None:
                logger.warning("%s: no checkpoints from here on: %s", self._name, reason)

    def stage(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, now: Sequence[dict[str, Any]]) -> None:
        """A checkpoint with all loaders in these states, to be published. One that fails is the last."""
        assert self._folder is not None
        random = now[0]["random"] if self._is_fed else self._latest
        position, state = self._state(model, optimizer, now, random)
        try:
            self._folder.stage(position, state)
            self._staged = position
        except Exception as error:  # of a full disk, or what no checkpoint can hold
            self._stop(str(error))

    def now(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[Position, Any]:
        """What a checkpoint of this moment would hold, in the trial's thread and between two steps; the tensors are the
        trial's own.

        Raises:
            ResumeError: nobody could go on from it; says why.
        """
        if not self._asked and self._counted:
            raise ResumeError("it never calls hydra_tune.resume_step(), so that it would not know where to go on")
        if why := self._stop_reason or self._uncountable:
            raise ResumeError(why)
        return self._state(model, optimizer, [each.now() for each in self._loaders], self._random_state.states())

    def _state(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        now: Sequence[dict[str, Any]],
        random: Sequence[torch.Tensor],
    ) -> tuple[Position, Any]:
        assert self._given is not None
        state = {
            **_state_of(model),
            "made_of": _made_of(model, optimizer, self._loaders),
            "given": self._given.plain(),
            "optimizer": None if optimizer is None else optimizer.state_dict(),
            "extra_state": [each.state_dict() for each in self._extra],
            "loaders": [p.state(each["generators"]) for p, each in zip(self._loaders, now, strict=True)],
            "random": random,
        }
        return Position(self._model, self._step), state

    def publish(self) -> None:
        """What was staged counts from here on."""
        if self._staged is not None and self._folder is not None:
            position, self._staged = self._staged, None
            self._last_step, self._last_s = position.step, time.monotonic()
            try:
                self._folder.publish(position)
            except OSError as error:
                self._stop(str(error))


def write_weights(folder: CheckpointFolder, model: nn.Module) -> None:
    """For `Resumption(weights=folder)`."""
    folder.write(Position(0, 0), {**_state_of(model), "gradients": {}})


class _GeneratorState:
    """A generator of the user's own, with the names that all else has. Where it goes on the random state says: by the
    time that a checkpoint is made, the next batch may be drawn from it."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["state"])


def extra_states(extra_state: Any) -> list[Any]:
    """Of `prepare`'s argument: one object, a sequence of them, or a mapping whose order counts.

    Raises:
        ConfigError: one of them has no `state_dict` and `load_state_dict`.
    """
    if extra_state is None:
        return []
    if isinstance(extra_state, Mapping):
        given = list(extra_state.values())
    else:
        given = list(extra_state) if isinstance(extra_state, (list, tuple)) else [extra_state]
    given = [_GeneratorState(each) if isinstance(each, torch.Generator) else each for each in given]
    for each in given:
        has = callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))
        if isinstance(each, type) or not has:
            name = f"the class {each.__name__}" if isinstance(each, type) else f"a {type(each).__name__}"
            raise ConfigError(
                f"extra_state is what has state_dict and load_state_dict (a schedule, a GradScaler, an average of the "
                f"model), a torch.Generator, or several of these in a list; got {name}."
            )
    return given


def _state_of(model: nn.Module) -> dict[str, Any]:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    extra = {name: module.get_extra_state() for name, module in _with_extra_state(model)}
    tensors = {"parameters": dict(model.named_parameters()), "buffers": dict(model.named_buffers())}
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    return {**tensors, "trained": trained, "gradients": gradients, "module_state": extra}


def _with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]


def _made_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, loaders: Sequence[LoaderProgress]
) -> dict[str, str]:
    """By which a changed objective is known, as far as it can be."""
    return {
        "model": re.sub(r" at 0x[0-9a-f]+", "", repr(model)),
        "optimizer": "none" if optimizer is None else type(optimizer).__qualname__,
        "loaders": ", ".join(loader.description for loader in loaders) or "none",
    }


def _refuse_changed(state: dict[str, Any], made_of: dict[str, str], *, but_model: bool) -> None:
    """`but_model`: what its layers are set to, such as a dropout's rate, may have changed."""
    for kind, now in made_of.items():
        if kind != "model" or not but_model:
            _refuse_other(kind, state["made_of"][kind], now)


def _restore(
    state: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loaders: Sequence[LoaderProgress],
    extra: Sequence[Any],
) -> None:
    _refuse_other("number of extra states", str(len(state["extra_state"])), str(len(extra)))
    _refuse_other_model(state, model)  # all that may be refused comes before the first change
    if optimizer is not None:
        _restore_optimizer(state["optimizer"], optimizer)
    _restore_model(state, model)
    for each, value in zip(extra, state["extra_state"], strict=True):
        each.load_state_dict(value)
    for loader, value in zip(loaders, state["loaders"], strict=True):
        loader.restore(value)


def _refuse_other(what: str, then: str, now: str) -> None:
    if then != now:
        lines = zip_longest(then.splitlines(), now.splitlines(), fillvalue="nothing")
        before, after = next((a, b) for a, b in lines if a != b)
        raise _OtherError(f"its {what} had {before.strip()!r} where it has {after.strip()!r} now")


def _refuse_other_model(state: dict[str, Any], model: nn.Module) -> None:
    for kind, now in (("parameters", model.named_parameters()), ("buffers", model.named_buffers())):
        both = state[kind].items(), now
        _refuse_other(kind, *["\n".join(f"{n} {tuple(t.shape)} {t.dtype}" for n, t in each) for each in both])


@torch.no_grad()
def _restore_model(state: dict[str, Any], model: nn.Module) -> None:
    _refuse_other_model(state, model)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for kind, now in (("parameters", parameters), ("buffers", buffers)):
        for name, tensor in now.items():
            tensor.copy_(state[kind][name])
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in state["trained"])
        parameter.grad = state["gradients"].get(name)
    for name, module in _with_extra_state(model):
        module.set_extra_state(state["module_state"][name])


def _restore_optimizer(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    try:
        load_exactly(optimizer, state)
    except (ValueError, KeyError) as error:
        raise _OtherError(f"the optimizer's state is another's: {error}") from None


class _OtherError(Exception):
    """What is to be restored is another than what there is: what of it."""
