"""accelerate's states, each trial's own.

`PartialState`, `AcceleratorState` and `GradientState` share one dict for all threads, in which a Trainer notes whether
its next backward is the last one before its step. So one trial's accumulation made another's `optimizer.step()` a
no-op, and trials of two precisions could not be in one process.
"""

from __future__ import annotations

from typing import Any

import wrapt

from hydra_tune.errors import PrepareError
from hydra_tune.integrations.frameworks.current_trial import current_trial


class StateOfTrial:
    """In place of a class's dict: the running trial's own, empty at first; outside of trials that of the process."""

    def __init__(self, of_process: dict[str, Any]) -> None:
        self.of_process = of_process

    def __get__(self, instance: Any, owner: Any = None) -> dict[str, Any]:
        trial = current_trial()
        return self.of_process if trial is None else trial.library_states.setdefault(id(self), {})

    def __set__(self, instance: Any, value: dict[str, Any]) -> None:
        raise AttributeError("what accelerate's states share is changed in place.")


def install() -> None:
    """Now, or once accelerate is imported, be it by a trial."""
    wrapt.register_post_import_hook(_divide_states, "accelerate.state")
    wrapt.register_post_import_hook(_refuse_shared_accelerators, "accelerate.accelerator")


def _divide_states(module: Any) -> None:
    for kind in (module.PartialState, module.AcceleratorState, module.GradientState):
        if isinstance(shared := vars(kind)["_shared_state"], dict):  # with XLA it is a thread's own already
            kind._shared_state = StateOfTrial(shared)


def _refuse_shared_accelerators(module: Any) -> None:
    stock = module.Accelerator.prepare_optimizer

    def prepare_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's, of an `Accelerator` that the running trial has made.

        Raises:
            PrepareError: it was made elsewhere, so that all trials would accumulate gradients in one count.
        """
        if current_trial() is not None and vars(self.gradient_state) is not module.GradientState._shared_state:
            raise PrepareError(
                "an Accelerator counts the steps of one trial, but this one was made outside of the trial that runs. "
                "Make it within the objective."
            )
        return stock(self, *args, **kwargs)

    module.Accelerator.prepare_optimizer = prepare_optimizer
