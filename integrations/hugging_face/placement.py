"""Where a trainer and accelerate put models, optimizers and batches.

Both move a model to the GPU as soon as they see it. Over a pool the model stays in host memory, and only batches go to
the device: that of the trial while its model is prepared, else the CPU.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

CPU = torch.device("cpu")
_DEVICE_CACHES = ("_setup_devices", "__cached__setup_devices")  # of TrainingArguments.device, in transformers 5 and 4
_environment = threading.Lock()


def place(args: Any, device: torch.device) -> None:
    """Where its trainer puts batches."""
    assert args.device is not None  # which fills the cache
    for name in _DEVICE_CACHES:
        if name in vars(args):
            vars(args)[name] = device


def place_batches_only(accelerator: Any) -> None:
    """Not by its `device_placement`, by which accelerate also decides how it reads data without a length."""
    accelerator.prepare_model = functools.partial(_where_it_is, accelerator.prepare_model)
    accelerator.prepare_optimizer = functools.partial(_where_it_is, accelerator.prepare_optimizer)


def _where_it_is(prepare: Any, each: Any, device_placement: Any = None, **options: Any) -> Any:
    return prepare(each, device_placement=False, **options)


@contextmanager
def precision_of(args: Any) -> Iterator[None]:
    """Transformers 4 tells accelerate by the process's environment, where the precision of one trainer stays for all
    that come after it."""
    if hasattr(args, "mixed_precision"):
        yield
        return
    name, wanted = "ACCELERATE_MIXED_PRECISION", "fp16" if args.fp16 else "bf16" if args.bf16 else "no"
    with _environment:
        before = os.environ.get(name)
        os.environ[name] = wanted
        try:
            yield
        finally:
            os.environ[name] = before or "no"
