"""Hooks on modules: which are the user's."""

from __future__ import annotations

from typing import Any

from torch import nn

HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LIBRARIES = ("torch.", "transformers.")  # whose hooks compute weights, or collect outputs


def user_hooks(module: nn.Module) -> bool:
    """Whether the user has put a hook on this module."""
    own = vars(module)
    kinds = [kind for kind in HOOKS_OF_MODULES if own.get(kind)]
    return bool(kinds) and any(_is_users(hook) for kind in kinds for hook in own[kind].values())


def has_user_pre_hook(module: nn.Module) -> bool:
    """Whether one fires before its forward."""
    return any(map(_is_users, vars(module).get("_forward_pre_hooks", {}).values()))


def _is_users(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)  # functools.partial
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return not origin.startswith(_LIBRARIES)
