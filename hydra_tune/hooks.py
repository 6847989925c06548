"""Hooks on modules: which are the user's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LIBRARIES = ("torch.", "transformers.")  # whose hooks compute weights, or collect outputs


def user_hooks(module: nn.Module, kinds: Sequence[str] = HOOKS_OF_MODULES) -> bool:
    """Whether the user has put a hook of one of these kinds on this module."""
    own = vars(module)
    return any(_is_users(hook) for kind in kinds if own.get(kind) for hook in own[kind].values())


def keep_only_pytorchs(module: nn.Module) -> None:
    """Of the hooks on a copy of a module: PyTorch's compute weights, all others tell somebody of a call."""
    for kind in HOOKS_OF_MODULES:
        hooks = vars(module).get(kind, {})
        for key in [key for key, hook in hooks.items() if not _origin_of(hook).startswith("torch.")]:
            del hooks[key]


def _is_users(hook: Any) -> bool:
    return not _origin_of(hook).startswith(_LIBRARIES)


def _origin_of(hook: Any) -> str:
    """The module that its code is in."""
    hook = getattr(hook, "func", hook)  # functools.partial
    return getattr(hook, "__module__", None) or type(hook).__module__
