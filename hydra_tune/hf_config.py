"""Hugging Face configs: `use_cache=False` while a model is prepared.

A cache that grows in each layer would grow twice where a forward is repeated. Several trials may share a config.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Any

from torch import nn

from hydra_tune.fork import new_in_child

_lock = new_in_child(threading.Lock())
_users: dict[int, int] = {}  # by config: prepared models that it is switched off for, each of which keeps it
_left: deque[Any] = deque()  # configs, once for each such model that needs it no more


def use_no_cache(model: nn.Module) -> list[Any]:
    """The configs that say `use_cache`, switched off until `use_cache_again` was called as often."""
    configs = {id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if c is not None}
    off: list[Any] = []
    try:
        with _lock:
            for key, config in configs.items():
                if key in _users or getattr(config, "use_cache", False) is True:
                    config.use_cache = False
                    _users[key] = _users.get(key, 0) + 1
                    off.append(config)
    except BaseException:  # one may be frozen
        use_cache_again(off)
        raise
    _put_back()
    return off


def use_cache_again(configs: list[Any]) -> None:
    """May be called wherever garbage is collected, so also by who has the lock: that one does it then."""
    while configs:
        _left.append(configs[-1])
        configs.pop()
    _put_back()


def _put_back() -> None:
    while _left and _lock.acquire(blocking=False):
        try:
            with suppress(IndexError):
                while True:
                    config = _left.popleft()
                    _users[id(config)] -= 1
                    if not _users[id(config)]:
                        del _users[id(config)]
                        config.use_cache = True
        finally:
            _lock.release()
