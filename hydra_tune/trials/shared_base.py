"""`share`: one copy of a frozen base's weights, for all trials that ask for it.

A search over adapters makes the same base in every objective, and each copy takes host memory, a device's memory and
the link. Here `build` runs once. Every caller gets a module of its own, whose Parameters lie in the memory of the one
that was built:

    build() --> the base       Parameters P Q ..        in no trial
                   |  |
                   |  +--> trial 1's module    Parameters over the memory of P Q ..   hooks, flags, buffers of its own
                   +-----> trial 2's module    Parameters over the memory of P Q ..

What a trial does must not change the base. A weight that it writes or unfreezes gets memory of its own first
(`sharing/shared_parameter.py`).
"""

from __future__ import annotations

import copy
import logging
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hydra_tune.devices.tensor_bytes import is_quantized_buffer, tensor_bytes
from hydra_tune.errors import ConfigError, PrepareError
from hydra_tune.pool.shard_pool import ShardPool
from hydra_tune.process.fork import new_in_child
from hydra_tune.randomness import RandomState, drawing_from
from hydra_tune.sharing.base_storages import note_base
from hydra_tune.sharing.shared_parameter import shared_parameter
from hydra_tune.trials.context import current_context

logger = logging.getLogger("hydra_tune")


class _Base:
    """A base, once it is built. `lock` is held while it is."""

    def __init__(self) -> None:
        self.lock = new_in_child(threading.RLock())
        self.model: nn.Module | None = None
        self.num_bytes = 0


_lock = new_in_child(threading.Lock())
_bases: weakref.WeakValueDictionary[Hashable, _Base] = weakref.WeakValueDictionary()
_kept: list[_Base] = []  # the one that a plain script has asked for last


def share(build: Callable[..., nn.Module], *args: Any, key: Hashable = None, **kwargs: Any) -> Any:
    """Return a module with the weights that ``build(*args, **kwargs)`` makes, frozen, and shared with all trials that
    ask for the same.

    `build` is called once. Each call of `share` returns a module of its own: with its own Python objects, hooks,
    buffers and `requires_grad` flags, over one copy of the weights in host memory. Add adapters and heads, or unfreeze
    layers, as on any model, and give it to `prepare`. What a trial trains becomes its own; the base never changes.
    Over one base trials share device memory and copies, too.

    In an objective of a pool the base is kept until the search ends or the pool is closed; of several bases, those that
    were asked for last, in half of the pool's host memory. Elsewhere this is a cached `build`: the base that was asked
    for last is kept.

    Args:
        build: makes the model. Random numbers that it draws do not count as the trial's.
        key: tells bases apart. By default `build` (a function's code, not the object) with its arguments.

    Raises:
        ConfigError: `build` is no function, or the arguments cannot be told apart: they are not hashable, and there is
            no `key`.
        PrepareError: `build` returned no module, or one that cannot be copied.
    """
    if isinstance(build, nn.Module) or not callable(build):
        raise ConfigError(
            f"share takes a function that makes the base, and calls it once; got {type(build).__name__}. Write "
            "share(make_model), where make_model() returns the model."
        )
    pool = current_context().pool
    base = _base_of(_key(build, args, kwargs) if key is None else (share, key), pool)
    with base.lock:
        if base.model is None:
            base.model = _built(build, args, kwargs, pool)
            base.num_bytes = sum(map(tensor_bytes, base.model.parameters()))
            if pool is not None:
                _drop_oldest(pool)
    return _copy_of(base)


def _base_of(key: Hashable, pool: ShardPool | None) -> _Base:
    with _lock:
        base = _bases.get(key)
        if base is None:
            _kept.clear()  # before another is built
            base = _bases[key] = _Base()
        if pool is None:
            _kept[:] = [base]
        else:
            kept = pool.shared_weights.kept_bases
            kept[base] = kept.pop(base, None)  # the last one from here on
        return base


def _drop_oldest(pool: ShardPool) -> None:
    """Keep no more bases for trials to come than half of host memory holds; trials that live keep theirs. So a script
    that makes another base for each trial by mistake does not fill the host's memory."""
    with _lock:
        kept: dict[Any, None] = pool.shared_weights.kept_bases
        while len(kept) > 1 and sum(base.num_bytes for base in kept) > pool.host_memory_bytes // 2:
            del kept[next(iter(kept))]
            if not pool.shared_weights.has_dropped:
                pool.shared_weights.has_dropped = True
                logger.warning(
                    "share has built %d bases, more than half of host memory holds, and keeps only the last ones. If "
                    "trials should have the same base, build refers to an object that each objective makes anew: give "
                    'share a key="a name of this base".',
                    len(kept) + 1,
                )


def _key(build: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    key = (_told(build), tuple(map(_told, args)), tuple((name, _told(kwargs[name])) for name in sorted(kwargs)))
    try:
        hash(key)
    except TypeError as error:
        raise ConfigError(
            f"share tells bases apart by build and its arguments, but one of them is not hashable ({error}). Write "
            'share(build, ..., key="a name of this base").'
        ) from None
    return key


def _told(value: Any) -> Hashable:
    """Equal for functions that an objective defines anew each time."""
    if isinstance(value, partial):
        return partial, _key(value.func, value.args, value.keywords)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        given = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return value.__module__, value.__qualname__, value.__code__, tuple(map(_told_or_same, given))
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_told, value))
    if isinstance(value, Mapping):
        return type(value), tuple((key, _told(value[key])) for key in value)
    return value  # type: ignore[no-any-return]


def _told_or_same(value: Any) -> Hashable:
    """What a function refers to: by its value, or else as the same object."""
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return _told(value)


class _Same:
    """Equal for the same object, which it keeps."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _built(
    build: Callable[..., nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any], pool: ShardPool | None
) -> nn.Module:
    """The base: in host memory, frozen, and made with random numbers of its own."""
    with drawing_from(RandomState(torch.initial_seed() if pool is None else pool.seed)), torch.inference_mode(False):
        model = build(*args, **kwargs)
    if not isinstance(model, nn.Module):
        raise PrepareError(
            f"share takes a function that returns a torch.nn.Module; it returned {type(model).__name__}."
        )
    if any(t.device.type != "cpu" for t in (*model.parameters(), *model.buffers())):
        model.to("cpu")
    model.requires_grad_(False)
    note_base((*model.parameters(), *filter(is_quantized_buffer, model.buffers())))
    return model


def _copy_of(base: _Base) -> nn.Module:
    assert base.model is not None
    memo: dict[int, Any] = {}
    for p in base.model.parameters():
        memo[id(p)] = shared_parameter(p)
    for buffer in filter(is_quantized_buffer, base.model.buffers()):  # other buffers may be written
        memo[id(buffer)] = buffer.detach()
    try:
        model: nn.Module = copy.deepcopy(base.model, memo)
    except Exception as error:
        raise PrepareError(
            f"share gives each trial a copy.deepcopy of the {type(base.model).__name__} that build returned, over the "
            f"same weights, but that failed: {error}. Return a module that can be copied."
        ) from error
    weakref.finalize(model, _forget, base).atexit = False  # the base lives as long as a copy of it does
    return model


def _forget(_: _Base) -> None:
    """Called with the base of a copy that is gone."""
