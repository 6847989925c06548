"""Hugging Face configs: `use_cache=False` while a model is prepared.

A cache that grows in each layer would grow twice where a forward is repeated. Several trials may share a config. There
is no lock: models end wherever garbage is collected. So who is about to use a config says so before it looks at it, and
who has put it back looks once more.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import nn

_off: dict[int, list[Any]] = {}  # the configs that are switched off, of each prepared model


def use_no_cache(model: nn.Module) -> list[Any]:
    """The configs that say `use_cache`, switched off until `use_cache_again`."""
    configs = {id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if c is not None}
    off: list[Any] = []
    _off[id(off)] = off
    try:
        for config in configs.values():
            if _is_off(config) or getattr(config, "use_cache", False) is True:
                off.append(config)
                config.use_cache = False
    except BaseException:  # one may be frozen
        use_cache_again(off)
        raise
    return off


def use_cache_again(off: list[Any]) -> None:
    """More often than once does no harm."""
    for config in off:
        if not _is_off(config, but_for=off):
            with suppress(Exception):  # one that is frozen never was off
                config.use_cache = True
    _off.pop(id(off), None)
    for config in off:
        if _is_off(config):
            config.use_cache = False
    off.clear()


def _is_off(config: Any, but_for: list[Any] | None = None) -> bool:
    return any(config is other for off in [*_off.values()] if off is not but_for for other in off)
