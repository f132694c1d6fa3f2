"""The tables in which torch keeps a parameter's hooks."""

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
    """A hook in the table that the user's handle removes it from.

    Args:
        table: The table of the parameter that it was put on.
        key: Its key in there.
    """

    table: Table
    key: int

    @property
    def hook(self) -> Hook | None:
        """The hook, or None where the user has removed it."""
        return self.table.get(self.key)


def table_of(parameter: torch.Tensor, name: str) -> Table:
    """Return one of a parameter's tables, an empty one where torch has none."""
    return getattr(parameter, name, None) or {}


def put_table(parameter: torch.Tensor, name: str, hooks: Table) -> None:
    """Give a parameter a table of its own; handles of the one before go on removing hooks from that."""
    setattr(parameter, name, hooks if isinstance(hooks, OrderedDict) else OrderedDict(hooks))


def is_user_hook(hook: Hook) -> bool:
    """Return whether a hook is the user's: those of a schedule, which sum gradients, say so of themselves."""
    return not getattr(hook, "of_schedule", False)
