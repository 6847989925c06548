"""What happens in one Trainer over a pool: it tells the optimizer's step to the pool, and evaluations to the search."""

from __future__ import annotations

from typing import Any

import torch

from hydra_tune.blocks.root import trial_of
from hydra_tune.integrations.frameworks.trial_reports import report, reports_here
from hydra_tune.trials.context import current_context

_KEY = "hydra_tune"  # of a checkpoint
_REPORTERS = ("optuna", "optuna_integration", "ray")  # packages whose callbacks report by themselves


class LightningEvents:
    """What happens in one trainer: a callback of its own package, in the place of the user's."""

    state_key = "HydraLightningCallback"
    report: bool

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Lightning runs forward and backward within the optimizer's step, whose own hooks come before them."""
        trial = trial_of(pl_module)
        if trial is not None and pl_module.automatic_optimization:
            trial.before_optimizer_step()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        random_state = current_context().random_state
        if trainer.pool_state.checkpoints is not None and random_state is not None:
            checkpoint[_KEY] = {"random_states": random_state.states()}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        pool_state = trainer.pool_state
        if pool_state.goes_on and pool_state.random_states is None:  # not of a search for a learning rate
            pool_state.random_states = checkpoint[_KEY]["random_states"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.pool_state.goes_on:
            trainer.pool_state.checkpoints.goes_on_from(trainer.fit_loop.epoch_loop.batch_progress.total.ready)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if not hasattr(trainer.fit_loop, "is_resuming"):  # of Lightning before 2.6, which iterates over its loader anew
            trainer.draw_on()
        trainer.pool_state.random_states = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.pool_state.checkpoints is not None:
            trainer.pool_state.checkpoints.end()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not self.report or trainer.sanity_checking or trainer.state.fn != "fit" or not reports_here():
            return
        if _reports_itself(trainer):
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if torch.numel(value) == 1}
        name, larger = _monitored(trainer)
        if metrics:
            report(metrics.get(name), trainer.global_step, metrics, larger_is_better=larger)


def _monitored(trainer: Any) -> tuple[str, bool]:
    """Of a ModelCheckpoint, else of an EarlyStopping; and whether larger is better."""
    for callback in (*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks):
        if getattr(callback, "monitor", None) is not None:
            return callback.monitor, callback.mode == "max"
    return "val_loss", False


def _reports_itself(trainer: Any) -> bool:
    kinds = [kind for callback in trainer.callbacks for kind in type(callback).__mro__]
    return any(kind.__module__.partition(".")[0] in _REPORTERS for kind in kinds)
