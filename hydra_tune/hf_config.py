"""Hugging Face configs: `use_cache=False` while a model is prepared.

A cache that grows in each layer would grow twice where a forward is repeated. Several trials may share a config.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

from hydra_tune.fork import new_in_child

_lock = new_in_child(threading.Lock())
_users: dict[int, int] = {}  # by config: prepared models that it is switched off for


def use_no_cache(model: nn.Module) -> list[Any]:
    """The configs that say `use_cache`, switched off until `use_cache_again` was called as often."""
    configs = {id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if c is not None}
    with _lock:
        chosen = [c for key, c in configs.items() if key in _users or getattr(c, "use_cache", False) is True]
        for config in chosen:
            _users[id(config)] = _users.get(id(config), 0) + 1
            config.use_cache = False
    return chosen


def use_cache_again(configs: list[Any]) -> None:
    with _lock:
        for config in configs:
            _users[id(config)] -= 1
            if not _users[id(config)]:
                del _users[id(config)]
                config.use_cache = True
    configs.clear()
