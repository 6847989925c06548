"""Python's and NumPy's global random numbers, which all threads of a process share: whether something draws some, and
how that is taken back.

Their states say that somebody has drawn. It may have been another thread, as one that loads data or seeds, so what is
watched runs again then: what draws each time draws itself.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
_TRIES = 3


def watching_draws(run: Callable[[], ResultT]) -> tuple[ResultT, bool]:
    """What `run` returns, and whether it draws; if so, both states are what they were, as where it raises. It may be
    called several times."""
    first = _states()
    try:
        for _ in range(_TRIES):
            before = _states()
            result = run()
            if before == _states():
                return result, False
    except BaseException:
        _put_back(first)
        raise
    _put_back(first)
    return result, True


def _states() -> tuple[Any, Any]:
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return random.getstate(), None
    name, keys, *rest = numpy_random.get_state()
    return random.getstate(), (name, keys.tolist(), *rest)


def _put_back(states: tuple[Any, Any]) -> None:
    pythons, numpys = states
    random.setstate(pythons)
    if numpys is not None:
        sys.modules["numpy.random"].set_state(numpys)
