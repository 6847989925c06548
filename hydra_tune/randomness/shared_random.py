"""Python's and NumPy's global random states, which all threads of a process share: whether somebody draws from them."""

from __future__ import annotations

import random
import sys
from typing import Any


class SharedRandom:
    """A snapshot of both states."""

    def __init__(self) -> None:
        self._pythons, self._numpys = random.getstate(), _numpys()

    def have_moved(self) -> bool:
        """Whether some thread has drawn or seeded since the snapshot."""
        numpys_moved = self._numpys not in (None, _numpys())  # None: NumPy was not imported then
        return numpys_moved or random.getstate() != self._pythons

    def put_back(self) -> None:
        """Set both states to the snapshot."""
        random.setstate(self._pythons)
        if self._numpys is not None:
            sys.modules["numpy.random"].set_state(self._numpys)


def _numpys() -> tuple[Any, ...] | None:
    if "numpy.random" not in sys.modules:
        return None
    name, keys, *rest = sys.modules["numpy.random"].get_state()
    return name, keys.tolist(), *rest
