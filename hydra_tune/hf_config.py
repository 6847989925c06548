"""Hugging Face configs: `use_cache=False` while a model is prepared.

A cache that grows in each layer would grow twice where a forward is repeated. Models of several trials may share a
config, so a prepared one gets a copy of its own.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn


def use_no_cache(model: nn.Module) -> list[Any]:
    """Switch off `use_cache` in the configs that say it, copies of which are the model's from here on; these copies."""
    owners = [m for m in model.modules() if getattr(vars(m).get("config"), "use_cache", False) is True]
    copies: dict[int, Any] = {}  # by id: a config within another one stays the one that a module has
    for module in owners:
        module.config = config = deepcopy(vars(module)["config"], copies)
        config.use_cache = False
    return [module.config for module in owners]
