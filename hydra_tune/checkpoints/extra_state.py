"""What a user gives `prepare` as `extra_state`: it belongs to a checkpoint, but to neither model nor optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hydra_tune.errors import ConfigError


class GeneratorState:
    """A generator of the user's own, with `state_dict` and `load_state_dict` as all else has.

    Where the generator goes on after a resume is set with the trial's random state, not from here: by the time that a
    checkpoint is made, the next batch may have been drawn from it.
    """

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
    given = [GeneratorState(each) if isinstance(each, torch.Generator) else each for each in given]
    for each in given:
        has = callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))
        if isinstance(each, type) or not has:
            name = f"the class {each.__name__}" if isinstance(each, type) else f"a {type(each).__name__}"
            raise ConfigError(
                f"extra_state is what has state_dict and load_state_dict (a schedule, a GradScaler, an average of the "
                f"model), a torch.Generator, or several of these in a list; got {name}."
            )
    return given
