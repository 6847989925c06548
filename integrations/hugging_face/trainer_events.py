"""What happens in the loop of one trainer over a pool: prepare as it begins, checkpoints, reports to the search."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import transformers
from transformers.trainer_utils import default_compute_objective

from hydra_tune.integrations.frameworks.trial_reports import report, reports_here


class TrainerEvents(transformers.TrainerCallback):  # type: ignore[misc]
    """A callback that a pooled trainer gives itself for the time that it trains."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        trainer = self._trainer
        known = 0 < state.max_steps < sys.maxsize
        steps = (state.max_steps - state.global_step) * args.gradient_accumulation_steps if known else 0
        trainer.prepare_in_pool(optimizer, steps if steps > 0 else None)
        trainer.pool_state.is_training = True
        if trainer.pool_state.checkpoints is not None and state.global_step:
            trainer.pool_state.checkpoints.goes_on_from(state.global_step * args.gradient_accumulation_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        pool_state = self._trainer.pool_state
        pool_state.was_due = False
        checkpoints = pool_state.checkpoints
        if checkpoints is None or control.should_save:
            return
        if checkpoints.is_due(state.global_step * args.gradient_accumulation_steps):
            control.should_save = pool_state.was_due = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        checkpoints = trainer.pool_state.checkpoints
        if checkpoints is not None and not checkpoints.is_behind:
            path = Path(trainer._get_output_dir(trainer._trial)) / f"checkpoint-{state.global_step}"
            step = state.global_step * args.gradient_accumulation_steps
            checkpoints.note(path, step, was_due=trainer.pool_state.was_due)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        trainer = self._trainer
        if not trainer.pool_state.is_training or not reports_here() or not metrics or _reports_itself(trainer):
            return
        if args.metric_for_best_model is not None:
            name = args.metric_for_best_model
            value, larger = metrics.get(name if name.startswith("eval_") else f"eval_{name}"), args.greater_is_better
        elif "eval_loss" in metrics:
            value, larger = default_compute_objective(metrics), False if _is_loss(metrics) else None
        else:
            return  # one of several data sets
        report(value, state.global_step, metrics, larger_is_better=larger)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer.pool_state.checkpoints is not None:
            self._trainer.pool_state.checkpoints.end()


def _is_loss(metrics: dict[str, float]) -> bool:
    """Whether Hugging Face's objective of these metrics is their loss: it is, where there is no other one."""
    return bool(default_compute_objective(metrics) == metrics["eval_loss"])


def _reports_itself(trainer: Any) -> bool:
    """A `Trainer.hyperparameter_search` does, Ray Train's callback, and a script that says so."""
    callbacks = trainer.callback_handler.callbacks
    told = any(type(each).__module__.startswith("ray.train") or not getattr(each, "report", True) for each in callbacks)
    return told or trainer.hp_search_backend is not None
