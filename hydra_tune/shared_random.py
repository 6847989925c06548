"""Python's and NumPy's global random numbers, which all threads of a process share: whether the calling thread draws
some, and how it takes that back.

Their states say that somebody has drawn. Who it was is watched where other threads live, for another trial's data set
may draw at any time: Python's generator by the thread's profile function, NumPy's by what stands in for its functions
meanwhile.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_PYTHONS: Any = random.random.__self__  # type: ignore[attr-defined]  # the generator behind the module's functions
_PYTHONS_DRAWS = ("random", "getrandbits")  # which all others call
_NO_DRAWS = ("get_state", "set_state", "seed")  # of NumPy's functions


class SharedDraws:
    """A context manager, once: what the calling thread draws inside."""

    def __init__(self) -> None:
        self._seen = False
        self._watched = False
        self._changed: bool | None = None  # once it has ended

    def __enter__(self) -> SharedDraws:
        self._before = _states()
        self._watched = _has_company() and _watchers.begin(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._changed = self._has_changed()
        if self._watched:
            _watchers.end(self)

    def note(self) -> None:
        self._seen = True

    @property
    def are_some(self) -> bool:
        """The thread has drawn; where nobody else lives who could have, by the states alone."""
        return self.may_be and (self._seen or not self._watched)

    @property
    def may_be(self) -> bool:
        """Somebody has drawn."""
        return self._has_changed() if self._changed is None else self._changed

    def _has_changed(self) -> bool:
        pythons, numpys = _states()
        now = pythons, numpys if self._before[1] is not None else None  # imported since, it tells nothing
        return _comparable(now) != _comparable(self._before)

    def take_back(self) -> None:
        """Both states are what they were, if the thread has drawn. Else what others have drawn stays drawn."""
        if self.are_some:
            pythons, numpys = self._before
            random.setstate(pythons)
            if numpys is not None:
                sys.modules["numpy.random"].set_state(numpys)


def _states() -> tuple[Any, Any]:
    numpy_random = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy_random is None else numpy_random.get_state()


def _comparable(states: tuple[Any, Any]) -> tuple[Any, ...]:
    pythons, numpys = states
    if numpys is None:
        return (pythons,)
    name, keys, *rest = numpys
    return pythons, name, keys.tobytes(), *rest


def _has_company() -> bool:
    """Whether another thread lives that may draw: copies are a pool's own."""
    own = threading.current_thread()
    return any(each is not own and not each.name.startswith("copies of ") for each in threading.enumerate())


class _Watchers:
    """Of all threads; a thread's within each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._own = threading.local()
        self._stood_in: dict[str, tuple[Any, Any]] = {}  # by name: NumPy's function, and what stands in for it

    def _of_thread(self) -> list[SharedDraws]:
        watchers: list[SharedDraws] | None = getattr(self._own, "watchers", None)
        if watchers is None:
            watchers = self._own.watchers = []
        return watchers

    def begin(self, draws: SharedDraws) -> bool:
        """False if the thread's profile function is somebody else's."""
        watchers = self._of_thread()
        if not watchers and sys.getprofile() is not None:
            return False
        watchers.append(draws)
        if len(watchers) == 1:
            with self._lock:
                self._number += 1
                if self._number == 1:
                    self._stand_in()
            sys.setprofile(self._profile)
        return True

    def end(self, draws: SharedDraws) -> None:
        watchers = self._of_thread()
        watchers.remove(draws)
        if not watchers:
            sys.setprofile(None)
            with self._lock:
                self._number -= 1
                if self._number == 0:
                    self._put_back()

    def _profile(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__self__", None) is _PYTHONS and called.__name__ in _PYTHONS_DRAWS:
            self.note()

    def note(self) -> None:
        for draws in self._of_thread():
            draws.note()

    def _stand_in(self) -> None:
        numpy_random: Any = sys.modules.get("numpy.random")
        if numpy_random is None:
            return
        generator = numpy_random.mtrand._rand
        for name, function in list(vars(numpy_random).items()):
            if getattr(function, "__self__", None) is generator and name not in _NO_DRAWS:
                self._stood_in[name] = function, _noting(function)
                setattr(numpy_random, name, self._stood_in[name][1])

    def _put_back(self) -> None:
        numpy_random: Any = sys.modules.get("numpy.random")
        for name, (function, stands_in) in self._stood_in.items():
            if getattr(numpy_random, name, None) is stands_in:
                setattr(numpy_random, name, function)
        self._stood_in.clear()

    def drop_in_child(self) -> None:
        self._put_back()
        self._number, self._lock, self._own = 0, threading.Lock(), threading.local()
        if getattr(sys.getprofile(), "__self__", None) is self:
            sys.setprofile(None)


_watchers = _Watchers()
os.register_at_fork(after_in_child=_watchers.drop_in_child)


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        _watchers.note()
        return function(*args, **kwargs)

    return noting
