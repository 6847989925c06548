"""Python's and NumPy's global random numbers, which all threads of a process share: whether somebody draws some."""

from __future__ import annotations

import random
import sys
from typing import Any


class SharedRandom:
    """Their states, as they are now."""

    def __init__(self) -> None:
        self._then = _states()

    def have_moved(self) -> bool:
        """Since then: some thread has drawn, or seeded."""
        (pythons, numpys), then = _states(), self._then
        return pythons != then[0] or then[1] not in (None, numpys)  # NumPy, imported since, tells nothing

    def put_back(self) -> None:
        pythons, numpys = self._then
        random.setstate(pythons)
        if numpys is not None:
            sys.modules["numpy.random"].set_state(numpys)


def _states() -> tuple[Any, Any]:
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return random.getstate(), None
    name, keys, *rest = numpy_random.get_state()
    return random.getstate(), (name, keys.tolist(), *rest)
