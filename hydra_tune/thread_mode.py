"""A dispatch mode of the calling thread alone."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode


class ThreadMode(TorchDispatchMode):
    """Enters and leaves the thread's stack, and that is all: PyTorch's own modes note for the process, too, that one is
    active, and put back what each has found; where threads come and go, that stays wrong."""

    def __init__(self) -> None: ...

    def __enter__(self) -> Any:
        _push_mode(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _pop_mode()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import its compiler at the first operator, which takes seconds, and ask it at each."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled, and is not seen."""
        return True
