"""Hooks of modules: their list, and their transfer to another module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

_TABLES = {
    "fwd_pre": ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    "fwd_post": ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "bwd_pre": ("_backward_pre_hooks",),
    "bwd_post": ("_backward_hooks",),
}
"""Type of hook to the tables in which torch keeps the hooks and their flags."""


def get_hooks(mod: nn.Module) -> dict[str, list[Callable[..., Any]]]:
    """Return a module's hooks in the order they run, by type: ``"fwd_pre"``, ``"fwd_post"``, ``"bwd_pre"``, ``"bwd_post"``."""
    return {hook_type: list(getattr(mod, tables[0]).values()) for hook_type, tables in _TABLES.items()}


def has_hook(mod: nn.Module, hook_type: str) -> bool:
    """Return whether a module has a hook of a type.

    Raises:
        ValueError: there is no such type.
    """
    return bool(getattr(mod, _tables(hook_type)[0]))


def transfer_hooks(old_mod: nn.Module, new_mod: nn.Module, hook_types: Iterable[str] | None = None) -> None:
    """Copy the hooks of one module to another, after its own. A hook's handle removes it from the first module only.

    Args:
        old_mod: The module that has them, and keeps them.
        new_mod: The one that gets them.
        hook_types: Out of those of ``get_hooks``; default: all.

    Raises:
        ValueError: there is no such type, or one module has a full backward hook and the other one that is not.
    """
    tables = [_tables(hook_type) for hook_type in (_TABLES if hook_types is None else hook_types)]
    full = [mod._is_full_backward_hook for mod in (old_mod, new_mod)]
    moves_backward = ("_backward_hooks",) in tables and bool(old_mod._backward_hooks)
    if moves_backward and None not in full and full[0] != full[1]:
        raise ValueError(
            "one module has full backward hooks and the other has not; register all with register_full_backward_hook"
        )
    for name in (name for names in tables for name in names):
        getattr(new_mod, name).update(getattr(old_mod, name))
    if moves_backward:
        new_mod._is_full_backward_hook = full[0]


def _tables(hook_type: str) -> tuple[str, ...]:
    if hook_type not in _TABLES:
        raise ValueError(f"no type of hook {hook_type!r}; available: {', '.join(_TABLES)}")
    return _TABLES[hook_type]
