"""Hooks."""

from .module_hooks import get_hooks, has_hook, transfer_hooks

__all__ = ["get_hooks", "has_hook", "transfer_hooks"]
