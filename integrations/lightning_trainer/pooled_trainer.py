"""A Lightning Trainer that trains, validates, tests and predicts within a pool.

Trainer._run   setup hooks | strategy.setup      | restored state | batches ... | strategy.teardown
                             optimizers, prepare   of optimizers    steps         release
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hydra_tune.integrations.frameworks.current_trial import current_trial
from hydra_tune.integrations.frameworks.framework_checkpoints import FrameworkCheckpoints
from hydra_tune.integrations.lightning_trainer.refusals import refuse_module
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.trials.context import current_context


@dataclass
class LightningPoolState:
    """What a Trainer with the callback has more than others."""

    pool: ShardPool | None
    checkpoints: FrameworkCheckpoints | None = None  # of the training, in a search that keeps some
    goes_on: bool = False  # this training does, from a checkpoint of the trial's
    random_states: Sequence[torch.Tensor] | None = None  # of that checkpoint, until they are drawn from


class _Interrupted(BaseException):
    """A Ctrl-C in a search's trial. Lightning would answer KeyboardInterrupt by ignoring the signal from then on."""


def _interruptible(method: str) -> Callable[..., Any]:
    """The Trainer's own method of this name; a Ctrl-C in a search's trial is a KeyboardInterrupt again as it ends."""

    def run(self: PooledLightningTrainer, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(super(PooledLightningTrainer, self), method)(*args, **kwargs)
        except _Interrupted:
            raise KeyboardInterrupt from None

    return run


class PooledLightningTrainer:
    """Comes before a Trainer's own class, in a class that is made of both."""

    pool_state: LightningPoolState
    state: Any
    strategy: Any
    fit_loop: Any

    fit, validate = _interruptible("fit"), _interruptible("validate")
    test, predict = _interruptible("test"), _interruptible("predict")

    def _run(self, model: Any, ckpt_path: Any = None, **kwargs: Any) -> Any:
        refuse_module(model)
        pool_state = self.pool_state
        pool_state.checkpoints = FrameworkCheckpoints.of_running_trial() if self.state.fn == "fit" else None
        newest = None if pool_state.checkpoints is None else pool_state.checkpoints.newest_of_training()
        pool_state.goes_on, pool_state.random_states = newest is not None, None
        if newest is not None:
            ckpt_path = newest
            if "weights_only" in kwargs:
                kwargs["weights_only"] = False  # it is our own
        try:
            return super()._run(model, ckpt_path=ckpt_path, **kwargs)  # type: ignore[misc]
        except KeyboardInterrupt:
            if current_trial() is None:
                raise
            raise _Interrupted from None
        finally:
            self.strategy.release()

    def _run_stage(self) -> Any:
        self.draw_on()
        return super()._run_stage()  # type: ignore[misc]

    def draw_on(self) -> None:
        """As the training would have that this one continues."""
        random_state = current_context().random_state
        if self.pool_state.random_states is not None and random_state is not None:
            random_state.set_states(self.pool_state.random_states)
            self.fit_loop._combined_loader = None  # `estimated_stepping_batches` has drawn an order of the data
