"""What a trial goes on from, and what it leaves for whoever has to: its checkpoints, in its own thread.

    loader   0 1 2 | 3 ...    a checkpoint after three mini-batches is written when the fourth has arrived, for then
    trains   0 1 2 |          all work of the third is done: schedules, reports, the evaluation at an epoch's end
Without a prepared loader it is written when the model is called to train; its random state is then the one after the
last thing that was seen of the trial (a backward, an optimizer's step, an evaluation, a report).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from hydra_tune.checkpoint import CheckpointFolder, Moment
from hydra_tune.errors import ConfigError, PrepareError
from hydra_tune.loader_progress import LoaderProgress
from hydra_tune.random_state import RandomState

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


class Resumption:
    """Of one trial: reads the newest checkpoint in any of some folders, writes to one.

    Args:
        writes: where.
        reads: those of the trials that this one continues, the nearest first.
        every: at least so often; as soon as it can between two steps.
        random_state: the trial's.
        name: the trial's, for messages.
        weights: where those of the trial are that it was cloned from, if it was.
    """

    def __init__(
        self,
        writes: CheckpointFolder,
        reads: Sequence[CheckpointFolder],
        every: Interval,
        random_state: RandomState,
        name: str,
        weights: CheckpointFolder | None = None,
    ) -> None:
        self._folder = writes
        self._weights = weights
        self._every = every
        self._random_state = random_state
        self._name = name
        found = (folder.newest() for folder in (writes, *reads))
        self._from: tuple[Moment, Any] | None = next((each for each in found if each is not None), None)
        self._thread = threading.get_ident()
        self._asked = self._stopped = self._was_called = False
        self._model = -1  # the number of the one that is prepared now
        self._restored = False
        self._loaders: list[LoaderProgress] = []
        self._extra: list[Any] = []
        self._start(0)

    def _start(self, step: int) -> None:
        self._trained = self._began_at = self._last_step = step
        self._was_called = False
        self._last_s = time.monotonic()
        self._latest = self._random_state.states()

    @property
    def moment(self) -> Moment | None:
        """That the trial goes on from, if it does."""
        return self._from[0] if self._from else None

    def _steps_behind(self, model: int) -> int:
        return self.moment.step if self.moment is not None and self.moment.model == model else 0

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
        self._loaders = [LoaderProgress(loader, self._random_state) for loader in loaders]
        self._extra = list(extra)
        self._start(0)
        if self._from is not None and self._from[0].model == self._model:
            moment, state = self._from
            _restore(state, model, optimizer, self._loaders, self._extra)
            self._random_state.set_states(state["random"])
            self._restored = True
            self._start(moment.step)
            logger.info("%s: goes on from mini-batch %d", self._name, moment.step)
            self._from = moment, None
        elif self._weights is not None and self._model == 0:
            copied = self._weights.newest()
            if copied is None:
                raise PrepareError(f"{self._name} starts from another's weights, but {self._weights.path} has none.")
            _restore_model(copied[1], model)
        return self._loaders

    # ---- as the trial goes on ----

    def note(self) -> None:
        """Something of the trial has just ended, from which its random state may be taken."""
        if not self._is_fed:
            self._latest = self._random_state.states()

    def has_trained(self) -> None:
        """One mini-batch."""
        self._trained += 1

    @property
    def _is_fed(self) -> bool:
        """By its first loader."""
        return bool(self._loaders) and self._loaders[0].drawn > 0

    @property
    def _step(self) -> int:
        return self._loaders[0].drawn if self._is_fed else self._trained

    def before_batch(self, progress: LoaderProgress) -> list[dict[str, Any]] | None:
        """Of one of the loaders: the states of all, if a checkpoint is due now that is to be written if it arrives."""
        if threading.get_ident() != self._thread:
            self._stop(
                "a batch was drawn in another thread than the objective's, so that nobody knows which were trained"
            )
        if progress is self._loaders[0] and self._is_due():
            return [loader.now() for loader in self._loaders]
        return None

    def before_forward(self) -> list[dict[str, Any]] | None:
        """Of training, between two steps: the states of all loaders, if a checkpoint is due now."""
        ahead = self._step - self._began_at if self._is_fed and not self._was_called else 0
        self._was_called = True
        if ahead > 1:
            self._stop(f"{ahead} batches were drawn before the first was trained, so that nobody knows which were")
        return None if self._is_fed or not self._is_due() else [loader.now() for loader in self._loaders]

    def _is_due(self) -> bool:
        step = self._step
        if self._stopped or step <= max(self._last_step, 0):
            return False
        if self._every.steps is not None:
            due = step - self._last_step >= self._every.steps
        else:
            assert self._every.seconds is not None
            due = time.monotonic() - self._last_s >= self._every.seconds
        if due and not self._asked:
            self._stop(
                "the objective would not know where to go on: it never calls hydra_tune.resume_step(). "
                "Begin its loop there: for step in range(hydra_tune.resume_step(), STEPS)"
            )
        return due and not self._stopped and (self.moment is None or Moment(self._model, step) > self.moment)

    def _stop(self, reason: str) -> None:
        if not self._stopped:
            self._stopped = True
            logger.warning("%s: no checkpoints from here on: %s", self._name, reason)

    def write(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, now: Sequence[dict[str, Any]]) -> None:
        """A checkpoint with all loaders in these states. One that fails is the last; the trial goes on."""
        state = {
            **_state_of(model),
            "optimizer": None if optimizer is None else optimizer.state_dict(),
            "extra_state": [each.state_dict() for each in self._extra],
            "loaders": [p.state(each["generators"]) for p, each in zip(self._loaders, now, strict=True)],
            "random": now[0]["random"] if self._is_fed else self._latest,
        }
        try:
            self._folder.write(Moment(self._model, self._step), state)
        except (OSError, ConfigError) as error:
            self._stop(str(error))
        self._last_step, self._last_s = self._step, time.monotonic()


def write_weights(folder: CheckpointFolder, model: nn.Module) -> None:
    """For `Resumption(weights=folder)`."""
    folder.write(Moment(0, 0), {**_state_of(model), "gradients": {}})


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
    for each in given:
        if not (callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))):
            raise ConfigError(
                f"extra_state is what has state_dict and load_state_dict (a schedule, a GradScaler, an average of the "
                f"model), or several of these in a list; a {type(each).__name__} has not."
            )
    return given


def _state_of(model: nn.Module) -> dict[str, Any]:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    extra = {name: module.get_extra_state() for name, module in _with_extra_state(model)}
    tensors = {"parameters": dict(model.named_parameters()), "buffers": dict(model.named_buffers())}
    return {**tensors, "gradients": gradients, "module_state": extra}


def _with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]


def _restore(
    state: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loaders: Sequence[LoaderProgress],
    extra: Sequence[Any],
) -> None:
    _restore_model(state, model)
    optimizers = "an optimizer" if state["optimizer"] is not None else "no optimizer"
    if (optimizer is None) != (state["optimizer"] is None):
        raise _does_not_fit(f"it was written with {optimizers}, now it is otherwise")
    if len(loaders) != len(state["loaders"]) or len(extra) != len(state["extra_state"]):
        then = len(state["loaders"]), len(state["extra_state"])
        raise _does_not_fit(
            f"it was written with {then[0]} loaders and {then[1]} extra states, now prepare was given {len(loaders)} "
            f"and {len(extra)}"
        )
    if optimizer is not None:
        _restore_optimizer(state["optimizer"], optimizer)
    for each, value in zip(extra, state["extra_state"], strict=True):
        each.load_state_dict(value)
    for loader, value in zip(loaders, state["loaders"], strict=True):
        loader.restore(value)


@torch.no_grad()
def _restore_model(state: dict[str, Any], model: nn.Module) -> None:
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for kind, now in (("parameters", parameters), ("buffers", buffers)):
        then = state[kind]
        layout = {name: (tuple(t.shape), t.dtype) for name, t in now.items()}
        if layout != {name: (tuple(t.shape), t.dtype) for name, t in then.items()}:
            raise _does_not_fit(f"the model's {kind} are others than then")
        for name, tensor in now.items():
            tensor.copy_(then[name])
    for name, parameter in parameters.items():
        parameter.grad = state["gradients"].get(name)
    for name, module in _with_extra_state(model):
        module.set_extra_state(state["module_state"][name])


def _restore_optimizer(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """To the bit: `load_state_dict` would round a state to its parameter's dtype."""
    optimizer.load_state_dict(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in state["state"].items():
        own = optimizer.state[parameters[index]] if isinstance(index, int) else {}
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, torch.Tensor) and own[key].dtype != value.dtype:
                own[key] = value


def _does_not_fit(why: str) -> PrepareError:
    return PrepareError(
        f"a trial goes on from its checkpoint with what it was written of, but {why}. Restore the objective as it was, "
        "or remove the trial's folder in checkpoint_dir to train it from its beginning."
    )
