"""Python's and NumPy's global random states, which all threads of a process share: whether somebody draws from them."""

from __future__ import annotations

import random
import sys
from typing import Any


class PythonAndNumpyStates:
    """A snapshot of both states."""

    def __init__(self) -> None:
        self._python_state, self._numpy_state = random.getstate(), _numpy_state()

    def have_moved(self) -> bool:
        """Whether some thread has drawn or seeded since the snapshot."""
        numpy_has_moved = self._numpy_state not in (None, _numpy_state())  # None: NumPy was not imported then
        return numpy_has_moved or random.getstate() != self._python_state

    def put_back(self) -> None:
        """Set both states to the snapshot."""
        random.setstate(self._python_state)
        if self._numpy_state is not None:
            sys.modules["numpy.random"].set_state(self._numpy_state)


def _numpy_state() -> tuple[Any, ...] | None:
    if "numpy.random" not in sys.modules:
        return None
    name, keys, *rest = sys.modules["numpy.random"].get_state()
    return name, keys.tolist(), *rest
