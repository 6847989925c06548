"""A user's function or class on its way from the driver, through a trial's proxy, to its pool."""

from __future__ import annotations

from io import StringIO
from typing import Any

from ray import cloudpickle
from ray.util import inspect_serializability

from hydra_tune.errors import ConfigError


def _found(payload: Payload) -> str:
    """Which of the variables that the function refers to cannot be pickled, as far as Ray can tell."""
    failures: Any = inspect_serializability(payload._content, print_file=StringIO())[1]
    names = sorted({failure.path[-1] if hasattr(failure, "path") else failure.name for failure in failures})
    return f". It refers to {', '.join(names)}" if names else ""


class Payload:
    """A function or a class, pickled. A proxy hands it on unread: reading it would import what it uses, torch first."""

    def __init__(self, content: Any) -> None:
        self._content = content
        self._pickled: bytes | None = None

    def pickled(self) -> bytes:
        """
        Raises:
            ConfigError: it cannot be.
        """
        if self._pickled is not None:
            return self._pickled
        try:
            return bytes(cloudpickle.dumps(self._content))
        except Exception as error:
            name = getattr(self._content, "__name__", repr(self._content))
            raise ConfigError(
                f"a trial's function travels to its node's pool, but {name} cannot be pickled: {error}{_found(self)}. "
                "Make that within the function."
            ) from error

    def __getstate__(self) -> bytes:
        return self.pickled()

    def __setstate__(self, state: bytes) -> None:
        self._content, self._pickled = None, state
