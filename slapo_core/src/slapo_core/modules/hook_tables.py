"""Attributes in which torch stores the hooks of a module."""

HOOK_TABLES = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks"),
)
"""Names of the dicts of a module's hooks, which have a key for each hook."""
