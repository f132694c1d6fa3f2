"""Torch's tables of a parameter's hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

TENSOR_HOOKS, POST_HOOKS = TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Hooks of ``register_hook``, and of ``register_post_accumulate_grad_hook``."""

Hook = Callable[[Any], Any]
Table = dict[int, Hook]


class HookRef(NamedTuple):
    """Reference to a hook in the table of the user's parameter that the user's handle removes it from."""

    table: Table
    key: int

    @property
    def hook(self) -> Hook | None:
        """The hook, or None if the user removed it."""
        return self.table.get(self.key)


def table_of(parameter: torch.Tensor, name: str) -> Table:
    return getattr(parameter, name, None) or {}


def put_table(parameter: torch.Tensor, name: str, hooks: Table) -> None:
    """Replace a parameter's table; handles of the old table still remove hooks from the old one."""
    setattr(parameter, name, hooks if isinstance(hooks, OrderedDict) else OrderedDict(hooks))


def is_user_hook(hook: Hook) -> bool:
    """Return True for a user's hook; hooks of the schedule, which sum gradients, have ``of_schedule``."""
    return not getattr(hook, "of_schedule", False)
