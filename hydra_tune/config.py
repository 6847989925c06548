"""Bytes and paths as users write them, and the switches that are read from the environment."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hydra_tune.errors import ConfigError

_UNIT_BYTES = {
    "": 1,
    "B": 1,
    **{f"{prefix}iB": 1024 ** (i + 1) for i, prefix in enumerate("KMGT")},
    **{f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("KMGT")},
}
MOST_TRIALS_A_DEVICE = 8  # live at a time; more gain nothing there, and a sampler knows less when it is asked
MOST_BYTES = 1 << 62  # more than any machine has
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
ALIGNMENT_BYTES = 512  # of each tensor in a host buffer or a slot, as in CUDA's allocator


def parse_bytes(text: int | str, name: str = "memory") -> int:
    """Bytes from an int, or from text such as ``"20GiB"``, ``"1.5 GB"`` or ``"4096"``.

    Args:
        name: of the user's argument, for the error.

    Raises:
        ConfigError: not a positive number of bytes.
    """
    amount = text if isinstance(text, int) and not isinstance(text, bool) else 0
    if isinstance(text, str) and (match := _BYTES.fullmatch(text)) and match[2] in _UNIT_BYTES:
        amount = int(min(float(match[1]) * _UNIT_BYTES[match[2]], 2.0 * MOST_BYTES))
    if not 0 < amount <= MOST_BYTES:
        raise ConfigError(
            f"{name} is a positive number of bytes, got {text!r}. "
            'Write an int, or text with a unit, such as "20GiB" or "512MiB".'
        )
    return amount


def check_folder(path: Path, what: str) -> None:
    """Check, before any work, that its result can be written to this path.

    Args:
        what: the result, for the error.

    Raises:
        ConfigError: the path's folder does not exist.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{what} is saved in a folder that there is, got {str(path)!r}. Make {str(path.parent)!r}.")


def format_bytes(amount: int, *, up: bool = False) -> str:
    """``1536`` -> ``"1.5 KiB"``. With `up` it is rounded up: a budget that a user copies from the text is enough."""
    power = min(max(0, abs(amount).bit_length() - 1) // 10, 4)  # of 1024
    value = -(-10 * amount // 1024**power) / 10 if up else amount / 1024**power
    return f"{value:.1f} {'KMGT'[power - 1]}iB" if power else f"{amount} B"


def align(num_bytes: int) -> int:
    """`num_bytes` rounded up to the alignment of slots and host buffers."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def checks_enabled() -> bool:
    """Whether the bytes of every operator are counted, and freed slots filled with NaN (``HYDRA_TUNE_CHECKS=1``).

    This costs some ten microseconds an operator. The tests of this project run with it.
    """
    return os.environ.get("HYDRA_TUNE_CHECKS", "") not in ("", "0")
