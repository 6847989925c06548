"""A user's function or class on its way from the driver, through a trial's proxy, to its pool."""

from __future__ import annotations

from typing import Any

from ray import cloudpickle

from hydra_tune.errors import ConfigError


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
                f"a trial's function travels to its node's pool, but {name} cannot be pickled: {error}. Make what it "
                "uses within it, or hand it over by tune.with_parameters."
            ) from error

    def __getstate__(self) -> bytes:
        return self.pickled()

    def __setstate__(self, state: bytes) -> None:
        self._content, self._pickled = None, state
