"""Models are loaded one at a time, and what that changes for the process is changed for the loading thread only.

transformers and accelerate patch functions of the process while they make a model that is to be filled from a file:
`PreTrainedModel.tie_weights` and the functions of `torch.nn.init` do nothing then, new parameters go to the meta
device, and the default dtype is the checkpoint's. Two such loads at once left the process broken for good; a model
made beside one was left without weights.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import wrapt
from torch import nn
from torch.overrides import TorchFunctionMode

from hydra_tune.integrations.current_trial import current_trial, has_company
from hydra_tune.integrations.process_settings import warn_of

_one_at_a_time = threading.RLock()
_local = threading.local()

# by module: functions that make a model, and contexts that patch the process while one is made
LOADERS = {"transformers.modeling_utils": ("PreTrainedModel.from_pretrained", "PreTrainedModel._from_config")}
PATCHES = {
    "accelerate.big_modeling": ("init_on_device",),
    "transformers.integrations.accelerate": ("init_on_device",),
    "transformers.initialization": ("no_init_weights", "no_tie_weights", "meta_device_safe_creation_ops"),
    "transformers.modeling_utils": ("no_init_weights",),  # until transformers 4
}


def install() -> None:
    """Now, or once the libraries are imported, be it by a trial."""
    torch.set_default_dtype = _set_default_dtype
    torch.get_default_dtype = _get_default_dtype
    for module in {*LOADERS, *PATCHES}:
        wrapt.register_post_import_hook(_guard, module)


def _guard(module: Any) -> None:
    for path in LOADERS.get(module.__name__, ()):
        kind, name = path.split(".")
        owner = getattr(module, kind)
        setattr(owner, name, classmethod(_alone(vars(owner)[name].__func__)))
    for name in PATCHES.get(module.__name__, ()):
        stock = vars(module).get(name)
        if stock is not None and stock.__module__ == module.__name__:
            _replace_everywhere(stock, _for_its_thread(stock))


def _replace_everywhere(stock: Any, ours: Any) -> None:
    """In all modules that have imported it by its name."""
    name = stock.__name__
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is stock:
            setattr(module, name, ours)


def _alone(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with _one_at_a_time, _own_default_dtype():
            return load(*args, **kwargs)

    return alone


# ---- functions of the process ----


def _patched() -> list[tuple[Any, str]]:
    """What the contexts in `PATCHES` replace, in any version: the owner, and the name there."""
    init = [name for name, value in vars(nn.init).items() if name.endswith("_") and callable(value)]
    layers = [module for name, module in list(sys.modules.items()) if name.startswith("torch.nn.modules.")]
    points: list[tuple[Any, str]] = [
        (owner, name) for owner in (nn.init, *layers) for name in init if name in vars(owner)
    ]
    points += [(torch, "linspace"), (nn.Module, "register_parameter"), (nn.Module, "register_buffer")]
    if (modeling := sys.modules.get("transformers.modeling_utils")) is not None:
        points += [(modeling.PreTrainedModel, name) for name in ("tie_weights", "init_weights")]
        points += [(modeling, name) for name in ("_init_weights",) if name in vars(modeling)]
    return points


def _for_its_thread(patching: Callable[..., AbstractContextManager[Any]]) -> Callable[..., AbstractContextManager[Any]]:
    """The same context, whose patches other threads do not see."""

    @contextmanager
    @functools.wraps(patching)
    def entered(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with _one_at_a_time:
            before = [(owner, name, getattr(owner, name)) for owner, name in _patched()]
            with patching(*args, **kwargs) as value:
                for owner, name, stock in before:
                    if (now := getattr(owner, name)) is not stock:
                        setattr(owner, name, _by_thread(now, stock))
                yield value

    return entered


def _by_thread(here: Any, elsewhere: Any) -> Any:
    """For the calling thread `here`, for all others `elsewhere`: functions, or flags."""
    thread = threading.get_ident()
    if not callable(here):
        return _Flag(here, elsewhere)

    @functools.wraps(elsewhere)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (here if threading.get_ident() == thread else elsewhere)(*args, **kwargs)

    return chosen


class _Flag:
    def __init__(self, here: Any, elsewhere: Any) -> None:
        self._thread, self._here, self._elsewhere = threading.get_ident(), here, elsewhere

    def __bool__(self) -> bool:
        return bool(self._here if threading.get_ident() == self._thread else self._elsewhere)


# ---- the default dtype ----

_stock_set, _stock_get = torch.set_default_dtype, torch.get_default_dtype
_INFERRED = frozenset((torch.tensor, torch.as_tensor, torch.asarray, torch.arange, torch.range, torch.full))
_FLOATS = frozenset((
    torch.empty, torch.empty_strided, torch.zeros, torch.ones, torch.rand, torch.randn, torch.eye, torch.linspace,
    torch.logspace, torch.normal, torch.hann_window, torch.hamming_window, torch.bartlett_window,
    torch.blackman_window, torch.kaiser_window, torch.scalar_tensor, torch.empty_permuted,
))  # fmt: skip


class _DefaultDtype(TorchFunctionMode):
    """That of one thread: PyTorch's own is the whole process's."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = _stock_get()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") is None and self.dtype is not _stock_get():
            if func in _FLOATS and not any(isinstance(each, torch.Tensor) for each in args):
                return func(*args, **{**kwargs, "dtype": self.dtype})
            if func in _INFERRED:
                found = func(*args, **kwargs)
                inferred = found.dtype is _stock_get() and not any(hasattr(each, "dtype") for each in args)
                return func(*args, **{**kwargs, "dtype": self.dtype}) if inferred else found
        return func(*args, **kwargs)


@contextmanager
def _own_default_dtype() -> Iterator[None]:
    """While a trial loads a model, what it sets as default dtype is its thread's alone."""
    if current_trial() is None or getattr(_local, "default", None) is not None:
        yield
        return
    with _DefaultDtype() as mode:
        _local.default = mode
        try:
            yield
        finally:
            _local.default = None


@functools.wraps(_stock_set)
def _set_default_dtype(dtype: torch.dtype) -> None:
    mode: _DefaultDtype | None = getattr(_local, "default", None)
    if mode is not None:
        mode.dtype = dtype
        return
    if dtype is not _stock_get() and has_company():
        warn_of("torch.set_default_dtype", "Give layers and tensors their dtype, or convert the model: model.to(dtype)")
    _stock_set(dtype)


@functools.wraps(_stock_get)
def _get_default_dtype() -> torch.dtype:
    mode: _DefaultDtype | None = getattr(_local, "default", None)
    return _stock_get() if mode is None else mode.dtype
