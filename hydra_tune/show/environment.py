"""What a run's figures travel with: versions, machine, cores and threads."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("hydra-tune", "torch", "optuna", "ray", "transformers", "accelerate", "lightning", "peft")


def environment() -> dict[str, Any]:
    """Names and values, as text. Packages that are not installed are left out."""
    found = {"python": platform.python_version(), "machine": platform.platform(), "cores": str(os.cpu_count())}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
