"""Lightning is two packages with the same classes, `lightning` and `pytorch_lightning`. A process may have imported
either or both, and a Trainer of the one takes no callback of the other."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def callback_base() -> Any:
    """A Callback of each of the packages that are imported; of the first that is installed, where none is."""
    names = [name for name in PACKAGES if name in sys.modules]
    names = names or [name for name in PACKAGES if find_spec(name.partition(".")[0]) is not None][:1]
    return type("Callback", tuple(import_module(name).Callback for name in names), {})


def is_a(name: str, value: Any) -> bool:
    """Of that class, of whichever of the two packages."""
    return any(kind.__name__ == name for kind in type(value).__mro__)
