"""Hugging Face configs: `use_cache=False` while a model is prepared.

A cache that grows in each layer would grow twice where a forward is repeated. Models of several trials may share a
config, so a prepared one gets a copy of its own.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn


def use_no_cache(model: nn.Module) -> list[Any]:
    """Switch off `use_cache` in the model's configs that say it, which are the model's own from here on; these."""
    owners = [m for m in model.modules() if getattr(vars(m).get("config"), "use_cache", False) is True]
    copies: dict[int, Any] = {}  # by id: a config within another one stays the one that a module has
    for module in owners:
        module.config = deepcopy(module.config, copies)
    own = {id(module.config): module.config for module in owners}
    for config in own.values():
        config.use_cache = False
    return list(own.values())


def use_cache_again(own: list[Any]) -> None:
    """More often than once does no harm."""
    for config in own:
        config.use_cache = True
