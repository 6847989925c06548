"""Loading models while other trials run.

transformers and accelerate patch functions of the process while they make a model that is to be filled from a file:
`PreTrainedModel.tie_weights` and the functions of `torch.nn.init` do nothing then, new parameters go to the meta
device, and the default dtype is the checkpoint's. Two such loads at once left the process broken for good; a model made
beside one was left without weights. So models are loaded one at a time, and what a load changes is changed for its own
thread only.
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

from hydra_tune.integrations.frameworks.current_trial import current_trial, runs_beside_others
from hydra_tune.integrations.frameworks.process_settings import warn_of

_one_at_a_time = threading.RLock()


class _LoadingThread(threading.local):
    """What the calling thread's load has changed, that others do not see. A patch, even one that looks which thread
    calls it, would be seen for the moment before it does."""

    ties = True  # tie_weights ties
    initializes = True  # functions of torch.nn.init, and PreTrainedModel.init_weights
    device: torch.device | None = None  # of new parameters
    default: _DefaultDtype | None = None


_here = _LoadingThread()


def install() -> None:
    """Now, or once the libraries are imported, be it by a trial."""
    torch.set_default_dtype = _set_default_dtype
    torch.get_default_dtype = _get_default_dtype
    wrapt.register_post_import_hook(_guard_models, "transformers.modeling_utils")
    wrapt.register_post_import_hook(_guard_contexts, "transformers.initialization")
    for module in ("accelerate.big_modeling", "transformers.integrations.accelerate"):
        wrapt.register_post_import_hook(_guard_devices, module)


def _guard_models(module: Any) -> None:
    kind = module.PreTrainedModel
    for name in ("from_pretrained", "_from_config"):
        setattr(kind, name, classmethod(_alone(vars(kind)[name].__func__)))
    kind.tie_weights = _unless(lambda: not _here.ties, kind.tie_weights)
    kind.init_weights = _unless(lambda: not _here.initializes, kind.init_weights)
    if hasattr(module, "_init_weights"):  # until transformers 4
        module._init_weights = _Initializes()
        for name in module.TORCH_INIT_FUNCTIONS:
            setattr(nn.init, name, _unless(lambda: not _here.initializes, getattr(nn.init, name)))
        _replace(module, "no_init_weights", _set_here("initializes", False))


def _guard_contexts(module: Any) -> None:
    _replace(module, "no_tie_weights", _set_here("ties", False))


def _guard_devices(module: Any) -> None:
    stock = getattr(module, "init_on_device", None)
    if stock is None:  # transformers 5 has none of its own
        return

    def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Any:
        return device if include_buffers else _set_here("device", torch.device(device))()

    _replace(module, "init_on_device", functools.wraps(stock)(init_on_device))
    if not hasattr(nn.Module.register_parameter, "__wrapped__"):
        nn.Module.register_parameter = _register_parameter  # type: ignore[method-assign]


def _replace(module: Any, name: str, ours: Any) -> None:
    """In it, and in all that have imported it by this name."""
    stock = getattr(module, name)
    for each in list(sys.modules.values()):
        if getattr(each, "__dict__", {}).get(name) is stock:
            setattr(each, name, ours)


def _alone(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with _one_at_a_time, _own_default_dtype():
            return load(*args, **kwargs)

    return alone


def _unless(is_off: Callable[[], bool], stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def unless(*args: Any, **kwargs: Any) -> Any:
        return None if is_off() else stock(*args, **kwargs)

    return unless


def _set_here(name: str, value: Any) -> Callable[[], AbstractContextManager[None]]:
    """A context in which `_here` has this, in place of one that patches the process."""

    @contextmanager
    def entered() -> Iterator[None]:
        before = getattr(_here, name)
        with _one_at_a_time:
            setattr(_here, name, value)
            try:
                yield
            finally:
                setattr(_here, name, before)

    return entered


class _Initializes:
    """In place of a flag of transformers 4."""

    def __bool__(self) -> bool:
        return _here.initializes


_stock_register = nn.Module.register_parameter


@functools.wraps(_stock_register)
def _register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
    _stock_register(self, name, param)
    if param is not None and _here.device is not None:
        made = self._parameters[name]
        assert made is not None
        options = {**vars(made), "requires_grad": made.requires_grad}
        self._parameters[name] = type(made)(made.to(_here.device), **options)


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
    if current_trial() is None or _here.default is not None:
        yield
        return
    with _DefaultDtype() as mode:
        _here.default = mode
        try:
            yield
        finally:
            _here.default = None


@functools.wraps(_stock_set)
def _set_default_dtype(dtype: torch.dtype) -> None:
    mode = _here.default
    if mode is not None:
        mode.dtype = dtype
        return
    if dtype is not _stock_get() and runs_beside_others():
        warn_of("torch.set_default_dtype", "Give layers and tensors their dtype, or convert the model: model.to(dtype)")
    _stock_set(dtype)


@functools.wraps(_stock_get)
def _get_default_dtype() -> torch.dtype:
    mode = _here.default
    return _stock_get() if mode is None else mode.dtype
